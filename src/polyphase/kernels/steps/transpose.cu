// Layout transpose: a tensor of any strides to one whose channels are innermost (NCHW to NHWC), without gaps, as TMA
// takes boxes of it. NHWC to NCHW is the same with pixels and channels exchanged. The channels of each group may be
// padded with zeros; with `parts` those of float32 come twice, as TF32 and as what that loses.
//
// Index mapping. A block has PIXELS pixels, of all images one after the other, by CHANNELS channels. Neighbouring
// threads read neighbouring pixels of a channel, and write neighbouring channels of a pixel, 16 bytes each where
// channels are whole pieces of those. Shared memory: [channel][pixel], PITCH elements a channel.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"

struct Params {
  long long stride[5];   // of the source, in elements: of images, channels, slabs, rows, columns
  int channels, pixels;  // that are written; the latter of all images
  Divisor sizes[3];      // of an image along d, h, w
  Divisor padded;        // channels of a group, and those that exist
  int group, parts;
};

constexpr int ELEMENT = sizeof(scalar_t), VECTOR = 16 / ELEMENT;
constexpr int PIXELS = 64, CHANNELS = 64, PITCH = PIXELS + 4 / ELEMENT;
constexpr int AT_ONCE = THREADS / PIXELS, LOADS = CHANNELS / AT_ONCE;  // channels that are loaded together
constexpr int VECTORS = CHANNELS / VECTOR;                             // of a pixel

// TF32, or what it loses (operand/tf32.cuh).
__device__ __forceinline__ float part_of(float value, int part) {
  float high = 0, low = 0;
  split_tf32(value, high, low);
  return part == 0 ? high : low;
}
template <class T>
__device__ __forceinline__ T part_of(T value, int) {
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    transpose(const scalar_t* __restrict__ src, scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  __shared__ scalar_t tile[CHANNELS][PITCH];
  const int blocks = ceil_div(params.pixels, PIXELS);  // of so many channels
  const int first_pixel = (int)blockIdx.x % blocks * PIXELS, first_channel = (int)blockIdx.x / blocks * CHANNELS;

  const int pixel = first_pixel + threadIdx.x % PIXELS;
  if (pixel < params.pixels) {
    const int row = pixel / params.sizes[2], slab = row / params.sizes[1], image = slab / params.sizes[0];
    const int own = threadIdx.x / PIXELS;  // the first of the thread's channels
    const scalar_t* const from = src + image * params.stride[0] + slab % params.sizes[0] * params.stride[2] +
                                 row % params.sizes[1] * params.stride[3] + pixel % params.sizes[2] * params.stride[4];
    scalar_t values[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int channel = first_channel + own + i * AT_ONCE, of_parts = channel / params.padded;
      const int group = params.parts > 1 ? of_parts / 2 : of_parts;
      const int in_group = channel - of_parts * params.padded.value;
      const bool exists = channel < params.channels && in_group < params.group;
      values[i] = exists ? read(from + (group * params.group + in_group) * params.stride[1]) : zero<scalar_t>();
      if (params.parts > 1) values[i] = part_of(values[i], of_parts % 2);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (first_channel + own + i * AT_ONCE < params.channels)
        tile[own + i * AT_ONCE][threadIdx.x % PIXELS] = values[i];
  }
  __syncthreads();

  if (params.channels % VECTOR) {
    const int count = min(CHANNELS, params.channels - first_channel);
    for (int i = threadIdx.x; i < PIXELS * count; i += THREADS)
      if (first_pixel + i / count < params.pixels)
        dst[(long long)(first_pixel + i / count) * params.channels + first_channel + i % count] =
            tile[i % count][i / count];
    return;
  }
  const int channel = threadIdx.x % VECTORS * VECTOR;
  if (first_channel + channel >= params.channels) return;
#pragma unroll
  for (int i = threadIdx.x / VECTORS; i < PIXELS; i += THREADS / VECTORS) {
    if (first_pixel + i >= params.pixels) break;
    Vector<scalar_t, VECTOR> values;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) values.value[j] = tile[channel + j][i];
    *(Vector<scalar_t, VECTOR>*)(dst + (long long)(first_pixel + i) * params.channels + first_channel + channel) =
        values;
  }
}
