#pragma once

// Waits for `threads` threads of the block, at one of its 16 named barriers; number 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
