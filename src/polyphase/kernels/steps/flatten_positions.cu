// Both operands of a weight gradient as planes whose positions are innermost, as wgmma takes them:
//
//     planes[plane][part][c][position] = src[n, c, at(d), at(h), at(w)],   at(i) = i·step + first + (plane's
//     number)·apart
//
// and zero where there is no such element. A position counts n, d, h, w of padded images, or d, h, w, n. PARTS = 2:
// TF32, and what that loses.
//
// Index mapping. The first blocks have the layer's input, the others the gradient of its output; planes are fastest, so
// that what they share of the source is read once. Words are of four bytes. There is one mapping for each innermost
// dimension:
//
//     ROWS           columns are, in the source as in the planes: THREADS words of positions of CHANNELS channels
//     CHANNELS_LAST  channels are, in the source: TILE positions by TILE channels, through shared memory
//     BATCH          images are, in the planes: TILE pixels by so many images and channels, TILE in all, through shared
//                    memory

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"

// Four dimensions in the order in which positions count them.
struct Operand {
  long long stride[4], channel_stride;  // of the source, in elements
  long long pitch;                      // elements from a channel to the next, a multiple of 16 bytes
  int channels;                         // of all groups
  int positions;
  Divisor extent[3];  // of the inner three, padded
  int size[4];        // of the source
  int step[4], first[4], apart[4];
  Divisor planes[4];  // along each dimension
  Divisor blocks;     // of positions
  Divisor images;     // of a block, where those are innermost
};

struct Params {
  Operand x, grad;
  int x_blocks;
};

constexpr int ROWS = 0, CHANNELS_LAST = 1, BATCH = 2;
constexpr int WORD = 4 / (int)sizeof(scalar_t);
constexpr int CHANNELS = 8, TILE = 64;

struct Plane {
  int index;
  int first[4];

  __device__ __forceinline__ Plane(const Operand& of, int plane) : index(plane) {
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      first[i] = of.first[i] + plane % of.planes[i] * of.apart[i];
      plane = plane / of.planes[i];
    }
  }
  // Where dimension i's share of a position lies in the source; below zero where there is none.
  __device__ __forceinline__ long long along(const Operand& of, int i, int place) const {
    const int at = place * of.step[i] + first[i];
    return (unsigned)at < (unsigned)of.size[i] ? at * of.stride[i] : -1;
  }
  // The same of the first DIMENSIONS dimensions, of which `position` counts the places.
  template <int DIMENSIONS>
  __device__ __forceinline__ long long element(const Operand& of, int position) const {
    long long sum = 0;
    bool exists = true;
#pragma unroll
    for (int i = DIMENSIONS - 1; i >= 0; --i) {
      const int outer = i > 0 ? position / of.extent[max(0, i - 1)] : 0;
      const long long share = along(of, i, i > 0 ? position - outer * of.extent[max(0, i - 1)].value : position);
      exists = exists && share >= 0, sum += share, position = outer;
    }
    return exists ? sum : -1;
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

__device__ __forceinline__ void flatten_rows(const Operand& of, const Plane& plane, int along, int across,
                                             const scalar_t* __restrict__ src, scalar_t* __restrict__ planes) {
  const int first = (along * THREADS + (int)threadIdx.x) * WORD, first_channel = across * CHANNELS;
  if (first >= of.positions) return;
  long long from[WORD];
#pragma unroll
  for (int j = 0; j < WORD; ++j) from[j] = first + j < of.positions ? plane.element<4>(of, first + j) : -1;
  Vector<scalar_t, WORD> words[CHANNELS];
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
    for (int j = 0; j < WORD; ++j) {
      const int channel = first_channel + i;
      const bool exists = from[j] >= 0 && channel < of.channels;
      words[i].value[j] = exists ? read(src + from[j] + channel * of.channel_stride) : zero<scalar_t>();
    }
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i)
    if (first_channel + i < of.channels) store_word(of, plane, first_channel + i, first, words[i], planes);
}

// Shared memory of the ways that need it: where its rows and columns lie in the source, below zero where there is
// nothing, and a tile of it.
struct Tile {
  long long rows[TILE], columns[TILE];
  scalar_t values[TILE][TILE + WORD];

  // By all threads, where neighbours have neighbouring columns.
  __device__ __forceinline__ void load(const scalar_t* __restrict__ src) {
    __syncthreads();
    const long long column = columns[threadIdx.x % TILE];
    scalar_t found[TILE * TILE / THREADS];
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i) {
      const long long row = rows[threadIdx.x / TILE + i * (THREADS / TILE)];
      found[i] = row >= 0 && column >= 0 ? read(src + row + column) : zero<scalar_t>();
    }
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i)
      values[threadIdx.x / TILE + i * (THREADS / TILE)][threadIdx.x % TILE] = found[i];
    __syncthreads();
  }
};

// Rows of the tile are positions, columns channels.
__device__ __forceinline__ void flatten_channels_last(const Operand& of, const Plane& plane, int along, int across,
                                                      const scalar_t* __restrict__ src, scalar_t* __restrict__ planes,
                                                      Tile& tile) {
  const int first = along * TILE, first_channel = across * TILE, lane = threadIdx.x;
  if (lane < TILE) {
    tile.rows[lane] = first + lane < of.positions ? plane.element<4>(of, first + lane) : -1;
    tile.columns[lane] = first_channel + lane < of.channels ? (first_channel + lane) * of.channel_stride : -1;
  }
  tile.load(src);
  const int at = lane % (TILE / WORD) * WORD;
  if (first + at >= of.positions) return;
#pragma unroll
  for (int i = lane / (TILE / WORD); i < TILE; i += THREADS / (TILE / WORD)) {
    if (first_channel + i >= of.channels) break;
    Vector<scalar_t, WORD> word;
#pragma unroll
    for (int j = 0; j < WORD; ++j) word.value[j] = tile.values[at + j][i];
    store_word(of, plane, first_channel + i, first + at, word, planes);
  }
}

// Rows of the tile are images of each of some channels, columns pixels.
__device__ __forceinline__ void flatten_batch(const Operand& of, const Plane& plane, int along, int across,
                                              const scalar_t* __restrict__ src, scalar_t* __restrict__ planes,
                                              Tile& tile) {
  const int all = of.extent[2], images = of.images, blocks = ceil_div(all, images), of_block = TILE / images;
  const int first_pixel = along / blocks * TILE, first_image = along % blocks * images, lane = threadIdx.x;
  const int first_channel = across * of_block, pixels = of.positions / of.extent[2];
  if (lane < TILE) {
    const int channel = lane / of.images, image = first_image + lane % of.images;
    const long long at = image < all ? plane.along(of, 3, image) : -1;
    const bool exists = channel < of_block && first_channel + channel < of.channels && at >= 0;
    tile.rows[lane] = exists ? at + (first_channel + channel) * of.channel_stride : -1;
    tile.columns[lane] = first_pixel + lane < pixels ? plane.element<3>(of, first_pixel + lane) : -1;
  }
  tile.load(src);
  const int words = images / WORD;  // of a pixel
#pragma unroll 4
  for (int i = lane; i < TILE * words * of_block; i += THREADS) {
    const int line = i * WORD / of.images, image = i * WORD % of.images;
    const int pixel = line % TILE, channel = line / TILE;
    if (first_pixel + pixel >= pixels || first_channel + channel >= of.channels || first_image + image >= all) continue;
    Vector<scalar_t, WORD> word;
#pragma unroll
    for (int j = 0; j < WORD; ++j) word.value[j] = tile.values[channel * images + image + j][pixel];
    store_word(of, plane, first_channel + channel, (first_pixel + pixel) * all + first_image + image, word, planes);
  }
}

template <int WAY>
__device__ __forceinline__ void flatten(const Operand& of, int index, const scalar_t* __restrict__ src,
                                        scalar_t* __restrict__ planes) {
  const int all_planes = of.planes[0] * of.planes[1] * of.planes[2] * of.planes[3];
  const Plane plane(of, index % all_planes);
  const int block = index / all_planes, along = block % of.blocks, across = block / of.blocks;
  if constexpr (WAY == ROWS) {
    flatten_rows(of, plane, along, across, src, planes);
  } else {
    __shared__ Tile tile;
    if constexpr (WAY == CHANNELS_LAST)
      flatten_channels_last(of, plane, along, across, src, planes, tile);
    else if constexpr (WAY == BATCH)
      flatten_batch(of, plane, along, across, src, planes, tile);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flatten_positions(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad,
                      scalar_t* __restrict__ x_planes, scalar_t* __restrict__ grad_planes,
                      const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  const int index = blockIdx.x;
  if (index < params.x_blocks)
    flatten<X_WAY>(params.x, index, x, x_planes);
  else
    flatten<GRAD_WAY>(params.grad, index - params.x_blocks, grad, grad_planes);
}
