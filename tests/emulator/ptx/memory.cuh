// Loads and stores as C++ has them.

#pragma once

#include "core/types.cuh"

template <class T>
inline T load_global(const T* from) {
  return *from;
}
template <class T, class V>
inline void load_global_if(bool exists, const T* from, V& value) {
  value = exists ? *(const V*)from : V{};
}
inline void prefetch_l2(const void*) {}
template <class Words>
inline void store_global(void* to, const Words& words) {
  *(Words*)to = words;
}
template <class Bits>
inline void store_global_if(bool exists, void* to, const Bits& bits) {
  if (exists) *(Bits*)to = bits;
}
template <class T>
inline void load_shared(unsigned from, T& to) {
  to = *(const T*)__cvta_shared_to_generic(from);
}
