// Direct kernel of the forward pass and the input gradient where channels come last and groups have few of them:
// depthwise layers, and others whose groups would leave most of a tensor core's operation empty.
//
//   destination[n, cd, cell·DST + dst_offset(tap)]  =
//       bias[cd]  +  Σ source[n, cs, cell·SRC + src_offset(tap)] · w[cs, cd, tap]
//
// summed over the source channels cs of the group and over all taps (core/geometry.cuh has the offsets).
//
// Index mapping. Lanes run along channels: a thread owns VECTOR neighbouring destination channels, of one group or of
// GROUPS_HELD whole groups, at all elements of CELLS neighbouring cells along w, in one destination row at a time.
// LANES neighbouring threads own neighbouring vectors; the block's other threads take positions along w, then h, d, n
// in extents chosen at launch. A block advances along h, for `steps` rows of each thread.
//
// Along w the taps are straight-line code; along h and d they are a loop (core/taps.cuh). The source is read through
// L1, the columns of one row at a time, since neighbouring threads read the same elements.
//
// CHAINED: the products of one row of taps, for the source channels held at a time, are summed separately first, so
// that a long sum of float32 is no single chain of roundings.
//
// SRC_PIXEL and DST_PIXEL are the elements from a pixel to its neighbour along w, which hold all groups' channels.
//
// Shared memory: the weights of the block's channels, [tap][source channel of the group][destination channel], which
// are written once, before the only barrier.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "operand/rounding.cuh"

struct Params {
  Tensor5 src, dst;
  int batch;
  int lanes[4];  // threads along n, d, h, w; their product is at most THREADS / LANES
  int tiles[4];  // tiles along n, d, h, w; one along h has `steps` times as many rows as threads
  int steps;
  int vectors;  // vectors of all destination channels
};

constexpr int THREADS = 256;
constexpr int BLOCK_DST = LANES * VECTOR;
constexpr int GROUPS_HELD = VECTOR > DST_CHANNELS ? VECTOR / DST_CHANNELS : 1;
// Source channels that a thread reads of a pixel, and those of them that it holds at a time.
constexpr int SRC_READ = GROUPS_HELD * SRC_CHANNELS;
constexpr int SRC_HELD = GROUPS_HELD > 1 ? SRC_READ : SRC_VECTOR;
constexpr int DST_W = dst_cell(AXIS_W), SRC_W = src_cell(AXIS_W);
constexpr int WINDOW = window(AXIS_W, CELLS);

static_assert(DST_CHANNELS_LAST, "lanes run along channels");
static_assert(VECTOR % DST_CHANNELS == 0 || DST_CHANNELS % VECTOR == 0, "a vector is of whole groups, or of one");
static_assert(SRC_HELD % SRC_VECTOR == 0 && SRC_READ % SRC_HELD == 0, "source channels are read in whole vectors");

// Copies the weights of the block's channels to shared memory, reading them in memory order.
__device__ __forceinline__ void load_weights(const scalar_t* weight, int first_channel, int channels,
                                             accum_t* weights) {
  constexpr int COUNT = TAPS * SRC_CHANNELS * BLOCK_DST;
  constexpr bool DST_FIRST = WEIGHT_STRIDE_OUT == 1 && !INPUT_GRAD;
#pragma unroll 4
  for (int item = threadIdx.x; item < COUNT; item += THREADS) {
    const int channel = DST_FIRST ? item % BLOCK_DST : item / (TAPS * SRC_CHANNELS);
    const int tap = DST_FIRST ? item / BLOCK_DST % TAPS : item % TAPS;
    const int source = DST_FIRST ? item / (BLOCK_DST * TAPS) : item / TAPS % SRC_CHANNELS;
    const int of_all = first_channel + channel, of_group = of_all % DST_CHANNELS;
    const long long group = (long long)(of_all / DST_CHANNELS) * (SRC_CHANNELS * DST_CHANNELS * TAPS);
    const int offset = INPUT_GRAD ? weight_offset(of_group, source, tap) : weight_offset(source, of_group, tap);
    weights[(tap * SRC_CHANNELS + source) * BLOCK_DST + channel] =
        of_all < channels ? operand(widen(read(weight + group + offset))) : (accum_t)0;
  }
}

// A thread's part of a source row: the columns that its cells read, from column `first` on.
struct Row {
  accum_t values[WINDOW][SRC_HELD];

  __device__ __forceinline__ void load(const scalar_t* from, int first, int size) {
#pragma unroll
    for (int column = 0; column < WINDOW; ++column) {
      const bool exists = (unsigned)(first + column) < (unsigned)size;
#pragma unroll
      for (int i = 0; i < SRC_HELD; i += SRC_VECTOR) {
        Vector<scalar_t, SRC_VECTOR> vector = {};
        if (exists) vector = *(const Vector<scalar_t, SRC_VECTOR>*)(from + column * SRC_PIXEL + i);
#pragma unroll
        for (int j = 0; j < SRC_VECTOR; ++j) values[column][i + j] = operand(widen(vector.value[j]));
      }
    }
  }
};

// Destination elements of a row of cells, all phases along w.
struct Sums {
  typedef accum_t Phase[CELLS][VECTOR];
  Phase values[DST_W];

  // Adds all taps of a row of the kernel. `weights`: its first tap's for the first source channel held.
  __device__ __forceinline__ void add(const Row& row, const accum_t* weights) {
#pragma unroll
    for (int phase = 0; phase < DST_W; ++phase) {
      if constexpr (CHAINED) {
        Phase chain = {};
        add(row, weights, phase, chain);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
          for (int i = 0; i < VECTOR; ++i) values[phase][cell][i] += chain[cell][i];
      } else {
        add(row, weights, phase, values[phase]);
      }
    }
  }

  // Adds those taps that belong to one phase.
  static __device__ __forceinline__ void add(const Row& row, const accum_t* weights, int phase, Phase& sum) {
    constexpr int OF_GROUP = SRC_HELD / GROUPS_HELD;
#pragma unroll
    for (int kw = 0; kw < AXIS_W.kernel; ++kw) {
      if (dst_offset(AXIS_W, kw) != phase) continue;
#pragma unroll
      for (int source = 0; source < OF_GROUP; ++source) {
        const Vector<accum_t, VECTOR> tap =
            *(const Vector<accum_t, VECTOR>*)(weights + (kw * SRC_CHANNELS + source) * BLOCK_DST);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
          for (int i = 0; i < VECTOR; ++i)
            sum[cell][i] += row.values[cell * SRC_W + src_offset(AXIS_W, kw) - first_offset(AXIS_W)]
                                      [(GROUPS_HELD > 1 ? i / DST_CHANNELS : 0) * OF_GROUP + source] *
                            tap.value[i];
      }
    }
  }

  __device__ __forceinline__ void store(scalar_t* to, int columns, const ChannelTerms (&terms)[VECTOR]) const {
#pragma unroll
    for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
      for (int phase = 0; phase < DST_W; ++phase) {
        const int column = cell * DST_W + phase;
        if (column >= columns) continue;
        Vector<scalar_t, VECTOR> vector;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          narrow(finish(values[phase][cell][i], terms[i], to + column * DST_PIXEL + i), vector.value[i]);
        *(Vector<scalar_t, VECTOR>*)(to + column * DST_PIXEL) = vector;
      }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_channels(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                    const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                    const Params params) {
  extern __shared__ __align__(32) unsigned char shared_memory[];
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  accum_t* weights = (accum_t*)shared_memory;
  const int tile = blockIdx.z * gridDim.y + blockIdx.y;
  if (tile >= params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3]) return;
  load_weights(weight, blockIdx.x * BLOCK_DST, params.vectors * VECTOR, weights);
  __syncthreads();

  const int lane = threadIdx.x % LANES, vector = blockIdx.x * LANES + lane;
  int first[4], at[4];
  decode(params.tiles, tile, first);
  decode(params.lanes, (int)threadIdx.x / LANES, at);
  const int n = first[0] * params.lanes[0] + at[0], d = first[1] * params.lanes[1] + at[1];
  const int w = (first[3] * params.lanes[3] + at[3]) * CELLS;
  int h = first[2] * params.lanes[2] * params.steps + at[2];
  const int columns = params.dst.size[2] - w * DST_W;
  if (vector >= params.vectors || at[0] >= params.lanes[0] || n >= params.batch || d >= params.dst.size[0] ||
      columns <= 0)
    return;

  const int channel = vector * VECTOR;
  ChannelTerms terms[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) terms[i] = channel_terms(operands, channel + i);
  weights += lane * VECTOR;
  const int column = w * SRC_W + first_offset(AXIS_W);
  src += n * params.src.stride[0] + (long long)column * SRC_PIXEL + channel / DST_CHANNELS * SRC_CHANNELS;
  dst += n * params.dst.stride[0] + d * params.dst.stride[2] + (long long)w * (DST_W * DST_PIXEL) + channel;
  const Progression at_d = TapsD::at(d);

#pragma unroll 1
  for (int step = 0; step < params.steps && h < params.dst.size[1]; ++step, h += params.lanes[2]) {
    const Progression at_h = TapsH::at(h);
    Sums sums = {};
    int src_d = at_d.src;
#pragma unroll 1
    for (int kd = at_d.tap; kd < AXIS_D.kernel; kd += TapsD::TAP_STEP, src_d += TapsD::SRC_STEP) {
      if ((unsigned)src_d >= (unsigned)params.src.size[0]) continue;
      int src_h = at_h.src;
#pragma unroll 1
      for (int kh = at_h.tap; kh < AXIS_H.kernel; kh += TapsH::TAP_STEP, src_h += TapsH::SRC_STEP) {
        if ((unsigned)src_h >= (unsigned)params.src.size[1]) continue;
        const scalar_t* const line = src + src_d * params.src.stride[2] + src_h * params.src.stride[3];
        const accum_t* const taps = weights + (kd * AXIS_H.kernel + kh) * (AXIS_W.kernel * SRC_CHANNELS * BLOCK_DST);
#pragma unroll 1
        for (int source = 0; source < SRC_READ; source += SRC_HELD) {
          Row row;
          row.load(line + source, column, params.src.size[2]);
          sums.add(row, taps + source * BLOCK_DST);
        }
      }
    }
    sums.store(dst + h * params.dst.stride[3], columns, terms);
  }
}
