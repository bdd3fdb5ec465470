// Programmatic dependent launch, from Hopper on: a kernel may start before the one ahead of it has ended. Where it was
// launched otherwise, both do nothing.

#pragma once

// The first kernel: all its blocks run, so that those of the second may be placed beside them.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The second: what the first has written is there. A step that reads nothing of it waits all the same before it ends,
// as a third step waits for the second alone.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
