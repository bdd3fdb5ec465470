// The scales by which float32 becomes float16 (operand/scales.cuh) are computed in two steps. This is the first: it
// measures the magnitudes of pixels and weights, by parts. Packing combines them.
//
// With COPIED only weights are measured. Else the first PIXEL_PARTS blocks measure pixels, after a prologue: `lanes`
// neighbouring threads take `vector` pixels each, of an image and a group, the other threads the same pixels in other
// channels. Each further block measures TILE output channels in one of WEIGHT_PARTS parts of the input channels; a
// thread has the same weight of a row for every input channel.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "operand/input_value.cuh"
#include "operand/scaled_half.cuh"
#include "operand/scales.cuh"

constexpr int THREADS = 256;
constexpr int TILE = TAPS < THREADS ? THREADS / TAPS : 1, RUN = TILE * TAPS;
constexpr int TILES = ceil_div(DST_CHANNELS, TILE);
constexpr int TAP_STRIDE = WEIGHT_STRIDE_TAP < 0 ? -WEIGHT_STRIDE_TAP : WEIGHT_STRIDE_TAP;  // in any order
constexpr bool TAPS_INNERMOST = TAP_STRIDE <= WEIGHT_STRIDE_OUT;

struct Params {
  Tensor5 src;
  Divisor sizes[4];  // one image; depth, height and width; an image that is a single row has all pixels along the width
  Divisor runs;      // runs of an image's pixels, lanes · vector each
  int all_runs;      // runs of all images and groups
  int pixels;        // pixels of an image
  int lanes;         // a power of two
  int vector;        // pixels of one load: four, or one
};

template <int VECTOR>
__device__ __forceinline__ void find_largest(const Params& params, const scalar_t* from, const InputChannels& of,
                                             int slice, int slices, unsigned (&largest)[4]) {
  constexpr int AT_ONCE = 8;
#pragma unroll 1
  for (int channel = slice; channel < SRC_CHANNELS; channel += AT_ONCE * slices) {
    Vector<scalar_t, VECTOR> values[AT_ONCE];  // in flight together
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int one = min(channel + k * slices, SRC_CHANNELS - 1);
      values[k] = *(const Vector<scalar_t, VECTOR>*)(from + one * params.src.stride[1]);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        largest[i] = max(largest[i],
                         finite_magnitude(of.value(values[k].value[i], min(channel + k * slices, SRC_CHANNELS - 1))));
  }
}

__device__ __forceinline__ void measure_pixels(const Params& params, const scalar_t* src,
                                               const PrologueOperands& operands, Measured& found) {
  __shared__ unsigned of_threads[THREADS][4];
  __shared__ Measured of_warps[THREADS / 32];
  const int lane = threadIdx.x & (params.lanes - 1), slice = threadIdx.x / params.lanes,
            slices = THREADS / params.lanes;
  Measured all;
  for (int run = blockIdx.x; run < params.all_runs; run += PIXEL_PARTS) {
    const int image = run / params.runs, pixel = (run % params.runs * params.lanes + lane) * params.vector;
    unsigned largest[4] = {};
    if (pixel < params.pixels) {
      int at[4];
      decode(params.sizes, pixel, at);
      at[0] = image / GROUPS;
      const scalar_t* const from =
          src + offset_of(params.src, at) + image % GROUPS * SRC_CHANNELS * params.src.stride[1];
      const InputChannels channels{operands, image % GROUPS * SRC_CHANNELS, SRC_CHANNELS};
      if (params.vector == 4)
        find_largest<4>(params, from, channels, slice, slices, largest);
      else
        find_largest<1>(params, from, channels, slice, slices, largest);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) of_threads[threadIdx.x][i] = largest[i];
    __syncthreads();
    for (int i = threadIdx.x; i < params.lanes * 4; i += THREADS) {  // of a pixel, all its channels
      unsigned of_pixel = 0;
      for (int other = 0; other < slices; ++other)
        of_pixel = max(of_pixel, of_threads[other * params.lanes + i / 4][i % 4]);
      if (of_pixel > 0) all.take(Measured{of_pixel, of_pixel});
    }
    __syncthreads();
  }
  all.take_lanes();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < THREADS / 32; ++warp) all.take(of_warps[warp]);
  found = all;
}

__device__ __forceinline__ void measure_weights(int index, const scalar_t* weight, unsigned* channels) {
  __shared__ unsigned of_run[RUN];
  const int tile = index % TILES, part = index / TILES % WEIGHT_PARTS, group = index / (TILES * WEIGHT_PARTS);
  const scalar_t* const origin =
      weight + (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS + tile * TILE * WEIGHT_STRIDE_OUT;
  for (int i = threadIdx.x; i < RUN; i += THREADS) {
    const int out = TAPS_INNERMOST ? i / TAPS : i % TILE, tap = TAPS_INNERMOST ? i % TAPS : i / TILE;
    unsigned largest = 0;
    if (tile * TILE + out < DST_CHANNELS) {
      const scalar_t* const from = origin + out * WEIGHT_STRIDE_OUT + tap * TAP_STRIDE;
#pragma unroll 16
      for (int in = part; in < SRC_CHANNELS; in += WEIGHT_PARTS)
        largest = max(largest, finite_magnitude(read(from + (long long)in * WEIGHT_STRIDE_IN)));
    }
    of_run[out * TAPS + tap] = largest;
  }
  __syncthreads();
  for (int out = threadIdx.x; out < TILE && tile * TILE + out < DST_CHANNELS; out += THREADS) {
    unsigned largest = 0;
    for (int tap = 0; tap < TAPS; ++tap) largest = max(largest, of_run[out * TAPS + tap]);
    channels[part * Scales::CHANNELS + group * DST_CHANNELS + tile * TILE + out] = largest;
  }
}

#if COPIED
#define SRC_PARAMETERS
#else
#define SRC_PARAMETERS , const scalar_t* __restrict__ src PROLOGUE_PARAMETERS
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    measure_scales(const scalar_t* __restrict__ weight, unsigned char* __restrict__ workspace SRC_PARAMETERS,
                   const Params params) {
  griddepcontrol_launch_dependents();
  const Scales scales(workspace + COUNTER_BYTES);
#if COPIED
  measure_weights(blockIdx.x, weight, scales.channels());
#else
  if (blockIdx.x < PIXEL_PARTS)
    measure_pixels(params, src, PROLOGUE_OPERANDS, scales.pixels()[blockIdx.x]);
  else
    measure_weights(blockIdx.x - PIXEL_PARTS, weight, scales.channels());
#endif
}
