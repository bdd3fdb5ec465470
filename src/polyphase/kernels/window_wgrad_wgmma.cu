// The weight gradient by wgmma (mainloop/window_wgmma.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// GEMM. M = (output channel, tap) pairs of a group, N = its input channels, K = batch x input positions. A block owns
// one M x N tile, OUT_CHUNK output channels with all their taps by COLUMNS input channels, and one split of K: a
// contiguous run of tiles of positions. A pipeline stage holds one K-tile, which is one tile of positions. Splits write
// different partial planes, which the caller sums in order: the result does not depend on timing.
//
// With channels last, in half types, x is an MN-major B operand (MN_MAJOR: the descriptor's transpose bit), and W and C
// of g are merged: one channel, whose rows have W*C elements (`as_one_channel` in schedules/window_gemm/window.py).
//
// Tensor-core accumulation truncates at every step. So accumulators are flushed: after `flush` stages they are added in
// float32 to `partial` in global memory, and start from zero. A thread's earlier sums of PRELOADED column tiles are
// loaded together, so that few loads wait for others; one by one with PRELOADED 0, where registers would spill. Where
// there is one flush and one split, the sums are `narrowed` to the tensors' type at once.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "operand/half_copies.cuh"
#include "operand/run_loader.cuh"
#include "operand/window.cuh"
#include "operand/window_rows.cuh"
#include "mainloop/window_wgmma.cuh"

struct Params {
  TensorMap box, window_box;  // the input; the output gradient
  Tensor5 x, g;
  Window window;
  Runs runs;
  int batch, groups;
  int tile_extent[4];  // positions of a tile along n, d, h, w: whole operations
  int tiles[4];        // tiles along n, d, h, w
  int joined;          // W if H and W are contiguous and loaded as one run of H*W, else 0
  int steps, flush;    // wgmma k-steps per stage; stages between flushes
  int narrowed;        // whether `partial` is the result, in the tensors' type
  int skew;            // elements by which the window starts early along w, so that TMA boxes and pairs are aligned
  int box_bytes;       // bytes of the window's box, 0 if threads copy it
  int piece_bytes;     // bytes of a cp.async of the input, 8 or 4, 0 if TMA loads it
  int table_bytes, stage_bytes, window_offset;  // bytes of the offset table; of a stage; up to the window in its stage
  long long split_length;                       // tiles of a split
  long long all_tiles;
  long long plane;  // elements of a partial plane: all weights
};

constexpr int GRID_N = ceil_div(IN_CHANNELS, COLUMNS), GRID_M = ceil_div(OUT_CHANNELS, OUT_CHUNK);

static_assert(OUT_CHUNK * TAPS <= ROWS, "a block computes all taps of its channels");

constexpr int ALL_ROWS = OUT_CHANNELS * TAPS;  // rows of the product; innermost in the result
// Rows that are stored together: two if a thread's rows are neighbours and every tile's first row is even. (If two
// lanes had to exchange sums for that, the compiler would fence each product.)
constexpr int TOGETHER = PAIRS && ALL_ROWS % 2 == 0 && OUT_CHUNK * TAPS % 2 == 0 ? 2 : 1;
typedef Vector<float, TOGETHER> Stored;
typedef Vector<scalar_t, TOGETHER> Narrowed;

// Stores the accumulators of a warpgroup from element `to` of `partial` on. `columns`, `filled`: valid columns and rows
// of the tile; `again`: accumulate onto the previous flush; `narrowed`: as in Params.
__device__ __forceinline__ void flush(const Sums& sums, void* partial, long long to, int columns, int filled,
                                      bool again, bool narrowed) {
  to += (long long)Sums::first_column() * ALL_ROWS + Sums::row(0);
  columns -= Sums::first_column();  // valid columns, from the thread's first
  constexpr int AT_ONCE = PRELOADED > 1 ? PRELOADED : 1, OF_COLUMN = 2 * ROW_TILES / TOGETHER;
#pragma unroll
  for (int first = 0; first < COLUMN_TILES; first += AT_ONCE) {
    Stored before[AT_ONCE * 2 * OF_COLUMN] = {};
    const auto valid = [&](int j, int i) {  // column j from the first tile's on, row i
      return first + j / 2 < COLUMN_TILES && j / 2 * 8 + j % 2 < columns && Sums::row(i) < filled;
    };
    const auto element = [&](int j, int i) {
      return to + (j / 2 * 8 + j % 2) * ALL_ROWS + Sums::row(i) - Sums::row(0);
    };
    if constexpr (PRELOADED > 0) {
#pragma unroll
      for (int j = 0; j < AT_ONCE * 2; ++j)
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i += TOGETHER)
          if (again && valid(j, i))
            before[j * OF_COLUMN + i / TOGETHER] = *(const Stored*)((float*)partial + element(j, i));
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE * 2; ++j)
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; i += TOGETHER) {
        if (!valid(j, i)) continue;
        Stored sum = before[j * OF_COLUMN + i / TOGETHER];
        if constexpr (PRELOADED == 0) {
          if (again) sum = *(const Stored*)((float*)partial + element(j, i));
        }
        Narrowed result;
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
          sum.value[k] += sums.of[i / 2][(first + j / 2) * 4 + (i + k) % 2 * 2 + j % 2];
          narrow(sum.value[k], result.value[k]);
        }
        if (ELEMENT == 2 && narrowed)
          *(Narrowed*)((scalar_t*)partial + element(j, i)) = result;
        else
          *(Stored*)((float*)partial + element(j, i)) = sum;
      }
    to += AT_ONCE * 8 * ALL_ROWS, columns -= AT_ONCE * 8;
    __syncwarp();  // keeps the compiler from interleaving column tiles, which would spill
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_wgrad_wgmma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad,
                       void* __restrict__ partial GUARD_PARAMETER, const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  RETURN_IF_EXACT;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) WindowBarriers ring;
  int block = blockIdx.x;
  const int block_n = block % GRID_N;
  block /= GRID_N;
  const int block_m = block % GRID_M;
  block /= GRID_M;
  const int group = block % params.groups;
  const int split = block / params.groups;
  const long long first_tile = split * params.split_length;
  const int k_tiles =
      (int)(first_tile + params.split_length < params.all_tiles ? params.split_length : params.all_tiles - first_tile);

  const int first_in = block_n * COLUMNS, first_out = block_m * OUT_CHUNK;
  const int channels = OUT_CHANNELS - first_out;  // valid channels, from the tile's first

  char* const stage_memory = (char*)shared_memory;  // each stage: B (x, swizzled), then the window of g, from which A
                                                    // is gathered into registers
  int* const offsets = (int*)(shared_memory + STAGES * params.stage_bytes);
  Place* const places = (Place*)((char*)offsets + params.table_bytes);

  // Whether TMA loads both operands. If threads must copy the window, all producers do.
  const bool all_by_tma = params.box_bytes != 0;
  ring.init(all_by_tma);
  __syncthreads();

  // Producers start now: building the offset table below overlaps the first loads.
  if (threadIdx.x >= CONSUMER_THREADS) {
    RowLoader<OUT_CHUNK> g_loader(params.g, params.window);
    if (!all_by_tma) {
      g_loader.init(places);
      named_barrier_sync(LOADERS_MEET, LOADERS);
    }
    const scalar_t* const first_channel = grad + (long long)(group * OUT_CHANNELS + first_out) * params.g.stride[1];
    // tile: the next tile's index. origin: its first position; after to_window() the first element of its window.
    int tile[4], origin[4];
    decode(params.tiles, first_tile, tile);
    auto locate = [&]() {
#pragma unroll
      for (int i = 0; i < 4; ++i) origin[i] = tile[i] * params.tile_extent[i];
    };
    PipelineState<STAGES> state;
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    load_stages(
        k_tiles, all_by_tma, ring, state, stage_memory, params.stage_bytes,
        [&](int, char* to, unsigned barrier) {
          if (ELEMENT == 2 && params.piece_bytes) return;
          locate();
          const int channel = group * IN_CHANNELS + first_in, w = origin[3] + origin[2] * params.joined;
          const int place[5] = {MN_MAJOR ? channel : w, MN_MAJOR ? w : channel, params.joined ? 0 : origin[2],
                                origin[1], origin[0]};
          load_runs(params.box, x, params.runs, place, to, barrier);
          if (!all_by_tma) return;
          to_window(origin, params.skew);
          const int from[5] = {origin[3], origin[2], origin[1], origin[0], group * OUT_CHANNELS + first_out};
          tma_load_box(shared_address(to + params.window_offset), params.window_box, grad, from, params.box_bytes,
                       barrier);
          advance<false>(params.tiles, tile);
        },
        [&](int, char* to, unsigned barrier) {
          locate();
          if (ELEMENT == 2 && params.piece_bytes) {  // built again for each stage, since keeping it would spill
            const RunLoader x_loader(params.x, params.runs, params.piece_bytes, params.tile_extent, params.joined);
            const scalar_t* const column = x + (long long)(group * IN_CHANNELS + first_in) * params.x.stride[1];
            if (params.piece_bytes == 8) x_loader.load<8>(column, IN_CHANNELS - first_in, to, params.batch, origin);
            if (params.piece_bytes == 4) x_loader.load<4>(column, IN_CHANNELS - first_in, to, params.batch, origin);
            mbarrier_expect_cp_async(barrier);
          }
          to_window(origin, params.skew);
          const int shift =
              g_loader.load(first_channel, channels, to + params.window_offset, params.batch, origin, barrier);
          advance<false>(params.tiles, tile);
          return shift;
        });
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }

  list_positions<CONSUMER_THREADS>(offsets, params.steps * OPERATION, params.window, params.tile_extent, params.skew);
  named_barrier_sync(CONSUMERS_MEET, CONSUMER_THREADS);

  setmaxnreg_inc<CONSUMER_REGISTERS>();
  int offsets_of_rows[ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    // Rows past the tile read the last valid row (pair); they are never stored.
    const int row = min(Sums::row(i), OUT_CHUNK * TAPS - (PAIRS ? 2 : 1));
    offsets_of_rows[i / 2][i % 2] = offset_of_tap(params.window, row / TAPS, row % TAPS);
  }
  const long long to = split * params.plane + (long long)(group * IN_CHANNELS + first_in) * ALL_ROWS + first_out * TAPS;
  const int filled = min(OUT_CHUNK, channels) * TAPS;

  Sums sums;
  int until_flush = params.flush;
  PipelineState<STAGES> state;
  add_stages(k_tiles, ring, state, stage_memory, params.stage_bytes, ELEMENT == 2 && params.piece_bytes != 0,
             [&](int stage, const char* from, int shift) {
               sums.add(from + params.window_offset + shift, from, params.runs, offsets, offsets_of_rows, params.steps,
                        until_flush == params.flush, all_by_tma);
               if (--until_flush > 0 && stage + 1 < k_tiles) return;
               flush(sums, partial, to, IN_CHANNELS - first_in, filled, stage >= params.flush, params.narrowed);
               until_flush = params.flush;
             });
  if (k_tiles > 0) return;
  // An empty batch, which emitted files launch (the operators do not).
  for (int column = 0; column < min(COLUMNS, IN_CHANNELS - first_in); ++column)
    for (int row = threadIdx.x; row < filled; row += CONSUMER_THREADS)
      ((float*)partial)[to + column * ALL_ROWS + row] = 0;
}
