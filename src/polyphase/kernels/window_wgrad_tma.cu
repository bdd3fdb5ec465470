// The weight gradient in NHWC, by TMA and wgmma, or mma.sync in float32 (mainloop/box_product.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// GEMM. M = input channels of a group, N = (tap, output channel) pairs, K = batch x input positions. N consists of
// units: neighbouring output channels at one tap (operand/tap_windows.cuh). A work tile is some rows of M, the units of
// some windows, and one split of K: of n splits each has every n-th tile of positions, so that concurrent blocks read
// neighbouring tiles. A pipeline stage holds one K-tile, which is one tile of positions: TMA loads its input and, for
// each window, the elements of the output gradient that its taps read. Positions past the tensor are zeros of the
// input. Splits write different partial planes, output channels innermost, which the caller sums in order: the
// result does not depend on timing.
//
// Blocks are persistent: work tiles are dealt out round-robin (N fastest, then M, group, split), and the next is loaded
// while one is stored.
//
// Tensor-core accumulation truncates at every step. So accumulators are flushed: after `flush` stages they are added in
// float32 to `partial` in global memory, and start from zero. If there is a single split and a single flush, `partial`
// is the result, in the tensors' type (`narrowed`).
//
// SCALED: operands are copies in float16 (operand/half_copies.cuh), and sums are multiplied back.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "operand/half_copies.cuh"
#include "operand/tap_windows.cuh"
#include "epilogue/exchange.cuh"
#include "ptx/griddepcontrol.cuh"
#include "mainloop/box_product.cuh"

struct Params {
  TensorMap x_box, grad_box;
  int groups, blocks[2];  // M-tiles and N-tiles of a group
  int tile_extent[4];     // positions of a tile along n, d, h, w: STEPS k-steps in all
  int tiles[4];           // tiles along n, d, h, w
  int ahead[4];           // step from a split's tile to its next, in tiles along n, d, h, w: `splits` in mixed radix
  int splits, flush, narrowed, work_tiles;
  long long all_tiles;
  long long plane;  // elements of a partial plane: all weights
};

constexpr int BLOCK_ROWS = ROW_GROUPS * GROUP_ROWS;
constexpr bool WHOLE_UNITS = OUT_CHANNELS % UNIT == 0;
static_assert(OUT_CHANNELS % 2 == 0 && UNIT % 8 == 0, "neighbouring sums, and eight columns, are of one tap");

// A work tile: its first input channel and window, and its split of K.
struct WorkTile {
  int first_in, first_window, group, split, stages;

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    first_window = index % params.blocks[1] * BLOCK_WINDOWS;
    index /= params.blocks[1];
    first_in = index % params.blocks[0] * BLOCK_ROWS;
    index /= params.blocks[0];
    group = index % params.groups, split = index / params.groups;
    stages = (int)((params.all_tiles - split + params.splits - 1) / params.splits);
  }
};

// By one warp: TMA loads of a work tile's K-tiles, each box by another lane.
__device__ __forceinline__ void load_tiles(const Params& params, const WorkTile& work, const scalar_t* x,
                                           const scalar_t* grad, PipelineBarriers<STAGES>& ring,
                                           PipelineState<STAGES>& state, const unsigned char* stage_memory) {
  const int in_boxes =
      min(BLOCK_ROWS / ROW_BOX, ceil_div(IN_CHANNELS - work.first_in, ROW_BOX));  // rows past the group are not stored
  const int boxes = in_boxes + min(BLOCK_WINDOWS, WINDOWS - work.first_window);
  int tile[4];
  decode(params.tiles, work.split, tile);
#pragma unroll 1
  for (int stage = 0; stage < work.stages; ++stage) {
    int at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = tile[i] * params.tile_extent[i];
    const unsigned buffer = shared_address(stage_memory + state.index * stage_bytes<WindowColumns>());
    const unsigned full = shared_address(ring.full + state.index);
    mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < boxes; i += 32) {
      if (i < in_boxes) {
        const int from[5] = {work.group * IN_CHANNELS + work.first_in + i * ROW_BOX, at[3], at[2], at[1], at[0]};
        tma_load_box(buffer + i * box_bytes(ROW_PITCH), params.x_box, x, from, box_bytes(ROW_PITCH), full);
      } else {
        const TapWindow window(work.first_window + i - in_boxes);
        const int from[5] = {work.group * OUT_CHANNELS + window.channel,
                             at[3] * AXIS_W.stride + window.tap[2] * AXIS_W.dilation - AXIS_W.padding,
                             at[2] * AXIS_H.stride + window.tap[1] * AXIS_H.dilation - AXIS_H.padding,
                             at[1] * AXIS_D.stride + window.tap[0] * AXIS_D.dilation - AXIS_D.padding, at[0]};
        tma_load_box(buffer + A_BYTES + (i - in_boxes) * WINDOW_BYTES, params.grad_box, grad, from, WINDOW_BOX, full);
      }
    }
    mbarrier_arrive(full);
    state.next();
    int carry = 0;  // adds `ahead`, in mixed radix
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      tile[i] += params.ahead[i] + carry;
      carry = i > 0 && tile[i] >= params.tiles[i];
      if (carry) tile[i] -= params.tiles[i];
    }
  }
}

// Stores the accumulators of a work tile. `again`: accumulate onto the previous flush.
__device__ __forceinline__ void store(const Params& params, const WorkTile& work, const Sums& sums, void* partial,
                                      bool again) {
  const long long weights = (long long)(work.group * IN_CHANNELS + work.first_in) * (TAPS * OUT_CHANNELS);
  const int rows = IN_CHANNELS - work.first_in;  // rows that exist
  // Opaque, so that the compiler does not hoist all columns' addresses above the products, which would spill.
  const int first_window = (int)opaque(work.first_window);
#pragma unroll
  for (int line = 0; line < LINES; ++line) {
    const int first_unit = (int)opaque((column_group() * LINES + line) * LINE_UNITS);
    // Offset of a column in the first row; negative for none.
    const auto place = [=](int column) {
      const int unit = first_unit + column / UNIT, index = first_window + unit / WINDOW_TAPS;
      const TapWindow window(index);
      const int tap = window.weight_tap(unit % WINDOW_TAPS), out = window.channel + column % UNIT;
      return index < WINDOWS && tap >= 0 && (WHOLE_UNITS || out < OUT_CHANNELS) ? tap * OUT_CHANNELS + out : -1;
    };
    if (ELEMENT == 2 && !SCALED && params.narrowed) {
      scalar_t* const to = (scalar_t*)partial + weights;
#pragma unroll
      for (int j = 0; j < SUMS / 4; j += 2) {
        const int at = place(8 * j + first_exchanged());
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
          const int row = Sums::row(i / 2, i % 2 * 2);
          const float* const found = sums.of[i / 2 * LINES + line] + 4 * j + i % 2 * 2;
          const Vector<unsigned, 2> four = exchanged(found, found + 4);
          if (at >= 0 && row < rows) *(Vector<unsigned, 2>*)(to + row * (TAPS * OUT_CHANNELS) + at) = four;
        }
        __syncwarp();  // keeps the compiler from interleaving columns, which would spill
      }
    } else {
      float* const to = (float*)partial + work.split * params.plane + weights;
#pragma unroll
      for (int j = 0; j < SUMS / 4; ++j) {
        const int at = place(Sums::column(4 * j));
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
          const int row = Sums::row(i / 2, 4 * j + i % 2 * 2);
          if (at < 0 || row >= rows) continue;
          const float* const found = sums.of[i / 2 * LINES + line] + 4 * j + i % 2 * 2;
          Vector<float, 2>* const pair = (Vector<float, 2>*)(to + row * (TAPS * OUT_CHANNELS) + at);
          const Vector<float, 2> before = again ? *pair : Vector<float, 2>{};
          *pair = {found[0] + before.value[0], found[1] + before.value[1]};
        }
        __syncwarp();
      }
    }
  }
}

#if SCALED
#define SCALES_PARAMETER , const HalfCopies* __restrict__ scales
#else
#define SCALES_PARAMETER
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_wgrad_tma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad SCALES_PARAMETER,
                     void* __restrict__ partial GUARD_PARAMETER, const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  RETURN_IF_EXACT;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) PipelineBarriers<STAGES> ring;
  if (threadIdx.x == 0) ring.init(32, CONSUMER_THREADS / 32);
  __syncthreads();
  PipelineState<STAGES> state;
  if (threadIdx.x < CONSUMER_THREADS) {
    reallocate_registers<true>();
#pragma unroll 1
    for (int index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
      const WorkTile work(params, index);
      int stage = 0;
#pragma unroll 1
      do {
        Sums sums;
        const int count = min(params.flush, work.stages - stage);
        if (count == 0) sums.clear();  // an empty batch, which emitted files launch (the operators do not)
        sums.multiply<WindowColumns>(count, ring, state, shared_memory);
#if SCALED
        sums.unscale(Unscaling(*scales));
#endif
        store(params, work, sums, partial, stage > 0);
        stage += count;
      } while (stage < work.stages);
    }
  } else {
    reallocate_registers<false>();
    if (threadIdx.x < CONSUMER_THREADS + 32)
#pragma unroll 1
      for (int index = blockIdx.x; index < params.work_tiles; index += gridDim.x)
        load_tiles(params, WorkTile(params, index), x, grad, ring, state, shared_memory);
  }
}
