#pragma once

// Two to the power of `v`, with an error of two units in the last place; 0 if the result is not a normal number.
__device__ __forceinline__ float exp2_approximate(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

// A quotient, with an error of two units in the last place; 0 if it is not a normal number.
__device__ __forceinline__ float divide_approximate(float dividend, float divisor) {
  float found;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(found) : "f"(dividend), "f"(divisor));
  return found;
}
