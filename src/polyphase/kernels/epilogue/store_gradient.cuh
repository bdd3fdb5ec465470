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

// Whether the four lanes of a warp that have eight neighbouring rows of a column, in all of a warp, have neighbours in
// memory, or none; `together`: a lane's own two are neighbours.
template <class Stored>
__device__ __forceinline__ bool are_eights(Stored* const (&to)[2], bool together) {
  const unsigned long long first = to[0] ? (unsigned long long)(to[0] - threadIdx.x % 32 / 8 * 2) : 0;
  const bool same = (swapped(first, 8) == first) & (swapped(first, 16) == first);
  return __all_sync(~0u, same && first % sizeof(Vector<Stored, 8>) == 0 && (together || !(to[0] || to[1])));
}

// Stores 16 rows in NCHW, of which a thread has two neighbours. `channel`: elements from a column to the next. In half
// types, where eight rows are neighbours in memory in all of a warp, lanes exchange twice more, and a thread stores
// eight rows of one column: a quarter of a warp, whose 16-byte stores go together, then fills whole sectors. (Stores of
// eight bytes go by half warps, which would fill half sectors, and take twice the time.)
template <bool WHOLE, class Stored>
__device__ __forceinline__ void store_rows(const float (&sums)[COLUMNS / 2], Stored* const (&to)[2], long long channel,
                                           int columns) {
  const bool together =
      to[0] && to[1] == to[0] + 1 && channel % 2 == 0 && (unsigned long long)to[0] % sizeof(Vector<Stored, 2>) == 0;
  constexpr int TILES = COLUMNS / 8;
  int first_tile = 0;
  if constexpr (sizeof(Stored) == 2) {
    if (are_eights(to, together && channel % 8 == 0)) {
      const int next = threadIdx.x % 16 / 8, other = threadIdx.x % 32 / 16;
      Stored* const at =
          to[0] ? to[0] - 2 * (next + 2 * other) + (8 * other + fragment_column() + next) * channel : nullptr;
#pragma unroll
      for (int tile = 0; tile + 1 < TILES; tile += 2) {
        Vector<Stored, 2> first, second;
        Vector<Stored, 4> fours[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          narrowed_rows(sums, tile + i, first, second);
          fours[i] = exchange_columns(first, second);
        }
        const Vector<Stored, 8> eight = exchange_tiles(fours[0], fours[1]);
        if (at && has<WHOLE>(columns, 8 * (tile + other) + fragment_column() + next))
          *(Vector<Stored, 8>*)(at + 8 * tile * channel) = eight;
      }
      if (TILES % 2 == 0) return;
      first_tile = TILES - 1;
    }
  }
  Stored* at[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) at[j] = to[j] ? to[j] + fragment_column() * channel : nullptr;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (tile < first_tile) continue;
    Vector<Stored, 2> pairs[2];
    narrowed_rows(sums, tile, pairs[0], pairs[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has<WHOLE>(columns, 8 * tile + fragment_column() + i)) continue;
      const long long column = (8 * tile + i) * channel;
      if (together) {
        *(Vector<Stored, 2>*)(at[0] + column) = pairs[i];
      } else {
        if (at[0]) at[0][column] = pairs[i].value[0];
        if (at[1]) at[1][column] = pairs[i].value[1];
      }
    }
  }
}
