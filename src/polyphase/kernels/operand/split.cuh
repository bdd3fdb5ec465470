// float32 in PARTS parts: two of TF32 or three of bfloat16. These splits take few instructions, for kernels whose
// products cannot hide more.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"

// Words that the tensor cores multiply.
typedef conditional_t<PARTS == 3, bfloat16, scalar_t> part_t;
static_assert(PARTS == 1 || sizeof(scalar_t) == 4, "float32 alone comes in parts");

// The low part is what a float loses as TF32. Tensor cores truncate it, on average by half of its last bit, which is
// added before. (Rounding it, or both parts as operand/tf32.cuh does, would take more instructions than the products.)
// The low part of NaN is NaN.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  if constexpr (PARTS == 2) {
    high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint((value - __uint_as_float(high)) * (1 + 0.72f / 2048));
  } else {
    high = __float_as_uint(round_tf32(value));
  }
}

// Two floats as three pairs of bfloat16, the first float in the lower half. Each part is the rounding error of the
// previous ones, and 24 significant bits are three times eight; so parts sum to the float exactly, from 2^-110 on
// (below that the last part is too small for bfloat16). Infinities, NaN and floats that round to infinity leave NaN.
__device__ __forceinline__ void split_pair(float first, float second, unsigned (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    bf16x2_of_floats(first, second, parts[i]);
    first -= __uint_as_float(parts[i] << 16), second -= __uint_as_float(parts[i] & 0xffff0000u);
  }
}
