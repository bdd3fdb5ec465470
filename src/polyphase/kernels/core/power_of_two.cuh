#pragma once

// 2^(bits - 127), of normal numbers.
__device__ __forceinline__ float power_of_two(int bits) { return __uint_as_float((unsigned)bits << 23); }
// The same bits of a number.
__device__ __forceinline__ int exponent_bits(float magnitude) { return (int)(__float_as_uint(magnitude) >> 23); }
