// setmaxnreg: producer warps, which need few registers, release some, and consumer warpgroups claim them.

#pragma once

#include "specialisation.cuh"

#if WGMMA
template <int KEPT>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KEPT));
}
template <int CLAIMED>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CLAIMED));
}
#else
template <int>
__device__ __forceinline__ void setmaxnreg_dec() {}
template <int>
__device__ __forceinline__ void setmaxnreg_inc() {}
#endif

// Whether the registers of a block suffice for what consumers claim and producers keep; else consumers would wait
// forever.
__host__ __device__ constexpr bool registers_suffice(int consumers, int claimed, int producers, int kept) {
  const int threads = consumers + producers, at_launch = 65536 / threads / 8 * 8;
  return consumers * claimed + producers * kept <= threads * at_launch;
}
