// A tensor of any strides as planes whose positions are innermost, as wgmma takes both operands of a weight gradient:
//
//     planes[plane][part][c][((n·D + d)·H + h)·W + w] = src[n, c, at(d), at(h), at(w)]
//     at(i) = i·step + first + (the plane's number)·apart
//
// and zero where there is no such element, in images that are padded to D by H by W. PARTS = 2: TF32, and what that
// loses.
//
// Index mapping. A block has THREADS words of positions, WORD each, of CHANNELS channels of one plane; planes are
// fastest, so that what they share of the source is read once. Where channels are innermost it has TILE positions by
// TILE channels: neighbouring threads read neighbouring channels, and write neighbouring positions.
//
// Shared memory, then: where positions lie, and [position][channel].

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"

struct Params {
  long long stride[5];  // of the source, in elements: of images, channels, slabs, rows, columns
  int channels;         // of all groups
  int positions;        // of all padded images
  Divisor padded[3];    // along d, h, w
  int size[3];          // of the source's images
  int step[3], first[3], apart[3];
  Divisor planes[3];  // along d, h, w
  Divisor blocks;     // of positions
  long long pitch;    // elements from a channel to the next, a multiple of 16 bytes
};

constexpr int WORD = 4 / (int)sizeof(scalar_t);
constexpr int CHANNELS = 8, TILE = 64;

struct Plane {
  int index;
  int first[3];

  __device__ __forceinline__ Plane(const Params& params, int plane) : index(plane) {
    const int row = plane / params.planes[2], slab = row / params.planes[1];
    const int of[3] = {slab, row % params.planes[1], plane % params.planes[2]};
#pragma unroll
    for (int i = 0; i < 3; ++i) first[i] = params.first[i] + of[i] * params.apart[i];
  }
  // The source element of a position, of channel 0; below zero where there is none.
  __device__ __forceinline__ long long element(const Params& params, int position) const {
    if (position >= params.positions) return -1;
    const int row = position / params.padded[2], slab = row / params.padded[1], image = slab / params.padded[0];
    const int d = slab % params.padded[0] * params.step[0] + first[0];
    const int h = row % params.padded[1] * params.step[1] + first[1];
    const int w = position % params.padded[2] * params.step[2] + first[2];
    const bool exists = (unsigned)d < (unsigned)params.size[0] && (unsigned)h < (unsigned)params.size[1] &&
                        (unsigned)w < (unsigned)params.size[2];
    const long long at = image * params.stride[0] + d * params.stride[2] + h * params.stride[3] + w * params.stride[4];
    return exists ? at : -1;
  }
};

// Four bytes of a channel, in all parts.
__device__ __forceinline__ void store_word(const Vector<float, 1>& values, long long beside, float* to) {
  float high = values.value[0], low = 0;
  if (PARTS == 2) split_tf32(values.value[0], high, low);
  *to = high;
  if (PARTS == 2) to[beside] = low;
}
template <class T>
__device__ __forceinline__ void store_word(const Vector<T, 2>& values, long long, T* to) {
  *(Vector<T, 2>*)to = values;
}
__device__ __forceinline__ void store_word(const Params& params, const Plane& plane, int channel, int first,
                                           const Vector<scalar_t, WORD>& values, scalar_t* planes) {
  const long long row = (long long)plane.index * PARTS * params.channels + channel;
  store_word(values, params.channels * params.pitch, planes + row * params.pitch + first);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flatten_positions(const scalar_t* __restrict__ src, scalar_t* __restrict__ planes,
                      const __grid_constant__ Params params) {
  const int all_planes = params.planes[0] * params.planes[1] * params.planes[2];
  const Plane plane(params, (int)blockIdx.x % all_planes);
  const int block = (int)blockIdx.x / all_planes, along = block % params.blocks, across = block / params.blocks;
  if constexpr (CHANNELS_LAST) {
    __shared__ long long elements[TILE];
    __shared__ scalar_t tile[TILE][TILE + WORD];
    const int first = along * TILE, first_channel = across * TILE;
    if (threadIdx.x < TILE) elements[threadIdx.x] = plane.element(params, first + threadIdx.x);
    __syncthreads();
    const int channel = first_channel + threadIdx.x % TILE;
    scalar_t values[TILE * TILE / THREADS];
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i) {
      const long long element = elements[threadIdx.x / TILE + i * (THREADS / TILE)];
      const bool exists = element >= 0 && channel < params.channels;
      values[i] = exists ? read(src + element + channel * params.stride[1]) : zero<scalar_t>();
    }
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i)
      tile[threadIdx.x / TILE + i * (THREADS / TILE)][threadIdx.x % TILE] = values[i];
    __syncthreads();
    const int at = threadIdx.x % (TILE / WORD) * WORD;
    if (first + at >= params.positions) return;
#pragma unroll
    for (int i = threadIdx.x / (TILE / WORD); i < TILE; i += THREADS / (TILE / WORD)) {
      if (first_channel + i >= params.channels) break;
      Vector<scalar_t, WORD> word;
#pragma unroll
      for (int j = 0; j < WORD; ++j) word.value[j] = tile[at + j][i];
      store_word(params, plane, first_channel + i, first + at, word, planes);
    }
  } else {
    const int first = (along * THREADS + (int)threadIdx.x) * WORD, first_channel = across * CHANNELS;
    if (first >= params.positions) return;
    long long from[WORD];
#pragma unroll
    for (int j = 0; j < WORD; ++j) from[j] = plane.element(params, first + j);
    Vector<scalar_t, WORD> words[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        const int channel = first_channel + i;
        const bool exists = from[j] >= 0 && channel < params.channels;
        words[i].value[j] = exists ? read(src + from[j] + channel * params.stride[1]) : zero<scalar_t>();
      }
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
      if (first_channel + i < params.channels) store_word(params, plane, first_channel + i, first, words[i], planes);
  }
}
