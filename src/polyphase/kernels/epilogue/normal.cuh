// The moments of each pixel's channels, for an operation that normalises over these (LayerNorm, softmax), where the
// accumulators of a warpgroup have all channels of a pixel: channels are rows, pixels columns.
//
//   1. A thread finds those of its own rows of a column.
//   2. The eight lanes that have other rows of the same columns add theirs up. Of the columns that two lanes share each
//      goes on with half, so that eight columns take 4 + 2 + 1 exchanges, and each lane ends with one of them.
//   3. A thread for each column adds up those of the four warps, through shared memory.
//
// Moments are the mean and the sum of squared deviations from it, and are added as such: no sum of squares cancels. Of
// a softmax they are the largest value and the sum of exponentials of the differences from it.

#pragma once

#include "specialisation.cuh"
#include "core/row_blocks.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"

struct Moments {
  // Before the first value. A softmax begins with the least finite number, so that minus infinities add nothing.
  float center = EPILOGUE_SOFTMAX ? -3.402823466e38f : 0.f, spread = 0.f;

  // One value more than `count`.
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

// Those of `count` values and of `others`.
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

// Of the 16 rows that a warp has of each row block, those that are channels.
__device__ __forceinline__ int rows_of_warp(int warp) {
  int rows = 0;
#pragma unroll
  for (int block = 0; block < CHANNEL_BLOCKS; ++block) rows += min(max(DST_CHANNELS - block * ROWS - 16 * warp, 0), 16);
  return rows;
}

// Adds up the moments of columns that lanes share, of `count` rows of the thread's. Those of COLUMNS / 8 remain, in
// front, of the columns from `first_column` on.
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

// What a pixel's outputs are normalised by: of the moments that the warps have, those of one `pitch` behind the
// other's.
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
