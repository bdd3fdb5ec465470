// Direct kernel of the weight gradient, in exact arithmetic.
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// A matrix product of each group: rows are the input channels, columns the pairs (co, tap), and the sum runs over the
// K = batch × input positions. The second operand is gathered from the output gradient as it is copied to shared
// memory, one element for each (column, position), zero in the padding.
//
// Index mapping. A block owns ROWS × COLUMNS of one group and one split of K, which is contiguous; if one stage has the
// WHOLE of K it computes every row_shares-th row block, with columns that stay in shared memory. Its threads are
// K_SLICES × (ROWS / THREAD_ROWS) × (COLUMNS / THREAD_COLUMNS); a K slice takes every K_SLICES-th position of a stage,
// summed at the end in slice order. Splits of K write to different partial planes, which the caller sums in order:
// the result does not depend on timing. A single split's sums are complete, and `narrowed` to the tensors' type at
// once. Neighbouring threads store neighbouring columns, whichever thread has summed them: with few positions, writing
// the weights takes most of the time.
//
// Shared memory: two buffers of DEPTH × ROW_PITCH of x and DEPTH × COLUMN_PITCH of g, both [position][row or column],
// padded so that stores along K have no bank conflicts; then every thread's sums as [K slice][sum][thread], with
// threads of a sum swizzled, so that neither threads nor neighbouring columns meet in a bank.
//
// Synchronisation: stage i+1 is loaded to registers while stage i is computed, and stored to the other buffer; one
// barrier a stage suffices, since a buffer is written again only after the barrier that follows its last reads. The
// next rows' x is such a stage, too.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  Tensor5 x, g;
  int batch, groups;
  int rows;                // rows that exist: IN_CHANNELS, or fewer if ALONG_CHANNELS
  int row_shares;          // blocks along the rows; fewer than ROW_BLOCKS only if WHOLE
  int splits;              // blocks along K
  long long split_length;  // positions of a split
  long long positions;     // K
  long long plane;         // elements of a partial plane: all weights
  int narrowed;            // whether `partial` is the result, in the tensors' type
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

constexpr int SUMS = THREAD_ROWS * THREAD_COLUMNS, RESULTS = ROWS * COLUMNS;  // sums of a thread; of a block
constexpr int FLUSH = 2048 / DEPTH > 0 ? 2048 / DEPTH : 1;  // stages whose positions are summed in one chain
constexpr int STAGE = DEPTH * (ROW_PITCH + COLUMN_PITCH);   // shared values of one stage
// Neighbouring results of one store.
constexpr int TOGETHER = COLUMNS_TOTAL % 4 == 0 ? 4 : COLUMNS_TOTAL % 2 == 0 ? 2 : 1;
constexpr int STORE_THREADS = COLUMNS / TOGETHER, STORE_ROWS = THREADS / STORE_THREADS;  // along a row; rows at once

// Lanes of a warp load neighbouring positions of one tap, or neighbouring columns if these are contiguous.
__device__ __forceinline__ int loaded_position() {
  return ALONG_CHANNELS ? threadIdx.x / ROW_STEP : threadIdx.x % DEPTH;
}
__device__ __forceinline__ int loaded_row() { return ALONG_CHANNELS ? threadIdx.x % ROW_STEP : threadIdx.x / DEPTH; }

static_assert(!ALONG_CHANNELS || TAPS == 1, "columns that lie side by side are channels");
static_assert(COLUMNS % TOGETHER == 0 && THREADS % STORE_THREADS == 0, "a thread stores the same columns of every row");
static_assert(SUMS * SLICE_THREADS == RESULTS, "a slice has a sum for each result");
static_assert(THREADS % DEPTH == 0, "a thread loads the same position of every stage");
static_assert(DEPTH % K_SLICES == 0, "every K slice takes the same share of a stage");

// Distance from the first tap of a dimension to the last.
__host__ __device__ constexpr int reach(Axis axis) { return (axis.kernel - 1) * axis.dilation; }

// A column: its output channel, and its tap's offset from tap 0.
struct Column {
  int channel, d, h, w;
};

__device__ __forceinline__ Column column_at(int column) {
  const int tap = column % TAPS;
  return {column / TAPS, tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation,
          tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation, tap % AXIS_W.kernel * AXIS_W.dilation};
}

// Index of a thread's sum `i` among the sums of its slice.
__device__ __forceinline__ int place_of(int i, int thread) {
  const int row = i / THREAD_COLUMNS, column = i % THREAD_COLUMNS;
  const int swizzle = column * (32 / THREAD_COLUMNS) ^ row % 2 * 16 ^ row / 2 % 2 * 8;
  return i * SLICE_THREADS + (thread ^ swizzle % SLICE_THREADS);
}

template <class T>
__device__ __forceinline__ void store(const accum_t (&total)[TOGETHER], T* to) {
  constexpr int AT_ONCE = TOGETHER * sizeof(T) > 16 ? 2 : TOGETHER;
#pragma unroll
  for (int j = 0; j < TOGETHER; j += AT_ONCE) {
    Vector<T, AT_ONCE> result;
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) narrow(total[j + k], result.value[k]);
    *(Vector<T, AT_ONCE>*)(to + j) = result;
  }
}

// Adds the sums of the K slices in order, for neighbouring columns of one thread, and stores them. `at`: the group's
// first weight in `partial`, which is aligned to 16 bytes.
__device__ __forceinline__ void store_results(const accum_t* totals, void* partial, long long at, int in_channel,
                                              int channels, int first_column, bool narrowed) {
  const int column = threadIdx.x % STORE_THREADS * TOGETHER, global = first_column + column;
  if (global >= COLUMNS_TOTAL) return;
  const int rows = min(ROWS, channels - in_channel);
  at += (long long)in_channel * COLUMNS_TOTAL + global;
#pragma unroll 4
  for (int row = threadIdx.x / STORE_THREADS; row < rows; row += STORE_ROWS) {
    accum_t total[TOGETHER];
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      const int i = row % THREAD_ROWS * THREAD_COLUMNS + (column + j) % THREAD_COLUMNS;  // a thread's sum
      const accum_t* const own =
          totals + place_of(i, row / THREAD_ROWS * COLUMN_THREADS + (column + j) / THREAD_COLUMNS);
      total[j] = own[0];
#pragma unroll 8
      for (int slice = 1; slice < K_SLICES; ++slice) total[j] += own[slice * RESULTS];
    }
    const long long first = at + (long long)row * COLUMNS_TOTAL;
    if (sizeof(scalar_t) < sizeof(accum_t) && narrowed)
      store(total, (scalar_t*)partial + first);
    else
      store(total, (accum_t*)partial + first);
  }
}

// A position of x: image and place in it.
struct Position {
  long long n;
  int d, h, w;

  __device__ __forceinline__ Position(const Tensor5& x, long long index) {
    w = next_index(index, x.size[2]), h = next_index(index, x.size[1]), d = next_index(index, x.size[0]), n = index;
  }
  // Advances by `by` positions.
  __device__ __forceinline__ void advance(const Tensor5& x, int by) {
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
};

// Loads the thread's part of a stage: elements of every ROW_STEP-th row or column, all at one position.
__device__ __forceinline__ void load_rows(const Tensor5& tensor, const scalar_t* x, const Position& at, bool exists,
                                          int first_row, int rows, scalar_t (&value)[X_ITEMS]) {
  const int load_row = loaded_row();
  x += at.n * tensor.stride[0] + at.d * tensor.stride[2] + at.h * tensor.stride[3] + at.w * tensor.stride[4] +
       (first_row + load_row) * tensor.stride[1];
#pragma unroll
  for (int i = 0; i < X_ITEMS; ++i, x += ROW_STEP * tensor.stride[1]) {
    const int row = load_row + i * ROW_STEP;
    value[i] = exists && row < ROWS && first_row + row < rows ? read(x) : zero<scalar_t>();
  }
}

// Offsets of the thread's columns from tap 0 of channel 0. Columns beyond the last repeat it.
__device__ __forceinline__ void find_columns(const Tensor5& tensor, int first_column, long long (&offset)[G_ITEMS]) {
#pragma unroll
  for (int i = 0; i < G_ITEMS; ++i) {
    const int column = first_column + loaded_row() + i * ROW_STEP;
    const Column c = column_at(column);
    offset[i] = ALONG_CHANNELS ? column
                               : c.channel * tensor.stride[1] + c.d * tensor.stride[2] + c.h * tensor.stride[3] +
                                     c.w * tensor.stride[4];
    constexpr bool ALL_EXIST = COLUMNS_TOTAL % COLUMNS == 0 && G_ITEMS * ROW_STEP <= COLUMNS;
    if (!ALL_EXIST && column >= COLUMNS_TOTAL) offset[i] = 0;
  }
}

__device__ __forceinline__ void load_columns(const Tensor5& tensor, const scalar_t* grad, const Position& at,
                                             bool exists, int first_column, const long long (&offset)[G_ITEMS],
                                             scalar_t (&value)[G_ITEMS]) {
  const int base_d = at.d * AXIS_D.stride - AXIS_D.padding;
  const int base_h = at.h * AXIS_H.stride - AXIS_H.padding;
  const int base_w = at.w * AXIS_W.stride - AXIS_W.padding;
  grad += at.n * tensor.stride[0] + base_d * tensor.stride[2] + base_h * tensor.stride[3] + base_w * tensor.stride[4];
  const bool interior = base_d >= 0 && base_d + reach(AXIS_D) < tensor.size[0] && base_h >= 0 &&
                        base_h + reach(AXIS_H) < tensor.size[1] && base_w >= 0 &&
                        base_w + reach(AXIS_W) < tensor.size[2];
  if (exists && interior) {
#pragma unroll
    for (int i = 0; i < G_ITEMS; ++i) value[i] = read(grad + offset[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < G_ITEMS; ++i) {
    const int column = first_column + loaded_row() + i * ROW_STEP;
    const Column c = column_at(column);
    const bool inside = exists && column < COLUMNS_TOTAL && (unsigned)(base_d + c.d) < (unsigned)tensor.size[0] &&
                        (unsigned)(base_h + c.h) < (unsigned)tensor.size[1] &&
                        (unsigned)(base_w + c.w) < (unsigned)tensor.size[2];
    value[i] = inside ? read(grad + offset[i]) : zero<scalar_t>();
  }
}

// Adds the products of the thread's rows and columns at one position.
__device__ __forceinline__ void add_products(const accum_t* rows, const accum_t* columns,
                                             accum_t (&sum)[THREAD_ROWS][THREAD_COLUMNS]) {
  accum_t a[THREAD_ROWS], b[THREAD_COLUMNS];
  load_vectors<gcd(THREAD_ROWS, 4)>(rows, a);
  load_vectors<gcd(THREAD_COLUMNS, 4)>(columns, b);
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; ++r)
#pragma unroll
    for (int c = 0; c < THREAD_COLUMNS; ++c) sum[r][c] += a[r] * b[c];
}

// Adds a chain to the thread's sums in shared memory, and starts it from zero.
__device__ __forceinline__ void flush(accum_t (&sum)[THREAD_ROWS][THREAD_COLUMNS], accum_t* slice, int thread,
                                      bool first) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    accum_t* const own = slice + place_of(i, thread);
    const accum_t chain = (&sum[0][0])[i];
    *own = first ? chain : *own + chain;
    (&sum[0][0])[i] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_wgrad_gemm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, accum_t* __restrict__ partial,
                      const Params params) {
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  int row_block = next_index(block, params.row_shares);
  const int column_block = next_index(block, COLUMN_BLOCKS);
  const int group = next_index(block, params.groups), split = block;
  const long long first = split * params.split_length;
  const long long end = min(first + params.split_length, params.positions);

  const int thread = threadIdx.x;
  const int k_slice = thread / SLICE_THREADS;
  const int row = thread % SLICE_THREADS / COLUMN_THREADS * THREAD_ROWS;
  const int column = thread % COLUMN_THREADS * THREAD_COLUMNS;
  const int load_k = loaded_position(), load_row = loaded_row();

  const int first_column = column_block * COLUMNS;
  const int rows = ALONG_CHANNELS ? params.rows : IN_CHANNELS;
  x += (long long)group * IN_CHANNELS * params.x.stride[1];
  grad += (long long)group * OUT_CHANNELS * params.g.stride[1];

  long long column_offset[G_ITEMS];
  find_columns(params.g, first_column, column_offset);
  Position at(params.x, first + load_k);
  scalar_t x_values[X_ITEMS], g_values[G_ITEMS];
  load_rows(params.x, x, at, first + load_k < end, row_block * ROWS, rows, x_values);
  load_columns(params.g, grad, at, first + load_k < end, first_column, column_offset, g_values);

  // Chains of FLUSH stages are summed in registers, and added in shared memory: rounding errors grow with the root of
  // the number of terms, and millions of positions in one chain would lose three digits.
  accum_t sum[THREAD_ROWS][THREAD_COLUMNS] = {};
  accum_t* const totals = (accum_t*)shared_memory + 2 * STAGE;
  accum_t* const slice = totals + k_slice * RESULTS;
  const long long weights = split * params.plane + (long long)group * IN_CHANNELS * COLUMNS_TOTAL;

  int buffer = 0;
  bool first_rows = true;
#pragma unroll 1
  do {
    const int in_channel = row_block * ROWS;
    int until_flush = FLUSH;
    bool first_chain = true;
    row_block += params.row_shares;
#pragma unroll 1
    for (long long stage = first; WHOLE || stage < end; stage += DEPTH, buffer ^= 1) {
      accum_t* const x_tile = (accum_t*)shared_memory + buffer * STAGE;
      accum_t* const g_tile = (accum_t*)shared_memory + (WHOLE ? 0 : buffer) * STAGE + DEPTH * ROW_PITCH;
#pragma unroll
      for (int i = 0; i < X_ITEMS; ++i)
        if (load_row + i * ROW_STEP < ROWS) x_tile[load_k * ROW_PITCH + load_row + i * ROW_STEP] = widen(x_values[i]);
      if (!WHOLE || first_rows)
#pragma unroll
        for (int i = 0; i < G_ITEMS; ++i)
          if (load_row + i * ROW_STEP < COLUMNS)
            g_tile[load_k * COLUMN_PITCH + load_row + i * ROW_STEP] = widen(g_values[i]);
      __syncthreads();
      if (WHOLE) {
        if (row_block < ROW_BLOCKS) load_rows(params.x, x, at, stage + load_k < end, row_block * ROWS, rows, x_values);
      } else if (stage + DEPTH < end) {
        const bool exists = stage + DEPTH + load_k < end;
        at.advance(params.x, DEPTH);
        load_rows(params.x, x, at, exists, in_channel, rows, x_values);
        load_columns(params.g, grad, at, exists, first_column, column_offset, g_values);
      }
#pragma unroll 4
      for (int step = k_slice; step < DEPTH; step += K_SLICES)
        add_products(x_tile + step * ROW_PITCH + row, g_tile + step * COLUMN_PITCH + column, sum);
      if (WHOLE) break;
      if (--until_flush == 0) {
        flush(sum, slice, thread % SLICE_THREADS, first_chain);
        first_chain = false;
        until_flush = FLUSH;
      }
    }
    flush(sum, slice, thread % SLICE_THREADS, first_chain);
    first_rows = false, buffer ^= 1;

    __syncthreads();
    store_results(totals, partial, weights, in_channel, rows, first_column, params.narrowed);
  } while (WHOLE && row_block < ROW_BLOCKS);
}
