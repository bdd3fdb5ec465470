// Loads and stores as one instruction, where the compiler would split them, move them or branch around them.

#pragma once

#include "core/types.cuh"

// Constraint of an operand that is written before others are read. CUDA 11 has no early clobber; there the operand is
// read, too, which also gives it a register of its own.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 12
#define WRITTEN_EARLY "+"
#else
#define WRITTEN_EARLY "=&"
#endif

// A load through the read-only path that the compiler does not move.
__device__ __forceinline__ float load_global(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}
template <class T>
__device__ __forceinline__ T load_global(const T* from) {
  return T{*(const volatile unsigned short*)from};
}

// The same if `exists`, else zero; without a branch, which would make the compiler spill.
__device__ __forceinline__ void load_global_if(bool exists, const float* from, float& value) {
  asm volatile(
      "{ .reg .pred exists;\n"
      "setp.ne.b32 exists, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@exists ld.global.nc.f32 %0, [%1]; }"
      : WRITTEN_EARLY "f"(value)
      : "l"(from), "r"((int)exists));
}
__device__ __forceinline__ void load_global_if(bool exists, const double* from, double& value) {
  asm volatile(
      "{ .reg .pred exists;\n"
      "setp.ne.b32 exists, %2, 0;\n"
      "mov.b64 %0, 0;\n"
      "@exists ld.global.nc.f64 %0, [%1]; }"
      : WRITTEN_EARLY "d"(value)
      : "l"(from), "r"((int)exists));
}
// An element of 16 bits.
template <class T>
__device__ __forceinline__ void load_global_if(bool exists, const T* from, T& value) {
  asm volatile(
      "{ .reg .pred exists;\n"
      "setp.ne.b32 exists, %2, 0;\n"
      "mov.b16 %0, 0;\n"
      "@exists ld.global.nc.u16 %0, [%1]; }"
      : WRITTEN_EARLY "h"(value.bits)
      : "l"(from), "r"((int)exists));
}
template <class T>
__device__ __forceinline__ void load_global_if(bool exists, const T* from, Vector<unsigned, 1>& value) {
  float word;
  load_global_if(exists, (const float*)from, word);
  value.value[0] = __float_as_uint(word);
}
template <class T>
__device__ __forceinline__ void load_global_if(bool exists, const T* from, Vector<unsigned, 2>& value) {
  asm volatile(
      "{ .reg .pred exists;\n"
      "setp.ne.b32 exists, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@exists ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
      : WRITTEN_EARLY "r"(value.value[0]), WRITTEN_EARLY "r"(value.value[1])
      : "l"(from), "r"((int)exists));
}

template <class T>
__device__ __forceinline__ void load_global_if(bool exists, const T* from, Vector<unsigned, 4>& value) {
  asm volatile(
      "{ .reg .pred exists;\n"
      "setp.ne.b32 exists, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@exists ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : WRITTEN_EARLY "r"(value.value[0]), WRITTEN_EARLY "r"(value.value[1]), WRITTEN_EARLY "r"(value.value[2]),
        WRITTEN_EARLY "r"(value.value[3])
      : "l"(from), "r"((int)exists));
}

// Prefetches a line to L2.
__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// A store that the compiler does not split.
__device__ __forceinline__ void store_global(void* to, const Vector<unsigned, 4>& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.value[0]), "r"(words.value[1]),
               "r"(words.value[2]), "r"(words.value[3])
               : "memory");
}
__device__ __forceinline__ void store_global(void* to, const Vector<unsigned, 2>& words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.value[0]), "r"(words.value[1]) : "memory");
}
__device__ __forceinline__ void store_global(void* to, const Vector<unsigned, 1>& words) {
  *(unsigned*)to = words.value[0];
}

// The same if `exists`, without a branch. (If another path stores the same elements one by one, the compiler may split
// the vector to merge the stores of both paths.)
#define STORE_IF "{ .reg .pred exists; setp.ne.b32 exists, %0, 0; @exists st.global."
__device__ __forceinline__ void store_global_if(bool exists, void* to, const Vector<unsigned, 4>& bits) {
  asm volatile(STORE_IF "v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"((int)exists), "l"(to), "r"(bits.value[0]),
               "r"(bits.value[1]), "r"(bits.value[2]), "r"(bits.value[3])
               : "memory");
}
__device__ __forceinline__ void store_global_if(bool exists, void* to, const Vector<unsigned, 2>& bits) {
  asm volatile(STORE_IF "v2.b32 [%1], {%2, %3}; }" ::"r"((int)exists), "l"(to), "r"(bits.value[0]), "r"(bits.value[1])
               : "memory");
}
__device__ __forceinline__ void store_global_if(bool exists, void* to, const Vector<unsigned, 1>& bits) {
  asm volatile(STORE_IF "b32 [%1], %2; }" ::"r"((int)exists), "l"(to), "r"(bits.value[0]) : "memory");
}
__device__ __forceinline__ void store_global_if(bool exists, void* to, const Vector<unsigned short, 1>& bits) {
  asm volatile(STORE_IF "b16 [%1], %2; }" ::"r"((int)exists), "l"(to), "h"(bits.value[0]) : "memory");
}

// A load from shared memory that the compiler does not move.
__device__ __forceinline__ void load_shared(unsigned from, Vector<float, 4>& to) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to.value[0]), "=f"(to.value[1]), "=f"(to.value[2]), "=f"(to.value[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_shared(unsigned from, Vector<float, 2>& to) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.value[0]), "=f"(to.value[1]) : "r"(from) : "memory");
}
