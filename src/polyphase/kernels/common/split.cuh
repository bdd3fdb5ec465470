// float32 in two parts of TF32 where there are more of them than products to hide them behind; PARTS says how many.

// What a float loses as TF32 is its low part. The cores truncate that: they take off half of its last bit on average,
// which is put on before. (Rounding it, or both by common/tensor_float.cuh, would take more instructions than the
// products.) NaN stays NaN in the low part whatever becomes of the high one.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  if constexpr (PARTS == 2) {
    high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint((value - __uint_as_float(high)) * (1 + 0.72f / 2048));
  } else {
    high = __float_as_uint(round_tf32(value));
  }
}
