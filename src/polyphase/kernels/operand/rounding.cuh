#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"

// Operands of the direct kernels: with ROUNDED float32 is rounded to TF32. The kernels do not need that, but PyTorch
// rounds, so results are nearer to its results.
template <class T>
__device__ __forceinline__ T operand(T value) {
  if constexpr (ROUNDED) return round_tf32(value);
  return value;
}
