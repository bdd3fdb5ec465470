// The input gradient by mma.sync (mainloop/window_mma.cuh):
//
//   gx[n, ci, i] = Σ over output channels and taps of   w[ci, co, tap] · g[n, co, i·stride + tap·dilation - padding]
//
// GEMM. M = input channels of a group, N = batch x input positions, K = its (output channel, tap) pairs, in the
// weight's order. A block owns one M x N tile: ROWS input channels by a tile of at most COLUMNS positions. A pipeline
// stage holds one K-tile: OUT_CHUNK output channels with all their taps.
//
// Shared memory: tables of the pieces of both operands, and of the offsets of a stage's channels and taps and of the
// positions, then STAGES stages; at the end the offset of each position in the input.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "operand/half_copies.cuh"
#include "operand/window.cuh"
#include "mainloop/multistage.cuh"
#include "mainloop/window_mma.cuh"

struct Params {
  Tensor5 g, weight, x;  // the weight as rows of channels, whose elements are along h and w
  StageBox weight_box, window;
  int batch;
  int tile_extent[4];            // positions of a tile along n, d, h, w; their product is at most COLUMNS
  int tiles[4];                  // tiles along n, d, h, w
  int skew;                      // elements by which the window starts early along w, so that pieces are aligned
  int table_bytes, stage_bytes;  // of shared memory
  int pairs;                     // whether two neighbouring positions are stored together
};

constexpr int GRID_M = ceil_div(IN_CHANNELS, ROWS), K_TILES = ceil_div(OUT_CHANNELS, OUT_CHUNK);

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_dgrad_mma(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight, const scalar_t*,
                     scalar_t* __restrict__ dst GUARD_PARAMETER, const Params params) {
  RETURN_IF_EXACT;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  const int block_m = block % GRID_M;
  block /= GRID_M;
  const int tiles = volume(params.tiles);
  const int group = block / tiles;
  int first[4];  // first position of the tile
  tile_origin(params.tiles, params.tile_extent, block % tiles, first);

  const int first_in = block_m * ROWS;
  const int rows = IN_CHANNELS - first_in;  // valid rows, from the tile's first

  int* const offsets = (int*)shared_memory;
  int* const positions = offsets + DEPTH;
  Place* const places = (Place*)(positions + COLUMNS);
  char* const stage_memory = (char*)shared_memory + params.table_bytes;

  StageBoxLoader<false, ROWS, Moving> weight_loader(params.weight, params.weight_box);
  StageBoxLoader<G_CHANNELS_LAST, OUT_CHUNK, Still> g_loader(params.g, params.window);
  weight_loader.init(places, DEPTH);
  int window[4] = {first[0], first[1], first[2], first[3]};
  to_window(window, params.skew);
  g_loader.init((long long*)(places + weight_loader.box.pieces), volume(params.window.extent), params.batch, window);
  list_positions(positions, COLUMNS, params.window, params.tile_extent, params.skew);
  for (int i = threadIdx.x; i < DEPTH; i += THREADS) {
    const int channel = WEIGHT_STRIDE_OUT == 1 ? i % OUT_CHUNK : i / TAPS;
    const int tap = WEIGHT_STRIDE_OUT == 1 ? i / OUT_CHUNK : i % TAPS;
    offsets[i] = i < CHUNK_TAPS ? offset_of_tap(params.window, channel, tap) : 0;
  }
  grad += (long long)group * OUT_CHANNELS * params.g.stride[1];
  weight += (long long)(group * IN_CHANNELS + first_in) * WEIGHT_STRIDE_IN;
  __syncthreads();

  int columns[COLUMN_TILES];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; ++j) columns[j] = positions[Sums::operand_column(j)];

  Sums sums;
  sums.clear();
  auto load = [&](int stage, char* to) {
    const int origin[4] = {0, 0, 0, stage * (WEIGHT_STRIDE_OUT == 1 ? OUT_CHUNK : CHUNK_TAPS)};
    weight_loader.load(weight, rows, to, 1, origin);
    g_loader.load(grad + (long long)stage * OUT_CHUNK * params.g.stride[1], OUT_CHANNELS - stage * OUT_CHUNK,
                  to + A_BYTES);
  };
  run_stages<STAGES>(K_TILES, stage_memory, params.stage_bytes, load,
                     [&](int, const char* from) { sums.add(from, from + A_BYTES, offsets, columns); });

  // Offset of each position in the input; -1 if it does not exist.
  __syncthreads();
  long long* const targets = (long long*)stage_memory;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    int at[4];
    decode(params.tile_extent, i, at);
    const int n = first[0] + at[0], d = first[1] + at[1], h = first[2] + at[2], w = first[3] + at[3];
    const bool exists = at[0] < params.tile_extent[0] && n < params.batch && d < params.x.size[0] &&
                        h < params.x.size[1] && w < params.x.size[2];
    targets[i] =
        exists ? n * params.x.stride[0] + d * params.x.stride[2] + h * params.x.stride[3] + w * params.x.stride[4] : -1;
  }
  __syncthreads();
  dst += (long long)(group * IN_CHANNELS + first_in) * params.x.stride[1];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; ++j) {
    const long long* const target = targets + Sums::first_column() + 8 * j;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      const int row = Sums::first_row() + 8 * i;
      if (row >= rows) continue;
      scalar_t* const to = dst + row * params.x.stride[1];
      const float* const sum = sums.of[i / 2] + 4 * j + i % 2 * 2;
      Vector<scalar_t, 2> both;
      narrow(sum[0], both.value[0]);
      narrow(sum[1], both.value[1]);
      if (params.pairs) {
        if (target[0] >= 0) *(Vector<scalar_t, 2>*)(to + target[0]) = both;
      } else {
        if (target[0] >= 0) to[target[0]] = both.value[0];
        if (target[1] >= 0) to[target[1]] = both.value[1];
      }
    }
  }
}
