// Conversions between float32, TF32 and the formats of 16 bits, which are plain bits here. They round to nearest, ties
// to even unless a comment says otherwise.

#pragma once

__device__ __forceinline__ float float_of_f16(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}
__device__ __forceinline__ void f16_of_float(float value, unsigned short& bits) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
}
__device__ __forceinline__ void bf16_of_float(float value, unsigned short& bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  union {
    float number;
    unsigned int bits;
  } wide = {value};
  const bool nan = (wide.bits & 0x7fffffffu) > 0x7f800000u;
  bits = nan ? 0x7fff : (unsigned short)((wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u)) >> 16);
#endif
}

// Converts two numbers; the first is in the lower half.
__device__ __forceinline__ unsigned f16x2_of_floats(float first, float second) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
__device__ __forceinline__ void bf16x2_of_floats(float first, float second, unsigned& both) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
}

// To the nearest TF32 (float32 with 11 significant bits), ties away from zero, as PyTorch's convolutions round. GPUs
// before compute capability 8.0 have no TF32, and keep the value.
__device__ __forceinline__ float round_tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return value;
#else
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
#endif
}
