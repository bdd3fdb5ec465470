// Direct kernel of the weight gradient where groups have few channels: depthwise layers, and others whose groups would
// fill little of a tensor core's instruction. In exact arithmetic.
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. Lanes run along channels: a thread owns VECTOR neighbouring output channels, of one group or of
// GROUPS_HELD whole groups; LANES neighbouring threads own neighbouring vectors. It also owns IN_HELD input channels of
// each of these groups, and ROWS rows of the kernel with COLUMNS taps each: a *share* of its vectors' weights. A block
// has as many shares as fit; they read the same elements at the same time, from L1.
//
// There are WALKERS sets of such threads, at neighbouring positions along w first, then h, d and n in extents chosen at
// launch. A thread takes POSITIONS neighbours along w at a time: it loads the elements that they read in a row of the
// output gradient, then adds to all its sums. A block advances along h, so that rows that the next positions read again
// are in the cache. Splits of the positions write to different partial planes, which the caller sums in order: the
// result does not depend on timing.
//
// That is with channels last. With channels first a thread has one channel on either side (LANES, VECTOR and IN_HELD
// are 1), so that neighbouring threads are at neighbouring positions. It loads the output gradient in aligned runs of
// GRAD_RUN neighbours along w, from SKEW elements before the first that it needs; a row has whole runs.
//
// X_PIXEL and GRAD_PIXEL are the elements from a pixel to its neighbour along w.
//
// Shared memory: all threads' sums of ROWS_AT_ONCE of their rows, [thread][sum] in the weight's order, at an odd pitch
// to avoid bank conflicts; between barriers they are written, then read by the threads that add and store them.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  Tensor5 x, g;
  int batch;
  int vectors, vector_blocks;   // vectors of all output channels; blocks of LANES vectors
  int flush;                    // tiles that are summed in one chain
  int walkers[4];               // extents along n, d, h, w; their product is at most WALKERS
  int tiles[4];                 // tiles of all walkers' positions, along n, d, w, h
  int split_length, all_tiles;  // tiles of a split; all tiles
  long long plane;              // elements of a partial plane: all weights
};

constexpr int GROUPS_HELD = VECTOR > OUT_CHANNELS ? VECTOR / OUT_CHANNELS : 1;
constexpr int X_HELD = GROUPS_HELD * IN_HELD;
constexpr int KERNEL_ROWS = AXIS_D.kernel * AXIS_H.kernel;
constexpr int ROW_SHARES = ceil_div(KERNEL_ROWS, ROWS), COLUMN_SHARES = ceil_div(AXIS_W.kernel, COLUMNS);
constexpr int SHARES = ROW_SHARES * COLUMN_SHARES * (IN_CHANNELS / IN_HELD);
constexpr int SHARE_BLOCKS = ceil_div(SHARES, BLOCK_SHARES);
constexpr int SLOTS = LANES * BLOCK_SHARES;  // threads at the same positions
constexpr int THREADS = round_up(SLOTS * WALKERS, 32);
constexpr int OF_ROW = COLUMNS * IN_HELD * VECTOR;  // sums of a thread
constexpr int PITCH = ROWS_AT_ONCE * OF_ROW | 1;
constexpr int WINDOW = (POSITIONS - 1) * AXIS_W.stride + (COLUMNS - 1) * AXIS_W.dilation + 1;
constexpr int SKEW = round_up(AXIS_W.padding, GRAD_RUN) - AXIS_W.padding;
constexpr int RUNS = ceil_div(SKEW + WINDOW, GRAD_RUN);

static_assert(VECTOR % OUT_CHANNELS == 0 || OUT_CHANNELS % VECTOR == 0, "a vector is of whole groups, or of one");
static_assert(IN_CHANNELS % IN_HELD == 0 && X_HELD % X_VECTOR == 0 && VECTOR * GRAD_RUN % GRAD_VECTOR == 0,
              "whole vectors");
static_assert(GRAD_RUN == 1 || (VECTOR == 1 && POSITIONS * AXIS_W.stride % GRAD_RUN == 0 &&
                                (COLUMN_SHARES == 1 || COLUMNS * AXIS_W.dilation % GRAD_RUN == 0)),
              "every thread's runs are aligned");
static_assert(GROUPS_HELD == 1 || IN_HELD == IN_CHANNELS, "input channels of several groups are neighbours");

// Whether a position reads an element of run `run` of a row's window at any tap.
__host__ __device__ constexpr bool is_met(int run) {
  for (int column = run * GRAD_RUN - SKEW; column < (run + 1) * GRAD_RUN - SKEW; ++column)
    for (int tap = 0; tap < COLUMNS; ++tap) {
      const int rest = column - tap * AXIS_W.dilation;
      if (rest >= 0 && rest % AXIS_W.stride == 0 && rest / AXIS_W.stride < POSITIONS) return true;
    }
  return false;
}

// COUNT neighbouring elements as loaded, channels of a pixel or columns of a row; WIDTH by one load.
template <class T, int COUNT, int WIDTH, bool PAIRS = sizeof(T) == 2 && COUNT % 2 == 0>
struct Held {
  T value[COUNT];

  __device__ __forceinline__ void load(const T* from, bool exists) {
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
      Vector<T, WIDTH> vector = {};
      if (exists) vector = *(const Vector<T, WIDTH>*)(from + i);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) value[i + j] = vector.value[j];
    }
  }
  __device__ __forceinline__ accum_t operator[](int i) const { return widen(value[i]); }
};

// Two elements of 16 bits stay in one register until they are used, since unpacking would wait for the load.
template <class T, int COUNT, int WIDTH>
struct Held<T, COUNT, WIDTH, true> {
  unsigned pairs[COUNT / 2];

  __device__ __forceinline__ void load(const T* from, bool exists) {
    constexpr int AT_ONCE = WIDTH > 1 ? WIDTH / 2 : 1;
#pragma unroll
    for (int i = 0; i < COUNT / 2; i += AT_ONCE) {
      Vector<unsigned, AT_ONCE> vector = {};
      if (exists && WIDTH > 1) vector = *(const Vector<unsigned, AT_ONCE>*)(from + 2 * i);
      if (exists && WIDTH == 1) vector.value[0] = from[2 * i].bits | (unsigned)from[2 * i + 1].bits << 16;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) pairs[i + j] = vector.value[j];
    }
  }
  __device__ __forceinline__ accum_t operator[](int i) const {
    return widen(T{(unsigned short)(pairs[i / 2] >> 16 * (i % 2))});
  }
};

// A thread's share of the weights of its vector.
struct Share {
  int row, column, in;  // the first row of the kernel, tap of a row, and input channel of a group

  __device__ __forceinline__ explicit Share(int index)
      : row(index % ROW_SHARES * ROWS),
        column(index / ROW_SHARES % COLUMN_SHARES * COLUMNS),
        in(index / (ROW_SHARES * COLUMN_SHARES) * IN_HELD) {}
};

// POSITIONS neighbouring positions, of which `count` exist, and the element of the output gradient that the first tap
// reads.
struct Positions {
  const scalar_t *x, *grad;  // at the thread's channels
  int count, d, h, w;

  // Whether all elements that the kernel's rows and the share's columns read exist.
  __device__ __forceinline__ bool is_whole(const Tensor5& g) const {
    return count >= POSITIONS && d >= 0 && d + (AXIS_D.kernel - 1) * AXIS_D.dilation < g.size[0] && h >= 0 &&
           h + (AXIS_H.kernel - 1) * AXIS_H.dilation < g.size[1] && w >= SKEW &&
           w - SKEW + RUNS * GRAD_RUN <= g.size[2];
  }
};

struct Sums {
  accum_t of[ROWS][COLUMNS][IN_HELD][VECTOR];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS * IN_HELD * VECTOR; ++i) (&of[0][0][0][0])[i] = 0;
  }

  // WHOLE: all elements exist; none is tested.
  template <bool WHOLE>
  __device__ __forceinline__ void add(const Positions& at, const Share& share, const Tensor5& g) {
    Held<scalar_t, X_HELD, X_VECTOR> x[POSITIONS];
#pragma unroll
    for (int i = 0; i < POSITIONS; ++i) x[i].load(at.x + i * X_PIXEL, WHOLE || i < at.count);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = share.row + r;
      if (KERNEL_ROWS % ROWS != 0 && row >= KERNEL_ROWS) continue;
      const int d = row / AXIS_H.kernel * AXIS_D.dilation, h = row % AXIS_H.kernel * AXIS_H.dilation;
      const bool exists =
          WHOLE || ((unsigned)(at.d + d) < (unsigned)g.size[0] && (unsigned)(at.h + h) < (unsigned)g.size[1]);
      const scalar_t* const line = at.grad + d * g.stride[2] + h * g.stride[3];
      Held<scalar_t, VECTOR * GRAD_RUN, GRAD_VECTOR> grad[RUNS];
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        const int column = run * GRAD_RUN - SKEW;
        if (is_met(run))
          grad[run].load(line + column * GRAD_PIXEL,
                         WHOLE || (exists && (unsigned)(at.w + column) < (unsigned)g.size[2]));
      }
#pragma unroll
      for (int i = 0; i < POSITIONS; ++i) {
        if (!WHOLE && i >= at.count) continue;
#pragma unroll
        for (int tap = 0; tap < COLUMNS; ++tap)
#pragma unroll
          for (int in = 0; in < IN_HELD; ++in)
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
              const int column = SKEW + i * AXIS_W.stride + tap * AXIS_W.dilation;
              of[r][tap][in][j] += x[i][(GROUPS_HELD > 1 ? j / OUT_CHANNELS : 0) * IN_HELD + in] *
                                   grad[column / GRAD_RUN][column % GRAD_RUN * VECTOR + j];
            }
      }
    }
  }

  // Adds the walkers' sums in order and stores them; `again`: adds them to the stored sums.
  __device__ __forceinline__ void store(accum_t* shared, accum_t* plane, int first_vector, int first_share, int vectors,
                                        bool again) const {
#pragma unroll
    for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
      constexpr int PAIRS = IN_HELD * VECTOR, AT_ONCE = ROWS_AT_ONCE * OF_ROW;
#pragma unroll
      for (int r = 0; r < ROWS_AT_ONCE && first + r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < OF_ROW; ++i)
          shared[threadIdx.x * PITCH + (i % PAIRS * ROWS_AT_ONCE + r) * COLUMNS + i / PAIRS] =
              (&of[first + r][0][0][0])[i];
      __syncthreads();
#pragma unroll 1
      for (int index = threadIdx.x; index < AT_ONCE * SLOTS; index += THREADS) {
        const int tap = index % COLUMNS, pair = index / (COLUMNS * ROWS_AT_ONCE) % PAIRS, slot = index / AT_ONCE;
        const int vector = first_vector + slot % LANES, of_all = first_share + slot / LANES;
        const Share share(of_all);
        const int own = first + index / COLUMNS % ROWS_AT_ONCE, row = share.row + own, column = share.column + tap;
        const accum_t* const from = shared + slot * PITCH + index % AT_ONCE;
        if (vector >= vectors || of_all >= SHARES || own >= ROWS || row >= KERNEL_ROWS || column >= AXIS_W.kernel)
          continue;
        accum_t total = from[0];
#pragma unroll 8
        for (int walker = 1; walker < WALKERS; ++walker) total += from[walker * (SLOTS * PITCH)];
        const int out = vector * VECTOR + pair % VECTOR;
        const long long in = (long long)(out / OUT_CHANNELS) * IN_CHANNELS + share.in + pair / VECTOR;
        accum_t* const to = plane + (in * OUT_CHANNELS + out % OUT_CHANNELS) * TAPS + row * AXIS_W.kernel + column;
        *to = again ? *to + total : total;
      }
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_wgrad_channels(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, accum_t* partial,
                          const Params params) {
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int first_vector = blockIdx.x % params.vector_blocks * LANES;
  const int first_share = blockIdx.x / params.vector_blocks % SHARE_BLOCKS * BLOCK_SHARES;
  const int split = blockIdx.x / params.vector_blocks / SHARE_BLOCKS;
  const int vector = first_vector + threadIdx.x % LANES, of_all = first_share + threadIdx.x / LANES % BLOCK_SHARES;
  const Share share(of_all);
  x += (vector * VECTOR / OUT_CHANNELS * IN_CHANNELS + share.in) * params.x.stride[1];
  grad += vector * VECTOR * params.g.stride[1] + (long long)share.column * AXIS_W.dilation * GRAD_PIXEL;
  partial += split * params.plane;

  int walker[4], tile[4];
  decode(params.walkers, (int)threadIdx.x / SLOTS, walker);
  const bool owns = vector < params.vectors && of_all < SHARES && walker[0] < params.walkers[0];
  int first = split * params.split_length;
  const int end = min(first + params.split_length, params.all_tiles);
  decode(params.tiles, first, tile);
  bool again = false;
#pragma unroll 1
  do {
    Sums sums;
    sums.clear();
    const int until = min(first + params.flush, end);
#pragma unroll 1
    for (; first < until; ++first) {
      const int n = tile[0] * params.walkers[0] + walker[0], d = tile[1] * params.walkers[1] + walker[1];
      const int w = (tile[2] * params.walkers[3] + walker[3]) * POSITIONS, h = tile[3] * params.walkers[2] + walker[2];
      Positions at;
      at.count = params.x.size[2] - w;
      at.d = d * AXIS_D.stride - AXIS_D.padding;
      at.h = h * AXIS_H.stride - AXIS_H.padding;
      const int first_column = w * AXIS_W.stride - AXIS_W.padding;
      at.w = first_column + share.column * AXIS_W.dilation;
      at.x = x + n * params.x.stride[0] + d * params.x.stride[2] + h * params.x.stride[3] + (long long)w * X_PIXEL;
      at.grad = grad + n * params.g.stride[0] + at.d * params.g.stride[2] + at.h * params.g.stride[3] +
                (long long)first_column * GRAD_PIXEL;
      const bool exists = owns && n < params.batch && d < params.x.size[0] && h < params.x.size[1] && at.count > 0;
      if (__all_sync(~0u, !exists || at.is_whole(params.g))) {  // so that a warp does not diverge
        if (exists) sums.add<true>(at, share, params.g);
      } else {
        if (exists) sums.add<false>(at, share, params.g);
      }
      advance(params.tiles, tile);
    }
    sums.store((accum_t*)shared_memory, partial, first_vector, first_share, params.vectors, again);
    again = true;
  } while (first < end);
}
