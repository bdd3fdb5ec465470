// The weight gradient of tensors whose channels are innermost, on tensor cores (common/box_product.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. Rows of the product are input channels, columns units: some neighbouring output channels at one tap. A
// block has some rows and columns of one group, and one contiguous part of the tiles of input positions; a stage is a
// tile. For each unit the copy engine brings the tile's elements of the output gradient, every stride-th one; positions
// that do not exist are zeros of the input. Blocks on different parts write to different planes of `partial`, which the
// caller sums in order: the result does not depend on timing. There output channels are innermost. Blocks take items
// (columns fastest, then rows, group and part) in turns, and load the next while they store one.
//
// The cores' sums lose a bit at every step. So `flush` stages are summed there, and those sums in `partial`. Where
// there is but one part, of no more stages than that, `partial` is the result, of the tensors' type (`narrowed`).

struct Geometry {
  TensorMap x_box, grad_box;
  int groups, blocks[2];  // of rows, of columns
  int lanes[4];           // positions of a tile along n, d, h, w: STEPS operations
  int tiles[4];           // tiles along n, d, h, w
  int flush, narrowed, items;
  long long part_length;  // tiles of a part
  long long all_tiles;
  long long plane;  // elements of one plane of `partial`: all weights
};

constexpr int BLOCK_ROWS = ROW_GROUPS * GROUP_ROWS, BLOCK_COLUMNS = 2 / ROW_GROUPS * COLUMNS;
constexpr int UNIT = COLUMN_BOX;  // output channels
constexpr int TAP_UNITS = ceil_div(OUT_CHANNELS, UNIT), UNITS = TAPS * TAP_UNITS;
constexpr bool WHOLE_UNITS = OUT_CHANNELS % UNIT == 0;
static_assert(OUT_CHANNELS % 2 == 0 && UNIT % 8 == 0, "neighbouring sums, and eight columns, are of one tap");

// Where the output gradient's boxes of a unit begin.
struct UnitPlace {
  int channel, offset[3];  // the channel of the group; along d, h, w

  __device__ __forceinline__ explicit UnitPlace(int unit) {
    const int tap = unit / TAP_UNITS;
    channel = unit % TAP_UNITS * UNIT;
    offset[0] = tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation - AXIS_D.padding;
    offset[1] = tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation - AXIS_H.padding;
    offset[2] = tap % AXIS_W.kernel * AXIS_W.dilation - AXIS_W.padding;
  }
};

// What a block computes at once: its first input channel and unit, and tiles of positions.
struct Item {
  int first_in, first_unit, group, part, stages;
  long long first_tile;

  __device__ __forceinline__ Item(const Geometry& g, int index) {
    first_unit = index % g.blocks[1] * (BLOCK_COLUMNS / UNIT);
    index /= g.blocks[1];
    first_in = index % g.blocks[0] * BLOCK_ROWS;
    index /= g.blocks[0];
    group = index % g.groups, part = index / g.groups;
    first_tile = part * g.part_length;
    stages = (int)(first_tile + g.part_length < g.all_tiles ? g.part_length : g.all_tiles - first_tile);
  }
};

// By one warp: the boxes of an item's tiles, each by a lane of its own.
__device__ __forceinline__ void load_tiles(const Geometry& g, const Item& item, const scalar_t* x, const scalar_t* grad,
                                           Ring& ring, Turn& turn, const unsigned char* buffers) {
  const int in_boxes =
      min(BLOCK_ROWS / ROW_BOX, ceil_div(IN_CHANNELS - item.first_in, ROW_BOX));  // others are not stored
  const int boxes = in_boxes + min(BLOCK_COLUMNS / UNIT, UNITS - item.first_unit);
  int tile[4];
  decode(g.tiles, item.first_tile, tile);
#pragma unroll 1
  for (int stage = 0; stage < item.stages; ++stage) {
    int at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = tile[i] * g.lanes[i];
    const unsigned buffer = shared_address(buffers + turn.index * STAGE_BYTES);
    const unsigned full = shared_address(ring.full + turn.index);
    barrier_wait(shared_address(ring.empty + turn.index), turn.parity ^ 1);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < boxes; i += 32) {
      if (i < in_boxes) {
        const int from[5] = {item.group * IN_CHANNELS + item.first_in + i * ROW_BOX, at[3], at[2], at[1], at[0]};
        box_copy(buffer + i * box_bytes(ROW_PITCH), g.x_box, x, from, box_bytes(ROW_PITCH), full);
      } else {
        const UnitPlace unit(item.first_unit + i - in_boxes);
        const int from[5] = {item.group * OUT_CHANNELS + unit.channel, at[3] * AXIS_W.stride + unit.offset[2],
                             at[2] * AXIS_H.stride + unit.offset[1], at[1] * AXIS_D.stride + unit.offset[0], at[0]};
        box_copy(buffer + A_BYTES + (i - in_boxes) * box_bytes(COLUMN_PITCH), g.grad_box, grad, from,
                 box_bytes(COLUMN_PITCH), full);
      }
    }
    barrier_arrive(full);
    turn.next();
#pragma unroll
    for (int i = 3; i >= 0; --i) {  // the next tile
      if (++tile[i] < g.tiles[i]) break;
      tile[i] = 0;
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
  const int unit = (int)opaque(item.first_unit) + (ROW_GROUPS == 1 ? threadIdx.x / 128 * (COLUMNS / UNIT) : 0);
  // The place of a column in the first row, below zero where there is none.
  const auto place = [=](int first, int beside) {
    const int tap = (unit + first / UNIT) / TAP_UNITS;
    const int out = (unit + first / UNIT) % TAP_UNITS * UNIT + first % UNIT + beside;
    return tap < TAPS && (WHOLE_UNITS || out < OUT_CHANNELS) ? tap * OUT_CHANNELS + out : -1;
  };
  if (ELEMENT == 2 && g.narrowed) {
    scalar_t* const to = (scalar_t*)partial + weights;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
      const int at = place(8 * j, first_exchanged());
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int row = Sums::row(i / 2, i % 2 * 2);
        const float* const found = sums.of[i / 2] + 4 * j + i % 2 * 2;
        const Vector<unsigned, 2> four = exchanged(found, found + 4);
        if (at >= 0 && row < rows) *(Vector<unsigned, 2>*)(to + row * (TAPS * OUT_CHANNELS) + at) = four;
      }
      __syncwarp();  // so that it does not mingle columns, either
    }
  } else {
    float* const to = (float*)partial + item.part * g.plane + weights;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const int at = place(8 * j, threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int row = Sums::row(i / 2, i % 2 * 2);
        if (at < 0 || row >= rows) continue;
        const float* const found = sums.of[i / 2] + 4 * j + i % 2 * 2;
        Vector<float, 2>* const pair = (Vector<float, 2>*)(to + row * (TAPS * OUT_CHANNELS) + at);
        const Vector<float, 2> before = again ? *pair : Vector<float, 2>{};
        *pair = {found[0] + before.value[0], found[1] + before.value[1]};
      }
      __syncwarp();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_grad_boxes(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, void* __restrict__ partial,
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
        sums.multiply(count, ring, turn, shared_memory);
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
