// The input gradient without tensor cores, in the accumulator's own arithmetic, for few input channels in a group:
//
//   gx[n, ci, i] = Σ over output channels and taps of   w[ci, co, tap] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. A work tile is a tile of positions by BLOCK_IN input channels of a group. The threads of a block are
// IN_SLICES × SLICE_THREADS: a slice has IN_TILE input channels, a thread CELLS positions. A stage holds the window of
// OUT_CHUNK output channels (operand/window_rows.cuh) in memory order, and their weights as [channel][kd][slice]
// [kh][kw][input channel]. Blocks take work_tiles_per_block work tiles one after the other, positions fastest.
//
// With BY_ROWS a thread's positions are in one column of the tile, so that they share rows of the window: each row is
// read once for all of them, and the weights of a slab of taps are in registers. Else a thread's positions are
// SLICE_THREADS apart in the tile, and each tap's weights are read once for all of them.
//
// If a tile has whole rows, all rows of a slab are copied as one, without zeros between them; then a thread uses zero
// for columns outside the tensor.
//
// Two buffers of windows, loaded a step ahead (a step: a stage of a work tile), each with an mbarrier, and two of
// weights, through registers. One barrier a step suffices: a buffer is last read before it, and filled again after it.
//
// Sums of float32 have two levels, so that rounding does not grow with the number of output channels: every FLUSH
// stages they are added to a second set of registers.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/types.cuh"
#include "ptx/mbarrier.cuh"
#include "operand/window.cuh"
#include "operand/window_rows.cuh"
#include "mainloop/accumulators.cuh"

struct Params {
  Tensor5 x, g;
  Window window;
  int batch, work_tiles, work_tiles_per_block;
  int lanes[4];        // a slice's threads along n, d, h and w; without BY_ROWS the positions of a tile
  int tile_extent[4];  // positions of a tile along n, d, h, w
  int tiles[4];        // tiles along n, d, h, w
  int window_bytes;    // bytes of a window buffer
};

constexpr int SLICE_THREADS = THREADS / IN_SLICES, BLOCK_IN = IN_TILE * IN_SLICES;
constexpr int IN_BLOCKS = ceil_div(IN_CHANNELS, BLOCK_IN), STAGES = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr bool CHAINED = FLUSH < STAGES;

// Weights: input channels of a tap, taps of a slab for a slice, and all of a stage; whole vectors.
constexpr int VECTOR = 16 / sizeof(accum_t);
constexpr int PITCH = IN_TILE > 2 ? round_up(IN_TILE, VECTOR) : IN_TILE;
constexpr int SLAB = round_up(AXIS_H.kernel * AXIS_W.kernel * PITCH, VECTOR);
constexpr int WEIGHT_STAGE = OUT_CHUNK * AXIS_D.kernel * IN_SLICES * SLAB;

// BY_ROWS: a thread's positions are ROW_STEP apart, so that they read the same rows, each CELL_ROWS further, in units
// of a dilation.
constexpr int ROW_STEP = element_step(AXIS_H), CELL_ROWS = tap_step(AXIS_H);
constexpr int ROWS_READ = (CELLS - 1) * CELL_ROWS + AXIS_H.kernel;
__host__ __device__ constexpr bool is_read(int row) {
  return row % CELL_ROWS < AXIS_H.kernel || row >= (CELLS - 1) * CELL_ROWS;
}
constexpr int OFFSETS = BY_ROWS ? 1 : CELLS;  // window offsets that a thread holds for its positions
constexpr int POSITIONS = SLICE_THREADS * OFFSETS;
constexpr bool MASKED = AXIS_W.padding > 0 && AXIS_W.kernel <= 32;  // a bit for each tap along w

// A stage of a work tile; next() advances to the next stage.
struct Step {
  int stage, block;  // block: of input channels, of all groups
  int tile[4];

  __device__ __forceinline__ Step(const Params& params, int work_tile) : stage(0) {
    const int tiles = volume(params.tiles);
    block = work_tile / tiles;
    decode(params.tiles, work_tile % tiles, tile);
  }
  __device__ __forceinline__ void next(const Params& params) {
    if (++stage < STAGES) return;
    stage = 0;
    advance<false>(params.tiles, tile);
    if (tile[0] == params.tiles[0]) tile[0] = 0, ++block;
  }
  __device__ __forceinline__ int group() const { return block / IN_BLOCKS; }
  __device__ __forceinline__ int first_in() const { return block % IN_BLOCKS * BLOCK_IN; }
};

// Copies the weights of a stage to shared memory through registers; channels that do not exist get zeros.
struct WeightLoader {
  static constexpr int COUNT = BLOCK_IN * OUT_CHUNK * TAPS, ITEMS = ceil_div(COUNT, THREADS);
  static constexpr bool WHOLE = OUT_CHANNELS % OUT_CHUNK == 0 && IN_CHANNELS % BLOCK_IN == 0;

  scalar_t values[ITEMS];

  // The thread's element `i`, in the memory order of a contiguous weight.
  static __device__ __forceinline__ bool locate(int i, int& in, int& channel, int& tap) {
    const int item = threadIdx.x + i * THREADS;
    tap = item % TAPS, channel = item / TAPS % OUT_CHUNK, in = item / (TAPS * OUT_CHUNK);
    return item < COUNT;
  }

  __device__ __forceinline__ void load(const scalar_t* weight, const Step& step) {
    const int first_in = step.first_in(), first_out = step.stage * OUT_CHUNK;
    weight += (long long)step.group() * (IN_CHANNELS * OUT_CHANNELS * TAPS) + weight_offset(first_in, first_out, 0);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int in, channel, tap;
      bool exists = locate(i, in, channel, tap);
      if (!WHOLE) exists = exists && first_in + in < IN_CHANNELS && first_out + channel < OUT_CHANNELS;
      values[i] = exists ? read(weight + weight_offset(in, channel, tap)) : zero<scalar_t>();
    }
  }

  __device__ __forceinline__ void store(accum_t* weights) const {
    constexpr int SLAB_TAPS = AXIS_H.kernel * AXIS_W.kernel;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int in, channel, tap;
      if (!locate(i, in, channel, tap)) break;
      const int slab = (channel * AXIS_D.kernel + tap / SLAB_TAPS) * IN_SLICES + in / IN_TILE;
      weights[slab * SLAB + tap % SLAB_TAPS * PITCH + in % IN_TILE] = widen(values[i]);
    }
  }
};

// Loads COUNT neighbouring weights by the widest loads that their alignment allows.
template <int COUNT>
__device__ __forceinline__ void read_weights(const accum_t* from, accum_t (&to)[COUNT]) {
  constexpr int AT_ONCE = COUNT % VECTOR == 0 ? VECTOR : COUNT == 2 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < COUNT; i += AT_ONCE) {
    const Vector<accum_t, AT_ONCE> some = *(const Vector<accum_t, AT_ONCE>*)(from + i);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) to[i + j] = some.value[j];
  }
}

// A position's window offset at the first tap, in bytes, and a mask of the taps along w that read inside the tensor's
// rows.
struct Meeting {
  int offset;
  unsigned inside;

  // The element that it reads at tap `kw` of a row of taps; `row`: the window's first element moved to that row.
  __device__ __forceinline__ accum_t at(const char* row, int kw) const {
    if (MASKED && !(inside >> kw & 1)) return 0;
    return widen(*(const scalar_t*)(row + offset + kw * AXIS_W.dilation * ELEMENT));
  }
};

struct Sums : Accumulators<CELLS, IN_TILE, accum_t> {
  // Adds one stage. `meetings`: the thread's positions; `weights`: its slice's.
  __device__ __forceinline__ void add(const Params& params, const char* window, const Meeting (&meetings)[OFFSETS],
                                      const accum_t* weights) {
#pragma unroll 1
    for (int channel = 0; channel < OUT_CHUNK; ++channel) {
      const char* slab = window;
#pragma unroll 1
      for (int kd = 0; kd < AXIS_D.kernel; ++kd) {
        if constexpr (BY_ROWS)
          add_rows(params, slab, meetings[0], weights);
        else
          add_taps(params, slab, meetings, weights);
        slab += window_offset(params.window, 0, AXIS_D.dilation, 0, 0);
        weights += IN_SLICES * SLAB;
      }
      window += channel_pitch(params.window);
    }
  }

 private:
  // Adds a slab of taps, row by row of the window.
  __device__ __forceinline__ void add_rows(const Params& params, const char* from, const Meeting& meeting,
                                           const accum_t* weights) {
    accum_t weight[SLAB];
    read_weights(weights, weight);
    const int row_bytes = window_offset(params.window, 0, 0, AXIS_H.dilation, 0);
#pragma unroll
    for (int row = 0; row < ROWS_READ; ++row, from += row_bytes) {
      accum_t met[AXIS_W.kernel];
#pragma unroll
      for (int kw = 0; kw < AXIS_W.kernel; ++kw) met[kw] = is_read(row) ? meeting.at(from, kw) : 0;
#pragma unroll
      for (int cell = 0; cell < CELLS; ++cell) {
        const int kh = row - cell * CELL_ROWS;
        if (kh < 0 || kh >= AXIS_H.kernel) continue;
#pragma unroll
        for (int kw = 0; kw < AXIS_W.kernel; ++kw)
#pragma unroll
          for (int in = 0; in < IN_TILE; ++in) of[cell][in] += met[kw] * weight[(kh * AXIS_W.kernel + kw) * PITCH + in];
      }
    }
  }

  // Adds a slab of taps, tap by tap.
  __device__ __forceinline__ void add_taps(const Params& params, const char* from, const Meeting (&meetings)[OFFSETS],
                                           const accum_t* weights) {
    const int row_bytes = window_offset(params.window, 0, 0, AXIS_H.dilation, 0);
#pragma unroll 1
    for (int kh = 0; kh < AXIS_H.kernel; ++kh, from += row_bytes) {
#pragma unroll(AXIS_W.kernel <= 16 ? AXIS_W.kernel : 8)
      for (int kw = 0; kw < AXIS_W.kernel; ++kw, weights += PITCH) {
        accum_t weight[PITCH];
        read_weights(weights, weight);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
          const accum_t met = meetings[BY_ROWS ? 0 : cell].at(from, kw);
#pragma unroll
          for (int in = 0; in < IN_TILE; ++in) of[cell][in] += met * weight[in];
        }
      }
    }
  }
};

// The thread's position `cell` in its tile.
__device__ __forceinline__ RowPlace place_of(const RowPlace* rows, int cell) {
  const int thread = threadIdx.x % SLICE_THREADS;
  if (!BY_ROWS) return rows[cell * SLICE_THREADS + thread];
  RowPlace place = rows[thread];
  place.at[2] += (short)(cell * ROW_STEP);
  return place;
}

// Run by all threads: lists the positions of a tile. With BY_ROWS a thread's first positions: ROW_STEP neighbours along
// h, then their further positions.
__device__ __forceinline__ void list_rows(const Params& params, RowPlace* rows) {
  for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
    int at[4];
    decode(params.lanes, i, at);
    if (BY_ROWS) at[2] = at[2] / ROW_STEP * (ROW_STEP * CELLS) + at[2] % ROW_STEP;
    rows[i] = RowPlace{(short)(at[0] < params.lanes[0] ? at[0] : -1), (short)at[1], (short)at[2], (short)at[3]};
  }
}

// The `Meeting` of the position at `place`; a position that does not exist reads what the first one reads.
__device__ __forceinline__ Meeting meeting_of(const Params& params, const RowPlace& place) {
  Meeting found = {0, ~0u};
  if (place.at[0] < 0) return found;
  found.offset = window_offset(params.window, place.at[0], place.at[1] * AXIS_D.stride, place.at[2] * AXIS_H.stride,
                               place.at[3] * AXIS_W.stride);
  if constexpr (MASKED) {
#pragma unroll
    for (int kw = 0; kw < AXIS_W.kernel; ++kw) {
      const int column = place.at[3] * AXIS_W.stride + src_offset(AXIS_W, kw);  // the tile has whole rows
      const bool beside = (unsigned)column >= (unsigned)params.g.size[2];
      if (params.window.joined && beside) found.inside &= ~(1u << kw);
    }
  }
  return found;
}

// Stores a work tile's results.
__device__ __forceinline__ void store(const Params& params, const Step& step, const Sums& sums, const RowPlace* rows,
                                      scalar_t* dst) {
  const int first_in = step.first_in() + threadIdx.x / SLICE_THREADS * IN_TILE;
  dst += ((long long)step.group() * IN_CHANNELS + first_in) * params.x.stride[1];
  int first[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] = step.tile[i] * params.tile_extent[i];
#pragma unroll
  for (int cell = 0; cell < CELLS; ++cell) {
    const long long target = target_of(params.x, params.batch, first, place_of(rows, cell));
    if (target < 0) continue;
    scalar_t* to = dst + target;
#pragma unroll
    for (int in = 0; in < IN_TILE; ++in, to += params.x.stride[1])
      if (IN_CHANNELS % BLOCK_IN == 0 || first_in + in < IN_CHANNELS) narrow(sums.of[cell][in], *to);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_dgrad_fma(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight, const scalar_t*,
                     scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ __align__(8) PipelineBarriers<2> ring;
  char* const windows = (char*)shared_memory;
  accum_t* const weights = (accum_t*)(windows + 2 * params.window_bytes);
  RowPlace* const rows = (RowPlace*)(weights + 2 * WEIGHT_STAGE);
  Place* const places = (Place*)(rows + POSITIONS);
  if (threadIdx.x == 0) ring.init(WARPS, 1);

  const int first_work_tile = blockIdx.x * params.work_tiles_per_block;
  const int steps = min(params.work_tiles_per_block, params.work_tiles - first_work_tile) * STAGES;
  RowLoader<OUT_CHUNK> windows_of_g(params.g, params.window);
  windows_of_g.init(places);
  list_rows(params, rows);
  Step step(params, first_work_tile), ahead = step, next = step;
  WeightLoader taps;
  taps.load(weight, step);
  taps.store(weights);
  __syncthreads();

  Meeting meetings[OFFSETS];
#pragma unroll
  for (int i = 0; i < OFFSETS; ++i)
    meetings[i] = meeting_of(params, rows[i * SLICE_THREADS + threadIdx.x % SLICE_THREADS]);

  // Loads the window of the step `ahead`; returns its shift in bytes.
  const auto load = [&](int buffer) {
    int window[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) window[i] = ahead.tile[i] * params.tile_extent[i];
    to_window(window, 0);
    const int channel = ahead.stage * OUT_CHUNK;
    const scalar_t* const from = grad + ((long long)ahead.group() * OUT_CHANNELS + channel) * params.g.stride[1];
    const unsigned full = shared_address(ring.full + buffer);
    const int shift = windows_of_g.load(from, OUT_CHANNELS - channel, windows + buffer * params.window_bytes,
                                        params.batch, window, full);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    ahead.next(params);
    return shift;
  };
  int shift = load(0);

  Sums sums, total;
  sums.clear(), total.clear();
  PipelineState<2> state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    mbarrier_wait(shared_address(ring.full + state.index), state.parity);
    __syncthreads();
    const bool more = i + 1 < steps;
    const char* const window = windows + state.index * params.window_bytes + shift;
    next.next(params);
    if (more) shift = load(state.before()), taps.load(weight, next);
    sums.add(params, window, meetings, weights + state.index * WEIGHT_STAGE + threadIdx.x / SLICE_THREADS * SLAB);
    if (more) taps.store(weights + state.before() * WEIGHT_STAGE);
    if (CHAINED && (step.stage % FLUSH == FLUSH - 1 || step.stage == STAGES - 1)) total.take(sums, false), sums.clear();
    if (step.stage == STAGES - 1) {
      Sums& all = CHAINED ? total : sums;
      store(params, step, all, rows, dst);
      all.clear();
    }
    step.next(params);
    state.next();
  }
}
