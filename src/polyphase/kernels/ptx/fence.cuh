#pragma once

// Ordinary writes to shared memory are seen by the tensor cores and TMA (the async proxy) after this.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
