#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"

// Operands of the direct kernels, as they are multiplied: float32 is rounded to TF32 where the specialisation says
// ROUNDED. These kernels need not, but results are then nearer to those of PyTorch, which does.
template <class T>
__device__ __forceinline__ T operand(T value) {
  if constexpr (ROUNDED) return round_tf32(value);
  return value;
}
