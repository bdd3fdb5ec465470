// Before float32 tensors are copied in float16 (operand/half_copies.cuh): finds the largest magnitude among samples of
// two tensors, by parts.
//
// A sample is eight neighbouring pixels of a channel, 32 bytes. Of every `step` samples one is read, any of them, so
// that each region of each channel is met. PARTS_OF_TENSOR blocks read the first tensor, as many the second.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/half_copies.cuh"
#include "ptx/griddepcontrol.cuh"

struct Sampled {
  long long stride[5];  // in elements: images, channels, slabs, rows, columns
  long long all;        // samples of the tensor
  Divisor sizes[3];     // of an image along d, h, w
  Divisor channels;
  int samples;  // of a channel of an image
  int pixels;   // of an image
  int step;     // at most 2^15
};
struct Params {
  Sampled of[2];
};

constexpr int RUN = 8, AT_ONCE = 4;

// Bits of a pixel's magnitude in a sample; zero if there is no such pixel, or it is not finite.
__device__ __forceinline__ unsigned magnitude_of(const Sampled& tensor, const float* src, long long sample, int run) {
  const long long first = sample * tensor.step;
  const unsigned any = ((unsigned)sample * 2654435761u >> 17) * (unsigned)tensor.step >> 15;
  const long long place = min(first + any, tensor.all - 1);
  const int plane = (int)(place / tensor.samples), pixel = (int)(place - (long long)plane * tensor.samples) * RUN + run;
  if (pixel >= tensor.pixels) return 0;
  const int row = pixel / tensor.sizes[2], slab = row / tensor.sizes[1], image = plane / tensor.channels;
  const unsigned bits =
      __float_as_uint(
          src[image * tensor.stride[0] + plane % tensor.channels * tensor.stride[1] + slab * tensor.stride[2] +
              row % tensor.sizes[1] * tensor.stride[3] + pixel % tensor.sizes[2] * tensor.stride[4]]) &
      0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sample_magnitudes(const float* __restrict__ first, const float* __restrict__ second,
                      HalfCopies* __restrict__ copies, const __grid_constant__ Params params) {
  __shared__ unsigned of_warps[THREADS / 32];
  griddepcontrol_launch_dependents();
  const int which = blockIdx.x / HalfCopies::PARTS_OF_TENSOR, part = blockIdx.x % HalfCopies::PARTS_OF_TENSOR;
  const Sampled& tensor = params.of[which];
  const float* const src = which == 0 ? first : second;
  const long long count = (tensor.all + tensor.step - 1) / tensor.step;
  constexpr int TOGETHER = THREADS / RUN, APART = HalfCopies::PARTS_OF_TENSOR * TOGETHER;
  unsigned largest = 0;
#pragma unroll 1
  for (long long i = part * TOGETHER + threadIdx.x / RUN; i < count; i += AT_ONCE * APART)
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
      if (i + k * APART < count) largest = max(largest, magnitude_of(tensor, src, i + k * APART, threadIdx.x % RUN));
#pragma unroll
  for (int by = 1; by < 32; by *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, by));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < THREADS / 32; ++warp) largest = max(largest, of_warps[warp]);
  copies->largest[which][part] = largest;
  if (blockIdx.x == 0) copies->inexact = 0;
}
