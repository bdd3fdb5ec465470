// The moments of each pixel's channels, for an operation that normalises over channels (LayerNorm, softmax). The
// accumulators of a warpgroup hold all channels of a pixel: channels are rows, pixels columns.
//
//   1. A thread computes the moments of its own rows, for each column.
//   2. The eight lanes with other rows of the same columns combine theirs. At each step two lanes split the columns
//      that they share, so that eight columns take 4 + 2 + 1 exchanges, and each lane ends with one column.
//   3. One thread for each column combines the four warps' moments, through shared memory.
//
// Moments are the mean and the sum of squared deviations from it, and are combined as such, so that no sum of squares
// cancels. For a softmax they are the maximum and the sum of exponentials of the differences from it.

#pragma once

#include "specialisation.cuh"
#include "core/row_blocks.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"

struct Moments {
  // Before the first value. A softmax begins with the least finite number, so that minus infinities add nothing.
  float center = EPILOGUE_SOFTMAX ? -3.402823466e38f : 0.f, spread = 0.f;

  // Adds a value to the moments of `count` values.
  __device__ __forceinline__ void add(float value, int count) {
    if (EPILOGUE_SOFTMAX) {
      const float ahead = value - center, power = exponential_term(-fabsf(ahead));
      spread = ahead > 0 ? spread * power + 1.f : spread + power;
      center = ahead > 0 ? value : center;
      return;
    }
    const float share = 1.f / (count + 1), ahead = value - center;
    center += ahead * share;
    spread += ahead * ahead * (count * share);
  }
};

// Combines the moments of `count` values and of `others` values.
__device__ __forceinline__ Moments both(const Moments& one, const Moments& other, int count, int others) {
  const float ahead = other.center - one.center;
  if (EPILOGUE_SOFTMAX) {
    const float power = exponential_term(-fabsf(ahead));
    return ahead > 0 ? Moments{other.center, other.spread + one.spread * power}
                     : Moments{one.center, one.spread + other.spread * power};
  }
  const float share = others ? (float)others / (count + others) : 0.f;
  return {one.center + ahead * share, one.spread + other.spread + ahead * ahead * (count * share)};
}

constexpr bool ALL_ROWS_EXIST = DST_CHANNELS % ROWS == 0;
static_assert(CHANNEL_GROUPS == 1 && STACKED == 1, "a warpgroup has all channels of a pixel, and nothing else");

// Rows of a warp that are channels; it has 16 rows of each row block.
__device__ __forceinline__ int rows_of_warp(int warp) {
  int rows = 0;
#pragma unroll
  for (int block = 0; block < CHANNEL_BLOCKS; ++block) rows += min(max(DST_CHANNELS - block * ROWS - 16 * warp, 0), 16);
  return rows;
}

// Combines the lanes' moments of the columns that they share; a thread's are those of `count` rows. The moments of
// COLUMNS / 8 columns remain, in front: those from `first_column` on.
template <int COLUMNS>
__device__ __forceinline__ void add_up_rows(Moments (&of)[COLUMNS], int count) {
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const int left = COLUMNS >> (level + 1), partner = 4 << level;
    const bool upper = threadIdx.x & partner;
    const int others = ALL_ROWS_EXIST ? count : __shfl_xor_sync(~0u, count, partner);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      if (i >= left) break;
      const Moments own = upper ? of[i + left] : of[i], given = upper ? of[i] : of[i + left];
      const Moments other = {__shfl_xor_sync(~0u, given.center, partner), __shfl_xor_sync(~0u, given.spread, partner)};
      of[i] = both(own, other, count, others);
    }
    count += others;
  }
}
template <int COLUMNS>
__device__ __forceinline__ int first_column() {
  const int of_warp = threadIdx.x / 4 % 8;  // its bits from the lowest on choose halves, from the largest on
  return of_warp % 2 * (COLUMNS / 2) + of_warp / 2 % 2 * (COLUMNS / 4) + of_warp / 4 * (COLUMNS / 8);
}

// The `Normal` of a pixel. The warps' moments are `pitch` apart.
__device__ __forceinline__ Normal normal_of(const Moments* of_warps, int pitch) {
  Moments all = of_warps[0];
  int count = rows_of_warp(0);
#pragma unroll
  for (int warp = 1; warp < 4; ++warp) {
    all = both(all, of_warps[warp * pitch], count, rows_of_warp(warp));
    count += rows_of_warp(warp);
  }
  // An infinite maximum gives NaN, as in PyTorch.
  if (EPILOGUE_SOFTMAX) return {all.center, (1 + (all.center - all.center)) / all.spread};
  return {all.center, 1 / square_root(all.spread * (1.f / DST_CHANNELS) + EPILOGUE_EPSILON)};
}
