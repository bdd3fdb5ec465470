// Operands of a single output, which kernels read where the output is stored.

#pragma once

#include "core/types.cuh"
#include "ptx/memory.cuh"

// The operand at `from` if it is to be read, else zero; without a branch, since kernels unroll all their outputs.
template <class T>
__device__ __forceinline__ accum_t read_if(bool exists, const T* from) {
  T value;
  load_global_if(exists, from, value);
  return widen(value);
}
