// Programmatic dependent launch, from Hopper on: a kernel may start before the previous one has ended. In other
// launches both functions do nothing.

#pragma once

// In the first kernel: blocks of the second may be launched once all blocks of the first have called this or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the second: waits until the first has ended and its writes are visible. A step that reads none of them also waits
// before it ends, since a third step waits for the second alone.
//
// A parameter through which threads read what the first has written is not `const __restrict__`: such reads would count
// as reads of constants, and the assembler moves these above the wait (tests/test_waits.py).
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
