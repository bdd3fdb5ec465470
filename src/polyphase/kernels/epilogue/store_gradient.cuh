// Stores accumulators of an input gradient: rows are positions, columns are channels. `columns`: how many columns exist
// from the first on, 0 if the row does not exist. WHOLE: all columns exist.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "epilogue/exchange.cuh"
#include "mainloop/accumulators.cuh"
#include "ptx/named_barrier.cuh"

template <bool WHOLE>
__device__ __forceinline__ bool has(int columns, int column) {
  return WHOLE ? columns > 0 : column < columns;
}

// Stores a row in NHWC, whose first column is at `to`. All lanes of a warp call this. Eight bytes of neighbouring
// channels are stored TOGETHER.
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

// NCHW. The two rows that a thread stores of each 64: where tensors allow it, neighbours `in_pairs`, which lanes
// exchange (store_row_pair); else rows 32 apart, which pass through shared memory (store_columns).

// Whether neighbouring rows of a tile, from even ones on, can be stored together: they are neighbours in memory along
// w, at even elements.
__device__ __forceinline__ bool in_pairs(const Tensor5& dst, const void* first, int tile_width) {
  const long long apart = dst.stride[0] | dst.stride[1] | dst.stride[2] | dst.stride[3] | tile_width;
  return apart % 2 == 0 && dst.stride[4] == 1 && (unsigned long long)first % 8 == 0;
}
__device__ __forceinline__ int stored_row(bool pairs, int i) {
  const int thread = threadIdx.x % 128;
  return pairs ? thread / 32 * 16 + (fragment_row() & ~1) + thread % 8 / 4 * 8 + i : thread % 32 + 32 * i;
}

// Stores two neighbouring rows from `to` on; null for none. `channel`: elements from a column to the next. All lanes of
// a warp call this.
template <bool WHOLE, class Stored>
__device__ __forceinline__ void store_row_pair(const float (&sums)[COLUMNS / 2], Stored* const (&to)[2],
                                               long long channel, int columns) {
  Stored* const at = to[0] ? to[0] + fragment_column() * channel : nullptr;  // the thread's first column
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    Vector<Stored, 2> first, second;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      narrow(sums[4 * tile + i], first.value[i]), narrow(sums[4 * tile + 2 + i], second.value[i]);
    exchange_rows(first, second);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!at || !has<WHOLE>(columns, 8 * tile + fragment_column() + i)) continue;
      Stored* const column = at + (8 * tile + i) * channel;
      if (to[1])
        *(Vector<Stored, 2>*)column = Vector<Stored, 2>{first.value[i], second.value[i]};
      else
        *column = first.value[i];
    }
  }
}

// Few columns at a time pass through shared memory, so that a warp stores 32 neighbouring rows of one column by an
// instruction: whole sectors, wherever in a sector the first row is. Of the two buffers of a warpgroup one is read
// while the next columns are written to the other, so that there is one barrier for each.
constexpr int STAGED_PITCH = 64 + 4;  // padded: a fragment has no bank conflicts
constexpr int STAGED_BYTES = 2 * 8 * STAGED_PITCH * (int)sizeof(float);
template <class Stored>
constexpr int STAGED_COLUMNS = 32 / (int)sizeof(Stored);
template <class Stored>
constexpr int STAGINGS = ceil_div(COLUMNS, STAGED_COLUMNS<Stored>);  // of a row tile

// Called by all threads of a warpgroup for each of TILES row tiles of a work tile in turn. `to`: the thread's rows, at
// the first column; null if they do not exist. `staged`: STAGED_BYTES of the warpgroup.
template <bool WHOLE, int TILES, class Stored>
__device__ __forceinline__ void store_columns(const float (&sums)[COLUMNS / 2], int tile, Stored* const (&to)[2],
                                              long long channel, int columns, unsigned char* staged) {
  constexpr int AT_ONCE = STAGED_COLUMNS<Stored>, OF_WARP = AT_ONCE / 4;
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % 4, 0), warpgroup = threadIdx.x / 128;
  Stored* at[2];  // the thread's first column of those that are staged
#pragma unroll
  for (int j = 0; j < 2; ++j) at[j] = to[j] ? to[j] + warp * OF_WARP * channel : nullptr;
#pragma unroll
  for (int first = 0; first < COLUMNS; first += AT_ONCE) {
    const int buffer = (tile * STAGINGS<Stored> + first / AT_ONCE) % 2;
    Stored* const columns_of = (Stored*)staged + buffer * (AT_ONCE * STAGED_PITCH);
#pragma unroll
    for (int i = 0; i < AT_ONCE / 2 && first / 2 + i < COLUMNS / 2; ++i) {
      const int row = 16 * warp + fragment_row() + i / 2 % 2 * 8, column = i / 4 * 8 + fragment_column() + i % 2;
      narrow(sums[first / 2 + i], columns_of[column * STAGED_PITCH + row]);
    }
    __syncwarp();
    named_barrier_sync(1 + warpgroup, 128);
    const Stored* const from = columns_of + warp * OF_WARP * STAGED_PITCH;
    Stored rows[OF_WARP][2];  // read together
#pragma unroll
    for (int i = 0; i < 2 * OF_WARP; ++i) rows[i / 2][i % 2] = from[i / 2 * STAGED_PITCH + stored_row(false, i % 2)];
    const int left = (WHOLE ? COLUMNS : min(COLUMNS, columns)) - first - warp * OF_WARP;  // columns that exist
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!to[j]) continue;
      Stored* to_column = at[j];
#pragma unroll
      for (int k = 0; k < OF_WARP; ++k, to_column += channel)
        if ((WHOLE && first + AT_ONCE <= COLUMNS) || k < left) *to_column = rows[k][j];
      at[j] += AT_ONCE * channel;
    }
  }
  __syncwarp();
  // The next work tile begins with the first buffer.
  if (TILES * STAGINGS<Stored> % 2 != 0 && tile == TILES - 1) named_barrier_sync(1 + warpgroup, 128);
}
