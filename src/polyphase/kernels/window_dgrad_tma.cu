// The input gradient in NHWC, by TMA and wgmma (mainloop/box_product.cuh):
//
//   gx[n, ci, i] = Σ over taps and output channels of   g[n, co, i·stride + tap·dilation - padding] · w[ci, co, tap]
//
// GEMM. M = batch x input positions, N = input channels of a group, K = (tap, output channel) pairs. A work tile is one
// M x N tile, a tile of positions by COLUMNS input channels, and one split of K. A pipeline stage holds one K-tile: one
// tap and as many output channels as STEPS k-steps take. For each tap TMA loads the tile's elements of the output
// gradient again, every stride-th one, and zeros outside the tensor; after the first tap most come from L2.
//
// Blocks are persistent: work tiles are dealt out round-robin (N fastest, then tile, group, split), and the next is
// loaded while one is stored. If there are few work tiles, K is split `splits` times; each split writes a partial
// plane, and steps/reduce_splits.cu adds them.
//
// Results are stored in NHWC or, with CHANNELS_FIRST, in NCHW: then lanes exchange them, so that each has neighbouring
// positions, or they pass through shared memory.
//
// Tensor-core accumulation truncates at every step. So if K is long, accumulators are flushed every FLUSH stages: they
// are added to a second set in registers, and start from zero.
//
// SCALED: operands are copies in float16 (operand/half_copies.cuh), and sums are multiplied back.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "operand/half_copies.cuh"
#include "epilogue/store_gradient.cuh"
#include "mainloop/box_product.cuh"

struct Params {
  TensorMap grad_box, weight_box;
  Tensor5 x;
  int batch, groups;
  int tile_extent[4];        // positions of a tile along n, d, h, w; their product is at most M of a block
  int tiles[4];              // tiles along n, d, h, w
  int splits, split_length;  // of K; K-tiles of each but the last, which may have fewer
  long long plane;           // elements of a partial plane
};

constexpr int CHANNELS = STEPS * OPERATION;  // channels of a stage
constexpr int CHUNKS = ceil_div(OUT_CHANNELS, CHANNELS), K_TILES = TAPS * CHUNKS;
constexpr int GRID_N = ceil_div(IN_CHANNELS, COLUMNS);
constexpr bool WHOLE_BLOCKS = IN_CHANNELS % COLUMNS == 0;

// Layout of B in a stage, for `Sums::multiply`: the weights are one box.
struct TapColumns {
  static constexpr int BYTES = COLUMNS * COLUMN_PITCH, BESIDE = 0, EIGHT = 8 * COLUMN_PITCH;
  static __host__ __device__ constexpr int line(int) { return 0; }
  static __host__ __device__ constexpr int step(int index) { return 32 * index; }
};

// A tile of M x N, and a split of K.
struct WorkTile {
  int split, group, first_in;
  int first[4];  // first position along n, d, h, w

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    const int tiles = volume(params.tiles);
    first_in = index % GRID_N * COLUMNS;
    index /= GRID_N;
    split = index / (tiles * params.groups);
    group = index / tiles % params.groups;
    tile_origin(params.tiles, params.tile_extent, index % tiles, first);
  }
  static __device__ __forceinline__ int count(const Params& params) {
    return volume(params.tiles) * params.groups * GRID_N * params.splits;
  }
  __device__ __forceinline__ int first_stage(const Params& params) const { return split * params.split_length; }
  __device__ __forceinline__ int stages(const Params& params) const {
    return min(params.split_length, K_TILES - first_stage(params));
  }
};

// A row's position in its tile along n, d, h, w, a byte each; NOWHERE past the tile.
constexpr unsigned NOWHERE = ~0u;
__device__ __forceinline__ unsigned place_of(const Params& params, int row) {
  int at[4];
  decode(params.tile_extent, row, at);
  return at[0] < params.tile_extent[0] ? at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3] : NOWHERE;
}

// The `i`-th of two rows that a thread stores of a row tile: its accumulators' row or, with CHANNELS_FIRST, that of
// epilogue/store_gradient.cuh.
__device__ __forceinline__ int row_of_thread(bool pairs, int tile, int i) {
  return CHANNELS_FIRST ? row_group() * GROUP_ROWS + tile * 64 + stored_row(pairs, i) : Sums::row(tile, 2 * i);
}

// Stores a work tile to `dst`, the tensor or a partial plane. `staged`: memory of the warpgroup, whose threads call
// this together.
template <class Stored>
__device__ __forceinline__ void store(const Params& params, const WorkTile& work, const Sums& sums,
                                      const unsigned (&places)[ROW_TILES][2], Stored* dst, bool pairs,
                                      unsigned char* staged) {
  const long long channel = CHANNELS_FIRST ? params.x.stride[1] : 1;
  dst += (work.group * IN_CHANNELS + work.first_in) * channel;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    Stored* to[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int at[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) at[k] = work.first[k] + (int)(places[i][j] >> (24 - 8 * k) & 255);
      const bool exists = places[i][j] != NOWHERE && at[0] < params.batch && at[1] < params.x.size[0] &&
                          at[2] < params.x.size[1] && at[3] < params.x.size[2];
      to[j] = exists ? dst + offset_of(params.x, at) : nullptr;
    }
    const int columns = IN_CHANNELS - work.first_in;
    constexpr bool TOGETHER = IN_CHANNELS % (8 / sizeof(Stored)) == 0;  // 32 bytes of four threads
    if constexpr (CHANNELS_FIRST) {
      if (pairs)
        store_row_pair<WHOLE_BLOCKS>(sums.of[i], to, channel, columns);
      else
        store_columns<WHOLE_BLOCKS, ROW_TILES>(sums.of[i], i, to, channel, columns, staged);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) store_pixel<WHOLE_BLOCKS, TOGETHER>(sums.of[i], j, to[j], to[j] ? columns : 0);
    }
  }
}

// By one thread: TMA loads of all stages of the block's work tiles.
__device__ __forceinline__ void load_items(const Params& params, const scalar_t* grad, const scalar_t* weight,
                                           PipelineBarriers<STAGES>& ring, const unsigned char* stage_memory) {
  griddepcontrol_wait();
  PipelineState<STAGES> state;
  const int work_tiles = WorkTile::count(params), step = gridDim.x;
  const int bytes = volume(params.tile_extent) * ROW_PITCH;
#pragma unroll 1
  for (int index = blockIdx.x; index < work_tiles; index += step) {
    const WorkTile work(params, index);
    const int first = work.first_stage(params), end = first + work.stages(params);
    int chunk = first % CHUNKS, tap = first / CHUNKS;
#pragma unroll 1
    for (int stage = first; stage < end; ++stage) {
      const int width = tap % AXIS_W.kernel, line = tap / AXIS_W.kernel;
      const int height = line % AXIS_H.kernel, depth = line / AXIS_H.kernel;
      const unsigned to = shared_address(stage_memory + state.index * stage_bytes<TapColumns>());
      const unsigned full = shared_address(ring.full + state.index);
      const int from[5] = {work.group * OUT_CHANNELS + chunk * CHANNELS,
                           work.first[3] * AXIS_W.stride + src_offset(AXIS_W, width),
                           work.first[2] * AXIS_H.stride + src_offset(AXIS_H, height),
                           work.first[1] * AXIS_D.stride + src_offset(AXIS_D, depth), work.first[0]};
      const int weights[5] = {chunk * CHANNELS, work.group * IN_CHANNELS + work.first_in, tap, 0, 0};
      mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
      tma_load_box(to, params.grad_box, grad, from, bytes, full);
      tma_load_box(to + A_BYTES, params.weight_box, weight, weights, TapColumns::BYTES, full);
      mbarrier_arrive(full);
      state.next();
      if (++chunk == CHUNKS) chunk = 0, ++tap;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_dgrad_tma(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight,
                     [[maybe_unused]] const HalfCopies* scales, scalar_t* __restrict__ dst GUARD_PARAMETER,
                     const __grid_constant__ Params params) {
  RETURN_IF_EXACT;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) PipelineBarriers<STAGES> ring;
  __shared__ __align__(16) unsigned char staged[ROW_GROUPS][CHANNELS_FIRST ? STAGED_BYTES : 1];
  if (threadIdx.x == 0) ring.init(1, CONSUMER_THREADS / 32);
  __syncthreads();

  const int work_tiles = WorkTile::count(params), step = gridDim.x;
  PipelineState<STAGES> state;
  if (threadIdx.x < CONSUMER_THREADS) {
    reallocate_registers<true>();
#if SCALED
    griddepcontrol_wait();  // for the scales
#endif
    const bool pairs = CHANNELS_FIRST && in_pairs(params.x, dst, params.tile_extent[3]);
    unsigned places[ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) places[i / 2][i % 2] = place_of(params, row_of_thread(pairs, i / 2, i % 2));
#pragma unroll 1
    for (int index = blockIdx.x; index < work_tiles; index += step) {
      const WorkTile work(params, index);
      const int stages = work.stages(params);
      Sums sums, total;
      if (FLUSH < K_TILES) {
#pragma unroll 1
        for (int stage = 0; stage < stages; stage += FLUSH) {
          sums.multiply<TapColumns>(min(FLUSH, stages - stage), ring, state, shared_memory);
          total.take(sums, stage == 0);
        }
      } else {
        sums.multiply<TapColumns>(stages, ring, state, shared_memory);
      }
      Sums& all = FLUSH < K_TILES ? total : sums;
#if SCALED
      all.unscale(Unscaling(*scales));
#endif
      if (ELEMENT == sizeof(float) || SCALED || params.splits > 1)
        store(params, work, all, places, (float*)dst + work.split * params.plane, pairs, staged[row_group()]);
      else
        store(params, work, all, places, dst, pairs, staged[row_group()]);
    }
  } else {
    reallocate_registers<false>();
    if (threadIdx.x == CONSUMER_THREADS) load_items(params, grad, weight, ring, shared_memory);
  }
}
