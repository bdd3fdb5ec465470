// Before float32 tensors are copied in float16 (operand/half_copies.cuh): finds the largest magnitude among samples of
// one or two tensors, by parts.
//
// A sample is eight neighbouring pixels of a channel, 32 bytes. Of every `step` samples one is read, any of them, so
// that each region of each channel is met. PARTS_OF_TENSOR blocks read the first of TENSORS, as many the second.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/half_copies.cuh"
#include "ptx/griddepcontrol.cuh"

struct Sampled {
  long long stride[5];  // in elements: images, channels, slabs, rows, columns
  Divisor sizes[3];     // of an image along d, h, w
  Divisor channels;
  Divisor samples;  // of a channel of an image
  int pixels;       // of an image
  int all, step;    // samples of the tensor; of each of which one is read, at most 2^15
};
struct Params {
  Sampled of[2];
};

constexpr int RUN = 8, AT_ONCE = 8;

// A pixel of the `index`-th sample that is read; the last pixel if the image has no such pixel.
__device__ __forceinline__ const float* address_of(const Sampled& tensor, const float* src, int index, int pixel) {
  const unsigned any = ((unsigned)index * 2654435761u >> 17) * (unsigned)tensor.step >> 15;
  const int sample = min(index * tensor.step + (int)any, tensor.all - 1), plane = sample / tensor.samples;
  const int place = min((sample - plane * tensor.samples.value) * RUN + pixel, tensor.pixels - 1);
  const int row = place / tensor.sizes[2], slab = row / tensor.sizes[1];
  return src + plane / tensor.channels * tensor.stride[0] + plane % tensor.channels * tensor.stride[1] +
         slab * tensor.stride[2] + row % tensor.sizes[1] * tensor.stride[3] +
         place % tensor.sizes[2] * tensor.stride[4];
}

#if TENSORS > 1
#define SECOND_PARAMETER , const float* __restrict__ second
#else
#define SECOND_PARAMETER
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sample_magnitudes(const float* __restrict__ first SECOND_PARAMETER, HalfCopies* __restrict__ copies,
                      const __grid_constant__ Params params) {
  __shared__ unsigned of_warps[THREADS / 32];
  griddepcontrol_launch_dependents();
  const int which = blockIdx.x / HalfCopies::PARTS_OF_TENSOR, part = blockIdx.x % HalfCopies::PARTS_OF_TENSOR;
  const Sampled& tensor = params.of[which];
#if TENSORS > 1
  const float* const src = which == 0 ? first : second;
#else
  const float* const src = first;
#endif
  const int count = ceil_div(tensor.all, tensor.step), thread = threadIdx.x;
  constexpr int TOGETHER = THREADS / RUN, APART = HalfCopies::PARTS_OF_TENSOR * TOGETHER;
  unsigned largest = 0;
#pragma unroll 1
  for (int i = part * TOGETHER + thread / RUN; i < count; i += AT_ONCE * APART) {
    float values[AT_ONCE];  // in flight together
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) values[k] = *address_of(tensor, src, min(i + k * APART, count - 1), thread % RUN);
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const unsigned bits = __float_as_uint(values[k]) & 0x7fffffffu;
      if (bits < 0x7f800000u) largest = max(largest, bits);  // finite
    }
  }
#pragma unroll
  for (int by = 1; by < 32; by *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, by));
  if (thread % 32 == 0) of_warps[thread / 32] = largest;
  __syncthreads();
  if (thread > 0) return;
  for (int warp = 1; warp < THREADS / 32; ++warp) largest = max(largest, of_warps[warp]);
  griddepcontrol_wait();  // so that a step that waits for this one has waited for the previous one, too
  copies->largest[which][part] = largest;
  if (blockIdx.x > 0) return;
  copies->inexact = 0, copies->measured = Measured{};
  copies->scale[0] = copies->scale[1] = 1;  // if tensors are empty: nothing copies them
}
