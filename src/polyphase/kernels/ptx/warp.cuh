#pragma once

// True for one thread of a warp, always the same one; called by all threads of the warp.
__device__ __forceinline__ bool elect() {
#if __CUDA_ARCH__ >= 900
  int chosen;
  asm volatile("{ .reg .pred chosen; elect.sync _|chosen, 0xffffffff; selp.b32 %0, 1, 0, chosen; }" : "=r"(chosen));
  return chosen;
#else
  return threadIdx.x % 32 == 0;
#endif
}
// A value that all threads of a warp have, so that the compiler knows it is uniform.
__device__ __forceinline__ int uniform(int value) {
#if __CUDA_ARCH__ >= 900
  return __reduce_max_sync(~0u, value);
#else
  return value;
#endif
}
