// float32 in two parts of TF32 or three of bfloat16, where there are more of them than products to hide them behind;
// PARTS says how many.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"

// What the tensor cores multiply.
template <int COUNT>
struct PartOf {
  typedef scalar_t type;
};
template <>
struct PartOf<3> {
  typedef bfloat16 type;
};
typedef PartOf<PARTS>::type part_t;
static_assert(PARTS == 1 || sizeof(scalar_t) == 4, "float32 alone comes in parts");

// What a float loses as TF32 is its low part. The tensor cores truncate that: they take off half of its last bit on
// average, which is put on before. (Rounding it, or both by operand/tf32.cuh, would take more instructions than the
// products.) NaN stays NaN in the low part whatever becomes of the high one.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  if constexpr (PARTS == 2) {
    high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint((value - __uint_as_float(high)) * (1 + 0.72f / 2048));
  } else {
    high = __float_as_uint(round_tf32(value));
  }
}

// Two floats as three pairs of bfloat16, the first in the lower half, that sum to them exactly from 2^-110 on (below
// that the last is too small for bfloat16): each is what rounding to the one before has left, and 24 significant bits
// are three times eight. What is not finite, or rounded to what is not, leaves NaN.
__device__ __forceinline__ void split_pair(float first, float second, unsigned (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    bf16x2_of_floats(first, second, parts[i]);
    first -= __uint_as_float(parts[i] << 16), second -= __uint_as_float(parts[i] & 0xffff0000u);
  }
}
