// What the compiler must have in a register at this point of the program, and knows nothing of.

#pragma once

__device__ __forceinline__ void materialize(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void materialize(unsigned& value) { asm volatile("" : "+r"(value)); }

// The same value, of which the compiler knows nothing: it keeps in no registers what follows from it.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  materialize(value);
  return value;
}
