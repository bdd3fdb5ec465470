#pragma once

// Makes ordinary writes to shared memory visible to wgmma and TMA (the async proxy).
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
