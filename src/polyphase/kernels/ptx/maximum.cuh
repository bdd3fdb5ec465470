#pragma once

// The larger and the smaller of two numbers; NaN if one of them is.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ float larger(float one, float other) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(one), "f"(other));
  return found;
}
__device__ __forceinline__ float smaller(float one, float other) {
  float found;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(one), "f"(other));
  return found;
}
#else
__device__ __forceinline__ float larger(float one, float other) { return other > one || other != other ? other : one; }
__device__ __forceinline__ float smaller(float one, float other) { return other < one || other != other ? other : one; }
#endif
__device__ __forceinline__ double larger(double one, double other) {
  return other > one || other != other ? other : one;
}
__device__ __forceinline__ double smaller(double one, double other) {
  return other < one || other != other ? other : one;
}
