// The weight gradient of tensors whose channels are innermost, on tensor cores (common/box_product.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. Rows of the product are input channels, columns units: some neighbouring output channels at one tap. A
// block has some rows and columns of one group, and one contiguous part of the tiles of input positions; a stage is a
// tile. For each unit the copy engine brings the tile's elements of the output gradient, every stride-th one; positions
// that do not exist are zeros of the input. Blocks on different parts write to different planes of `partial`, which the
// caller sums in order: the result does not depend on timing. There output channels are innermost.
//
// The cores' sums lose a bit at every step. So `flush` stages are summed there, and those sums in `partial`. Where
// there is but one part, of no more stages than that, `partial` is the result, of the tensors' type (`narrowed`).

struct Geometry {
  TensorMap x_box, grad_box;
  int groups, blocks[2];  // of rows, of columns
  int lanes[4];           // positions of a tile along n, d, h, w: STEPS operations
  int tiles[4];           // tiles along n, d, h, w
  int flush, narrowed;
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

// By one warp: the boxes of the block's tiles, each by a lane of its own.
__device__ __forceinline__ void load_tiles(const Geometry& g, const scalar_t* x, const scalar_t* grad, Ring& ring,
                                           const unsigned char* buffers, int stages, long long first_tile, int first_in,
                                           int first_unit, int group) {
  const int in_boxes =
      min(BLOCK_ROWS / ROW_BOX, ceil_div(IN_CHANNELS - first_in, ROW_BOX));  // others are stored nowhere
  const int boxes = in_boxes + min(BLOCK_COLUMNS / UNIT, UNITS - first_unit);
  Turn turn;
  int tile[4];
  decode(g.tiles, first_tile, tile);
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    int at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = tile[i] * g.lanes[i];
    const unsigned buffer = shared_address(buffers + turn.index * STAGE_BYTES);
    const unsigned full = shared_address(ring.full + turn.index);
    barrier_wait(shared_address(ring.empty + turn.index), turn.parity ^ 1);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < boxes; i += 32) {
      if (i < in_boxes) {
        const int from[5] = {group * IN_CHANNELS + first_in + i * ROW_BOX, at[3], at[2], at[1], at[0]};
        box_copy(buffer + i * box_bytes(ROW_PITCH), g.x_box, x, from, box_bytes(ROW_PITCH), full);
      } else {
        const UnitPlace unit(first_unit + i - in_boxes);
        const int from[5] = {group * OUT_CHANNELS + unit.channel, at[3] * AXIS_W.stride + unit.offset[2],
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

// Two neighbouring sums, or zeros where there are none, as of an empty batch; added to those before.
__device__ __forceinline__ void store_pair(void* partial, long long at, const float* sums, bool any, bool again,
                                           bool narrowed) {
  Vector<float, 2> pair = {any ? sums[0] : 0, any ? sums[1] : 0};
  if (narrowed) {
    Vector<scalar_t, 2> narrow_pair;
    narrow(pair.value[0], narrow_pair.value[0]);
    narrow(pair.value[1], narrow_pair.value[1]);
    *(Vector<scalar_t, 2>*)((scalar_t*)partial + at) = narrow_pair;
    return;
  }
  Vector<float, 2>* const to = (Vector<float, 2>*)((float*)partial + at);
  if (again) pair.value[0] += to->value[0], pair.value[1] += to->value[1];
  *to = pair;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_grad_boxes(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, void* __restrict__ partial,
                      const __grid_constant__ Geometry g) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) Ring ring;
  int block = blockIdx.x;
  const int first_unit = block % g.blocks[1] * (BLOCK_COLUMNS / UNIT);
  block /= g.blocks[1];
  const int first_in = block % g.blocks[0] * BLOCK_ROWS;
  block /= g.blocks[0];
  const int group = block % g.groups, part = block / g.groups;
  const long long first_tile = part * g.part_length;
  const int stages = (int)(first_tile + g.part_length < g.all_tiles ? g.part_length : g.all_tiles - first_tile);

  if (threadIdx.x == 0) ring.init(32, MULTIPLIERS / 32);
  __syncthreads();
  if (threadIdx.x >= MULTIPLIERS) {
    registers_change<false>();
    if (threadIdx.x < MULTIPLIERS + 32)
      load_tiles(g, x, grad, ring, shared_memory, stages, first_tile, first_in, first_unit, group);
    return;
  }
  registers_change<true>();
  const long long first_weight = part * g.plane + (long long)(group * IN_CHANNELS + first_in) * (TAPS * OUT_CHANNELS);
  const int rows = IN_CHANNELS - first_in;  // that exist
  Turn turn;
  Sums sums;
  int stage = 0;
#pragma unroll 1
  do {
    const int count = min(g.flush, stages - stage);
    sums.multiply(count, ring, turn, shared_memory);
    // Opaque, so that the compiler does not find all columns' places before the products: there are no registers for
    // that.
    const int first = (int)opaque(first_unit) + (ROW_GROUPS == 1 ? threadIdx.x / 128 * (COLUMNS / UNIT) : 0);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const int unit = first + 8 * j / UNIT, out = unit % TAP_UNITS * UNIT + 8 * j % UNIT + threadIdx.x % 4 * 2;
      const long long at = first_weight + unit / TAP_UNITS * OUT_CHANNELS + out;
      if (unit < UNITS && (WHOLE_UNITS || out < OUT_CHANNELS))
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
          const int row = Sums::row(i / 2, i % 2 * 2);
          const float* const found = sums.of[i / 2] + 4 * j + i % 2 * 2;
          if (row < rows)
            store_pair(partial, at + row * (TAPS * OUT_CHANNELS), found, count > 0, stage > 0, g.narrowed);
        }
      __syncwarp();  // nor mingles columns
    }
    stage += count;
  } while (stage < stages);
}
