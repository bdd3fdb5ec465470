// What float32 is multiplied by to be multiplied as float16 (common/scales.cuh) is found in two steps. This is the
// first: the magnitudes of pixels and weights, by parts. Packing takes them together.
//
// The first PIXEL_PARTS blocks measure pixels: LANES neighbouring threads take VECTOR pixels each, of an image and a
// group, the others the same pixels in other channels. Behind these a block measures TILE output channels in one of
// WEIGHT_PARTS parts of the input channels; a thread has the same weight of a row, of every input channel.

constexpr int THREADS = 256;
constexpr int TILE = TAPS < THREADS ? THREADS / TAPS : 1, RUN = TILE * TAPS;
constexpr int TILES = ceil_div(DST_CHANNELS, TILE);
constexpr int TAP_STRIDE = WEIGHT_STRIDE_TAP < 0 ? -WEIGHT_STRIDE_TAP : WEIGHT_STRIDE_TAP;  // in any order
constexpr bool TAPS_INNERMOST = TAP_STRIDE <= WEIGHT_STRIDE_OUT;

struct Geometry {
  Tensor5 src;
  Divisor sizes[3];  // of an image, along depth, height and width; of one that is a single row, the width is all of it
  Divisor runs;      // of an image's pixels, LANES · VECTOR each
  int batch, pixels;
  int lanes;   // a power of two
  int vector;  // pixels that are read at once: four, or one
};

template <int VECTOR>
__device__ __forceinline__ void find_largest(const Geometry& g, const scalar_t* from, int slice, int slices,
                                             unsigned (&largest)[4]) {
  constexpr int AT_ONCE = 8;
#pragma unroll 1
  for (int channel = slice; channel < SRC_CHANNELS; channel += AT_ONCE * slices) {
    Vector<scalar_t, VECTOR> values[AT_ONCE];  // on their way together
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int one = min(channel + k * slices, SRC_CHANNELS - 1);
      values[k] = *(const Vector<scalar_t, VECTOR>*)(from + one * g.src.stride[1]);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) largest[i] = max(largest[i], finite_magnitude(values[k].value[i]));
  }
}

__device__ __forceinline__ void measure_pixels(const Geometry& g, const scalar_t* src, Measured& found) {
  __shared__ unsigned of_threads[THREADS][4];
  __shared__ Measured of_lanes[32];
  const int lane = threadIdx.x & (g.lanes - 1), slice = threadIdx.x / g.lanes, slices = THREADS / g.lanes;
  Measured all = {0, ~0u};
  for (int run = blockIdx.x; run < g.batch * GROUPS * g.runs; run += PIXEL_PARTS) {
    const int image = run / g.runs, pixel = (run % g.runs * g.lanes + lane) * g.vector;
    unsigned largest[4] = {};
    if (pixel < g.pixels) {
      const int w = pixel % g.sizes[2], row = pixel / g.sizes[2], h = row % g.sizes[1], d = row / g.sizes[1];
      const scalar_t* const from = src + image / GROUPS * g.src.stride[0] + d * g.src.stride[2] + h * g.src.stride[3] +
                                   w * g.src.stride[4] + (long long)(image % GROUPS) * SRC_CHANNELS * g.src.stride[1];
      if (g.vector == 4)
        find_largest<4>(g, from, slice, slices, largest);
      else
        find_largest<1>(g, from, slice, slices, largest);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) of_threads[threadIdx.x][i] = largest[i];
    __syncthreads();
    for (int i = threadIdx.x; i < g.lanes * 4; i += THREADS) {  // of a pixel, all its channels
      unsigned of_pixel = 0;
      for (int other = 0; other < slices; ++other) of_pixel = max(of_pixel, of_threads[other * g.lanes + i / 4][i % 4]);
      all.largest = max(all.largest, of_pixel);
      if (of_pixel > 0) all.smallest = min(all.smallest, of_pixel);
    }
    __syncthreads();
  }
  // All threads' in the first.
  for (int by = 1; by < 32; by *= 2) {
    all.largest = max(all.largest, __shfl_xor_sync(~0u, all.largest, by));
    all.smallest = min(all.smallest, __shfl_xor_sync(~0u, all.smallest, by));
  }
  if (threadIdx.x % 32 == 0) of_lanes[threadIdx.x / 32] = all;
  __syncthreads();
  for (int i = 0; threadIdx.x == 0 && i < THREADS / 32; ++i) {
    all.largest = max(all.largest, of_lanes[i].largest);
    all.smallest = min(all.smallest, of_lanes[i].smallest);
  }
  if (threadIdx.x == 0) found = all;
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    measure_scales(const scalar_t* __restrict__ weight, unsigned char* __restrict__ workspace,
                   const scalar_t* __restrict__ src, const Geometry g) {
  let_dependents_start();
  const Scales scales(workspace + COUNTER_BYTES);
  if (blockIdx.x < PIXEL_PARTS)
    measure_pixels(g, src, scales.pixels()[blockIdx.x]);
  else
    measure_weights(blockIdx.x - PIXEL_PARTS, weight, scales.channels());
}
