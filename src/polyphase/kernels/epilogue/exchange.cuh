// Lanes exchange results before a store, so that a warp's store fills whole sectors. All lanes of a warp call these.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

// The other's value, of two lanes `apart`.
template <class T>
__device__ __forceinline__ T swapped(T value, int apart) {
  alignas(T) unsigned words[sizeof(T) / 4];
#pragma unroll
  for (int i = 0; i < (int)sizeof(T) / 4; ++i) words[i] = __shfl_xor_sync(~0u, ((const unsigned*)&value)[i], apart);
  return *(const T*)words;
}

// `pairs`: two neighbouring results of a row in each of two tiles of eight columns, in half precision. Two lanes swap a
// pair, so that each has four neighbours of one tile, from column `first_exchanged()` of the sixteen on.
__device__ __forceinline__ Vector<unsigned, 2> exchanged(const Vector<scalar_t, 2> (&pairs)[2]) {
  const unsigned mine[2] = {*(const unsigned*)&pairs[0], *(const unsigned*)&pairs[1]};
  const bool odd = threadIdx.x % 2;
  const unsigned other = __shfl_xor_sync(~0u, odd ? mine[0] : mine[1], 1);
  return {odd ? other : mine[0], odd ? mine[1] : other};
}
__device__ __forceinline__ int first_exchanged() { return threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4; }

// The same for sums.
__device__ __forceinline__ Vector<unsigned, 2> exchanged(const float* first, const float* second) {
  Vector<scalar_t, 2> pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) narrow(first[i], pairs[0].value[i]), narrow(second[i], pairs[1].value[i]);
  return exchanged(pairs);
}

// A lane has two columns of one row in the first eight rows and of one in the second eight. Lanes of neighbouring rows
// swap, so that each has both columns of two neighbouring rows: `first` receives the first column, `second` the second.
template <class Stored>
__device__ __forceinline__ void exchange_rows(Vector<Stored, 2>& first, Vector<Stored, 2>& second) {
  const bool second_eight = threadIdx.x % 8 / 4;
  const Vector<Stored, 2> other = swapped(second_eight ? first : second, 4);
  const Vector<Stored, 2> rows[2] = {second_eight ? other : first, second_eight ? second : other};
#pragma unroll
  for (int i = 0; i < 2; ++i) first.value[i] = rows[i].value[0], second.value[i] = rows[i].value[1];
}

// After `exchange_rows`: lanes with the next two rows swap, so that each has four rows of one column.
template <class Stored>
__device__ __forceinline__ Vector<Stored, 4> exchange_columns(const Vector<Stored, 2>& first,
                                                              const Vector<Stored, 2>& second) {
  const bool upper = threadIdx.x % 16 / 8;
  const Vector<Stored, 2> other = swapped(upper ? first : second, 8);
  const Vector<Stored, 2>&low = upper ? other : first, &high = upper ? second : other;
  return {low.value[0], low.value[1], high.value[0], high.value[1]};
}

// After `exchange_columns` of two tiles of eight columns: lanes with the other four rows of eight swap, so that each
// has eight rows of one column.
template <class Stored>
__device__ __forceinline__ Vector<Stored, 8> exchange_tiles(const Vector<Stored, 4>& first,
                                                            const Vector<Stored, 4>& second) {
  const bool upper = threadIdx.x % 32 / 16;
  const Vector<Stored, 4> other = swapped(upper ? first : second, 16);
  Vector<Stored, 8> found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    found.value[i] = upper ? other.value[i] : first.value[i];
    found.value[4 + i] = upper ? second.value[i] : other.value[i];
  }
  return found;
}
