// Operands as the tensor cores see them: TF32 is float32 without its last 13 bits.

#pragma once

#include "core/types.cuh"

template <class T>
inline float operand_value(T value) {
  float wide = widen(value);
  if (sizeof(T) == 4) wide = __uint_as_float(__float_as_uint(wide) & 0xffffe000u);
  return wide;
}
