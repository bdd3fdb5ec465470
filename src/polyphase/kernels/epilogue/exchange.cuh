// Lanes exchange results before a store, so that a warp's store fills whole sectors. All lanes of a warp call these.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

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
// swap, so that each has both columns of two neighbouring rows; `first` receives the first column.
template <class Stored>
__device__ __forceinline__ void exchange_rows(Vector<Stored, 2>& first, Vector<Stored, 2>& second) {
  typedef Vector<unsigned, sizeof(first) / sizeof(unsigned)> Words;
  const bool second_eight = threadIdx.x % 8 / 4;
  Words a = *(const Words*)&first, b = *(const Words*)&second;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(Words) / sizeof(unsigned)); ++i) {
    const unsigned other = __shfl_xor_sync(~0u, second_eight ? a.value[i] : b.value[i], 4);
    a.value[i] = second_eight ? other : a.value[i], b.value[i] = second_eight ? b.value[i] : other;
  }
  first = *(const Vector<Stored, 2>*)&a, second = *(const Vector<Stored, 2>*)&b;
}
