// Storage types of 16 bits without any header, and their conversion to and from the type of the accumulator.
// Every kernel computes in accum_t (float, or double for double) whatever the tensors hold.

#pragma once

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

__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float widen(bfloat16 value) {
  union {
    unsigned int bits;
    float number;
  } wide = {(unsigned int)value.bits << 16};
  return wide.number;
}

__device__ __forceinline__ float widen(float16 value) {
#ifndef EMULATOR
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  union {
    unsigned short bits;
    _Float16 number;
  } half = {value.bits};
  return (float)half.number;
#endif
}

// narrow: round to nearest, ties to even.
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

__device__ __forceinline__ void narrow(float value, bfloat16& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  union {
    float number;
    unsigned int bits;
  } wide = {value};
  const bool nan = (wide.bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = nan ? 0x7fff : (unsigned short)((wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ void narrow(float value, float16& out) {
#ifndef EMULATOR
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  union {
    _Float16 number;
    unsigned short bits;
  } half = {(_Float16)value};
  out.bits = half.bits;
#endif
}

// A zero of any storage type is all bits zero.
template <class T>
__device__ __forceinline__ T zero() {
  return T{};
}

// Reads that no thread writes go through the read-only path.
template <class T>
__device__ __forceinline__ T read(const T* address) {
#ifndef EMULATOR
  return __ldg(address);
#else
  return *address;
#endif
}

#ifndef EMULATOR
__device__ __forceinline__ bfloat16 read(const bfloat16* address) {
  return bfloat16{__ldg((const unsigned short*)address)};
}
__device__ __forceinline__ float16 read(const float16* address) {
  return float16{__ldg((const unsigned short*)address)};
}
#endif

// The same value, of which the compiler knows nothing: it keeps in no registers what follows from it.
__device__ __forceinline__ unsigned opaque(unsigned value) {
#ifndef EMULATOR
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// COUNT neighbouring elements, moved at once.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T)) Vector {
  T value[COUNT];
};

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

// To the nearest TF32, ties away from zero, as PyTorch's convolutions round: float32 with 11 significant bits. GPUs
// before compute capability 8.0 have none, and keep the value.
__device__ __forceinline__ float round_tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return value;
#elif !defined(EMULATOR)
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
#else
  union {
    float number;
    unsigned bits;
  } word = {value};
  if ((word.bits & 0x7f800000u) != 0x7f800000u) word.bits = (word.bits + 0x1000u) & 0xffffe000u;
  return word.number;
#endif
}
