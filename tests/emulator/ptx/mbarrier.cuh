// mbarriers of the runtime.

#pragma once

#include "ptx/arch.cuh"
#include "ptx/cp_async.cuh"

inline emulator::Barrier* barrier_at(unsigned barrier) { return (emulator::Barrier*)__cvta_shared_to_generic(barrier); }
inline void mbarrier_init(unsigned barrier, int arrivals) { emulator::barrier_init(barrier_at(barrier), arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned barrier) { emulator::barrier_arrive(barrier_at(barrier)); }
inline void mbarrier_arrive_cp_async(unsigned barrier) {
  cp_async_commit();
  cp_async_wait<0>();
  mbarrier_arrive(barrier);
}
inline void mbarrier_expect_cp_async(unsigned) {
  cp_async_commit();
  cp_async_wait<0>();
}
inline void mbarrier_wait(unsigned barrier, unsigned parity) { emulator::barrier_wait(barrier_at(barrier), parity); }
