// Both operands of a weight gradient as planes whose positions are innermost, as wgmma takes them:
//
//     planes[plane][part][c][((n·D + d)·H + h)·W + w] = src[n, c, at(d), at(h), at(w)]
//     at(i) = i·step + first + (the plane's number)·apart
//
// and zero where there is no such element, in images that are padded to D by H by W. PARTS = 2: TF32, and what that
// loses.
//
// Index mapping. The first blocks have the layer's input, the others the gradient of its output. A block has THREADS
// words of positions, WORD each, of CHANNELS channels of one plane; planes are fastest, so that what they share of the
// source is read once. Where channels are innermost it has TILE positions by TILE channels: neighbouring threads read
// neighbouring channels, and write neighbouring positions.
//
// Shared memory, then: where positions lie, and [position][channel].

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"

struct Operand {
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

struct Params {
  Operand x, grad;
  int x_blocks;
};

constexpr int WORD = 4 / (int)sizeof(scalar_t);
constexpr int CHANNELS = 8, TILE = 64;

struct Plane {
  int index;
  int first[3];

  __device__ __forceinline__ Plane(const Operand& of, int plane) : index(plane) {
    const int row = plane / of.planes[2], slab = row / of.planes[1];
    const int along[3] = {slab, row % of.planes[1], plane % of.planes[2]};
#pragma unroll
    for (int i = 0; i < 3; ++i) first[i] = of.first[i] + along[i] * of.apart[i];
  }
  // The source element of a position, of channel 0; below zero where there is none.
  __device__ __forceinline__ long long element(const Operand& of, int position) const {
    if (position >= of.positions) return -1;
    const int row = position / of.padded[2], slab = row / of.padded[1], image = slab / of.padded[0];
    const int d = slab % of.padded[0] * of.step[0] + first[0];
    const int h = row % of.padded[1] * of.step[1] + first[1];
    const int w = position % of.padded[2] * of.step[2] + first[2];
    const bool exists =
        (unsigned)d < (unsigned)of.size[0] && (unsigned)h < (unsigned)of.size[1] && (unsigned)w < (unsigned)of.size[2];
    const long long at = image * of.stride[0] + d * of.stride[2] + h * of.stride[3] + w * of.stride[4];
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
__device__ __forceinline__ void store_word(const Operand& of, const Plane& plane, int channel, int first,
                                           const Vector<scalar_t, WORD>& values, scalar_t* planes) {
  const long long row = (long long)plane.index * PARTS * of.channels + channel;
  store_word(values, of.channels * of.pitch, planes + row * of.pitch + first);
}

template <bool CHANNELS_LAST>
__device__ __forceinline__ void flatten(const Operand& of, int index, const scalar_t* __restrict__ src,
                                        scalar_t* __restrict__ planes) {
  const int all_planes = of.planes[0] * of.planes[1] * of.planes[2];
  const Plane plane(of, index % all_planes);
  const int block = index / all_planes, along = block % of.blocks, across = block / of.blocks;
  if constexpr (CHANNELS_LAST) {
    __shared__ long long elements[TILE];
    __shared__ scalar_t tile[TILE][TILE + WORD];
    const int first = along * TILE, first_channel = across * TILE;
    if (threadIdx.x < TILE) elements[threadIdx.x] = plane.element(of, first + threadIdx.x);
    __syncthreads();
    const int channel = first_channel + threadIdx.x % TILE;
    scalar_t values[TILE * TILE / THREADS];
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i) {
      const long long element = elements[threadIdx.x / TILE + i * (THREADS / TILE)];
      const bool exists = element >= 0 && channel < of.channels;
      values[i] = exists ? read(src + element + channel * of.stride[1]) : zero<scalar_t>();
    }
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i)
      tile[threadIdx.x / TILE + i * (THREADS / TILE)][threadIdx.x % TILE] = values[i];
    __syncthreads();
    const int at = threadIdx.x % (TILE / WORD) * WORD;
    if (first + at >= of.positions) return;
#pragma unroll
    for (int i = threadIdx.x / (TILE / WORD); i < TILE; i += THREADS / (TILE / WORD)) {
      if (first_channel + i >= of.channels) break;
      Vector<scalar_t, WORD> word;
#pragma unroll
      for (int j = 0; j < WORD; ++j) word.value[j] = tile[at + j][i];
      store_word(of, plane, first_channel + i, first + at, word, planes);
    }
  } else {
    const int first = (along * THREADS + (int)threadIdx.x) * WORD, first_channel = across * CHANNELS;
    if (first >= of.positions) return;
    long long from[WORD];
#pragma unroll
    for (int j = 0; j < WORD; ++j) from[j] = plane.element(of, first + j);
    Vector<scalar_t, WORD> words[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        const int channel = first_channel + i;
        const bool exists = from[j] >= 0 && channel < of.channels;
        words[i].value[j] = exists ? read(src + from[j] + channel * of.stride[1]) : zero<scalar_t>();
      }
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
      if (first_channel + i < of.channels) store_word(of, plane, first_channel + i, first, words[i], planes);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flatten_positions(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad,
                      scalar_t* __restrict__ x_planes, scalar_t* __restrict__ grad_planes,
                      const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  const int index = blockIdx.x;
  if (index < params.x_blocks)
    flatten<X_CHANNELS_LAST>(params.x, index, x, x_planes);
  else
    flatten<GRAD_CHANNELS_LAST>(params.grad, index - params.x_blocks, grad, grad_planes);
}
