// The weight gradient of tensors whose channels are innermost, on tensor cores (mainloop/box_product.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. Rows of the product are input channels, columns units: some neighbouring output channels at one tap
// (operand/tap_windows.cuh). A block has some rows of one group and the units of some windows, and every n-th tile of
// input positions, of n parts, so that those that blocks have at a time are neighbours; a stage is a tile. The copy
// engine brings the tile's input and for each window what its taps meet of the output gradient; positions that do not
// exist are zeros of the input. Blocks on different parts write to different planes of `partial`, which the caller sums
// in order: the result does not depend on timing. There output channels are innermost. Blocks take items (columns
// fastest, then rows, group and part) in turns, and load the next while they store one.
//
// The cores' sums lose a bit at every step. So `flush` stages are summed there, and those sums in `partial`. Where
// there is but one part, of no more stages than that, `partial` is the result, of the tensors' type (`narrowed`).

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "operand/tap_windows.cuh"
#include "mainloop/box_product.cuh"

struct Geometry {
  TensorMap x_box, grad_box;
  int groups, blocks[2];  // of rows, of columns
  int lanes[4];           // positions of a tile along n, d, h, w: STEPS operations
  int tiles[4];           // tiles along n, d, h, w
  int ahead[4];           // a part's tiles are so far apart, along n, d, h, w: the number of parts
  int parts, flush, narrowed, items;
  long long all_tiles;
  long long plane;  // elements of one plane of `partial`: all weights
};

constexpr int BLOCK_ROWS = ROW_GROUPS * GROUP_ROWS;
constexpr bool WHOLE_UNITS = OUT_CHANNELS % UNIT == 0;
static_assert(OUT_CHANNELS % 2 == 0 && UNIT % 8 == 0, "neighbouring sums, and eight columns, are of one tap");

// What a block computes at once: its first input channel and window, and tiles of positions.
struct Item {
  int first_in, first_window, group, part, stages;

  __device__ __forceinline__ Item(const Geometry& g, int index) {
    first_window = index % g.blocks[1] * BLOCK_WINDOWS;
    index /= g.blocks[1];
    first_in = index % g.blocks[0] * BLOCK_ROWS;
    index /= g.blocks[0];
    group = index % g.groups, part = index / g.groups;
    stages = (int)((g.all_tiles - part + g.parts - 1) / g.parts);
  }
};

// By one warp: the boxes of an item's tiles, each by a lane of its own.
__device__ __forceinline__ void load_tiles(const Geometry& g, const Item& item, const scalar_t* x, const scalar_t* grad,
                                           Ring& ring, Turn& turn, const unsigned char* buffers) {
  const int in_boxes =
      min(BLOCK_ROWS / ROW_BOX, ceil_div(IN_CHANNELS - item.first_in, ROW_BOX));  // others are not stored
  const int boxes = in_boxes + min(BLOCK_WINDOWS, WINDOWS - item.first_window);
  int tile[4];
  decode(g.tiles, item.part, tile);
#pragma unroll 1
  for (int stage = 0; stage < item.stages; ++stage) {
    int at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = tile[i] * g.lanes[i];
    const unsigned buffer = shared_address(buffers + turn.index * stage_bytes<WindowColumns>());
    const unsigned full = shared_address(ring.full + turn.index);
    mbarrier_wait(shared_address(ring.empty + turn.index), turn.parity ^ 1);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < boxes; i += 32) {
      if (i < in_boxes) {
        const int from[5] = {item.group * IN_CHANNELS + item.first_in + i * ROW_BOX, at[3], at[2], at[1], at[0]};
        tma_load_box(buffer + i * box_bytes(ROW_PITCH), g.x_box, x, from, box_bytes(ROW_PITCH), full);
      } else {
        const Window window(item.first_window + i - in_boxes);
        const int from[5] = {item.group * OUT_CHANNELS + window.channel,
                             at[3] * AXIS_W.stride + window.tap[2] * AXIS_W.dilation - AXIS_W.padding,
                             at[2] * AXIS_H.stride + window.tap[1] * AXIS_H.dilation - AXIS_H.padding,
                             at[1] * AXIS_D.stride + window.tap[0] * AXIS_D.dilation - AXIS_D.padding, at[0]};
        tma_load_box(buffer + A_BYTES + (i - in_boxes) * WINDOW_BYTES, g.grad_box, grad, from, WINDOW_BOX, full);
      }
    }
    mbarrier_arrive(full);
    turn.next();
    int carry = 0;  // to the part's next tile
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      tile[i] += g.ahead[i] + carry;
      carry = i > 0 && tile[i] >= g.tiles[i];
      if (carry) tile[i] -= g.tiles[i];
    }
  }
}

// The sums of an item, all of them or those of the first `flush` stages or of the next ones: `again`.
__device__ __forceinline__ void store(const Geometry& g, const Item& item, const Sums& sums, void* partial,
                                      bool again) {
  const long long weights = (long long)(item.group * IN_CHANNELS + item.first_in) * (TAPS * OUT_CHANNELS);
  const int rows = IN_CHANNELS - item.first_in;  // that exist
  // Opaque, so that the compiler does not find all columns' places before the products: there are no registers for
  // that.
  const int first_window = (int)opaque(item.first_window);
#pragma unroll
  for (int line = 0; line < LINES; ++line) {
    const int first_unit = (int)opaque((column_group() * LINES + line) * LINE_UNITS);
    // The place of a column in the first row, below zero where there is none.
    const auto place = [=](int column) {
      const int unit = first_unit + column / UNIT, index = first_window + unit / WINDOW_TAPS;
      const Window window(index);
      const int tap = window.weight_tap(unit % WINDOW_TAPS), out = window.channel + column % UNIT;
      return index < WINDOWS && tap >= 0 && (WHOLE_UNITS || out < OUT_CHANNELS) ? tap * OUT_CHANNELS + out : -1;
    };
    if (ELEMENT == 2 && g.narrowed) {
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
        __syncwarp();  // so that it does not mingle columns, either
      }
    } else {
      float* const to = (float*)partial + item.part * g.plane + weights;
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    window_wgrad_tma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, void* __restrict__ partial,
                     const __grid_constant__ Geometry g) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) Ring ring;
  if (threadIdx.x == 0) ring.init(32, MULTIPLIERS / 32);
  __syncthreads();
  Turn turn;
  if (threadIdx.x < MULTIPLIERS) {
    registers_change<true>();
#pragma unroll 1
    for (int index = blockIdx.x; index < g.items; index += gridDim.x) {
      const Item item(g, index);
      int stage = 0;
#pragma unroll 1
      do {
        Sums sums;
        const int count = min(g.flush, item.stages - stage);
        if (count == 0) sums.clear();  // of an empty batch
        sums.multiply<WindowColumns>(count, ring, turn, shared_memory);
        store(g, item, sums, partial, stage > 0);
        stage += count;
      } while (stage < item.stages);
    }
  } else {
    registers_change<false>();
    if (threadIdx.x < MULTIPLIERS + 32)
#pragma unroll 1
      for (int index = blockIdx.x; index < g.items; index += gridDim.x)
        load_tiles(g, Item(g, index), x, grad, ring, turn, shared_memory);
  }
}
