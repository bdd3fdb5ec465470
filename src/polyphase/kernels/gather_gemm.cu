// The forward pass and the input gradient of any layer on tensor cores (mainloop/gather_mma.cuh):
//
//   destination[cd, cell·DST + phase] = bias[cd] + Σ over taps of the phase and cs of
//                                                  w[cs, cd, tap] · source[cs, cell·SRC + offset of the tap]
//
// with cells and phases of core/geometry.cuh. Rows are destination channels, columns are cells of all images, one after
// the other, and k runs over the phase's tap groups: CHUNK source channels at one tap. Any number of taps and channels,
// any stride, dilation and memory format fits, because source elements are gathered one by one.
//
// Index mapping. A block owns ROWS channels of one group, one phase and COLUMNS cells, and with several splits one
// contiguous part of the stages. Rows come packed (steps/pack_gather.cu), in pieces of 16 bytes by cp.async. A thread
// gathers the source elements of one column or several, or shares a column with others. float32 goes to shared memory
// by cp.async; of half types two channels are packed into a word in registers.
//
// Shared memory: BUFFERS stages, each rows as [part][row][k] and columns as [k][column]; at the end, where each column
// lies in the destination.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "mainloop/gather_mma.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  Tensor5 src, dst;
  int columns;       // cells of all images
  Divisor tiles;     // of columns
  Divisor cells[3];  // of an image along d, h, w
  int groups;
  int splits;       // of the stages; several leave planes of partial sums
  long long plane;  // elements of one
  int pairs;        // whether a column and the next are stored together
};

constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);
constexpr int GROUPS_OF_STAGE = DEPTH / CHUNK, CHUNK_WORDS = CHUNK / WORD;
constexpr int PITCH = LINE_PITCH<COLUMNS>;
constexpr int A_BYTES = PARTS * ROWS * ROW_PITCH, STAGE_BYTES = A_BYTES + STAGE_WORDS * PITCH;
static_assert(DEPTH % CHUNK == 0 && CHUNK % WORD == 0, "a stage is whole tap groups, and these are whole words");

// What a thread gathers: EACH columns, or a share of one.
constexpr int EACH = COLUMNS > THREADS ? COLUMNS / THREADS : 1, SHARERS = COLUMNS < THREADS ? THREADS / COLUMNS : 1;
constexpr int WORDS = STAGE_WORDS / SHARERS;                                        // of a column
constexpr int RUN = WORDS < CHUNK_WORDS ? WORDS : CHUNK_WORDS, RUNS = WORDS / RUN;  // words of one tap group
static_assert(STAGE_WORDS % SHARERS == 0, "threads share a column evenly");

struct Gathered {
  CellSource cells[EACH];
  scalar_t elements[ELEMENT == 4 ? 1 : EACH][ELEMENT == 4 ? 1 : WORDS][2];

  static __device__ __forceinline__ int column(int i) { return threadIdx.x % (COLUMNS / EACH) + i * THREADS; }
  static __device__ __forceinline__ int first_word() { return SHARERS == 1 ? 0 : (int)threadIdx.x / COLUMNS * WORDS; }
  static __device__ __forceinline__ unsigned slot(char* to, int word, int i) {
    return shared_address(to) + (first_word() + word) * PITCH + column(i) * 4;
  }

  // Of the stage whose first tap group is `first`, of `count` that there are.
  __device__ __forceinline__ void fetch(const Params& params, const Phase& phase, const scalar_t* src, int first,
                                        int count, char* to) {
    const long long apart = params.src.stride[1];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int word = first_word() + run * RUN, index = first + word / CHUNK_WORDS;
      const TapGroup group(phase, index);
      const int channel = group.channel + word % CHUNK_WORDS * WORD;
      const long long by = channel * apart + group.tap.d * params.src.stride[2] + group.tap.h * params.src.stride[3] +
                           group.tap.w * params.src.stride[4];
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const bool inside = index < count && cells[i].meets(params.src, group.tap.d, group.tap.h, group.tap.w);
        const scalar_t* from = src + (cells[i].offset + by);
#pragma unroll
        for (int j = 0; j < RUN * WORD; ++j, from += apart) {
          const bool exists = inside && (SRC_CHANNELS % CHUNK == 0 || channel + j < SRC_CHANNELS);
          if constexpr (ELEMENT == 4)
            cp_async<4>(slot(to, run * RUN + j, i), from, exists);
          else
            elements[i][run * RUN + j / 2][j % 2] = exists ? read(from) : zero<scalar_t>();
        }
      }
    }
  }
  __device__ __forceinline__ void put(char* to) const {
    if constexpr (ELEMENT == 2) {
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int j = 0; j < WORDS; ++j)
          *(unsigned*)(to + (first_word() + j) * PITCH + column(i) * 4) = word_of(elements[i][j]);
    }
  }
};

__device__ __forceinline__ void multiply_stage(const char* from, Sums& sums) {
  const int lane = threadIdx.x % 32;
  const unsigned rows_at = shared_address(from) + (Sums::warp_row() + lane % 16) * ROW_PITCH + lane / 16 * 16;
  const char* const columns_at = from + A_BYTES + lane % 4 * PITCH + (Sums::warp_column() + lane / 4) * 4;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    unsigned a[PARTS][ROW_TILES][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i)
        ldmatrix(a[part][i], rows_at + (part * ROWS + i * 16) * ROW_PITCH + step * 32);
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      const char* const at = columns_at + step * 8 * PITCH + j * 32;
      ColumnFragment b;
      b.set(*(const unsigned*)at, *(const unsigned*)(at + 4 * PITCH));
      sums.multiply(a, b, j);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gather_gemm(const scalar_t* __restrict__ src, const unsigned char* __restrict__ packed,
                const scalar_t* __restrict__ bias, scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
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

  src += (long long)group * SRC_CHANNELS * params.src.stride[1];
  packed += (((long long)group * PHASES + phase_index) * ROW_BLOCKS + row_block) * PACKED_STAGES *
            (PARTS * ROWS * DEPTH * ELEMENT);

  Gathered gathered;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int column = first_column + Gathered::column(i);
    int cell[4];
    const int row = column / params.cells[2], slab = row / params.cells[1];
    cell[3] = column - row * params.cells[2].value, cell[2] = row - slab * params.cells[1].value;
    cell[0] = slab / params.cells[0], cell[1] = slab - cell[0] * params.cells[0].value;
    gathered.cells[i] = CellSource(params.src, phase, cell, column < params.columns);
  }

  Sums sums;
  sums.clear();
  griddepcontrol_wait();
  run_pipeline(
      stages, (char*)shared_memory, STAGE_BYTES,
      [&](int stage, char* to) {
        constexpr int PIECES = DEPTH * ELEMENT / 16, BEFORE = PARTS * ROWS * PIECES;
        const unsigned char* const from = packed + (long long)(first_stage + stage) * (BEFORE * 16);
#pragma unroll
        for (int i = 0; i < ceil_div(BEFORE, THREADS); ++i) {
          const int piece = threadIdx.x + i * THREADS;
          if (BEFORE % THREADS == 0 || piece < BEFORE)
            cp_async<16>(shared_address(to) + piece / PIECES * ROW_PITCH + piece % PIECES * 16, from + piece * 16,
                         true);
        }
        gathered.fetch(params, phase, src, (first_stage + stage) * GROUPS_OF_STAGE, tap_groups, to + A_BYTES);
      },
      [&](char* to) { gathered.put(to + A_BYTES); },
      [&](int stage, const char* from) {
        multiply_stage(from, sums);
        if (PROMOTE > 0 && (stage + 1) % PROMOTE == 0) sums.promote();
      });
  if (PROMOTE > 0) sums.promote(true);

  __syncthreads();
  long long* const targets = (long long*)shared_memory;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const int column = first_column + i;
    int cell[4];
    const int row = column / params.cells[2], slab = row / params.cells[1];
    cell[3] = column - row * params.cells[2].value, cell[2] = row - slab * params.cells[1].value;
    cell[0] = slab / params.cells[0], cell[1] = slab - cell[0] * params.cells[0].value;
    targets[i] = dst_element(params.dst, phase, cell, column < params.columns);
  }
  __syncthreads();
  const int first_channel = row_block * ROWS + Sums::first_row();
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const int channel = first_channel + 8 * i;
    if (channel >= DST_CHANNELS) break;
    const int of_all = group * DST_CHANNELS + channel;
    const ChannelTerms terms = channel_terms(bias, of_all, split == 0);
    const long long to = of_all * params.dst.stride[1];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      const long long* const target = targets + Sums::first_column() + 8 * j;
      const float* const sum = sums.of[i / 2][j] + i % 2 * 2;
      if (params.splits > 1) {
        accum_t* const partial = (accum_t*)dst + split * params.plane + to;
        if (target[0] >= 0) partial[target[0]] = finish(sum[0], terms);
        if (target[1] >= 0) partial[target[1]] = finish(sum[1], terms);
        continue;
      }
      Vector<scalar_t, 2> both;
      narrow(finish(sum[0], terms), both.value[0]);
      narrow(finish(sum[1], terms), both.value[1]);
      if (params.pairs) {
        if (target[0] >= 0) *(Vector<scalar_t, 2>*)(dst + to + target[0]) = both;
      } else {
        if (target[0] >= 0) dst[to + target[0]] = both.value[0];
        if (target[1] >= 0) dst[to + target[1]] = both.value[1];
      }
    }
  }
}
