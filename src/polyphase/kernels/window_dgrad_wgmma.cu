// The input gradient by wgmma (mainloop/window_wgmma.cuh):
//
//   gx[n, ci, i] = Σ over output channels and taps of   w[ci, co, tap] · g[n, co, i·stride + tap·dilation - padding]
//
// GEMM. M = batch x input positions, N = input channels of a group, K = its (output channel, tap) pairs. A work tile is
// one M x N tile: a tile of at most ROWS positions by COLUMNS input channels. A pipeline stage holds one K-tile:
// OUT_CHUNK output channels with all their taps. Blocks are persistent: work tiles are dealt out round-robin (N
// fastest, then tile, group), and the next is loaded while one is stored.
//
// Tensor-core accumulation truncates at every step. So if K is long, accumulators are flushed every FLUSH stages: they
// are added to a second set in registers, and start from zero.
//
// With ROWS_IN_PAIRS a thread's two rows of 16 are neighbouring positions, and are stored together if both are in one
// row of x, at an even element.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "operand/half_copies.cuh"
#include "operand/window.cuh"
#include "operand/window_rows.cuh"
#include "mainloop/window_wgmma.cuh"

struct Params {
  TensorMap box, window_box;  // the weight; the output gradient
  Tensor5 x, g;
  Window window;
  Runs runs;
  int batch, work_tiles;
  int tile_extent[4];  // positions of a tile along n, d, h, w; their product is at most ROWS
  int tiles[4];        // tiles along n, d, h, w
  int skew;            // elements by which the window starts early along w, so that TMA boxes and pairs are aligned
  int box_bytes;       // bytes of the window's box, 0 if threads copy it
  int table_bytes, stage_bytes, window_offset;  // bytes of the offset table; of a stage; up to the window in its stage
};

constexpr int GRID_N = ceil_div(IN_CHANNELS, COLUMNS), K_TILES = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr int DEPTH = OUT_CHUNK * TAPS;
constexpr bool WHOLE_BLOCKS = IN_CHANNELS % COLUMNS == 0;

static_assert(DEPTH % OPERATION == 0, "a stage is whole operations");

// Calls store(sum, to) for each column of a row of a thread's accumulators. `to`: the first column in memory;
// `channel`: elements to the next column; `columns`: how many are valid.
template <class Store>
__device__ __forceinline__ void store_rows(const float* sums, scalar_t* to, long long channel, int columns,
                                           const Store& store) {
#pragma unroll
  for (int tile = 0; tile < COLUMN_TILES; ++tile) {
    if (WHOLE_BLOCKS || 8 * tile < columns) store(sums + 4 * tile, to);
    if (WHOLE_BLOCKS || 8 * tile + 1 < columns) store(sums + 4 * tile + 1, to + channel);
    to += 8 * channel;
  }
}

// A tile of M x N.
struct WorkTile {
  int group, first_in;
  int first[4];  // first position along n, d, h, w

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    const int tiles = volume(params.tiles);
    first_in = index % GRID_N * COLUMNS;
    index /= GRID_N;
    group = index / tiles;
    tile_origin(params.tiles, params.tile_extent, index % tiles, first);
  }
};

// Stores a work tile's results; `rows`: places of the tile's rows.
__device__ __forceinline__ void store(const Params& params, const WorkTile& work, const Sums& sums,
                                      const RowPlace* rows, scalar_t* dst) {
  const int columns = IN_CHANNELS - work.first_in - Sums::first_column();  // valid columns, from the thread's first
  const long long channel = params.x.stride[1];
  dst += (work.group * IN_CHANNELS + work.first_in + Sums::first_column()) * channel;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    const long long above = target_of(params.x, params.batch, work.first, rows[Sums::row(2 * i)]);
    const long long below = target_of(params.x, params.batch, work.first, rows[Sums::row(2 * i + 1)]);
    const bool together =
        channel % 2 == 0 && above >= 0 && below == above + 1 && (unsigned long long)(dst + above) % (2 * ELEMENT) == 0;
    if (ROWS_IN_PAIRS && together) {
      store_rows(sums.of[i], dst + above, channel, columns, [](const float* row, scalar_t* to) {
        Vector<scalar_t, 2> both;
        narrow(row[0], both.value[0]), narrow(row[2], both.value[1]);
        *(Vector<scalar_t, 2>*)to = both;
      });
      continue;
    }
    const auto store = [](const float* row, scalar_t* to) { narrow(*row, *to); };
    if (above >= 0) store_rows(sums.of[i], dst + above, channel, columns, store);
    if (below >= 0) store_rows(sums.of[i] + 2, dst + below, channel, columns, store);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_dgrad_wgmma(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight, const scalar_t*,
                       scalar_t* __restrict__ dst GUARD_PARAMETER, const __grid_constant__ Params params) {
  RETURN_IF_EXACT;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) WindowBarriers ring;
  __shared__ int positions[ROWS];
  __shared__ RowPlace rows[ROWS];
  char* const stage_memory = (char*)shared_memory;  // each stage: B (the weight, swizzled), then the window of g, from
                                                    // which A is gathered into registers
  int* const offsets = (int*)(shared_memory + STAGES * params.stage_bytes);
  Place* const places = (Place*)((char*)offsets + params.table_bytes);

  // Whether TMA loads both operands. If threads must copy the window, all producers do.
  const bool all_by_tma = params.box_bytes != 0;
  ring.init(all_by_tma);
  __syncthreads();
  PipelineState<STAGES> state;

  // Producers start now: building the tables below overlaps the first loads.
  if (threadIdx.x >= CONSUMER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    RowLoader<OUT_CHUNK> g_loader(params.g, params.window);
    if (!all_by_tma) {
      g_loader.init(places);
      named_barrier_sync(LOADERS_MEET, LOADERS);
    }
#pragma unroll 1
    for (int index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
      const WorkTile work(params, index);
      int window[4] = {work.first[0], work.first[1], work.first[2], work.first[3]};
      to_window(window, params.skew);
      const scalar_t* const first_channel = grad + (long long)work.group * OUT_CHANNELS * params.g.stride[1];
      load_stages(
          K_TILES, all_by_tma, ring, state, stage_memory, params.stage_bytes,
          [&](int stage, char* to, unsigned barrier) {
            const int place[5] = {stage * DEPTH, work.group * IN_CHANNELS + work.first_in, 0, 0, 0};
            load_runs(params.box, weight, params.runs, place, to, barrier);
            if (!all_by_tma) return;
            const int from[5] = {window[3], window[2], window[1], window[0],
                                 work.group * OUT_CHANNELS + stage * OUT_CHUNK};
            tma_load_box(shared_address(to + params.window_offset), params.window_box, grad, from, params.box_bytes,
                         barrier);
          },
          [&](int stage, char* to, unsigned barrier) {
            const int channel = stage * OUT_CHUNK;
            return g_loader.load(first_channel + channel * params.g.stride[1], OUT_CHANNELS - channel,
                                 to + params.window_offset, params.batch, window, barrier);
          });
    }
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }

  list_positions<CONSUMER_THREADS>(positions, ROWS, params.window, params.tile_extent, params.skew);
  for (int i = threadIdx.x; i < DEPTH; i += CONSUMER_THREADS)
    offsets[i] = offset_of_tap(params.window, i / TAPS, i % TAPS);
  for (int i = threadIdx.x; i < ROWS; i += CONSUMER_THREADS) {
    int at[4];
    decode(params.tile_extent, i, at);
    rows[i] = RowPlace{(short)(at[0] < params.tile_extent[0] ? at[0] : -1), (short)at[1], (short)at[2], (short)at[3]};
  }
  named_barrier_sync(CONSUMERS_MEET, CONSUMER_THREADS);

  setmaxnreg_inc<CONSUMER_REGISTERS>();
  int offsets_of_rows[ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) offsets_of_rows[i / 2][i % 2] = positions[Sums::row(i)];
#pragma unroll 1
  for (int index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
    Sums sums, total;
    add_stages(K_TILES, ring, state, stage_memory, params.stage_bytes, false,
               [&](int stage, const char* from, int shift) {
                 sums.add(from + params.window_offset + shift, from, params.runs, offsets, offsets_of_rows,
                          DEPTH / OPERATION, stage % FLUSH == 0, all_by_tma);
                 if (FLUSH >= K_TILES || (stage % FLUSH < FLUSH - 1 && stage < K_TILES - 1)) return;
                 total.take(sums, stage < FLUSH);
               });
    store(params, WorkTile(params, index), FLUSH < K_TILES ? total : sums, rows, dst);
  }
}
