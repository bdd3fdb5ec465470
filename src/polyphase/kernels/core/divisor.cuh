#pragma once

// A divisor of numbers from 0 to 2³¹ - 1 that is known at launch: division by multiplication.
struct Divisor {
  int value;
  unsigned reciprocal;  // 2^shift / value, rounded up
  int shift;            // 31 and the logarithm of the value to the base of 2, rounded up
  __device__ __forceinline__ operator int() const { return value; }
};
__device__ __forceinline__ int operator/(int number, const Divisor& by) {
  return (int)((unsigned long long)(unsigned)number * by.reciprocal >> by.shift);
}
__device__ __forceinline__ int operator%(int number, const Divisor& by) { return number - number / by * by.value; }
