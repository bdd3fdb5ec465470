// Operands of the direct kernels, as they are multiplied.

// float32 is rounded to TF32 where the specialisation says ROUNDED: these kernels need not, but results are then nearer
// to those of PyTorch, which does. GPUs before compute capability 8.0 have no TF32.
__device__ __forceinline__ float operand(float value) {
  if (!ROUNDED) return value;
#if defined(EMULATOR) || __CUDA_ARCH__ >= 800
  return round_tf32(value);
#else
  return value;
#endif
}
__device__ __forceinline__ double operand(double value) { return value; }
