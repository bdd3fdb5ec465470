// The input gradient of tensors whose channels are innermost, by Hopper's instruction (mainloop/box_product.cuh):
//
//   gx[n, ci, i] = Σ over taps and output channels of   g[n, co, i·stride + tap·dilation - padding] · w[ci, co, tap]
//
// Index mapping. Rows of the product are a tile of input positions, columns COLUMNS input channels of one group; a
// stage is one tap and as many output channels as STEPS operations take. For each tap TMA brings the tile's
// elements of the output gradient anew, every stride-th one, and zeros beside the tensor: no tap needs a thread. They
// come from the L2 cache but for the first time.
//
// Blocks take work tiles (column block fastest, then tile, then group, then part) in turns, and load the next while
// they store one. Where work tiles would be few, each is shared out in `parts` of its stages, whose sums are planes of
// float32 that another kernel adds up (steps/reduce_splits.cu).
//
// Tensor-core accumulation truncates at every step. So FLUSH stages are summed there, and where those are not all,
// their sums beside them.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "mainloop/box_product.cuh"

struct Params {
  TensorMap grad_box, weight_box;
  Tensor5 x;
  int batch, groups;
  int lanes[4];          // positions of a tile along n, d, h, w; their product is at most the rows of a block
  int tiles[4];          // tiles along n, d, h, w
  int parts, part_size;  // of a work tile, and stages of each but the last, which may have fewer
  long long plane;       // elements
};

constexpr int CHANNELS = STEPS * OPERATION;  // of a stage
constexpr int CHUNKS = ceil_div(OUT_CHANNELS, CHANNELS), STAGES = TAPS * CHUNKS;
constexpr int COLUMN_BLOCKS = ceil_div(IN_CHANNELS, COLUMNS);
constexpr bool WHOLE_BLOCKS = IN_CHANNELS % COLUMNS == 0;

// What `Sums::multiply` asks: a stage's weights are one box.
struct TapColumns {
  static constexpr int BYTES = COLUMNS * COLUMN_PITCH, BESIDE = 0, EIGHT = 8 * COLUMN_PITCH;
  static __host__ __device__ constexpr int line(int) { return 0; }
  static __host__ __device__ constexpr int step(int index) { return 32 * index; }
};

// What a block computes at once.
struct WorkTile {
  int part, group, first_in;
  int first[4];  // position along n, d, h, w

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    const int tiles = params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3];
    first_in = index % COLUMN_BLOCKS * COLUMNS;
    index /= COLUMN_BLOCKS;
    part = index / (tiles * params.groups);
    group = index / tiles % params.groups;
    tile_origin(params.tiles, params.lanes, index % tiles, first);
  }
  static __device__ __forceinline__ int count(const Params& params) {
    return params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3] * params.groups * COLUMN_BLOCKS *
           params.parts;
  }
  __device__ __forceinline__ int first_stage(const Params& params) const { return part * params.part_size; }
  __device__ __forceinline__ int stages(const Params& params) const {
    return min(params.part_size, STAGES - first_stage(params));
  }
};

// The thread's row of a tile: its place in the tile along n, d, h, w, a byte each.
constexpr unsigned NOWHERE = ~0u;
__device__ __forceinline__ unsigned place_of(const Params& params, int row) {
  int at[4];
  decode(params.lanes, row, at);
  return at[0] < params.lanes[0] ? at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3] : NOWHERE;
}

// The sums of a row: `to` is the first of its columns in memory, of which `columns` exist, none or some.
template <class Stored>
__device__ __forceinline__ void store_row(const float (&sums)[COLUMNS / 2], int half, Stored* to, int columns) {
  // Neighbouring channels that a thread stores at once: 32 bytes of four threads.
  constexpr int AT_ONCE = 8 / sizeof(Stored), VECTOR = IN_CHANNELS % AT_ONCE == 0 ? AT_ONCE : 1;
  constexpr int TOGETHER = VECTOR == 4 ? 2 : 1;  // tiles of 8 columns
  const auto exists = [=](int column) { return WHOLE_BLOCKS ? columns > 0 : column < columns; };
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; tile += TOGETHER) {
    const float* const pair = sums + 4 * tile + 2 * half;
    const int column = 8 * tile + fragment_column();
    if constexpr (VECTOR == 4) {
      const bool both = tile + 1 < COLUMNS / 8;
      const Vector<unsigned, 2> found = exchanged(pair, both ? pair + 4 : pair);
      const int first = 8 * tile + first_exchanged();
      if ((both || threadIdx.x % 2 == 0) && exists(first)) *(Vector<unsigned, 2>*)(to + first) = found;
    } else if constexpr (VECTOR == 2) {
      if (exists(column)) *(Vector<float, 2>*)(to + column) = {pair[0], pair[1]};
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (exists(column + i)) narrow(pair[i], to[column + i]);
    }
  }
}

// By one thread: the boxes of all stages of the block's work tiles.
__device__ __forceinline__ void load_items(const Params& params, const scalar_t* grad, const scalar_t* weight,
                                           PipelineBarriers<BUFFERS>& ring, const unsigned char* buffers) {
  griddepcontrol_wait();
  PipelineState<BUFFERS> state;
  const int items = WorkTile::count(params), step = gridDim.x;
  const int bytes = params.lanes[0] * params.lanes[1] * params.lanes[2] * params.lanes[3] * ROW_PITCH;
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += step) {
    const WorkTile work(params, index);
    const int first = work.first_stage(params), end = first + work.stages(params);
    int chunk = first % CHUNKS, tap = first / CHUNKS;
#pragma unroll 1
    for (int stage = first; stage < end; ++stage) {
      const int width = tap % AXIS_W.kernel, line = tap / AXIS_W.kernel;
      const int height = line % AXIS_H.kernel, depth = line / AXIS_H.kernel;
      const unsigned to = shared_address(buffers + state.index * stage_bytes<TapColumns>());
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
    window_dgrad_tma(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ weight, const scalar_t*,
                     scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) PipelineBarriers<BUFFERS> ring;
  if (threadIdx.x == 0) ring.init(1, CONSUMER_THREADS / 32);
  __syncthreads();

  const int items = WorkTile::count(params), step = gridDim.x;
  PipelineState<BUFFERS> state;
  if (threadIdx.x < CONSUMER_THREADS) {
    reallocate_registers<true>();
    unsigned places[ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) places[i / 2][i % 2] = place_of(params, Sums::row(i / 2, i % 2 * 2));
#pragma unroll 1
    for (int index = blockIdx.x; index < items; index += step) {
      const WorkTile work(params, index);
      const int stages = work.stages(params);
      Sums sums, total;
      if (FLUSH < STAGES) {
#pragma unroll 1
        for (int stage = 0; stage < stages; stage += FLUSH) {
          sums.multiply<TapColumns>(min(FLUSH, stages - stage), ring, state, shared_memory);
          total.take(sums, stage == 0);
        }
      } else {
        sums.multiply<TapColumns>(stages, ring, state, shared_memory);
      }
      const Sums& all = FLUSH < STAGES ? total : sums;
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const unsigned place = places[i / 2][i % 2];
        int at[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) at[j] = work.first[j] + (int)(place >> (24 - 8 * j) & 255);
        const bool exists = place != NOWHERE && at[0] < params.batch && at[1] < params.x.size[0] &&
                            at[2] < params.x.size[1] && at[3] < params.x.size[2];
        const long long to = work.group * IN_CHANNELS + work.first_in + (exists ? offset_of(params.x, at) : 0);
        const int columns = exists ? IN_CHANNELS - work.first_in : 0;
        if (ELEMENT == sizeof(float) || params.parts > 1)
          store_row(all.of[i / 2], i % 2, (float*)dst + work.part * params.plane + to, columns);
        else
          store_row(all.of[i / 2], i % 2, dst + to, columns);
      }
    }
  } else {
    reallocate_registers<false>();
    if (threadIdx.x == CONSUMER_THREADS) load_items(params, grad, weight, ring, shared_memory);
  }
}
