// The input gradient by Hopper's instruction (mainloop/window_wgmma.cuh):
//
//   gx[n, ci, i] = Σ over output channels and taps of   w[ci, co, tap] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. A block owns COLUMNS input channels of one group and a tile of at most ROWS input positions; a stage
// is OUT_CHUNK output channels with all their taps.
//
// Tensor-core accumulation truncates at every step. So FLUSH stages are summed there, and where those are not all,
// their sums beside them.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "operand/window.cuh"
#include "operand/window_rows.cuh"
#include "mainloop/window_wgmma.cuh"

struct Params {
  TensorMap box, window_box;  // of the weight, and of the output gradient
  Tensor5 x, g;
  Window window;
  Runs runs;
  int batch;
  int lanes[4];   // positions of a tile along n, d, h, w; their product is at most ROWS
  int tiles[4];   // tiles along n, d, h, w
  int skew;       // elements from the window's first to what the first tap of the first position meets
  int box_bytes;  // of the window, if TMA brings it
  int table_bytes, stage_bytes, window_bytes;  // of shared memory
};

constexpr int COLUMN_BLOCKS = ceil_div(IN_CHANNELS, COLUMNS), STAGES = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr int DEPTH = OUT_CHUNK * TAPS;
constexpr bool WHOLE_BLOCKS = IN_CHANNELS % COLUMNS == 0;

static_assert(DEPTH % OPERATION == 0, "a stage is whole operations");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_dgrad_wgmma(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight, const scalar_t*,
                       scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) WindowBarriers ring;
  __shared__ int positions[ROWS];
  __shared__ long long targets[ROWS];  // where each position lies in the input, -1 where it does not exist
  int block = blockIdx.x;
  const int column_block = block % COLUMN_BLOCKS;
  block /= COLUMN_BLOCKS;
  const int tiles = params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3];
  const int group = block / tiles;
  int first[4];  // position of the tile
  tile_origin(params.tiles, params.lanes, block % tiles, first);
  const int first_in = column_block * COLUMNS;

  char* const buffers = (char*)shared_memory;  // the operand, then the window
  int* const offsets = (int*)(shared_memory + BUFFERS * params.stage_bytes);
  Place* const places = (Place*)((char*)offsets + params.table_bytes);

  const bool tells = params.box_bytes != 0;
  ring.init(tells);
  __syncthreads();

  if (threadIdx.x >= CONSUMER_THREADS) {  // at once: what the others do first hides their first stages
    RowLoader<OUT_CHUNK> g_loader(params.g, params.window);
    int window[4] = {first[0], first[1], first[2], first[3]};
    to_window(window, params.skew);
    if (!tells) {
      g_loader.init(places);
      named_barrier_sync(LOADERS_MEET, LOADERS);
    }
    const scalar_t* const first_channel = grad + (long long)group * OUT_CHANNELS * params.g.stride[1];
    load_stages(
        STAGES, tells, ring, buffers, params.stage_bytes,
        [&](int stage, char* to, unsigned barrier) {
          const int place[5] = {stage * DEPTH, group * IN_CHANNELS + first_in, 0, 0, 0};
          load_runs(params.box, weight, params.runs, place, to, barrier);
          if (!tells) return;
          const int from[5] = {window[3], window[2], window[1], window[0], group * OUT_CHANNELS + stage * OUT_CHUNK};
          tma_load_box(shared_address(to + params.window_bytes), params.window_box, grad, from, params.box_bytes,
                       barrier);
        },
        [&](int stage, char* to) {
          const int channel = stage * OUT_CHUNK;
          return g_loader.load(first_channel + channel * params.g.stride[1], OUT_CHANNELS - channel,
                               to + params.window_bytes, params.batch, window);
        });
    return;
  }

  list_positions<CONSUMER_THREADS>(positions, ROWS, params.window, params.lanes, params.skew);
  for (int i = threadIdx.x; i < DEPTH; i += CONSUMER_THREADS)
    offsets[i] = offset_of_tap(params.window, i / TAPS, i % TAPS);
  for (int i = threadIdx.x; i < ROWS; i += CONSUMER_THREADS) {
    int at[4];
    decode(params.lanes, i, at);
    const bool in_tile = at[0] < params.lanes[0];
#pragma unroll
    for (int j = 0; j < 4; ++j) at[j] += first[j];
    targets[i] = in_tile && exists(params.x, params.batch, at[0], at[1], at[2], at[3]) ? offset_of(params.x, at) : -1;
  }
  named_barrier_sync(CONSUMERS_MEET, CONSUMER_THREADS);

  setmaxnreg_inc<CONSUMER_REGISTERS>();
  int offsets_of_rows[ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) offsets_of_rows[i / 2][i % 2] = positions[Sums::row(i)];
  Sums sums, total;
  add_stages(STAGES, ring, buffers, params.stage_bytes, false, [&](int stage, const char* from, int shift) {
    sums.add(from + params.window_bytes + shift, from, params.runs, offsets, offsets_of_rows, DEPTH / OPERATION,
             stage % FLUSH == 0, tells);
    if (FLUSH >= STAGES || (stage % FLUSH < FLUSH - 1 && stage < STAGES - 1)) return;
    total.take(sums, stage < FLUSH);
  });
  const Sums& all = FLUSH < STAGES ? total : sums;

  const int columns = IN_CHANNELS - first_in - Sums::first_column();  // that exist, from the thread's first on
  const long long channel = params.x.stride[1];
  dst += (group * IN_CHANNELS + first_in + Sums::first_column()) * channel;
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const long long target = targets[Sums::row(i)];
    if (target < 0) continue;
    scalar_t* to = dst + target;
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
      const float* const pair = all.of[i / 2] + tile * 4 + i % 2 * 2;
      if (WHOLE_BLOCKS || 8 * tile < columns) narrow(pair[0], to[0]);
      if (WHOLE_BLOCKS || 8 * tile + 1 < columns) narrow(pair[1], to[channel]);
      to += 8 * channel;
    }
  }
}
