// Direct kernel of the weight gradient where output channels are few, in exact arithmetic:
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Neighbouring taps along the width read neighbouring elements of a row of the output gradient, and the next position
// reads the same row further on. So g keeps its memory order in shared memory, halo included: there is no im2col, and
// what a thread reads of a row serves several positions. (With channels last the host merges channels into the width:
// `as_one_channel` in schedules/window_gemm/window.py.)
//
// Index mapping. A block owns ROWS input channels and OUT_CHUNK output channels of a group with all their taps, and one
// split, contiguous, of the tiles of input positions; a stage is a tile, of one image and one slab of it. A thread owns
// THREAD_ROWS channels by THREAD_COLUMNS taps of each of THREAD_LINES kernel rows, and takes POSITIONS neighbours along
// w at once. K_SLICES groups of threads, each SLICE_THREADS apart, share the positions of a tile; their sums are added
// in order at the end. Splits write to different partial planes, which the caller sums in order: the result does
// not depend on timing.
//
// Shared memory: two stages, each the tile's input and its window of the output gradient. The input is staged in its
// global-memory order: [position][channel] if X_LAST, else [channel][position]. After the last stage the sums of all
// slices, [slice][row][column], overwrite the stages.
//
// Synchronisation: a stage is copied while the one before it is computed. The barrier that follows a stage's arrival
// also means that all threads are done with the previous stage, whose buffer is filled next.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/cp_async.cuh"

struct Params {
  Tensor5 x, g;
  int tile_extent[4];    // positions of a tile along n, d, h, w: one image, one slab, whole POSITIONS along w
  int tiles[4];          // tiles along n, d, h, w
  int rows, pitch;       // window: rows of a slab, elements from one row to the next
  int x_pitch;           // elements from one channel's positions to the next's, unless X_LAST
  int x_piece, g_piece;  // elements of one cp.async: four or one
  int lanes_log;         // log2 of the threads of a warp that copy one input row (not X_LAST)
  int window_at, stage;  // in elements: offset of the window in its stage; size of a stage
  int groups;
  int flush;               // stages that are summed in one chain
  long long split_length;  // tiles of a split
  long long all_tiles;
  long long plane;  // elements of a partial plane: all weights
};

constexpr int POSITIONS = 4;
constexpr int ROW_SHARES = ceil_div(AXIS_W.kernel, THREAD_COLUMNS);  // threads along a kernel row
constexpr int LINES = OUT_CHUNK * AXIS_D.kernel * AXIS_H.kernel;     // kernel rows, of all channels
constexpr int COLUMN_THREADS = ceil_div(LINES, THREAD_LINES) * ROW_SHARES;
constexpr int ROWS = ROW_THREADS * THREAD_ROWS, COLUMNS = LINES * AXIS_W.kernel;
constexpr int THREADS = round_up(SLICE_THREADS * K_SLICES, 32);
constexpr int ROW_BLOCKS = ceil_div(IN_CHANNELS, ROWS), COLUMN_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr int SLABS = (AXIS_D.kernel - 1) * AXIS_D.dilation + 1;  // slabs of the window

// A row of the window begins SKEW elements before the first that a tap reads, so that copies of four are aligned.
constexpr int SKEW = (4 - AXIS_W.padding % 4) % 4;

static_assert(ROW_THREADS * COLUMN_THREADS <= SLICE_THREADS, "a slice has a thread for all sums");
static_assert(THREAD_ROWS % 4 == 0, "rows are read four at a time");
static_assert(ROW_SHARES == 1 || THREAD_COLUMNS * AXIS_W.dilation % 4 == 0, "threads begin at whole quads of a row");

// Index of the element that a thread's column reads at a position, in the thread's part of a window row.
__host__ __device__ constexpr int place(int position, int column) {
  return SKEW + position * AXIS_W.stride + column * AXIS_W.dilation;
}
constexpr int QUADS = place(POSITIONS - 1, THREAD_COLUMNS - 1) / 4 + 1;  // groups of four elements in that part

// The first position that reads a quad; POSITIONS where none does.
__host__ __device__ constexpr int first_met(int quad) {
  for (int position = 0; position < POSITIONS; ++position)
    for (int column = 0; column < THREAD_COLUMNS; ++column)
      if (place(position, column) / 4 == quad) return position;
  return POSITIONS;
}

typedef Vector<float, 4> Four;

// Copies a tile of the input, PIECE elements at once: the block's channels of each position if X_LAST, else the rows of
// each channel. Elements that do not exist become zero.
template <int PIECE>
__device__ __forceinline__ void load_input(const float* x, int channels, const Params& params, const int (&at)[4],
                                           float* to) {
  const float* const from = x + offset_of(params.x, at);
  const int height = params.x.size[1] - at[2], width = params.x.size[2] - at[3];
  if constexpr (X_LAST) {
    constexpr int PIECES = ROWS / PIECE;  // copies for a position
    constexpr int W_STEP = THREADS / PIECES, CHANNEL_STEP = THREADS % PIECES * PIECE;
#pragma unroll 1
    for (int h = 0; h < params.tile_extent[2]; ++h) {
      int w = threadIdx.x / PIECES, channel = threadIdx.x % PIECES * PIECE;
      const float* next = from + h * params.x.stride[3] + w * params.x.stride[4];
      unsigned slot = shared_address(to + h * params.tile_extent[3] * ROWS) + threadIdx.x * (4 * PIECE);
#pragma unroll 1
      while (w < params.tile_extent[3]) {
        cp_async<4 * PIECE>(slot, next + channel, h < height && w < width && channel < channels);
        slot += THREADS * (4 * PIECE), w += W_STEP, next += W_STEP * params.x.stride[4];
        if (CHANNEL_STEP > 0 && (channel += CHANNEL_STEP) >= ROWS) channel -= ROWS, ++w, next += params.x.stride[4];
      }
    }
  } else {
    const int lane = threadIdx.x & ((1 << params.lanes_log) - 1), first = threadIdx.x >> params.lanes_log;
    const int at_once = THREADS >> params.lanes_log;
    const long long step = at_once * params.x.stride[1];
#pragma unroll 1
    for (int h = 0; h < params.tile_extent[2]; ++h)
#pragma unroll 1
      for (int w = lane * PIECE; w < params.tile_extent[3]; w += PIECE << params.lanes_log) {
        const bool exists = h < height && w < width;
        const float* next = from + h * params.x.stride[3] + w * params.x.stride[4] + first * params.x.stride[1];
        unsigned slot = shared_address(to + h * params.tile_extent[3] + w + first * params.x_pitch);
#pragma unroll 2
        for (int channel = first; channel < ROWS; channel += at_once) {
          cp_async<4 * PIECE>(slot, next, exists && channel < channels);
          slot += at_once * params.x_pitch * 4, next += step;
        }
      }
  }
}

// Copies the tile's window, each warp a row at a time; zeros outside the tensor.
template <int PIECE>
__device__ __forceinline__ void load_window(const float* grad, int channels, const Params& params, const int (&at)[4],
                                            float* to) {
  const int d = at[1] * AXIS_D.stride - AXIS_D.padding, h = at[2] * AXIS_H.stride - AXIS_H.padding;
  const int w = at[3] * AXIS_W.stride - AXIS_W.padding - SKEW;
  grad += at[0] * params.g.stride[0];
  int slab = 0, row = threadIdx.x / 32;  // slab: channel * SLABS + slab
#pragma unroll 1
  for (;; row += THREADS / 32) {
    for (; row >= params.rows; row -= params.rows) ++slab;
    if (slab >= OUT_CHUNK * SLABS) break;
    const int channel = slab / SLABS, of_d = d + slab % SLABS, of_h = h + row;
    const bool inside = channel < channels && (unsigned)of_d < (unsigned)params.g.size[0] &&
                        (unsigned)of_h < (unsigned)params.g.size[1];
    int i = threadIdx.x % 32 * PIECE;
    const float* next = grad + channel * params.g.stride[1] + of_d * params.g.stride[2] + of_h * params.g.stride[3] +
                        (w + i) * params.g.stride[4];
    unsigned slot = shared_address(to + (slab * params.rows + row) * params.pitch + i);
#pragma unroll 2
    for (; i < params.pitch; i += 32 * PIECE) {
      cp_async<4 * PIECE>(slot, next, inside && (unsigned)(w + i) < (unsigned)params.g.size[2]);
      slot += 32 * (4 * PIECE), next += 32 * PIECE * params.g.stride[4];
    }
  }
}

// A thread's share of the block's work: its slice of positions, first row, first kernel row, and share of its columns.
struct Thread {
  int slice, row, line, share;
  bool works;

  __device__ __forceinline__ Thread() {
    slice = threadIdx.x / SLICE_THREADS;
    const int within = threadIdx.x % SLICE_THREADS, column = within / ROW_THREADS;
    row = within % ROW_THREADS, line = column / ROW_SHARES * THREAD_LINES, share = column % ROW_SHARES;
    works = slice < K_SLICES && column < COLUMN_THREADS;
  }
  // The block's row that is the thread's `i`-th. If X_LAST one load reads four rows, so these are neighbours.
  __device__ __forceinline__ int row_of(int i) const {
    return X_LAST ? i / 4 * (4 * ROW_THREADS) + row * 4 + i % 4 : i * ROW_THREADS + row;
  }
};

struct Sums {
  float of[THREAD_ROWS][THREAD_LINES][THREAD_COLUMNS] = {};

  // Adds the products of POSITIONS neighbouring positions. `x`: the first position in the thread's first row. `window`
  // + lines[i]: what the first position reads for the first column of kernel row i.
  __device__ __forceinline__ void add(const float* x, int x_pitch, const float* window,
                                      const int (&lines)[THREAD_LINES]) {
    Met met;
    if constexpr (X_LAST) {
#pragma unroll
      for (int position = 0; position < POSITIONS; ++position) {
        met.read(window, lines, position, position);
#pragma unroll
        for (int rows = 0; rows < THREAD_ROWS; rows += 4) {
          const Four four = *(const Four*)(x + position * ROWS + rows * ROW_THREADS);
#pragma unroll
          for (int i = 0; i < 4; ++i) add(rows + i, four.value[i], met, position);
        }
      }
    } else {
      met.read(window, lines, 0, POSITIONS - 1);
#pragma unroll
      for (int row = 0; row < THREAD_ROWS; ++row) {
        const Four four = *(const Four*)(x + row * ROW_THREADS * x_pitch);
#pragma unroll
        for (int position = 0; position < POSITIONS; ++position) add(row, four.value[position], met, position);
      }
    }
  }

 private:
  // The window elements that the thread's positions read.
  struct Met {
    Four of[THREAD_LINES][QUADS];

    // Loads the quads whose first reader is one of these positions.
    __device__ __forceinline__ void read(const float* from, const int (&lines)[THREAD_LINES], int first, int last) {
#pragma unroll
      for (int line = 0; line < THREAD_LINES; ++line)
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad)
          if (first <= first_met(quad) && first_met(quad) <= last)
            of[line][quad] = *(const Four*)(from + lines[line] + 4 * quad);
    }
    __device__ __forceinline__ float at(int line, int place) const { return of[line][place / 4].value[place % 4]; }
  };

  __device__ __forceinline__ void add(int row, float x, const Met& met, int position) {
#pragma unroll
    for (int line = 0; line < THREAD_LINES; ++line)
#pragma unroll
      for (int column = 0; column < THREAD_COLUMNS; ++column)
        of[row][line][column] += x * met.at(line, place(position, column));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_wgrad_windows(const float* __restrict__ x, const float* __restrict__ grad, float* __restrict__ partial,
                         const Params params) {
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* const buffers = (float*)shared_memory;
  int block = blockIdx.x;
  const int first_in = next_index(block, ROW_BLOCKS) * ROWS;
  const int first_out = next_index(block, COLUMN_BLOCKS) * OUT_CHUNK;
  const int group = next_index(block, params.groups), split = block;
  const long long first_tile = split * params.split_length;
  const int all_stages =
      (int)(first_tile + params.split_length < params.all_tiles ? params.split_length : params.all_tiles - first_tile);
  const int in_channel = group * IN_CHANNELS + first_in;
  x += in_channel * params.x.stride[1];
  grad += (group * OUT_CHANNELS + first_out) * params.g.stride[1];
  partial += split * params.plane + (long long)in_channel * (OUT_CHANNELS * TAPS) + first_out * TAPS;
  const int rows = IN_CHANNELS - first_in, channels = OUT_CHANNELS - first_out;  // channels that exist from there on

  // A thread's first element in the input and in the window, and its first positions; it advances by K_SLICES of them.
  const Thread thread;
  const int of_w = params.tile_extent[3] / POSITIONS;
  const int first_h = thread.slice / of_w, first_w = thread.slice % of_w, step_h = K_SLICES / of_w;
  const int step_w = K_SLICES % of_w;
  int lines[THREAD_LINES];
#pragma unroll
  for (int i = 0; i < THREAD_LINES; ++i) {
    const int line = min(thread.line + i, LINES - 1);  // a kernel row that does not exist reads the last one
    const int tap_d = line / AXIS_H.kernel, tap_h = line % AXIS_H.kernel;
    const int slab = tap_d / AXIS_D.kernel * SLABS + tap_d % AXIS_D.kernel * AXIS_D.dilation;
    lines[i] = params.window_at + (slab * params.rows + tap_h * AXIS_H.dilation) * params.pitch +
               thread.share * (THREAD_COLUMNS * AXIS_W.dilation);
  }
  const int in_input = X_LAST ? thread.row * 4 : thread.row * params.x_pitch;

  int tile[4];  // the next tile to load
  decode(params.tiles, first_tile, tile);
  auto load = [&](float* to) {
    int at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = tile[i] * params.tile_extent[i];
    if (params.x_piece == 4)
      load_input<4>(x, rows, params, at, to);
    else
      load_input<1>(x, rows, params, at, to);
    if (params.g_piece == 4)
      load_window<4>(grad, channels, params, at, to + params.window_at);
    else
      load_window<1>(grad, channels, params, at, to + params.window_at);
    advance(params.tiles, tile);
  };

  int done = 0;
  do {
    Sums sums;
    const int stages = min(params.flush, all_stages - done);
    if (stages > 0) load(buffers);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      const float* const from = buffers + stage % 2 * params.stage;
      if (stage + 1 < stages) load(buffers + (stage + 1) % 2 * params.stage);
      if (!thread.works) continue;
      int h = first_h, w = first_w;
#pragma unroll 1
      while (h < params.tile_extent[2]) {
        const int position = h * params.tile_extent[3] + w * POSITIONS;
        sums.add(from + in_input + position * (X_LAST ? ROWS : 1), params.x_pitch,
                 from + h * AXIS_H.stride * params.pitch + w * (POSITIONS * AXIS_W.stride), lines);
        h += step_h, w += step_w;
        if (w >= of_w) w -= of_w, ++h;
      }
    }
    __syncthreads();

    // All slices' sums, then their sum in order.
    if (thread.works) {
      float* const to = buffers + thread.slice * (ROWS * COLUMNS) + thread.line * AXIS_W.kernel;
#pragma unroll
      for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
        for (int line = 0; line < THREAD_LINES; ++line)
#pragma unroll
          for (int j = 0; j < THREAD_COLUMNS; ++j) {
            const int column = thread.share * THREAD_COLUMNS + j;
            if ((LINES % THREAD_LINES == 0 || thread.line + line < LINES) &&
                (ROW_SHARES * THREAD_COLUMNS == AXIS_W.kernel || column < AXIS_W.kernel))
              to[thread.row_of(i) * COLUMNS + line * AXIS_W.kernel + column] = sums.of[i][line][j];
          }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
      const int row = i / COLUMNS, column = i % COLUMNS;
      if (row >= rows || column >= channels * TAPS) continue;
      float* const to = partial + (long long)row * (OUT_CHANNELS * TAPS) + column;
      float total = buffers[i];
#pragma unroll 4
      for (int slice = 1; slice < K_SLICES; ++slice) total += buffers[slice * (ROWS * COLUMNS) + i];
      *to = done > 0 ? *to + total : total;
    }
    __syncthreads();
    done += stages;
  } while (done < all_stages);
}
