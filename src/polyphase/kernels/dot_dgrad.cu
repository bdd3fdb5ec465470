// The input gradient of layers with long kernels, as dot products, exact in float32:
//
//   gx[n, ci, i] = Σ over output channels and taps of   w[ci, co, tap] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. A warp owns IN_TILE input channels of one group at POSITIONS neighbouring positions along w, 32 sums
// in all. Its lanes take neighbouring taps, which are contiguous in the weight, and neighbouring elements along w of
// the output gradient: each lane computes a part of all sums, and a reduction leaves lane i with sum i of all lanes.
// The warps of a block have the same input channels at neighbouring tiles, so that most weights come from L1.
//
// If there are few tiles, the output channels are split; each of `splits` writes a partial plane, which
// steps/reduce_splits.cu adds.
//
// After FLUSH output channels (or PIECE taps) a lane adds its sums to its totals and restarts them, so rounding errors
// do not build up.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"

struct Params {
  Tensor5 g, x;  // the output gradient, the input gradient
  int batch, groups;
  int tiles_w, tiles;        // tiles of POSITIONS along w; all tiles
  int splits, split_length;  // shares of the output channels; channels of each but the last
  long long plane;           // elements of a partial plane
};

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int POSITIONS = 32 / IN_TILE;
constexpr int IN_TILES = ceil_div(IN_CHANNELS, IN_TILE);

// Elements from a column of the output gradient to the next; one without WIDTH_APART.
__device__ __forceinline__ long long width_step(const Params& params) { return WIDTH_APART ? params.g.stride[4] : 1; }

static_assert(INPUT_GRAD && 32 % IN_TILE == 0, "a sum for every lane");

// A warp's tile.
struct Tile {
  int n, d, h, w;  // its first position

  __device__ __forceinline__ Tile(const Params& params, int tile) {
    w = next_index(tile, params.tiles_w) * POSITIONS;
    h = next_index(tile, params.x.size[1]);
    d = next_index(tile, params.x.size[0]);
    n = tile;
  }
};

struct Sums {
  accum_t values[32] = {};  // [input channel][position]

  __device__ __forceinline__ void take(Sums& others) {
#pragma unroll
    for (int i = 0; i < 32; ++i) values[i] += others.values[i];
    others = Sums{};
  }

  // Adds one tap of one output channel. `from`: what the tile's first position reads, in column `column`, if its row
  // exists. WHOLE: all elements that the tile reads exist. `weights`: the first input channel's; `last` more exist.
  template <bool WHOLE>
  __device__ __forceinline__ void add(const Params& params, const scalar_t* from, int column, bool row_exists,
                                      const scalar_t* weights, int last) {
    accum_t met[POSITIONS];
#pragma unroll
    for (int i = 0; i < POSITIONS; ++i) {
      const int at = i * AXIS_W.stride;
      const bool exists = WHOLE || (row_exists && (unsigned)(column + at) < (unsigned)params.g.size[2]);
      met[i] = exists ? widen(read(from + at * width_step(params))) : (accum_t)0;
    }
#pragma unroll
    for (int i = 0; i < IN_TILE; ++i) {
      const int channel = IN_CHANNELS % IN_TILE == 0 ? i : min(i, last);
      const accum_t weight = widen(read(weights + channel * WEIGHT_STRIDE_IN));
#pragma unroll
      for (int j = 0; j < POSITIONS; ++j) values[i * POSITIONS + j] += weight * met[j];
    }
  }

  // A transposing butterfly reduction: at each step a lane exchanges half of its sums, until values[0] of lane i is sum
  // i over all lanes.
  template <int HALF = 16>
  __device__ __forceinline__ void add_up(int lane) {
    const bool upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const accum_t low = values[i], high = values[HALF + i];
      values[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, HALF);
    }
    if constexpr (HALF > 1) add_up<HALF / 2>(lane);
  }
};

// Whether all elements that `count` neighbours along a dimension read exist; `from`: the first one's first element.
__device__ __forceinline__ bool whole(Axis axis, int from, int count, int size) {
  return from >= 0 && from + (count - 1) * axis.stride + (axis.kernel - 1) * axis.dilation < size;
}

// Adds all products of a lane.
template <bool WHOLE>
__device__ __forceinline__ void multiply(const Params& params, const int (&first)[3], const scalar_t* grad,
                                         const scalar_t* weight, int channels, int last, Sums& total) {
  const int lane = threadIdx.x % 32;
  Sums sums;
  int unflushed = 0;
#pragma unroll 1
  for (int out = 0; out < channels; ++out) {
#pragma unroll 1
    for (int piece = 0; piece < TAPS; piece += PIECE) {
      const int end = min(piece + PIECE, TAPS);
#pragma unroll 2
      for (int tap = piece + lane; tap < end; tap += 32) {
        const int kw = tap % AXIS_W.kernel, line = tap / AXIS_W.kernel;
        const int d = first[0] + line / AXIS_H.kernel * AXIS_D.dilation;
        const int h = first[1] + line % AXIS_H.kernel * AXIS_H.dilation, column = first[2] + kw * AXIS_W.dilation;
        const bool row_exists = (unsigned)d < (unsigned)params.g.size[0] && (unsigned)h < (unsigned)params.g.size[1];
        const scalar_t* const from =
            grad + d * params.g.stride[2] + h * params.g.stride[3] + column * width_step(params);
        sums.add<WHOLE>(params, from, column, row_exists, weight + tap * WEIGHT_STRIDE_TAP, last);
      }
      if (++unflushed == FLUSH) total.take(sums), unflushed = 0;
    }
    grad += params.g.stride[1];
    weight += WEIGHT_STRIDE_OUT;
  }
  total.take(sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dot_dgrad(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight, const scalar_t*,
              scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile_blocks = ceil_div(params.tiles, WARPS);
  int block = blockIdx.x;
  const int index = block % tile_blocks * WARPS + warp;
  block /= tile_blocks;
  const int first_in = block % IN_TILES * IN_TILE;
  block /= IN_TILES;
  const int group = block % params.groups, split = block / params.groups;
  if (index >= params.tiles) return;
  const Tile tile(params, index);

  const int first_out = split * params.split_length, channels = min(params.split_length, OUT_CHANNELS - first_out);
  const int last = IN_CHANNELS - 1 - first_in;
  grad += tile.n * params.g.stride[0] + ((long long)group * OUT_CHANNELS + first_out) * params.g.stride[1];
  weight += (long long)group * (OUT_CHANNELS * IN_CHANNELS * TAPS) + weight_offset(first_in, first_out, 0);
  const int first[3] = {tile.d * AXIS_D.stride - AXIS_D.padding, tile.h * AXIS_H.stride - AXIS_H.padding,
                        tile.w * AXIS_W.stride - AXIS_W.padding};
  Sums total;
  if (whole(AXIS_D, first[0], 1, params.g.size[0]) && whole(AXIS_H, first[1], 1, params.g.size[1]) &&
      whole(AXIS_W, first[2], POSITIONS, params.g.size[2]))
    multiply<true>(params, first, grad, weight, channels, last, total);
  else
    multiply<false>(params, first, grad, weight, channels, last, total);

  total.add_up(lane);
  const accum_t found = total.values[0];
  const int in = first_in + lane / POSITIONS, at[4] = {tile.n, tile.d, tile.h, tile.w + lane % POSITIONS};
  if (in >= IN_CHANNELS || at[3] >= params.x.size[2]) return;
  const long long to = ((long long)group * IN_CHANNELS + in) * params.x.stride[1] + offset_of(params.x, at);
  if (params.splits > 1)
    ((accum_t*)dst)[split * params.plane + to] = found;
  else
    narrow(found, dst[to]);
}
