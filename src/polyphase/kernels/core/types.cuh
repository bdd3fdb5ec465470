// Storage types of 16 bits without any header, and their conversion to and from the type of the accumulator.
// Every kernel computes in accum_t (float, or double for double) whatever the tensors hold.

#pragma once

#include "ptx/convert.cuh"

struct bfloat16 {
  unsigned short bits;
};
struct float16 {
  unsigned short bits;
};

template <class A, class B>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

// A if CONDITION, else B.
template <bool CONDITION, class A, class B>
struct Conditional {
  typedef A type;
};
template <class A, class B>
struct Conditional<false, A, B> {
  typedef B type;
};
template <bool CONDITION, class A, class B>
using conditional_t = typename Conditional<CONDITION, A, B>::type;

__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float widen(bfloat16 value) {
  union {
    unsigned int bits;
    float number;
  } wide = {(unsigned int)value.bits << 16};
  return wide.number;
}

__device__ __forceinline__ float widen(float16 value) { return float_of_f16(value.bits); }

// narrow: round to nearest, ties to even.
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

__device__ __forceinline__ void narrow(float value, bfloat16& out) { bf16_of_float(value, out.bits); }

__device__ __forceinline__ void narrow(float value, float16& out) { f16_of_float(value, out.bits); }

// A zero of any storage type is all bits zero.
template <class T>
__device__ __forceinline__ T zero() {
  return T{};
}

// Loads through the read-only path, of data that no thread writes.
template <class T>
__device__ __forceinline__ T read(const T* address) {
  return __ldg(address);
}
__device__ __forceinline__ bfloat16 read(const bfloat16* address) {
  return bfloat16{__ldg((const unsigned short*)address)};
}
__device__ __forceinline__ float16 read(const float16* address) {
  return float16{__ldg((const unsigned short*)address)};
}

// COUNT neighbouring elements, moved at once.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T)) Vector {
  T value[COUNT];
};

// Loads neighbouring elements, WIDTH at once.
template <int WIDTH, class T, int COUNT>
__device__ __forceinline__ void load_vectors(const T* from, T (&to)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += WIDTH) {
    const Vector<T, WIDTH> vector = *(const Vector<T, WIDTH>*)(from + i);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) to[i + j] = vector.value[j];
  }
}

// Four elements on their way from global memory, either one vector or four loads. They stay as they were loaded until
// they are used: to take a vector of 16-bit elements apart would wait for the load.
template <class T>
struct Quad {
  Vector<T, 4> elements;

  __device__ __forceinline__ void clear() { elements = Vector<T, 4>{}; }
  __device__ __forceinline__ void load(const T* from) { elements = *(const Vector<T, 4>*)from; }
  __device__ __forceinline__ void load(int i, const T* from) { elements.value[i] = read(from); }
  __device__ __forceinline__ T get(int i, bool /* whole */) const { return elements.value[i]; }
};

template <class T>
struct Quad16 {
  unsigned int words[4];  // two packed words, or one element each

  __device__ __forceinline__ void clear() { words[0] = words[1] = words[2] = words[3] = 0; }
  __device__ __forceinline__ void load(const T* from) {
    const Vector<unsigned int, 2> packed = *(const Vector<unsigned int, 2>*)from;
    words[0] = packed.value[0];
    words[1] = packed.value[1];
  }
  __device__ __forceinline__ void load(int i, const T* from) { words[i] = read(from).bits; }
  __device__ __forceinline__ T get(int i, bool whole) const {
    return T{(unsigned short)(whole ? words[i / 2] >> (16 * (i % 2)) : words[i])};
  }
};

template <>
struct Quad<bfloat16> : Quad16<bfloat16> {};
template <>
struct Quad<float16> : Quad16<float16> {};
