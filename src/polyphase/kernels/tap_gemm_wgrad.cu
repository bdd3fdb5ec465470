// The weight gradient of any layer on tensor cores (mainloop/tap_mma.cuh):
//
//   gw[cd, cs, tap] = Σ over cells of all images
//                       destination[cd, cell·DST + phase] · source[cs, cell·SRC + offset of the tap]
//
// with cells and phases of core/geometry.cuh. Both tensors are read; "source" and "destination" are those of the
// forward pass or those of the input gradient, and rows are channels of the destination, so either channel can be the
// row:
//
//     forward           rows are output channels   a tap belongs to one phase    columns are (tap, input channel)
//     input gradient    rows are input channels    there is one phase            columns are (tap, output channel)
//
// Columns are tap groups of the phase, CHUNK source channels at one tap; k runs over cells of all images. Both tensors
// have their channels innermost, those of a group in whole pieces of 16 bytes.
//
// Index mapping. A block owns ROWS channels and COLUMNS / CHUNK tap groups of one phase and group, and one contiguous
// part of the cells, whose sums it writes to its own partial plane. A thread copies the same piece of several cells.
//
// Tensor cores truncate at every addition. So after FLUSH stages accumulators are added to `partial` in float32; with
// two parts they are added to a second set after every stage.
//
// Shared memory: STAGES stages, rows and columns as [k][channel]; where the cells of as many stages lie.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "mainloop/tap_mma.cuh"
#include "ptx/cp_async.cuh"

struct Params {
  Tensor5 src, dst;
  int cells_of_all;
  int cells_of_part;  // a multiple of DEPTH
  Divisor cells[3];   // cells of an image along d, h, w
  int groups, column_blocks;
  long long plane;  // elements of a partial plane: all weights
};

constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);
constexpr int TAP_GROUPS = COLUMNS / CHUNK;
constexpr int ROW_LINE = line_pitch(ROWS), COLUMN_LINE = line_pitch(COLUMNS);
constexpr int A_BYTES = DEPTH * ROW_LINE, STAGE_BYTES = A_BYTES + DEPTH * COLUMN_LINE;
constexpr int ROW_PIECES = ROWS / PIECE, COLUMN_PIECES = COLUMNS / PIECE;                                 // of a cell
constexpr int ROW_CELLS = THREADS / ROW_PIECES, COLUMN_CELLS = THREADS / COLUMN_PIECES;                   // at once
constexpr int DST_PIECES = ceil_div(DST_CHANNELS, PIECE), SOURCE_PIECES = ceil_div(SRC_CHANNELS, PIECE);  // of a group
constexpr int BETWEEN_ROWS = INPUT_GRAD ? WEIGHT_STRIDE_IN : WEIGHT_STRIDE_OUT;  // elements of the weight
constexpr int IN_CHANNELS = INPUT_GRAD ? DST_CHANNELS : SRC_CHANNELS;            // of a group
static_assert(COLUMNS % CHUNK == 0 && CHUNK % PIECE == 0, "columns are whole tap groups, and these are whole pieces");

// A cell of a stage: its destination element and its source element.
struct alignas(16) CellEntry {
  CellSource source;
  int dst;  // offset of its destination element in pieces; negative for none

  __device__ __forceinline__ CellEntry() {}
  __device__ __forceinline__ CellEntry(const Params& params, const Phase& phase, int index, bool exists) {
    int cell[4];
    cell_at(params.cells, index, cell);
    source = CellSource(params.src, phase, cell, exists);
    const long long element = dst_element(params.dst, phase, cell, exists);
    dst = element < 0 ? -1 : (int)(element / PIECE);
  }
};

// Loads words of two steps from an operand in the order [k][row].
struct Fragments {
  // Rows: tile `i` of the warp, at step `step`.
  static __device__ __forceinline__ void rows(const char* from, int step, int i, unsigned (&to)[4]) {
    const int lane = threadIdx.x % 32, row = Sums::warp_row() + i * 16;
    if constexpr (ELEMENT == 4) {
      const float* const at = (const float*)(from + (step * 8 + lane % 4) * ROW_LINE) + row + lane / 4;
      const float* const four_on = (const float*)((const char*)at + 4 * ROW_LINE);
      to[0] = __float_as_uint(at[0]), to[1] = __float_as_uint(at[8]);
      to[2] = __float_as_uint(four_on[0]), to[3] = __float_as_uint(four_on[8]);
    } else {
      ldmatrix<true>(to, shared_address(from) + (step * 16 + lane % 8 + lane / 16 * 8) * ROW_LINE +
                             (row + lane / 8 % 2 * 8) * ELEMENT);
    }
  }
  // Columns: tile `j` of the warp, at steps 2·pair and 2·pair + 1.
  static __device__ __forceinline__ void columns(const char* from, int pair, int j, ColumnPair& to) {
    const int lane = threadIdx.x % 32, column = Sums::warp_column() + j * 8;
    if constexpr (ELEMENT == 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* const at = from + ((2 * pair + half) * 8 + lane % 4) * COLUMN_LINE + (column + lane / 4) * 4;
        to.of[half].set(*(const unsigned*)at, *(const unsigned*)(at + 4 * COLUMN_LINE));
      }
    } else {
      unsigned words[4];
      ldmatrix<true>(words, shared_address(from) + (pair * 32 + lane) * COLUMN_LINE + column * ELEMENT);
      to.of[0].set(words[0], words[1]), to.of[1].set(words[2], words[3]);
    }
  }
};

__device__ __forceinline__ void multiply_stage(const char* from, Sums& sums) {
#pragma unroll
  for (int pair = 0; pair < STEPS / 2; ++pair) {
    unsigned a[2][PARTS][ROW_TILES][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        unsigned words[4];
        Fragments::rows(from, 2 * pair + half, i, words);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          unsigned low = 0;
          if constexpr (ELEMENT == 4)
            split_word(words[k], a[half][0][i][k], low);
          else
            a[half][0][i][k] = words[k];
          if (PARTS == 2) a[half][PARTS - 1][i][k] = low;
        }
      }
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      ColumnPair b;
      Fragments::columns(from + A_BYTES, pair, j, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) sums.multiply(a[half], b.of[half], j);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tap_gemm_wgrad(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, float* __restrict__ partial,
                   const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ CellEntry entries[STAGES][DEPTH];
  int block = blockIdx.x;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int column_block = block % params.column_blocks;
  block /= params.column_blocks;
  const Phase phase(block % PHASES);
  const int group = block / PHASES % params.groups, part = block / PHASES / params.groups;
  const int tap_groups = CHUNKS * phase.taps, first_group = column_block * TAP_GROUPS;
  if (first_group >= tap_groups) return;
  const scalar_t* const src = INPUT_GRAD ? grad : x;
  const scalar_t* const dst = INPUT_GRAD ? x : grad;
  const int first_cell = part * params.cells_of_part;
  const int count = min(params.cells_of_part, params.cells_of_all - first_cell), stages = ceil_div(count, DEPTH);

  // The thread copies, for each of its cells, a piece of the rows and a piece of the columns, in one tap group.
  const int row_piece = threadIdx.x % ROW_PIECES, dst_piece = row_block * ROW_PIECES + row_piece;
  const bool row_exists = dst_piece < DST_PIECES;
  const int column_piece = threadIdx.x % COLUMN_PIECES, own_group = first_group + column_piece * PIECE / CHUNK;
  const TapGroup own(phase, min(own_group, tap_groups - 1));
  const int src_piece = own.channel / PIECE + column_piece % (CHUNK / PIECE);
  const bool column_exists = own_group < tap_groups && src_piece < SOURCE_PIECES;
  const int src_by = group * SOURCE_PIECES + src_piece + pieces_to(params.src, own.tap);
  const int dst_by = group * DST_PIECES + dst_piece;

  auto list = [&](int stage) {
    for (int i = threadIdx.x; i < DEPTH; i += THREADS) {
      const int in_part = stage * DEPTH + i;
      entries[stage % STAGES][i] = CellEntry(params, phase, first_cell + in_part, in_part < count);
    }
  };

  partial += part * params.plane + (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN;
  Sums sums;
  sums.clear();
  bool flushed = false;
  auto flush = [&]() {
#pragma unroll
    for (int j = 0; j < 2 * COLUMN_TILES; ++j) {
      const int column = Sums::first_column() + j / 2 * 8 + j % 2, index = first_group + column / CHUNK;
      const TapGroup at(phase, min(index, tap_groups - 1));
      const int channel = at.channel + column % CHUNK;
      if (index >= tap_groups || channel >= SRC_CHANNELS) continue;
      float* const to =
          partial + (INPUT_GRAD ? weight_offset(0, channel, at.tap.tap) : weight_offset(channel, 0, at.tap.tap));
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int row = row_block * ROWS + Sums::first_row() + 8 * i;
        if (row >= DST_CHANNELS) continue;
        const float sum = sums.of[i / 2][j / 2][i % 2 * 2 + j % 2];
        float* const target = to + (long long)row * BETWEEN_ROWS;
        *target = flushed ? *target + sum : sum;
      }
    }
    flushed = true;
  };

#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) list(stage);
  __syncthreads();
  run_stages<STAGES>(
      stages, (char*)shared_memory, STAGE_BYTES,
      [&](int stage, char* to) {
        if (stage >= STAGES - 1) list(stage + 1);  // before the barrier that precedes its use
        const CellEntry* const cells = entries[stage % STAGES];
        const unsigned slots = shared_address(to);
#pragma unroll
        for (int i = 0; i < ceil_div(DEPTH, ROW_CELLS); ++i) {
          const int k = threadIdx.x / ROW_PIECES + i * ROW_CELLS;
          if (DEPTH % ROW_CELLS != 0 && k >= DEPTH) break;
          const int element = cells[k].dst;
          cp_async<16>(slots + k * ROW_LINE + row_piece * 16, (const char*)dst + (long long)(element + dst_by) * 16,
                       row_exists && element >= 0);
        }
#pragma unroll
        for (int i = 0; i < ceil_div(DEPTH, COLUMN_CELLS); ++i) {
          const int k = threadIdx.x / COLUMN_PIECES + i * COLUMN_CELLS;
          if (DEPTH % COLUMN_CELLS != 0 && k >= DEPTH) break;
          const CellSource& cell = cells[k].source;
          cp_async_through_l1(slots + A_BYTES + k * COLUMN_LINE + column_piece * 16,
                              (const char*)src + (long long)(cell.pieces + src_by) * 16,
                              column_exists && cell.meets(params.src, own.tap.d, own.tap.h, own.tap.w));
        }
      },
      [&](int stage, const char* from) {
        multiply_stage(from, sums);
        if (PROMOTE > 0 && (stage + 1) % PROMOTE == 0) sums.promote();
        if (FLUSH > 0 && (stage + 1) % FLUSH == 0 && stage + 1 < stages) {
          flush();
          sums.clear();
        }
      });
  if (PROMOTE > 0) sums.promote(true);
  flush();
}
