// The weight gradient by mma.sync (mainloop/window_mma.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// GEMM. M = input channels of a group, N = its (output channel, tap) pairs, K = batch x input positions. A block owns
// one M x N tile, ROWS input channels by OUT_CHUNK output channels with all their taps, and one split of K: a
// contiguous run of tiles of positions. A pipeline stage holds one K-tile, which is one tile of positions. Splits write
// different partial planes, which the caller sums in order: the result does not depend on timing.
//
// Shared memory: tables of the pieces of both operands and of the positions' offsets, then STAGES stages.
//
// Tensor-core accumulation truncates at every step. So accumulators are flushed: after FLUSH stages they are added in
// float32 to `partial` in global memory, and start from zero.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "ptx/griddepcontrol.cuh"
#include "operand/half_copies.cuh"
#include "operand/window.cuh"
#include "mainloop/multistage.cuh"
#include "mainloop/window_mma.cuh"

struct Params {
  Tensor5 x, g;
  StageBox x_box, window;
  int batch, groups;
  int tile_extent[4];            // positions of a tile along n, d, h, w; their product is at most POSITIONS
  int tiles[4];                  // tiles along n, d, h, w
  int skew;                      // elements by which the window starts early along w, so that pieces are aligned
  int table_bytes, stage_bytes;  // of shared memory
  long long split_length;        // tiles of a split
  long long all_tiles;
  long long plane;  // elements of a partial plane: all weights
};

constexpr int GRID_M = ceil_div(IN_CHANNELS, ROWS), GRID_N = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr int FLUSH = ceil_div(2048, POSITIONS);

static_assert(CHUNK_TAPS <= COLUMNS, "a block computes all taps of its channels");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_wgrad_mma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad,
                     float* __restrict__ partial GUARD_PARAMETER, const Params params) {
  griddepcontrol_launch_dependents();
  RETURN_IF_EXACT;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  const int block_m = block % GRID_M;
  block /= GRID_M;
  const int block_n = block % GRID_N;
  block /= GRID_N;
  const int group = block % params.groups;
  const int split = block / params.groups;
  const long long first_tile = split * params.split_length;
  const int k_tiles =
      (int)(first_tile + params.split_length < params.all_tiles ? params.split_length : params.all_tiles - first_tile);

  const int first_in = block_m * ROWS, first_out = block_n * OUT_CHUNK;
  const int rows = IN_CHANNELS - first_in, channels = OUT_CHANNELS - first_out;  // valid channels of both sides

  int* const offsets = (int*)shared_memory;
  Place* const places = (Place*)(offsets + POSITIONS);
  char* const stage_memory = (char*)shared_memory + params.table_bytes;

  StageBoxLoader<X_CHANNELS_LAST, ROWS, Moving> x_loader(params.x, params.x_box);
  StageBoxLoader<G_CHANNELS_LAST, OUT_CHUNK, Moving> g_loader(params.g, params.window);
  x_loader.init(places, POSITIONS);
  g_loader.init(places + x_loader.box.pieces, volume(params.window.extent));
  list_positions(offsets, POSITIONS, params.window, params.tile_extent, params.skew);
  x += (long long)(group * IN_CHANNELS + first_in) * params.x.stride[1];
  grad += (long long)(group * OUT_CHANNELS + first_out) * params.g.stride[1];
  partial +=
      split * params.plane + (long long)(group * IN_CHANNELS + first_in) * (OUT_CHANNELS * TAPS) + first_out * TAPS;

  int columns[COLUMN_TILES];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; ++j) {
    const int column = Sums::operand_column(j);
    columns[j] = column < CHUNK_TAPS ? offset_of_tap(params.window, column / TAPS, column % TAPS) : 0;
  }

  Sums sums;
  sums.clear();
  bool flushed = false;
  auto flush = [&]() {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = Sums::first_row() + 16 * i + k / 2 * 8, column = Sums::first_column() + 8 * j + k % 2;
          if (row >= rows || column >= min(OUT_CHUNK, channels) * TAPS) continue;
          float* const to = partial + (long long)row * (OUT_CHANNELS * TAPS) + column;
          *to = flushed ? *to + sums.of[i][4 * j + k] : sums.of[i][4 * j + k];
        }
    sums.clear();
    flushed = true;
  };

  int tile[4];  // the next tile to load
  decode(params.tiles, first_tile, tile);
  auto load = [&](int, char* to) {
    int origin[4];  // the tile's first position; after to_window() the first element of its window
#pragma unroll
    for (int i = 0; i < 4; ++i) origin[i] = tile[i] * params.tile_extent[i];
    x_loader.load(x, rows, to, params.batch, origin);
    to_window(origin, params.skew);
    g_loader.load(grad, channels, to + A_BYTES, params.batch, origin);
    advance<false>(params.tiles, tile);
  };
  int until_flush = FLUSH;
  __syncthreads();
  run_stages<STAGES>(k_tiles, stage_memory, params.stage_bytes, load, [&](int, const char* from) {
    sums.add(from, from + A_BYTES, offsets, columns);
    if (--until_flush == 0) {
      flush();
      until_flush = FLUSH;
    }
  });
  flush();
}
