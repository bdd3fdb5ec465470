// Hopper's matrix instruction: operands are found by their descriptors, as the tensor cores do, and multiplied when the
// thread waits. Each thread computes its own accumulators.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "emulator/tensor_cores.cuh"
#include "ptx/wgmma_forms.cuh"

template <int PITCH>
inline unsigned long long matrix_descriptor(unsigned address, unsigned lbo, unsigned sbo = 8 * PITCH) {
  constexpr unsigned long long swizzle = PITCH == 128 ? 1 : PITCH == 64 ? 2 : PITCH == 32 ? 3 : 0;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(lbo >> 4) << 16 |
         (unsigned long long)(sbo >> 4) << 32 | swizzle << 62;
}
inline unsigned long long swizzled_descriptor(unsigned address, int pitch, unsigned lbo) {
  return pitch == 128  ? matrix_descriptor<128>(address, lbo)
         : pitch == 64 ? matrix_descriptor<64>(address, lbo)
                       : matrix_descriptor<32>(address, lbo);
}

#if WGMMA
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit(emulator::Async::products); }
// The four warps of a group are one: when the products of one are done, so are those of all.
template <int PENDING>
inline void wgmma_wait() {
  emulator::wait(emulator::Async::products, PENDING);
  emulator::threads_sync(16 + threadIdx.x / 128, 128);
}
#else
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
#endif
template <class T>
inline void pin(T&) {}
