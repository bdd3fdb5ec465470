// Direct kernel of the weight gradient of long kernels, exact in float32: rows of the output gradient are streamed
// once.
//
// A tap along the width is t = j·stride + r. At input position i = y - j it reads g at y·stride + r - padding:
//
//   gw[ci, co, j·stride + r] = Σ over batch and positions y of  x[n, ci, y - j] · g[n, co, y·stride + r - padding]
//
// So for one y the elements of g that all r read are contiguous, and each serves all j and all input channels.
//
// Index mapping. A column is VECTOR neighbouring r of one output channel and row of the kernel (d, h). A thread owns a
// column for IN_HELD input channels and TAPS_HELD neighbouring j, as sums in registers; neighbouring threads own
// neighbouring columns. A block has LANES columns of one group and WALKERS threads for each, which take every
// WALKERS-th step of POSITIONS neighbouring y; its steps are a split of those of all images. Blocks that differ only in
// input channels and j have neighbouring indices, so that they read g from L2.
//
// A step's elements of g are loaded a step ahead. Those of x are few and come from L1, as the threads of a walker read
// the same. If rows of g are whole quads, columns begin up to three elements before r = 0, so that quads are aligned;
// sums of such r are not stored.
//
// A chain of sums ends after `flush` steps, and is added to the block's stored sums. The walkers' sums are added in
// shared memory, in order, a row at a time in one of two buffers. Splits write partial planes, which
// steps/reduce_splits.cu adds.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  Tensor5 x, g;
  int groups, column_blocks;
  int steps, split_length, flush;  // steps of all images, of a split, and of a chain
  Divisor along[3];                // steps of a row, rows of a slab, slabs of an image
  long long plane;                 // elements of a partial plane: all weights
};

constexpr int RESIDUES = AXIS_W.kernel < AXIS_W.stride ? AXIS_W.kernel : AXIS_W.stride;
constexpr int SKEW = (PIECE - AXIS_W.padding % PIECE) % PIECE;  // elements of the first column before r = 0
constexpr int VECTORS = ceil_div(RESIDUES + SKEW, VECTOR);      // columns of a row of the kernel
constexpr int LINES = AXIS_D.kernel * AXIS_H.kernel;
constexpr int ALONG = ceil_div(AXIS_W.kernel, AXIS_W.stride);  // j
constexpr int IN_BLOCKS = ceil_div(IN_CHANNELS, IN_HELD), TAP_BLOCKS = ceil_div(ALONG, TAPS_HELD);
constexpr bool ALIGNED = PIECE > 1;  // rows of g are whole quads
constexpr int THREADS = round_up(LANES * WALKERS, 32);
constexpr int COLUMNS = OUT_CHANNELS * LINES * VECTORS;
constexpr int REACH = TAPS_HELD - 1, X_MET = POSITIONS + REACH;  // positions of x that a step reads
constexpr int QUADS = VECTOR / 4, RESULTS = LANES * VECTOR;
static_assert(AXIS_W.dilation == 1 && VECTOR % PIECE == 0, "columns are neighbours in memory, in whole pieces");

// A block's part of the result.
struct Block {
  int tap, in, column, group, split;  // first j, input channel and column

  __device__ __forceinline__ explicit Block(const Params& params) {
    int block = blockIdx.x;
    tap = next_index(block, TAP_BLOCKS) * TAPS_HELD;
    in = next_index(block, IN_BLOCKS) * IN_HELD;
    column = next_index(block, params.column_blocks) * LANES;
    group = next_index(block, params.groups), split = block;
  }
};

struct Column {
  int channel, d, h, first;  // first r

  __device__ __forceinline__ explicit Column(int column) {
    first = column % VECTORS * VECTOR - SKEW;
    const int line = column / VECTORS % LINES;
    channel = column / (VECTORS * LINES), d = line / AXIS_H.kernel, h = line % AXIS_H.kernel;
  }
  // Offset in its group of the weight of input channel `in` at element `i` of the column and at j; negative for none.
  __device__ __forceinline__ long long weight(int in, int i, int j) const {
    const int residue = first + i, tap = j * AXIS_W.stride + residue;
    const bool exists =
        channel < OUT_CHANNELS && in < IN_CHANNELS && residue >= 0 && residue < RESIDUES && tap < AXIS_W.kernel;
    const int line = d * AXIS_H.kernel + h;
    return exists ? ((long long)in * OUT_CHANNELS + channel) * TAPS + line * AXIS_W.kernel + tap : -1;
  }
};

// The rows that a step reads.
struct Rows {
  long long image;       // elements to its row of x
  int first;             // y - j of its first y and the block's first j
  const scalar_t* grad;  // its row of g
  bool exists;           // whether there is one

  // `grad`: the column's channel.
  __device__ __forceinline__ Rows(const Params& params, const scalar_t* grad, const Column& at, int step) {
    int place = step / params.along[0];
    first = (step - place * params.along[0].value) * POSITIONS;
    const int h = place % params.along[1];
    place = place / params.along[1];
    const int d = place % params.along[2], n = place / params.along[2];
    image = n * params.x.stride[0] + d * params.x.stride[2] + h * params.x.stride[3];
    const int grad_d = d * AXIS_D.stride + at.d * AXIS_D.dilation - AXIS_D.padding;
    const int grad_h = h * AXIS_H.stride + at.h * AXIS_H.dilation - AXIS_H.padding;
    exists = (unsigned)grad_d < (unsigned)params.g.size[0] && (unsigned)grad_h < (unsigned)params.g.size[1];
    this->grad = grad + n * params.g.stride[0] + grad_d * params.g.stride[2] + grad_h * params.g.stride[3];
  }
};

// A thread's elements of g for a step, and the positions of x that multiply them.
struct Loaded {
  Quad<scalar_t> g[POSITIONS][QUADS];
  long long image;  // as in Rows
  int first;

  // `grad`: the column's channel; `column`: the element of a row of g that the thread's first r reads at y = 0 of its
  // first j.
  __device__ __forceinline__ void load(const Params& params, const scalar_t* grad, const Column& at, int column,
                                       int step) {
    const Rows rows(params, grad, at, step);
    image = rows.image, first = rows.first;
    const int from = column + first * AXIS_W.stride;
#pragma unroll
    for (int i = 0; i < POSITIONS; ++i)
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        g[i][quad].clear();
        const int begin = from + i * AXIS_W.stride + quad * 4;
        if constexpr (ALIGNED) {
          if (rows.exists && (unsigned)begin < (unsigned)params.g.size[2]) g[i][quad].load(rows.grad + begin);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (rows.exists && (unsigned)(begin + j) < (unsigned)params.g.size[2])
              g[i][quad].load(j, rows.grad + begin + j);
        }
      }
  }
};

struct Sums {
  accum_t of[IN_HELD][TAPS_HELD][VECTOR] = {};

  // WHOLE: all positions of x that the step reads exist. Others are skipped, as zero times an infinite g would be NaN.
  template <bool WHOLE>
  __device__ __forceinline__ void add(const Params& params, const Loaded& step, const scalar_t* x, int in_channels) {
    x += step.image + (long long)(step.first - REACH) * X_PIXEL;
#pragma unroll
    for (int in = 0; in < IN_HELD; ++in) {
      accum_t met[X_MET];
#pragma unroll
      for (int i = 0; i < X_MET; ++i) {
        const bool exists = WHOLE || (unsigned)(step.first - REACH + i) < (unsigned)params.x.size[2];
        met[i] = exists ? widen(read(x + i * X_PIXEL)) : (accum_t)0;
      }
      if (in + 1 < in_channels) x += params.x.stride[1];  // beyond the last they repeat it, and are not stored
#pragma unroll
      for (int i = 0; i < POSITIONS; ++i)
#pragma unroll
        for (int j = 0; j < TAPS_HELD; ++j) {
          if (!WHOLE && (unsigned)(step.first + i - j) >= (unsigned)params.x.size[2]) continue;
#pragma unroll
          for (int k = 0; k < VECTOR; ++k)
            of[in][j][k] += met[i - j + REACH] * widen(step.g[i][k / 4].get(k % 4, ALIGNED));
        }
    }
  }

  __device__ __forceinline__ void add(const Params& params, const Loaded& step, const scalar_t* x, int in_channels) {
    if (step.first >= REACH && step.first + POSITIONS <= params.x.size[2])
      add<true>(params, step, x, in_channels);
    else
      add<false>(params, step, x, in_channels);
  }

  // Adds the walkers' sums and stores them; `again`: adds them to the stored sums. `plane`: the group's part of it.
  __device__ __forceinline__ void store(accum_t* shared, accum_t* plane, int first_column, int first_in, int first_tap,
                                        bool again) const {
#pragma unroll
    for (int in = 0; in < IN_HELD; ++in)
#pragma unroll
      for (int j = 0; j < TAPS_HELD; ++j) {
        accum_t* const buffer = shared + (in * TAPS_HELD + j) % 2 * (THREADS * VECTOR);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) buffer[threadIdx.x * VECTOR + k] = of[in][j][k];
        __syncthreads();
#pragma unroll 1
        for (int result = threadIdx.x; result < RESULTS; result += THREADS) {
          const long long to =
              Column(first_column + result / VECTOR).weight(first_in + in, result % VECTOR, first_tap + j);
          if (to < 0) continue;
          accum_t total = buffer[result];
#pragma unroll 4
          for (int walker = 1; walker < WALKERS; ++walker) total += buffer[walker * RESULTS + result];
          plane[to] = again ? plane[to] + total : total;
        }
      }
    __syncthreads();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_wgrad_long(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, accum_t* partial,
                      const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Block block(params);
  const int lane = threadIdx.x % LANES, walker = threadIdx.x / LANES;
  const bool owns = walker < WALKERS && block.column + lane < COLUMNS;
  const Column at(block.column + lane);
  x += ((long long)block.group * IN_CHANNELS + block.in) * params.x.stride[1];
  grad += ((long long)block.group * OUT_CHANNELS + at.channel) * params.g.stride[1];
  partial += block.split * params.plane + (long long)block.group * IN_CHANNELS * (OUT_CHANNELS * TAPS);
  const int column = block.tap * AXIS_W.stride + at.first - AXIS_W.padding;

  int first = block.split * params.split_length;
  const int end = min(first + params.split_length, params.steps);
  bool again = false;
#pragma unroll 1
  do {
    Sums sums;
    const int until = min(first + params.flush, end);
    if (owns && first + walker < until) {
      Loaded now;
      now.load(params, grad, at, column, first + walker);
#pragma unroll 1
      for (int step = first + walker; step < until; step += WALKERS) {
        Loaded next = now;
        if (step + WALKERS < until) next.load(params, grad, at, column, step + WALKERS);
        sums.add(params, now, x, IN_CHANNELS - block.in);
        now = next;
      }
    }
    sums.store((accum_t*)shared_memory, partial, block.column, block.in, block.tap, again);
    first = until, again = true;
  } while (first < end);
}
