// Applies the prologue to an element of the input: for all kernels that compute a prologue themselves, and for the step
// that does so for the others (steps/apply_prologue.cu).
//
//   value = prologue(x, terms of its channel)
//
// The operations are data (problem/epilogue.py) from which operand/prologue.cuh is generated for each kernel. Values
// are accum_t, and rounded to the tensors' type once, after the last operation: the same values as if a separate call
// had written them. Elements that do not exist are zeros; the operations here map zero to zero.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

#if PROLOGUE
#include "epilogue/activations.cuh"
#endif

#include "operand/prologue.cuh"

// The channels of a group, from the first channel of a chunk or stage on.
struct InputChannels {
  PrologueOperands operands;
  int first;   // channel of the tensor
  int exists;  // channels of the group that exist from there on

  __device__ __forceinline__ InputChannels operator+(int channels) const {
    return {operands, first + channels, exists - channels};
  }

#if PROLOGUE
  __device__ __forceinline__ PrologueTerms terms(int channel) const {
    return prologue_terms(operands, first + channel, channel < exists);
  }
#endif

  // An element of a channel, which is counted from `first`.
  template <class T>
  __device__ __forceinline__ T value(T x, int channel) const {
#if PROLOGUE
    narrow(prologue(widen(x), terms(channel)), x);
#endif
    return x;
  }
  // Two neighbouring elements of 16 bits of a channel, in one word.
  template <class T = scalar_t>
  __device__ __forceinline__ unsigned pair(unsigned word, int channel) const {
#if PROLOGUE
    if constexpr (sizeof(T) == 2) {
      const PrologueTerms of = terms(channel);
      const T first{(unsigned short)word}, second{(unsigned short)(word >> 16)};
      narrow_pair(prologue(widen(first), of), prologue(widen(second), of), first, word);
    }
#endif
    return word;
  }

 private:
#if PROLOGUE
  static __device__ __forceinline__ void narrow_pair(float first, float second, bfloat16, unsigned& word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    unsigned short low, high;
    bf16_of_float(first, low), bf16_of_float(second, high);
    word = low | (unsigned)high << 16;
#else
    bf16x2_of_floats(first, second, word);
#endif
  }
  static __device__ __forceinline__ void narrow_pair(float first, float second, float16, unsigned& word) {
    word = f16x2_of_floats(first, second);
  }
#endif
};
