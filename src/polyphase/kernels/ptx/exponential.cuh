#pragma once

// Two to the power of `v`, two units in the last place off; 0 where that has no normal number.
__device__ __forceinline__ float exp2_approximate(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

// A quotient, two units in the last place off; 0 where it has no normal number.
__device__ __forceinline__ float divide_approximate(float dividend, float divisor) {
  float found;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(found) : "f"(dividend), "f"(divisor));
  return found;
}
