// Stores accumulators of an input gradient: rows are positions, columns are channels. All lanes of a warp call these.
// `columns`: how many columns exist from the first on, 0 if the row does not exist. WHOLE: all columns exist.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "epilogue/exchange.cuh"
#include "mainloop/accumulators.cuh"

template <bool WHOLE>
__device__ __forceinline__ bool has(int columns, int column) {
  return WHOLE ? columns > 0 : column < columns;
}

// Stores a row in NHWC, whose first column is at `to`. Eight bytes of neighbouring channels are stored TOGETHER.
template <bool WHOLE, bool TOGETHER, class Stored>
__device__ __forceinline__ void store_pixel(const float (&sums)[COLUMNS / 2], int half, Stored* to, int columns) {
  constexpr int VECTOR = TOGETHER ? 8 / (int)sizeof(Stored) : 1;
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; tile += VECTOR == 4 ? 2 : 1) {
    const float* const pair = sums + 4 * tile + 2 * half;
    const int column = 8 * tile + fragment_column();
    if constexpr (VECTOR == 4) {
      const bool both = tile + 1 < COLUMNS / 8;
      const Vector<unsigned, 2> found = exchanged(pair, both ? pair + 4 : pair);
      const int first = 8 * tile + first_exchanged();
      if ((both || threadIdx.x % 2 == 0) && has<WHOLE>(columns, first)) *(Vector<unsigned, 2>*)(to + first) = found;
    } else if constexpr (VECTOR == 2) {
      if (has<WHOLE>(columns, column)) *(Vector<float, 2>*)(to + column) = {pair[0], pair[1]};
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (has<WHOLE>(columns, column + i)) narrow(pair[i], to[column + i]);
    }
  }
}

// A tile's two columns of the thread, each in two neighbouring rows (`exchange_rows`).
template <class Stored>
__device__ __forceinline__ void narrowed_rows(const float (&sums)[COLUMNS / 2], int tile, Vector<Stored, 2>& first,
                                              Vector<Stored, 2>& second) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    narrow(sums[4 * tile + i], first.value[i]), narrow(sums[4 * tile + 2 + i], second.value[i]);
  exchange_rows(first, second);
}

// Whether all lanes of a warp have, together with the lane that has the next two rows or the previous, four neighbours
// in memory, or none; `together`: a lane's own two are neighbours.
template <class Stored>
__device__ __forceinline__ bool are_fours(Stored* const (&to)[2], bool together) {
  const unsigned long long first = to[0] ? (unsigned long long)(to[0] - threadIdx.x % 16 / 8 * 2) : 0;
  const bool aligned = first % sizeof(Vector<Stored, 4>) == 0 && (together || !(to[0] || to[1]));
  const bool same = swapped(first, 8) == first;
  return __all_sync(~0u, aligned && same);
}

// Stores 16 rows in NCHW, of which a thread has two neighbours from `to` on; null for none. `channel`: elements from a
// column to the next. Where four rows are neighbours in memory in all of a warp, lanes exchange once more, and a thread
// stores four rows of one column.
template <bool WHOLE, class Stored>
__device__ __forceinline__ void store_rows(const float (&sums)[COLUMNS / 2], Stored* const (&to)[2], long long channel,
                                           int columns) {
  typedef Vector<Stored, 2> Two;
  typedef Vector<Stored, 4> Four;
  const bool together = to[0] && to[1] == to[0] + 1 && channel % 2 == 0 && (unsigned long long)to[0] % sizeof(Two) == 0;
  const bool fours = are_fours(to, together && channel % 4 == 0);
  if (fours) {
    const int upper = threadIdx.x % 16 / 8;
    Stored* const at = to[0] ? to[0] - 2 * upper + (fragment_column() + upper) * channel : nullptr;
#pragma unroll
    for (int tile = 0; tile < COLUMNS / 8; ++tile) {
      Two first, second;
      narrowed_rows(sums, tile, first, second);
      const Four all = exchange_columns(first, second);
      if (at && has<WHOLE>(columns, 8 * tile + fragment_column() + upper)) *(Four*)(at + 8 * tile * channel) = all;
    }
    return;
  }
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    Two first, second;
    narrowed_rows(sums, tile, first, second);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * tile + fragment_column() + i;
      const Two& pair = i ? second : first;
      if (!has<WHOLE>(columns, column)) continue;
      if (together) {
        *(Two*)(to[0] + column * channel) = pair;
      } else {
        if (to[0]) to[0][column * channel] = pair.value[0];
        if (to[1]) to[1][column * channel] = pair.value[1];
      }
    }
  }
}
