// Direct kernel of the weight gradient, in exact arithmetic.
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// A matrix product of each group: rows are the input channels, columns the pairs (co, tap), and the sum runs over the
// K = batch × input positions. The second operand is gathered from the output gradient on its way to shared memory, one
// element a (column, position), zero where it falls into the padding.
//
// Index mapping. A block owns ROWS × COLUMNS of one group and one split of K, which is contiguous. Its threads are
// K_SLICES × (ROWS / THREAD_ROWS) × (COLUMNS / THREAD_COLUMNS); a K slice takes every K_SLICES-th position of a stage,
// summed at the end in slice order. Splits of K write to different planes of `partial`, which the caller sums in order:
// the result does not depend on timing.
//
// Shared memory: two buffers of DEPTH × ROW_PITCH of x and DEPTH × COLUMN_PITCH of g, both [position][row or column],
// padded so that stores along K have no bank conflicts; then every thread's sums as [K slice][sum][thread].
//
// Synchronisation: stage i+1 is loaded to registers while stage i is computed, and stored to the other buffer; one
// barrier a stage suffices, since a buffer is written again only after the barrier that follows its last reads.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"

struct Params {
  Tensor5 x, g;
  int batch, groups;
  int splits;              // blocks along K
  long long split_length;  // positions of a split
  long long positions;     // K
  long long plane;         // elements of one plane of `partial`: all weights
};

constexpr int COLUMNS_TOTAL = OUT_CHANNELS * TAPS;
constexpr int ROW_BLOCKS = ceil_div(IN_CHANNELS, ROWS);
constexpr int COLUMN_BLOCKS = ceil_div(COLUMNS_TOTAL, COLUMNS);
constexpr int ROW_THREADS = ROWS / THREAD_ROWS, COLUMN_THREADS = COLUMNS / THREAD_COLUMNS;
constexpr int SLICE_THREADS = ROW_THREADS * COLUMN_THREADS;
constexpr int THREADS = SLICE_THREADS * K_SLICES;
constexpr int ROW_PITCH = round_up(ROWS, 4) + 4, COLUMN_PITCH = round_up(COLUMNS, 4) + 4;
constexpr int X_ITEMS = ceil_div(ROWS * DEPTH, THREADS), G_ITEMS = ceil_div(COLUMNS * DEPTH, THREADS);
constexpr int ROW_STEP = THREADS / DEPTH;  // rows or columns that the block loads at once

constexpr int SUMS = THREAD_ROWS * THREAD_COLUMNS, RESULTS = ROWS * COLUMNS;  // of a thread; of a block
constexpr int FLUSH = 2048 / DEPTH > 0 ? 2048 / DEPTH : 1;  // stages whose positions are summed in one chain
constexpr int STAGE = DEPTH * (ROW_PITCH + COLUMN_PITCH);   // shared values of one stage

static_assert(SUMS * SLICE_THREADS == RESULTS, "a slice has a sum for each result");
static_assert(THREADS % DEPTH == 0, "a thread loads the same position of every stage");
static_assert(DEPTH % K_SLICES == 0, "every K slice takes the same share of a stage");

// How far the last tap of a dimension lies from the first.
__host__ __device__ constexpr int reach(Axis axis) { return (axis.kernel - 1) * axis.dilation; }

// A column: its channel of the output, and where its tap lies from tap 0.
struct Column {
  int channel, d, h, w;
};

__device__ __forceinline__ Column column_at(int column) {
  const int tap = column % TAPS;
  return {column / TAPS, tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation,
          tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation, tap % AXIS_W.kernel * AXIS_W.dilation};
}

// THREAD_ROWS or THREAD_COLUMNS neighbouring values from shared memory, by vectorised loads.
template <int COUNT>
struct Values {
  accum_t value[COUNT];

  __device__ __forceinline__ void load(const accum_t* from) {
    constexpr int CHUNK = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < COUNT; i += CHUNK) {
      const Vector<accum_t, CHUNK> chunk = *(const Vector<accum_t, CHUNK>*)(from + i);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) value[i + j] = chunk.value[j];
    }
  }
};

// The sums of K slices are added up in order, each of the block's results by one thread. `partial` is the group's.
__device__ __forceinline__ void store_results(const accum_t* totals, accum_t* partial, int in_channel,
                                              int first_column) {
  for (int result = threadIdx.x; result < RESULTS; result += THREADS) {
    accum_t total = totals[result];
#pragma unroll 8
    for (int slice = 1; slice < K_SLICES; ++slice) total += totals[slice * RESULTS + result];
    const int i = result / SLICE_THREADS, of = result % SLICE_THREADS;  // a thread's sum, and the thread in its slice
    const int in = in_channel + of / COLUMN_THREADS * THREAD_ROWS + i / THREAD_COLUMNS;
    const int global = first_column + of % COLUMN_THREADS * THREAD_COLUMNS + i % THREAD_COLUMNS;
    if (in < IN_CHANNELS && global < COLUMNS_TOTAL) partial[(long long)in * COLUMNS_TOTAL + global] = total;
  }
}

// Moves a position of x on by so many.
__device__ __forceinline__ void advance(const Tensor5& x, int by, long long& n, int& d, int& h, int& w) {
  w += by;
  while (w >= x.size[2]) {
    w -= x.size[2];
    if (++h < x.size[1]) continue;
    h = 0;
    if (++d < x.size[0]) continue;
    d = 0;
    ++n;
  }
}

// The products of the thread's rows and columns at one position.
__device__ __forceinline__ void add_products(const accum_t* rows, const accum_t* columns,
                                             accum_t (&sum)[THREAD_ROWS][THREAD_COLUMNS]) {
  Values<THREAD_ROWS> a;
  Values<THREAD_COLUMNS> b;
  a.load(rows);
  b.load(columns);
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; ++r)
#pragma unroll
    for (int c = 0; c < THREAD_COLUMNS; ++c) sum[r][c] += a.value[r] * b.value[c];
}

// Adds a chain to the thread's sums in shared memory, and starts from zero.
__device__ __forceinline__ void flush(accum_t (&sum)[THREAD_ROWS][THREAD_COLUMNS], accum_t* own) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    own[i * SLICE_THREADS] += (&sum[0][0])[i];
    (&sum[0][0])[i] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_wgrad_gemm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, accum_t* __restrict__ partial,
                      const Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int column_block = block % COLUMN_BLOCKS;
  block /= COLUMN_BLOCKS;
  const int group = block % params.groups;
  const int split = block / params.groups;
  const long long first = split * params.split_length;
  const long long end = min(first + params.split_length, params.positions);

  const int thread = threadIdx.x;
  const int k_slice = thread / SLICE_THREADS;
  const int row = thread % SLICE_THREADS / COLUMN_THREADS * THREAD_ROWS;
  const int column = thread % COLUMN_THREADS * THREAD_COLUMNS;
  const int load_k = thread % DEPTH, load_row = thread / DEPTH;

  const int in_channel = row_block * ROWS, first_column = column_block * COLUMNS;
  x += (long long)(group * IN_CHANNELS + in_channel) * params.x.stride[1];
  grad += (long long)group * OUT_CHANNELS * params.g.stride[1];

  // The columns that this thread loads: how far each lies from tap 0 of channel 0. Columns beyond the last repeat it.
  long long column_offset[G_ITEMS];
#pragma unroll
  for (int i = 0; i < G_ITEMS; ++i) {
    const Column c = column_at(first_column + load_row + i * ROW_STEP);
    column_offset[i] =
        c.channel * params.g.stride[1] + c.d * params.g.stride[2] + c.h * params.g.stride[3] + c.w * params.g.stride[4];
    if (first_column + load_row + i * ROW_STEP >= COLUMNS_TOTAL) column_offset[i] = 0;
  }

  // The position that this thread loads, which goes on by DEPTH every stage.
  long long k = first + load_k;
  long long rest = k;
  int w = (int)(rest % params.x.size[2]);
  rest /= params.x.size[2];
  int h = (int)(rest % params.x.size[1]);
  rest /= params.x.size[1];
  int d = (int)(rest % params.x.size[0]);
  long long n = rest / params.x.size[0];

  scalar_t x_values[X_ITEMS], g_values[G_ITEMS];
  auto load = [&]() {
    const bool exists = k < end;
    const scalar_t* x_at = x + n * params.x.stride[0] + d * params.x.stride[2] + h * params.x.stride[3] +
                           w * params.x.stride[4] + load_row * params.x.stride[1];
#pragma unroll
    for (int i = 0; i < X_ITEMS; ++i, x_at += ROW_STEP * params.x.stride[1]) {
      const int r = load_row + i * ROW_STEP;
      x_values[i] = exists && r < ROWS && in_channel + r < IN_CHANNELS ? read(x_at) : zero<scalar_t>();
    }
    const int base_d = d * AXIS_D.stride - AXIS_D.padding;
    const int base_h = h * AXIS_H.stride - AXIS_H.padding;
    const int base_w = w * AXIS_W.stride - AXIS_W.padding;
    const scalar_t* const g_at = grad + n * params.g.stride[0] + base_d * params.g.stride[2] +
                                 base_h * params.g.stride[3] + base_w * params.g.stride[4];
    const bool interior = base_d >= 0 && base_d + reach(AXIS_D) < params.g.size[0] && base_h >= 0 &&
                          base_h + reach(AXIS_H) < params.g.size[1] && base_w >= 0 &&
                          base_w + reach(AXIS_W) < params.g.size[2];
    if (exists && interior) {
#pragma unroll
      for (int i = 0; i < G_ITEMS; ++i) g_values[i] = read(g_at + column_offset[i]);
    } else {
#pragma unroll
      for (int i = 0; i < G_ITEMS; ++i) {
        const Column c = column_at(first_column + load_row + i * ROW_STEP);
        const bool inside = exists && first_column + load_row + i * ROW_STEP < COLUMNS_TOTAL &&
                            (unsigned)(base_d + c.d) < (unsigned)params.g.size[0] &&
                            (unsigned)(base_h + c.h) < (unsigned)params.g.size[1] &&
                            (unsigned)(base_w + c.w) < (unsigned)params.g.size[2];
        g_values[i] = inside ? read(g_at + column_offset[i]) : zero<scalar_t>();
      }
    }
    k += DEPTH;
    advance(params.x, DEPTH, n, d, h, w);
  };

  // Sums of FLUSH stages in registers, sums of those in shared memory: rounding grows with the root of the terms, and
  // millions of positions in one chain would lose three digits.
  accum_t sum[THREAD_ROWS][THREAD_COLUMNS] = {};
  accum_t* const totals = (accum_t*)shared_memory + 2 * STAGE;
  accum_t* const own = totals + k_slice * RESULTS + thread % SLICE_THREADS;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) own[i * SLICE_THREADS] = 0;

  load();
  int until_flush = FLUSH;
  int buffer = 0;
#pragma unroll 1
  for (long long stage = first; stage < end; stage += DEPTH, buffer ^= 1) {
    accum_t* const x_tile = (accum_t*)shared_memory + buffer * STAGE;
    accum_t* const g_tile = x_tile + DEPTH * ROW_PITCH;
#pragma unroll
    for (int i = 0; i < X_ITEMS; ++i)
      if (load_row + i * ROW_STEP < ROWS) x_tile[load_k * ROW_PITCH + load_row + i * ROW_STEP] = widen(x_values[i]);
#pragma unroll
    for (int i = 0; i < G_ITEMS; ++i)
      if (load_row + i * ROW_STEP < COLUMNS)
        g_tile[load_k * COLUMN_PITCH + load_row + i * ROW_STEP] = widen(g_values[i]);
    __syncthreads();
    if (stage + DEPTH < end) load();
#pragma unroll 4
    for (int step = k_slice; step < DEPTH; step += K_SLICES)
      add_products(x_tile + step * ROW_PITCH + row, g_tile + step * COLUMN_PITCH + column, sum);
    if (--until_flush == 0) {
      flush(sum, own);
      until_flush = FLUSH;
    }
  }
  flush(sum, own);

  __syncthreads();
  partial += split * params.plane + (long long)group * IN_CHANNELS * COLUMNS_TOTAL;
  store_results(totals, partial, in_channel, first_column);
}
