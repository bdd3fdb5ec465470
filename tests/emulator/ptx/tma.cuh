// TMA as copies that come with the end of a barrier's phase.

#pragma once

#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/arch.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"

typedef emulator::TensorMap TensorMap;

inline void tma_load_bytes(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), from, bytes);
}
template <int BLOCKS>
inline void tma_load_bytes_multicast(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  tma_load_bytes(to, from, bytes, barrier);
}
template <class T>
inline void tma_load_box(unsigned to, const TensorMap& map, const T* tensor, const int (&place)[5], unsigned bytes,
                         unsigned barrier) {
  if (place[0] * (int)sizeof(T) % 16) __trap();
  unsigned char* const box = (unsigned char*)emulator::scratch(bytes);
  emulator::gather_box(box, to, map, tensor, place, sizeof(T), bytes);
  for (unsigned i = 0; sizeof(T) == 4 && map.tf32 && i < bytes / 4; ++i)
    ((float*)box)[i] = round_tf32(((const float*)box)[i]);
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), box, bytes);
}

inline void tma_store_bytes(void* to, const void* from, unsigned bytes) { emulator::bulk_store(to, from, bytes); }
inline void tma_store_commit() { emulator::commit(emulator::Async::stores); }
inline void tma_store_wait_read() { emulator::wait(emulator::Async::stores, 0); }
