// The weight gradient of tensors whose channels are innermost, on tensor cores (common/box_product.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. The product's columns are input channels, its rows units: some neighbouring output channels at one tap;
// or with UNIT_COLUMNS the other way round. A block has some rows and columns of one group, and one contiguous part of
// the tiles of input positions; a stage is a tile. For each unit the copy engine brings the tile's elements of the output
// gradient, every stride-th one; positions that do not exist are zeros of the input. Blocks on different parts write to
// different planes of `partial`, which the caller sums in order: the result does not depend on timing. There output
// channels are innermost.
//
// The cores' sums lose a bit at every step. So `flush` stages are summed there, and those sums in `partial`.

struct Geometry {
  TensorMap x_box, grad_box;
  int groups, blocks[2];  // of rows, of columns
  int lanes[4];           // positions of a tile along n, d, h, w: STEPS operations
  int tiles[4];           // tiles along n, d, h, w
  int flush;
  long long part_length;  // tiles of a part
  long long all_tiles;
  long long plane;  // elements of one plane of `partial`: all weights
};

constexpr int GRAD_PITCH = UNIT_COLUMNS ? COLUMN_PITCH : ROW_PITCH, X_PITCH = UNIT_COLUMNS ? ROW_PITCH : COLUMN_PITCH;
constexpr int UNIT = GRAD_PITCH / ELEMENT;                   // output channels
constexpr int TAP_UNITS = ceil_div(OUT_CHANNELS, UNIT), UNITS = TAPS * TAP_UNITS;
constexpr int IN_BOX = X_PITCH / ELEMENT;                    // input channels of a box
constexpr int BLOCK_ROWS = GROUPS * GROUP_ROWS;
constexpr bool WHOLE_UNITS = OUT_CHANNELS % UNIT == 0;
static_assert(OUT_CHANNELS % 2 == 0, "two neighbouring sums are of one tap");

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

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_grad_boxes(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, float* __restrict__ partial,
                      const __grid_constant__ Geometry g) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) Ring ring;
  int block = blockIdx.x;
  const int column_block = block % g.blocks[1];
  block /= g.blocks[1];
  const int row_block = block % g.blocks[0];
  block /= g.blocks[0];
  const int group = block % g.groups, part = block / g.groups;
  const long long first_tile = part * g.part_length;
  const int stages = (int)(first_tile + g.part_length < g.all_tiles ? g.part_length : g.all_tiles - first_tile);
  const int first_row = row_block * BLOCK_ROWS, first_column = column_block * COLUMNS;
  const int first_in = UNIT_COLUMNS ? first_row : first_column;
  const int first_unit = (UNIT_COLUMNS ? first_column : first_row) / UNIT;

  if (threadIdx.x == 0) ring.init(1, MULTIPLIERS / 32);
  __syncthreads();
  Turn turn;

  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x > MULTIPLIERS) return;
    constexpr int IN_BOXES = (UNIT_COLUMNS ? BLOCK_ROWS : COLUMNS) / IN_BOX;
    constexpr int BLOCK_UNITS = (UNIT_COLUMNS ? COLUMNS : BLOCK_ROWS) / UNIT;
    const int in_boxes = min(IN_BOXES, ceil_div(IN_CHANNELS - first_in, IN_BOX));  // what lies behind is stored nowhere
    const int units = min(BLOCK_UNITS, UNITS - first_unit);
    int tile[4];
    decode(g.tiles, first_tile, tile);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      int at[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) at[i] = tile[i] * g.lanes[i];
      const unsigned buffer = shared_address(shared_memory + turn.index * STAGE_BYTES);
      const unsigned full = shared_address(ring.full + turn.index);
      unsigned to = buffer + (UNIT_COLUMNS ? 0 : A_BYTES);
      barrier_wait(shared_address(ring.empty + turn.index), turn.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < in_boxes; ++i, to += box_bytes(X_PITCH)) {
        const int from[5] = {group * IN_CHANNELS + first_in + i * IN_BOX, at[3], at[2], at[1], at[0]};
        box_copy(to, g.x_box, x, from, box_bytes(X_PITCH), full);
      }
      to = buffer + (UNIT_COLUMNS ? A_BYTES : 0);
#pragma unroll 1
      for (int i = 0; i < units; ++i, to += box_bytes(GRAD_PITCH)) {
        const UnitPlace unit(first_unit + i);
        const int from[5] = {group * OUT_CHANNELS + unit.channel, at[3] * AXIS_W.stride + unit.offset[2],
                             at[2] * AXIS_H.stride + unit.offset[1], at[1] * AXIS_D.stride + unit.offset[0], at[0]};
        box_copy(to, g.grad_box, grad, from, box_bytes(GRAD_PITCH), full);
      }
      barrier_arrive(full);
      turn.next();
#pragma unroll
      for (int i = 3; i >= 0; --i) {  // the next tile
        if (++tile[i] < g.tiles[i]) break;
        tile[i] = 0;
      }
    }
    return;
  }

  partial += part * g.plane;
  Sums sums;
  // A sum's place in the plane, below zero where there is no such weight: two neighbouring output channels lie together.
  auto place = [&](int row, int column) {
    const int in = first_in + (UNIT_COLUMNS ? row : column), unit_element = UNIT_COLUMNS ? column : row;
    const int unit = first_unit + unit_element / UNIT, out = unit % TAP_UNITS * UNIT + unit_element % UNIT;
    const bool exists = in < IN_CHANNELS && unit < UNITS && (WHOLE_UNITS || out < OUT_CHANNELS);
    return exists ? ((long long)(group * IN_CHANNELS + in) * TAPS + unit / TAP_UNITS) * OUT_CHANNELS + out : -1;
  };
  int stage = 0;
#pragma unroll 1
  do {
    const int count = min(g.flush, stages - stage);
    sums.multiply(count, ring, turn, shared_memory);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i += 2) {
        const long long at = place(Sums::row(tile, i), Sums::column(i));
        const long long next = UNIT_COLUMNS ? at : place(Sums::row(tile, i), Sums::column(i) + 1);
        Vector<float, 2> pair = {count > 0 ? sums.of[tile][i] : 0, count > 0 ? sums.of[tile][i + 1] : 0};
        if constexpr (UNIT_COLUMNS) {
          if (at < 0) continue;
          Vector<float, 2>* const to = (Vector<float, 2>*)(partial + at);
          if (stage > 0) pair.value[0] += to->value[0], pair.value[1] += to->value[1];
          *to = pair;
        } else {
          if (at >= 0) partial[at] = pair.value[0] + (stage > 0 ? partial[at] : 0);
          if (next >= 0) partial[next] = pair.value[1] + (stage > 0 ? partial[next] : 0);
        }
      }
    stage += count;
  } while (stage < stages);
}
