// Values that the compiler must hold in a register at this point of the program, and knows nothing about.

#pragma once

__device__ __forceinline__ void materialize(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void materialize(unsigned& value) { asm volatile("" : "+r"(value)); }

// The same value, opaque to the compiler: it cannot compute values that depend on it earlier and keep them in
// registers.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  materialize(value);
  return value;
}
