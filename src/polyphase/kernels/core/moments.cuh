// Reductions over a group of values: each thread of a team reduces its share, then the team combines these.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "epilogue/activations.cuh"

enum Over { NOTHING, SUM, MEAN, MAXIMUM, MINIMUM, LOGSUMEXP, NORM, SOFTMAX };
constexpr int GROUPS = THREADS / TEAM;  // groups of values that a block reduces together
constexpr accum_t LEAST = (accum_t)(sizeof(accum_t) == 8 ? -1.7976931348623157e308 : -3.402823466e38);

// What is reduced: a sum, and in `spread` a second sum; or the largest or smallest value; or the mean, the sum of
// squared deviations and the number of values; or the largest (a finite number) and the sum of exponentials of the
// differences from it.
struct Moments {
  accum_t center, spread, count;
};

__device__ __forceinline__ accum_t infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ accum_t finite(accum_t v) { return v < LEAST ? LEAST : v > -LEAST ? -LEAST : v; }

__device__ __forceinline__ Moments of_none() {
  if (OVER == MAXIMUM) return {-infinity(), 0, 0};
  if (OVER == MINIMUM) return {infinity(), 0, 0};
  return {OVER == LOGSUMEXP || OVER == SOFTMAX ? LEAST : (accum_t)0, 0, 0};
}

__device__ __forceinline__ Moments both(const Moments& one, const Moments& other) {
  if (OVER == SUM || OVER == MEAN) return {one.center + other.center, one.spread + other.spread, 0};
  if (OVER == MAXIMUM) return {larger(one.center, other.center), 0, 0};
  if (OVER == MINIMUM) return {smaller(one.center, other.center), 0, 0};
  if (OVER == NORM) {
    const accum_t count = one.count + other.count, share = count > 0 ? quotient(other.count, count) : (accum_t)0;
    const accum_t ahead = other.center - one.center;
    return {one.center + ahead * share, one.spread + other.spread + ahead * ahead * (one.count * share), count};
  }
  const accum_t center = larger(one.center, other.center);
  return {center,
          one.spread * exponential_term(one.center - center) + other.spread * exponential_term(other.center - center),
          0};
}

typedef accum_t Values[UNROLL][VECTOR];

// Moments of the first `vectors` vectors.
__device__ __forceinline__ Moments moments_of(const Values& values, int vectors) {
  const Moments none = of_none();
  Moments found = none;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const accum_t v = i < vectors ? values[i][j] : none.center;
      if (OVER == MINIMUM)
        found.center = smaller(found.center, v);
      else if (OVER == SUM || OVER == MEAN || OVER == NORM)
        found.center += v;
      else
        found.center = larger(found.center, v);
    }
  if (OVER != NORM && OVER != LOGSUMEXP && OVER != SOFTMAX) return found;
  if (OVER == NORM && vectors > 0) {
    found.count = vectors * VECTOR;
    found.center *= quotient((accum_t)1, found.count);
  }
  if (OVER != NORM) found.center = finite(found.center);
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const accum_t ahead = values[i][j] - found.center;
      if (i < vectors) found.spread += OVER == NORM ? ahead * ahead : exponential_term(ahead);
    }
  return found;
}

// Combines the moments of all threads of a team.
__device__ __forceinline__ Moments of_team(Moments moments, int group) {
  constexpr int PARTS = ROWS ? TEAM / 32 : TEAM;
  __shared__ Moments parts[ROWS ? THREADS / 32 + 1 : THREADS];
#pragma unroll
  for (int lane = 1; ROWS && lane < (TEAM < 32 ? TEAM : 32); lane *= 2) {
    const Moments other = {__shfl_xor_sync(~0u, moments.center, lane), __shfl_xor_sync(~0u, moments.spread, lane),
                           __shfl_xor_sync(~0u, moments.count, lane)};
    moments = threadIdx.x & lane ? both(other, moments) : both(moments, other);
  }
  if (PARTS > 1) {
    if (!ROWS || threadIdx.x % 32 == 0) parts[ROWS ? threadIdx.x / 32 : threadIdx.x] = moments;
    __syncthreads();
    moments = parts[ROWS ? group * PARTS : group];
    for (int i = 1; i < PARTS; ++i) moments = both(moments, parts[ROWS ? group * PARTS + i : group + i * GROUPS]);
  }
  return moments;
}
