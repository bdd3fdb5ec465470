// Copies that come when the thread waits for them; until then their targets are undefined.

#pragma once

#include "core/shared_address.cuh"
#include "core/types.cuh"

template <int BYTES>
inline void cp_async_part(unsigned to, const void* from, int bytes) {
  if (bytes > 0 && (unsigned long long)from % BYTES) __trap();
  typedef Vector<unsigned char, BYTES> Bytes;
  Bytes copied = {};
  for (int i = 0; i < bytes; ++i) copied.value[i] = ((const unsigned char*)from)[i];
  emulator::copy_later((Bytes*)__cvta_shared_to_generic(to), copied);
}
template <int BYTES>
inline void cp_async(unsigned to, const void* from, bool exists) {
  typedef Vector<unsigned, BYTES / 4> Words;
  emulator::copy_later((Words*)__cvta_shared_to_generic(to), exists ? *(const Words*)from : Words{});
}
inline void cp_async_commit() { emulator::commit(emulator::Async::copies); }
template <int PENDING>
inline void cp_async_wait() {
  emulator::wait(emulator::Async::copies, PENDING);
}
inline void cp_async_through_l1(unsigned to, const void* from, bool exists) { cp_async<16>(to, from, exists); }
