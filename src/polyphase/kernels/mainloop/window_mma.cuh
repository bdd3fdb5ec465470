// Mainloop of both gradients by mma.sync, both operands from shared memory:
//
//     sum[m, n]  +=  Σ_k  A[m, k] · window[offset of k  +  offset of n]
//
// M are input channels. In the weight gradient N are (output channel, tap) pairs, K are positions, and A is the input;
// in the input gradient N are positions, K are (output channel, tap) pairs, and A is the weight. (Rows are those of M,
// columns those of N.)
//
// B is gathered from the window of the output gradient (operand/window.cuh): the address that a position reads at a tap
// is the sum of two offsets, one of the position, one of the output channel and the tap. So there is no im2col.
//
// Index mapping. The warps are ROW_WARPS × the rest; a warp computes 16·ROW_TILES rows and 8·COLUMN_TILES columns, with
// the fragments of ptx/mma.cuh: A's by ldmatrix, the window's element by element; float32 is rounded to TF32 there.
//
// Shared memory of a stage: A as [row][k], A_PITCH bytes a row, so that ldmatrix has no bank conflicts; the
// window as [output channel][n][d][h][w].

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "mainloop/accumulators.cuh"
#include "mainloop/multistage.cuh"

constexpr int COLUMN_WARPS = WARPS / ROW_WARPS;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, COLUMNS = 8 * COLUMN_TILES * COLUMN_WARPS;
constexpr int CHUNK_TAPS = OUT_CHUNK * TAPS;
constexpr int DEPTH = INPUT_GRAD ? round_up(CHUNK_TAPS, OPERATION) : POSITIONS;  // k of a stage
constexpr int A_PITCH = DEPTH * ELEMENT + 16;
constexpr int A_BYTES = ROWS * A_PITCH;

static_assert(DEPTH % OPERATION == 0, "a stage is whole operations");

// The accumulators of a warp.
struct Sums : Accumulators<ROW_TILES, 4 * COLUMN_TILES> {
  // The first row and column of the warp.
  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / COLUMN_WARPS * (16 * ROW_TILES); }
  static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % COLUMN_WARPS * (8 * COLUMN_TILES); }

  // The first row and column of the thread's sums.
  static __device__ __forceinline__ int first_row() { return warp_row() + fragment_row(); }
  static __device__ __forceinline__ int first_column() { return warp_column() + fragment_column(); }

  // The column of tile `j` whose operand the thread reads.
  static __device__ __forceinline__ int operand_column(int j) { return warp_column() + 8 * j + fragment_row(); }

  // Adds one stage. `columns`: window offset of each tile's operand column.
  __device__ __forceinline__ void add(const char* a, const char* window, const int* offsets,
                                      const int (&columns)[COLUMN_TILES]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // lanes may have loaded different numbers of pieces
    const unsigned rows_at = shared_address(a) + (warp_row() + lane % 16) * A_PITCH + lane / 16 * 16;
#pragma unroll 2
    for (int operation = 0; operation < DEPTH / OPERATION; ++operation) {
      unsigned rows[ROW_TILES][4];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        ldmatrix(rows[i], rows_at + i * 16 * A_PITCH + operation * 32);
        if constexpr (ELEMENT == 4) {
#pragma unroll
          for (int j = 0; j < 4; ++j) rows[i][j] = __float_as_uint(round_tf32(__uint_as_float(rows[i][j])));
        }
      }
      constexpr int EACH = 4 / ELEMENT;  // k of a word
      const char* from[2 * EACH];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Vector<int, EACH> two =
            *(const Vector<int, EACH>*)(offsets + operation * OPERATION + half * (OPERATION / 2) + lane % 4 * EACH);
#pragma unroll
        for (int i = 0; i < EACH; ++i) from[half * EACH + i] = window + two.value[i];
      }
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j) {
        unsigned column[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (ELEMENT == 4)
            column[half] = __float_as_uint(round_tf32(*(const float*)(from[half] + columns[j])));
          else
            column[half] = *(const unsigned short*)(from[half * EACH] + columns[j]) |
                           *(const unsigned short*)(from[half * EACH + EACH - 1] + columns[j]) << 16;
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) mma<scalar_t>(of[i] + 4 * j, rows[i], column[0], column[1]);
      }
    }
  }
};
