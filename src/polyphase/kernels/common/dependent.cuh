// Two kernels in a row, of which the second may start before the first has ended (programmatic dependent launch, from
// Hopper on). Where it was launched otherwise, both do nothing.

#pragma once

// The first kernel: all its blocks run, so that those of the second may be placed beside them.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The second: what the first has written is there.
__device__ __forceinline__ void wait_for_prologue() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
