// The mainloop of tap_gemm and tap_gemm_wgrad: a multistage pipeline of two operands in shared memory, multiplied by
// mma.sync.
//
//     sum[row, column]  +=  Σ_k  A[row, k] · B[column, k]
//
// A word is four bytes: one element of float32, or two neighbours along k of a half type. A stage has STAGE_WORDS of
// each row and column.
//
// Index mapping. The warps are ROW_WARPS × the rest; a warp computes 16·ROW_TILES rows and 8·COLUMN_TILES columns, with
// the fragments of ptx/mma.cuh. float32 is rounded to TF32 as it leaves shared memory, or with PARTS = 2 split in two,
// of which three products are added.
//
// Tensor cores truncate at every addition. So after PROMOTE stages (if not 0) accumulators are added to a second set in
// float32.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/mma.cuh"
#include "mainloop/cp_async_stages.cuh"
#include "operand/tf32.cuh"

constexpr int THREADS = 32 * WARPS, COLUMN_WARPS = WARPS / ROW_WARPS;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, COLUMNS = 8 * COLUMN_TILES * COLUMN_WARPS;
constexpr int ELEMENT = sizeof(scalar_t), WORD = 4 / ELEMENT;  // elements of a word
constexpr int STEPS = STAGE_WORDS / 8;                         // instructions along k of a stage
constexpr int DEPTH = STAGE_WORDS * WORD;                      // elements along k of a stage

// Pitch in bytes of an operand in the order [k][row], padded so that the lines of one load have no bank conflicts.
__host__ __device__ constexpr int line_pitch(int rows) { return rows * ELEMENT + (ELEMENT == 4 ? 32 : 16); }

__device__ __forceinline__ void split_word(unsigned word, unsigned& high, unsigned& low) {
  float high_part = 0, low_part = 0;
  split_tf32(__uint_as_float(word), high_part, low_part);
  high = __float_as_uint(high_part), low = __float_as_uint(low_part);
}

// Two words of a column along k.
struct ColumnFragment {
  unsigned high[2], low[2];

  __device__ __forceinline__ void set(unsigned first, unsigned second) {
    if constexpr (ELEMENT == 4) {
      split_word(first, high[0], low[0]), split_word(second, high[1], low[1]);
    } else {
      high[0] = first, high[1] = second;
    }
  }
};

struct Sums {
  float of[ROW_TILES][COLUMN_TILES][4];
  float promoted[PROMOTE > 0 ? ROW_TILES : 1][COLUMN_TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          of[i][j][k] = 0;
          if (PROMOTE > 0) promoted[i][j][k] = 0;
        }
  }
  // Adds the accumulators to the second set and clears them; with `end` leaves the totals in `of`.
  __device__ __forceinline__ void promote(bool end = false) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if constexpr (PROMOTE > 0) {
            promoted[i][j][k] += of[i][j][k];
            of[i][j][k] = end ? promoted[i][j][k] : 0;
          }
  }

  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / COLUMN_WARPS * (16 * ROW_TILES); }
  static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % COLUMN_WARPS * (8 * COLUMN_TILES); }
  // Row and column of the thread's first sum; sum i of a tile is i / 2 · 8 rows and i % 2 columns further.
  static __device__ __forceinline__ int first_row() { return warp_row() + threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int first_column() { return warp_column() + threadIdx.x % 4 * 2; }

  // Adds the products of one step: A's parts by a fragment of column tile `j`.
  __device__ __forceinline__ void multiply(const unsigned (&a)[PARTS][ROW_TILES][4], const ColumnFragment& b, int j) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      if constexpr (PARTS == 2) {
        mma<scalar_t>(of[i][j], a[1][i], b.high[0], b.high[1]);
        mma<scalar_t>(of[i][j], a[0][i], b.low[0], b.low[1]);
      }
      mma<scalar_t>(of[i][j], a[0][i], b.high[0], b.high[1]);
    }
  }
};

// The words of a tile of eight columns for two steps.
struct ColumnPair {
  ColumnFragment of[2];

  // Loads from an operand in the order [column][k]; `at`: the lane's address.
  __device__ __forceinline__ void load(unsigned at) {
    unsigned words[4];
    ldmatrix(words, at);
    of[0].set(words[0], words[1]), of[1].set(words[2], words[3]);
  }
};
