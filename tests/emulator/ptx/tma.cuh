// TMA as copies that come with the end of a barrier's phase; a box is gathered element by element.

#pragma once

#include "core/shared_address.cuh"
#include "core/swizzle.cuh"
#include "core/types.cuh"
#include "ptx/arch.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"

struct alignas(64) TensorMap {
  long long strides[4];  // in bytes, of all dimensions but the first
  int sizes[5], box[5];
  int swizzle;   // bytes within which chunks change places
  int tf32;      // whether float32 is rounded on its way
  int steps[5];  // from one element that is brought to the next
  unsigned char unused[28];
};

inline void tma_load_bytes(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), from, bytes);
}
template <int BLOCKS>
inline void tma_load_bytes_multicast(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  tma_load_bytes(to, from, bytes, barrier);
}
inline float rounded_on_the_way(float value) { return round_tf32(value); }
template <class T>
inline T rounded_on_the_way(T value) {
  return value;
}
template <class T>
inline void tma_load_box(unsigned to, const TensorMap& map, const T* tensor, const int (&place)[5], unsigned bytes,
                         unsigned barrier) {
  if (place[0] * (int)sizeof(T) % 16) __trap();
  unsigned char* const box = (unsigned char*)emulator::scratch(bytes);
  unsigned offset = 0;
  int at[5] = {};
  for (; offset < bytes; offset += sizeof(T)) {
    bool inside = true;
    long long from = 0;
    for (int i = 0; i < 5; ++i) {
      const int index = place[i] + at[i] * map.steps[i];
      inside = inside && index >= 0 && index < map.sizes[i];
      from += i == 0 ? (long long)index * sizeof(T) : index * map.strides[i - 1];
    }
    const T value = inside ? *(const T*)((const char*)tensor + from) : zero<T>();
    *(T*)(box + swizzled(to + offset, map.swizzle) - to) = map.tf32 ? rounded_on_the_way(value) : value;
    for (int i = 0; i < 5 && ++at[i] == map.box[i]; ++i) at[i] = 0;
  }
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), box, bytes);
}

inline void tma_store_bytes(void* to, const void* from, unsigned bytes) { emulator::bulk_store(to, from, bytes); }
inline void tma_store_commit() { emulator::commit(emulator::Async::stores); }
inline void tma_store_wait_read() { emulator::wait(emulator::Async::stores, 0); }
