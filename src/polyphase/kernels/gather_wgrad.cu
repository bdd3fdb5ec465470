// The weight gradient of any layer on tensor cores (mainloop/gather_mma.cuh):
//
//   gw[cd, cs, tap] = Σ over cells of all images   destination[cd, cell·DST + phase] · source[cs, cell·SRC + offset of
//   the tap]
//
// with cells and phases of core/geometry.cuh. Both tensors are read; "source" and "destination" are those of the
// forward pass or those of the input gradient, and rows are channels of the destination, so that either channel can be
// the row:
//
//     forward           rows are output channels   a tap belongs to one phase       columns are (input channel, tap)
//     input gradient    rows are input channels    there is one phase               columns are (output channel, tap)
//
// Columns are tap groups of the phase, CHUNK source channels at one tap; k runs over cells of all images.
//
// Index mapping. A block owns ROWS channels and COLUMNS / CHUNK tap groups of one phase and group, and one contiguous
// part of the cells, whose sums it leaves in a plane of its own. Neighbouring threads load neighbouring cells.
//
// The tensor cores truncate at every addition. So FLUSH stages are summed there, and those sums in `partial`; float32
// in two parts leaves them at every stage.
//
// Shared memory: what each tap group reads and where its results go; BUFFERS stages, rows and columns as [row][k].

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"
#include "core/types.cuh"
#include "mainloop/gather_mma.cuh"

struct Params {
  Tensor5 src, dst;
  int cells_of_all;
  int cells_of_part;  // a multiple of DEPTH
  Divisor cells[3];   // of an image along d, h, w
  int groups, column_blocks;
  long long plane;  // elements of a plane of partial sums: all weights
};

constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);
constexpr int TAP_GROUPS = COLUMNS / CHUNK;
constexpr int LANES = STAGE_WORDS, LINES = THREADS / LANES;  // threads along k, and rows at once
constexpr int ROWS_EACH = ceil_div(ROWS, LINES), COLUMNS_EACH = ceil_div(COLUMNS, LINES);
constexpr int RUN = COLUMNS_EACH < CHUNK ? COLUMNS_EACH : CHUNK, RUNS = COLUMNS_EACH / RUN;  // columns of one tap group
constexpr int STAGE_BYTES = (ROWS + COLUMNS) * ROW_PITCH;
static_assert(THREADS % LANES == 0 && COLUMNS % LINES == 0 && COLUMNS % CHUNK == 0 && COLUMNS_EACH % RUN == 0,
              "threads share columns evenly");

// What a tap group reads and writes.
struct alignas(16) GroupEntry {
  int d, h, w;       // source elements from that of the first tap
  int channel;       // the first, SRC_CHANNELS or more where there is none
  long long offset;  // elements from the first channel's source element of the first tap
  long long weight;  // elements to the weight of the first channel, and of destination channel 0
};

// A thread's words of an operand, on their way: one of each of COUNT rows.
template <int COUNT>
struct Held {
  scalar_t elements[ELEMENT == 4 ? 1 : COUNT][2];

  // Word `lane` of row `row` of what lies at `to`, counted by `i`.
  __device__ __forceinline__ void fetch(int i, char* to, int row, const scalar_t* const (&from)[2],
                                        const bool (&exists)[2]) {
    if constexpr (ELEMENT == 4) {
      cp_async<4>(shared_address(to) + row * ROW_PITCH + threadIdx.x % LANES * 4, from[0], exists[0]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) elements[i][j] = exists[j] ? read(from[j]) : zero<scalar_t>();
    }
  }
  __device__ __forceinline__ void put(int i, char* to, int row) const {
    if constexpr (ELEMENT == 2) *(unsigned*)(to + row * ROW_PITCH + threadIdx.x % LANES * 4) = word_of(elements[i]);
  }
};

__device__ __forceinline__ void multiply_stage(const char* from, Sums& sums) {
  const int lane = threadIdx.x % 32;
  const unsigned rows_at = shared_address(from) + (Sums::warp_row() + lane % 16) * ROW_PITCH + lane / 16 * 16;
  const unsigned columns_at =
      shared_address(from) + ROWS * ROW_PITCH + (Sums::warp_column() + lane % 8) * ROW_PITCH + lane / 8 * 16;
#pragma unroll
  for (int pair = 0; pair < STEPS / 2; ++pair) {  // of steps: ldmatrix brings two of a column tile at once
    unsigned a[2][PARTS][ROW_TILES][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        ldmatrix(a[half][0][i], rows_at + i * 16 * ROW_PITCH + (2 * pair + half) * 32);
        if constexpr (ELEMENT == 4) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            unsigned low;
            split_word(a[half][0][i][k], a[half][0][i][k], low);
            if (PARTS == 2) a[half][PARTS - 1][i][k] = low;
          }
        }
      }
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      unsigned words[4];
      ldmatrix(words, columns_at + j * 8 * ROW_PITCH + pair * 64);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ColumnFragment b;
        b.set(words[2 * half], words[2 * half + 1]);
        sums.multiply(a[half], b, j);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gather_wgrad(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, float* __restrict__ partial,
                 const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ GroupEntry entries[TAP_GROUPS];
  int block = blockIdx.x;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int column_block = block % params.column_blocks;
  block /= params.column_blocks;
  const Phase phase(block % PHASES);
  const int group = block / PHASES % params.groups, part = block / PHASES / params.groups;
  const int tap_groups = CHUNKS * phase.taps, first_group = column_block * TAP_GROUPS;
  if (first_group >= tap_groups) return;

  const scalar_t* const src = (INPUT_GRAD ? grad : x) + (long long)group * SRC_CHANNELS * params.src.stride[1];
  const int first_row = row_block * ROWS;
  const scalar_t* const dst =
      (INPUT_GRAD ? x : grad) + ((long long)group * DST_CHANNELS + first_row) * params.dst.stride[1];
  for (int i = threadIdx.x; i < TAP_GROUPS; i += THREADS) {
    GroupEntry entry = {0, 0, 0, SRC_CHANNELS, 0, 0};
    if (first_group + i < tap_groups) {
      const TapGroup at(phase, first_group + i);
      entry = {at.tap.d,
               at.tap.h,
               at.tap.w,
               at.channel,
               at.channel * params.src.stride[1] + at.tap.d * params.src.stride[2] + at.tap.h * params.src.stride[3] +
                   at.tap.w * params.src.stride[4],
               INPUT_GRAD ? weight_offset(0, at.channel, at.tap.tap) : weight_offset(at.channel, 0, at.tap.tap)};
    }
    entries[i] = entry;
  }
  const int first_cell = part * params.cells_of_part;
  const int count = min(params.cells_of_part, params.cells_of_all - first_cell), stages = ceil_div(count, DEPTH);
  const int line = threadIdx.x / LANES;

  partial += part * params.plane + (long long)group * (INPUT_GRAD ? DST_CHANNELS : SRC_CHANNELS) * WEIGHT_STRIDE_IN;
  Held<ROWS_EACH> rows;
  Held<COLUMNS_EACH> columns;
  Sums sums;
  sums.clear();
  bool flushed = false;
  auto flush = [&]() {
    constexpr int BETWEEN_ROWS = INPUT_GRAD ? WEIGHT_STRIDE_IN : WEIGHT_STRIDE_OUT;
    constexpr int BETWEEN_COLUMNS = INPUT_GRAD ? WEIGHT_STRIDE_OUT : WEIGHT_STRIDE_IN;
#pragma unroll
    for (int j = 0; j < 2 * COLUMN_TILES; ++j) {
      const int column = Sums::first_column() + j / 2 * 8 + j % 2;
      const GroupEntry& entry = entries[column / CHUNK];
      if (entry.channel + column % CHUNK >= SRC_CHANNELS) continue;
      float* const to = partial + entry.weight + (long long)(column % CHUNK) * BETWEEN_COLUMNS;
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int row = first_row + Sums::first_row() + 8 * i;
        if (row >= DST_CHANNELS) continue;
        const float sum = sums.of[i / 2][j / 2][i % 2 * 2 + j % 2];
        float* const at = to + (long long)row * BETWEEN_ROWS;
        *at = flushed ? *at + sum : sum;
      }
    }
    flushed = true;
  };
  __syncthreads();
  run_pipeline(
      stages, (char*)shared_memory, STAGE_BYTES,
      [&](int stage, char* to) {
        CellSource read_at[WORD];
        long long element[WORD];
#pragma unroll
        for (int j = 0; j < WORD; ++j) {
          const int in_part = stage * DEPTH + threadIdx.x % LANES * WORD + j, at = first_cell + in_part;
          int cell[4];
          const int row = at / params.cells[2], slab = row / params.cells[1];
          cell[3] = at - row * params.cells[2].value, cell[2] = row - slab * params.cells[1].value;
          cell[0] = slab / params.cells[0], cell[1] = slab - cell[0] * params.cells[0].value;
          read_at[j] = CellSource(params.src, phase, cell, in_part < count);
          element[j] = dst_element(params.dst, phase, cell, in_part < count);
        }
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i) {
          const int row = line * ROWS_EACH + i;
          if (ROWS % LINES != 0 && row >= ROWS) break;
          const scalar_t* from[2];
          bool exists[2];
#pragma unroll
          for (int j = 0; j < WORD; ++j) {
            exists[j] = element[j] >= 0 && (DST_CHANNELS % ROWS == 0 || first_row + row < DST_CHANNELS);
            from[j] = dst + (element[j] + row * params.dst.stride[1]);
          }
          rows.fetch(i, to, row, from, exists);
        }
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
          const int column = line * COLUMNS_EACH + run * RUN;
          const GroupEntry entry = entries[column / CHUNK];
          const int in_group = column % CHUNK;
          bool inside[2];
#pragma unroll
          for (int j = 0; j < WORD; ++j) inside[j] = read_at[j].meets(params.src, entry.d, entry.h, entry.w);
#pragma unroll
          for (int i = 0; i < RUN; ++i) {
            const scalar_t* from[2];
            bool exists[2];
#pragma unroll
            for (int j = 0; j < WORD; ++j) {
              exists[j] = inside[j] && entry.channel + in_group + i < SRC_CHANNELS;
              from[j] = src + (read_at[j].offset + entry.offset + (in_group + i) * params.src.stride[1]);
            }
            columns.fetch(run * RUN + i, to + ROWS * ROW_PITCH, column + i, from, exists);
          }
        }
      },
      [&](char* to) {
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i)
          if (ROWS % LINES == 0 || line * ROWS_EACH + i < ROWS) rows.put(i, to, line * ROWS_EACH + i);
#pragma unroll
        for (int i = 0; i < COLUMNS_EACH; ++i) columns.put(i, to + ROWS * ROW_PITCH, line * COLUMNS_EACH + i);
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
