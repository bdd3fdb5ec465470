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

// Stores 16 rows in NCHW: a thread stores two neighbouring rows from `to` on; null for none. `channel`: elements from a
// column to the next.
template <bool WHOLE, class Stored>
__device__ __forceinline__ void store_row_pair(const float (&sums)[COLUMNS / 2], Stored* const (&to)[2],
                                               long long channel, int columns) {
  const bool together =
      to[0] && to[1] == to[0] + 1 && channel % 2 == 0 && (unsigned long long)to[0] % sizeof(Vector<Stored, 2>) == 0;
  Stored* at[2];  // the thread's first column
#pragma unroll
  for (int j = 0; j < 2; ++j) at[j] = to[j] ? to[j] + fragment_column() * channel : nullptr;
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    Vector<Stored, 2> first, second;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      narrow(sums[4 * tile + i], first.value[i]), narrow(sums[4 * tile + 2 + i], second.value[i]);
    exchange_rows(first, second);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has<WHOLE>(columns, 8 * tile + fragment_column() + i)) continue;
      const long long column = (8 * tile + i) * channel;
      if (together) {
        *(Vector<Stored, 2>*)(at[0] + column) = Vector<Stored, 2>{first.value[i], second.value[i]};
      } else {
        if (at[0]) at[0][column] = first.value[i];
        if (at[1]) at[1][column] = second.value[i];
      }
    }
  }
}
