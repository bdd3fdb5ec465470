// The weight gradient by Hopper's instruction (mainloop/window_wgmma.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. A block owns COLUMNS input channels and OUT_CHUNK output channels with all their taps, of one group,
// and one contiguous part of the tiles of input positions; a stage is a tile. Blocks on different parts write to
// different planes of `partial`, which the caller sums in order: the result does not depend on timing.
//
// With channels last, in half types, the input is TRANSPOSED, and output channels that lie side by side are taken for
// one channel of wider rows (`as_one_channel` in schedules/window_gemm/window.py).
//
// Tensor-core accumulation truncates at every step. So some stages are summed there, and those sums in `partial`.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "operand/run_loader.cuh"
#include "operand/window.cuh"
#include "operand/window_rows.cuh"
#include "mainloop/window_wgmma.cuh"

struct Params {
  TensorMap box, window_box;  // of the input, and of the output gradient
  Tensor5 x, g;
  Window window;
  Runs runs;
  int batch, groups;
  int lanes[4];      // positions of a tile along n, d, h, w: whole operations
  int tiles[4];      // tiles along n, d, h, w
  int joined;        // elements of a row, where a slab's rows follow each other as one; 0 where they do not
  int steps, flush;  // operations of a stage; stages that the tensor cores sum
  int skew;          // elements from the window's first to what the first tap of the first position meets
  int box_bytes;     // of the window, if TMA brings it
  int piece_bytes;   // of the input, if TMA does not bring it: what is copied at once, 8 or 4
  int table_bytes, stage_bytes, window_bytes;  // of shared memory
  long long part_length;                       // tiles of a part
  long long all_tiles;
  long long plane;  // elements of one plane of `partial`: all weights
};

constexpr int COLUMN_BLOCKS = ceil_div(IN_CHANNELS, COLUMNS), ROW_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK);

static_assert(OUT_CHUNK * TAPS <= ROWS, "a block computes all taps of its channels");

// Stores what a group of threads has summed, or adds it to what it stored before (`again`): `columns` exist, and
// `filled` rows of the block.
__device__ __forceinline__ void flush(const Sums& sums, float* partial, int columns, int filled, bool again) {
  float* to = partial + (long long)Sums::first_column() * (OUT_CHANNELS * TAPS) + Sums::row(0);
  columns -= Sums::first_column();  // that exist, from there on
#pragma unroll
  for (int tile = 0; tile < COLUMN_TILES; ++tile) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float* const rows = to + column * (OUT_CHANNELS * TAPS);
      float before[2 * ROW_TILES] = {};  // on their way together
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i)
        if (again && column < columns && Sums::row(i) < filled) before[i] = rows[Sums::row(i) - Sums::row(0)];
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i)
        if (column < columns && Sums::row(i) < filled)
          rows[Sums::row(i) - Sums::row(0)] = before[i] + sums.of[i / 2][tile * 4 + i % 2 * 2 + column];
    }
    to += 8 * (OUT_CHANNELS * TAPS), columns -= 8;
    __syncwarp();  // so that the compiler does not mingle column tiles, for which there are no registers
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_wgrad_wgmma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, float* __restrict__ partial,
                       const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) WindowBarriers ring;
  int block = blockIdx.x;
  const int column_block = block % COLUMN_BLOCKS;
  block /= COLUMN_BLOCKS;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int group = block % params.groups;
  const int part = block / params.groups;
  const long long first_tile = part * params.part_length;
  const int stages =
      (int)(first_tile + params.part_length < params.all_tiles ? params.part_length : params.all_tiles - first_tile);

  const int first_in = column_block * COLUMNS, first_out = row_block * OUT_CHUNK;
  const int channels = OUT_CHANNELS - first_out;  // that exist, from there on

  char* const buffers = (char*)shared_memory;  // the operand, then the window
  int* const offsets = (int*)(shared_memory + BUFFERS * params.stage_bytes);
  Place* const places = (Place*)((char*)offsets + params.table_bytes);

  const bool tells = params.box_bytes != 0;  // all: where threads copy the input, they also copy the window
  ring.init(tells);
  __syncthreads();

  if (threadIdx.x >= CONSUMER_THREADS) {  // at once: what the others do first hides their first stages
    RowLoader<OUT_CHUNK> g_loader(params.g, params.window);
    if (!tells) {
      g_loader.init(places);
      named_barrier_sync(LOADERS_MEET, LOADERS);
    }
    const scalar_t* const first_channel = grad + (long long)(group * OUT_CHANNELS + first_out) * params.g.stride[1];
    int tile[4], origin[4];  // the next to be loaded, and its first position
    decode(params.tiles, first_tile, tile);
    auto next = [&]() {
#pragma unroll
      for (int i = 3; i > 0; --i) {
        if (++tile[i] < params.tiles[i]) return;
        tile[i] = 0;
      }
      ++tile[0];
    };
    auto locate = [&]() {
#pragma unroll
      for (int i = 0; i < 4; ++i) origin[i] = tile[i] * params.lanes[i];
    };
    load_stages(
        stages, tells, ring, buffers, params.stage_bytes,
        [&](int, char* to, unsigned barrier) {
          if (ELEMENT == 2 && params.piece_bytes) return;
          locate();
          const int channel = group * IN_CHANNELS + first_in, w = origin[3] + origin[2] * params.joined;
          const int place[5] = {TRANSPOSED ? channel : w, TRANSPOSED ? w : channel, params.joined ? 0 : origin[2],
                                origin[1], origin[0]};
          load_runs(params.box, x, params.runs, place, to, barrier);
          if (!tells) return;
          to_window(origin, params.skew);
          const int from[5] = {origin[3], origin[2], origin[1], origin[0], group * OUT_CHANNELS + first_out};
          tma_load_box(shared_address(to + params.window_bytes), params.window_box, grad, from, params.box_bytes,
                       barrier);
          next();
        },
        [&](int, char* to) {
          locate();
          if (ELEMENT == 2 && params.piece_bytes) {  // found anew for each stage: there are no registers to keep it
            const RunLoader x_loader(params.x, params.runs, params.piece_bytes, params.lanes, params.joined);
            const scalar_t* const column = x + (long long)(group * IN_CHANNELS + first_in) * params.x.stride[1];
            if (params.piece_bytes == 8) x_loader.load<8>(column, IN_CHANNELS - first_in, to, params.batch, origin);
            if (params.piece_bytes == 4) x_loader.load<4>(column, IN_CHANNELS - first_in, to, params.batch, origin);
          }
          to_window(origin, params.skew);
          const int shift = g_loader.load(first_channel, channels, to + params.window_bytes, params.batch, origin);
          next();
          return shift;
        });
    return;
  }

  list_positions<CONSUMER_THREADS>(offsets, params.steps * OPERATION, params.window, params.lanes, params.skew);
  named_barrier_sync(CONSUMERS_MEET, CONSUMER_THREADS);

  setmaxnreg_inc<CONSUMER_REGISTERS>();
  int offsets_of_rows[ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const int row = min(Sums::row(i), OUT_CHUNK * TAPS - (PAIRS ? 2 : 1));  // the last, or its pair, for those beyond
    offsets_of_rows[i / 2][i % 2] = offset_of_tap(params.window, row / TAPS, row % TAPS);
  }
  partial +=
      part * params.plane + (long long)(group * IN_CHANNELS + first_in) * (OUT_CHANNELS * TAPS) + first_out * TAPS;
  const int filled = min(OUT_CHUNK, channels) * TAPS;

  Sums sums;
  int until_flush = params.flush;
  add_stages(stages, ring, buffers, params.stage_bytes, ELEMENT == 2 && params.piece_bytes != 0,
             [&](int stage, const char* from, int shift) {
               sums.add(from + params.window_bytes + shift, from, params.runs, offsets, offsets_of_rows, params.steps,
                        until_flush == params.flush, tells);
               if (--until_flush > 0 && stage + 1 < stages) return;
               flush(sums, partial, IN_CHANNELS - first_in, filled, stage >= params.flush);
               until_flush = params.flush;
             });
  if (stages > 0) return;
  for (int column = 0; column < min(COLUMNS, IN_CHANNELS - first_in); ++column)  // of an empty batch
    for (int row = threadIdx.x; row < filled; row += CONSUMER_THREADS)
      partial[column * (OUT_CHANNELS * TAPS) + row] = 0;
}
