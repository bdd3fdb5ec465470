// The forward pass and the input gradient of any layer on tensor cores (mainloop/tap_mma.cuh):
//
//   destination[cd, cell·DST + phase] = bias[cd] + Σ over taps of the phase and cs of
//                                                  w[cs, cd, tap] · source[cs, cell·SRC + offset of the tap]
//
// with cells and phases of core/geometry.cuh. Rows are destination channels, columns are cells of all images, one after
// the other, and k runs over the phase's tap groups: CHUNK source channels at one tap. Any number of taps and channels,
// any stride, dilation and image size fits. The source has its channels innermost, those of a group in whole pieces of
// 16 bytes; the destination may have any strides.
//
// Index mapping. A block owns ROWS channels of one group, one phase and COLUMNS cells, and with several splits one
// contiguous part of the stages. Both operands are loaded by cp.async, 16 bytes a thread: rows from
// packed weights (steps/pack_tap_groups.cu), columns from the source element that each cell's tap reads. All pieces of
// a thread belong to one tap group.
//
// Shared memory: STAGES stages, each rows as [part][row][k] and columns as [column][k]; in the epilogue the
// destination offset of each column.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "mainloop/tap_mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  Tensor5 src, dst;
  int columns;       // cells of all images
  Divisor tiles;     // column tiles
  Divisor cells[3];  // cells of an image along d, h, w
  int splits;        // shares of the stages; several write partial planes
  int pairs;         // whether a column and the next are stored together
  long long plane;   // elements of a partial plane
};

constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);
constexpr int GROUPS_OF_STAGE = DEPTH / CHUNK;
constexpr int ROW_PITCH = STAGE_WORDS * 4 + 16;  // bytes of a row or column; eight of them have no bank conflicts
constexpr int A_BYTES = PARTS * ROWS * ROW_PITCH, STAGE_BYTES = A_BYTES + COLUMNS * ROW_PITCH;
constexpr int PIECES = DEPTH / PIECE;                                         // pieces of a row or column in a stage
constexpr int AT_ONCE = THREADS / PIECES, EACH = ceil_div(COLUMNS, AT_ONCE);  // columns loaded at once; of a thread
constexpr int SOURCE_PIECES = ceil_div(SRC_CHANNELS, PIECE);                  // pieces of a source element of a group
static_assert(DEPTH % CHUNK == 0 && CHUNK % PIECE == 0, "a stage is whole tap groups, and these are whole pieces");

__device__ __forceinline__ void multiply_stage(const char* from, Sums& sums) {
  const int lane = threadIdx.x % 32;
  const unsigned rows_at = shared_address(from) + (Sums::warp_row() + lane % 16) * ROW_PITCH + lane / 16 * 16;
  const unsigned columns_at =
      shared_address(from) + A_BYTES + (Sums::warp_column() + lane % 8) * ROW_PITCH + lane / 8 * 16;
#pragma unroll
  for (int pair = 0; pair < STEPS / 2; ++pair) {
    unsigned a[2][PARTS][ROW_TILES][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
          ldmatrix(a[half][part][i], rows_at + (part * ROWS + i * 16) * ROW_PITCH + (2 * pair + half) * 32);
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      ColumnPair b;
      b.load(columns_at + j * 8 * ROW_PITCH + pair * 64);
#pragma unroll
      for (int half = 0; half < 2; ++half) sums.multiply(a[half], b.of[half], j);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tap_gemm(const scalar_t* __restrict__ src, const unsigned char* __restrict__ packed,
             const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
             const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  int block = blockIdx.x;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int phase_index = block % PHASES;
  block /= PHASES;
  const int group = block / params.tiles, first_column = (block - group * params.tiles.value) * COLUMNS;
  const int split = (int)blockIdx.y;
  const Phase phase(phase_index);
  const int tap_groups = CHUNKS * phase.taps, all_stages = ceil_div(tap_groups, GROUPS_OF_STAGE);
  const int stages_of_split = ceil_div(all_stages, params.splits), first_stage = split * stages_of_split;
  const int stages = max(0, min(stages_of_split, all_stages - first_stage));
  packed += (((long long)group * PHASES + phase_index) * ROW_BLOCKS + row_block) * PACKED_STAGES *
            (PARTS * ROWS * PIECES * 16);

  // The thread gathers piece `piece` of columns AT_ONCE apart.
  const int piece = threadIdx.x % PIECES, own_column = threadIdx.x / PIECES;
  CellSource cells[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int column = own_column + i * AT_ONCE;
    int cell[4];
    cell_at(params.cells, first_column + column, cell);
    cells[i] = CellSource(params.src, phase, cell, column < COLUMNS && first_column + column < params.columns);
  }

  Sums sums;
  sums.clear();
  griddepcontrol_wait();
  run_stages<STAGES>(
      stages, (char*)shared_memory, STAGE_BYTES,
      [&](int stage, char* to) {
        constexpr int ROW_PIECES = PARTS * ROWS * PIECES;
        const unsigned slots = shared_address(to);
        const unsigned char* const from = packed + (long long)(first_stage + stage) * (ROW_PIECES * 16);
#pragma unroll
        for (int i = 0; i < ceil_div(ROW_PIECES, THREADS); ++i) {
          const int at = threadIdx.x + i * THREADS;
          if (ROW_PIECES % THREADS == 0 || at < ROW_PIECES)
            cp_async<16>(slots + at / PIECES * ROW_PITCH + at % PIECES * 16, from + at * 16, true);
        }
        const int index = (first_stage + stage) * GROUPS_OF_STAGE + piece * PIECE / CHUNK;
        const TapGroup tap_group(phase, index);
        const int of_element = tap_group.channel / PIECE + piece % (CHUNK / PIECE);
        const bool exists =
            index < tap_groups && (CHUNKS * CHUNK <= SOURCE_PIECES * PIECE || of_element < SOURCE_PIECES);
        const int by = group * SOURCE_PIECES + of_element + pieces_to(params.src, tap_group.tap);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const bool inside = exists && cells[i].meets(params.src, tap_group.tap.d, tap_group.tap.h, tap_group.tap.w);
          if (COLUMNS % AT_ONCE == 0 || own_column + i * AT_ONCE < COLUMNS)
            cp_async_through_l1(slots + A_BYTES + (own_column + i * AT_ONCE) * ROW_PITCH + piece * 16,
                                (const char*)src + (long long)(cells[i].pieces + by) * 16, inside);
        }
      },
      [&](int stage, const char* from) {
        multiply_stage(from, sums);
        if (PROMOTE > 0 && (stage + 1) % PROMOTE == 0) sums.promote();
      });
  if (PROMOTE > 0) sums.promote(true);

  __syncthreads();
  long long* const targets = (long long*)shared_memory;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    int cell[4];
    cell_at(params.cells, first_column + i, cell);
    targets[i] = dst_element(params.dst, phase, cell, first_column + i < params.columns);
  }
  __syncthreads();
  const int first_channel = row_block * ROWS + Sums::first_row();
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const int channel = first_channel + 8 * i;
    if (channel >= DST_CHANNELS) break;
    const int of_all = group * DST_CHANNELS + channel;
    const ChannelTerms terms = channel_terms(operands, ONE_BIAS ? 0 : of_all, split == 0);
    const long long to = of_all * params.dst.stride[1];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      const long long* const target = targets + Sums::first_column() + 8 * j;
      const float* const sum = sums.of[i / 2][j] + i % 2 * 2;
      if (params.splits > 1) {
        accum_t* const partial = (accum_t*)dst + split * params.plane + to;
        if (target[0] >= 0) partial[target[0]] = add_bias(sum[0], terms);
        if (target[1] >= 0) partial[target[1]] = add_bias(sum[1], terms);
        continue;
      }
      Vector<scalar_t, 2> both;
      narrow(finish(sum[0], terms, place_if(target[0] >= 0, dst + to + target[0])), both.value[0]);
      narrow(finish(sum[1], terms, place_if(target[1] >= 0, dst + to + target[1])), both.value[1]);
      if (params.pairs) {
        if (target[0] >= 0) *(Vector<scalar_t, 2>*)(dst + to + target[0]) = both;
      } else {
        if (target[0] >= 0) dst[to + target[0]] = both.value[0];
        if (target[1] >= 0) dst[to + target[1]] = both.value[1];
      }
    }
  }
}
