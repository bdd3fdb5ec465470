// Direct kernel of the forward pass and the input gradient: all phases of a tile in one block, in exact arithmetic.
//
//   destination[n, cd, cell·DST + dst_offset(tap)] = bias[cd] + Σ source[n, cs, cell·SRC + src_offset(tap)] · w[cs, cd, tap]
//
// summed over the source channels cs of the group and over all taps (common/geometry.cuh has the offsets). For layers
// whose taps unroll: weights × cells of a thread are straight-line code.
//
// Index mapping. A block owns a tile of cells in (n, d, h, w) and one or more items, one after the other: an item is a
// group and BLOCK_DST of its destination channels. The threads are SRC_SLICES × DST_SLICES × LANES: a lane is CELLS_H ×
// CELLS_W cells of the tile, lanes running along w, then h, d, n in extents chosen at launch; a destination slice is
// DST_PER_THREAD channels; a source slice is its share of every stage's source channels, summed at the end of an item. A
// thread keeps every phase of its cells in registers: CELLS_H × CELLS_W × (DST per cell) × DST_PER_THREAD accumulators, of
// which those without taps cost nothing.
//
// Shared memory: two buffers of weights as [channel][slice][tap][DST_PER_THREAD], padded to 16 bytes a slice; two buffers
// of STAGE_CHANNELS planes of the source tile with its halo as [n][d][h][w % SRC][w / SRC], so that lanes read neighbouring
// words at any stride; then the epilogue's: the sums of one source slice, and for each warp the row that it turns into
// a whole output line.
//
// Synchronisation: step i+1 (a stage of an item) is loaded to registers while step i is computed, and stored to the other
// buffer; one barrier a step suffices, since a buffer is written again only after the barrier that follows its last
// reads. A warp's row is its own.

struct Geometry {
  Tensor5 src, dst;
  int batch;
  int lanes[4];         // extents of the lanes along n, d, h, w; their product is at most LANES
  int tiles[4];         // tiles along n, d, h, w
  int items;            // of the layer: groups × DST_BLOCKS
  int items_per_block;
};

constexpr int SLICE_THREADS = LANES * DST_SLICES;
constexpr int THREADS = SLICE_THREADS * SRC_SLICES;
constexpr int BLOCK_DST = DST_PER_THREAD * DST_SLICES;
constexpr int DST_BLOCKS = ceil_div(DST_CHANNELS, BLOCK_DST);
constexpr int STAGES = ceil_div(SRC_CHANNELS, STAGE_CHANNELS);
constexpr int WEIGHT_SLICE = round_up(TAPS * DST_PER_THREAD, 4);
constexpr int WEIGHT_CHANNEL = DST_SLICES * WEIGHT_SLICE;
constexpr int WEIGHT_STAGE = STAGE_CHANNELS * WEIGHT_CHANNEL;
constexpr int WEIGHT_ITEMS = ceil_div(STAGE_CHANNELS * BLOCK_DST * TAPS, THREADS);
constexpr int SLICE_CHANNELS = STAGE_CHANNELS / SRC_SLICES;

constexpr int DST_D = dst_cell(AXIS_D), DST_H = dst_cell(AXIS_H), DST_W = dst_cell(AXIS_W);
constexpr int SRC_D = src_cell(AXIS_D), SRC_H = src_cell(AXIS_H), SRC_W = src_cell(AXIS_W);
constexpr int WINDOW_H = window(AXIS_H, CELLS_H), WINDOW_W = window(AXIS_W, CELLS_W);
constexpr int RUN = CELLS_W * DST_W;  // neighbouring destination elements along w that a thread owns
constexpr int ACCUMULATORS = CELLS_H * DST_D * DST_H * RUN * DST_PER_THREAD;

static_assert(STAGE_CHANNELS % SRC_SLICES == 0, "every source slice takes the same share of a stage");
static_assert(LANES % 32 == 0, "a warp lies in one slice");
static_assert(!SRC_CHANNELS_LAST || THREADS % STAGE_CHANNELS == 0, "a thread loads one channel of a stage");

// The tile of the source, as every thread sees it.
struct Tile {
  int n, d, h, w;          // first batch entry and first cells
  int size_d, size_h, size_w;  // source elements along each dimension, halo included
  int positions;           // source elements of one channel
  int phase_pitch;         // elements of one residue of w in a row
  int row, slab, image, plane;  // pitches of h, d, n and channel
};

__device__ __forceinline__ Tile make_tile(const Geometry& g, int tile) {
  Tile t;
  t.w = tile % g.tiles[3] * g.lanes[3] * CELLS_W;
  tile /= g.tiles[3];
  t.h = tile % g.tiles[2] * g.lanes[2] * CELLS_H;
  tile /= g.tiles[2];
  t.d = tile % g.tiles[1] * g.lanes[1];
  t.n = tile / g.tiles[1] * g.lanes[0];
  t.size_d = window(AXIS_D, g.lanes[1]);
  t.size_h = window(AXIS_H, g.lanes[2] * CELLS_H);
  t.size_w = window(AXIS_W, g.lanes[3] * CELLS_W);
  t.positions = g.lanes[0] * t.size_d * t.size_h * t.size_w;
  t.phase_pitch = ceil_div(t.size_w, SRC_W);
  t.row = t.phase_pitch * SRC_W;
  t.slab = t.row * t.size_h;
  t.image = t.slab * t.size_d;
  t.plane = t.image * g.lanes[0];
  return t;
}

// Position p of the source tile: its offset from the tile's batch entry, or -1 in the padding, and its slot in a plane.
__device__ __forceinline__ void locate(const Geometry& g, const Tile& t, int p, index_t& offset, int& slot) {
  const int w = p % t.size_w;
  p /= t.size_w;
  const int h = p % t.size_h;
  p /= t.size_h;
  const int d = p % t.size_d;
  const int n = p / t.size_d;
  slot = n * t.image + d * t.slab + h * t.row + w % SRC_W * t.phase_pitch + w / SRC_W;
  const int src_d = t.d * SRC_D + first_offset(AXIS_D) + d;
  const int src_h = t.h * SRC_H + first_offset(AXIS_H) + h;
  const int src_w = t.w * SRC_W + first_offset(AXIS_W) + w;
  const bool inside = t.n + n < g.batch && (unsigned)src_d < (unsigned)g.src.size[0] &&
                      (unsigned)src_h < (unsigned)g.src.size[1] && (unsigned)src_w < (unsigned)g.src.size[2];
  offset = inside ? n * (index_t)g.src.stride[0] + src_d * (index_t)g.src.stride[2] +
                        src_h * (index_t)g.src.stride[3] + src_w * (index_t)g.src.stride[4]
                  : (index_t)-1;
}

// One stage of the source in flight: channels-first tensors give a thread POSITIONS places and all channels of each,
// channels-last tensors one channel and as many places.
struct SourceLoader {
  static constexpr int PLACES = SRC_CHANNELS_LAST ? POSITIONS * STAGE_CHANNELS : POSITIONS;
  static constexpr int CHANNELS = SRC_CHANNELS_LAST ? 1 : STAGE_CHANNELS;

  index_t offsets[PLACES];
  int slots[PLACES];
  int first_channel;
  scalar_t values[PLACES][CHANNELS];

  __device__ __forceinline__ void init(const Geometry& g, const Tile& t, int thread) {
    first_channel = SRC_CHANNELS_LAST ? thread % STAGE_CHANNELS : 0;
    const int first = SRC_CHANNELS_LAST ? thread / STAGE_CHANNELS : thread;
    constexpr int STEP = SRC_CHANNELS_LAST ? THREADS / STAGE_CHANNELS : THREADS;
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      const int p = first + i * STEP;
      slots[i] = -1;
      offsets[i] = -1;
      if (p < t.positions) locate(g, t, p, offsets[i], slots[i]);
    }
  }

  __device__ __forceinline__ void load(const scalar_t* src, index_t channel_stride, int stage) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const int channel = stage * STAGE_CHANNELS + first_channel + c;
      const bool exists = SRC_CHANNELS % STAGE_CHANNELS == 0 || channel < SRC_CHANNELS;
#pragma unroll
      for (int i = 0; i < PLACES; ++i)
        values[i][c] = exists && offsets[i] >= 0 ? read(src + channel * channel_stride + offsets[i]) : zero<scalar_t>();
    }
  }

  __device__ __forceinline__ void store(accum_t* planes, int plane) const {
#pragma unroll
    for (int i = 0; i < PLACES; ++i)
      if (slots[i] >= 0) {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) planes[(first_channel + c) * plane + slots[i]] = widen(values[i][c]);
      }
  }
};

// One stage of the weights in flight, read in the order in which they lie in memory.
struct WeightLoader {
  scalar_t values[WEIGHT_ITEMS];

  static __device__ __forceinline__ void locate(int item, int& channel, int& dst, int& tap) {
    if (INPUT_GRAD) {
      tap = item % TAPS, channel = item / TAPS % STAGE_CHANNELS, dst = item / (TAPS * STAGE_CHANNELS);
    } else if (WEIGHT_STRIDE_OUT == 1) {
      dst = item % BLOCK_DST, tap = item / BLOCK_DST % TAPS, channel = item / (BLOCK_DST * TAPS);
    } else {
      tap = item % TAPS, dst = item / TAPS % BLOCK_DST, channel = item / (TAPS * BLOCK_DST);
    }
  }

  __device__ __forceinline__ void load(const scalar_t* weight, int dst_block, int stage, int thread) {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i) {
      int channel, dst, tap;
      locate(thread + i * THREADS, channel, dst, tap);
      channel += stage * STAGE_CHANNELS;
      dst += dst_block * BLOCK_DST;
      const bool exists = thread + i * THREADS < STAGE_CHANNELS * BLOCK_DST * TAPS && channel < SRC_CHANNELS &&
                          dst < DST_CHANNELS;
      values[i] = exists ? read(weight + (INPUT_GRAD ? weight_offset(dst, channel, tap)
                                                     : weight_offset(channel, dst, tap)))
                         : zero<scalar_t>();
    }
  }

  __device__ __forceinline__ void store(accum_t* weights, int thread) const {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i) {
      int channel, dst, tap;
      locate(thread + i * THREADS, channel, dst, tap);
      if (thread + i * THREADS < STAGE_CHANNELS * BLOCK_DST * TAPS)
        weights[channel * WEIGHT_CHANNEL + dst / DST_PER_THREAD * WEIGHT_SLICE + tap * DST_PER_THREAD +
                dst % DST_PER_THREAD] = widen(values[i]);
    }
  }
};

struct alignas(4 * sizeof(accum_t)) Quad {
  accum_t value[4];
};

// A thread's cells: accumulators as [cell h][phase d][phase h][run along w][destination channel].
struct Accumulators {
  accum_t sum[CELLS_H][DST_D][DST_H][RUN][DST_PER_THREAD];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) (&sum[0][0][0][0][0])[i] = 0;
  }

  // One source channel. `corner` is the thread's first source element, `weights` its slice's taps.
  __device__ __forceinline__ void accumulate(const accum_t* corner, const accum_t* weights, const Tile& t) {
    accum_t quad[WEIGHT_SLICE];
#pragma unroll
    for (int i = 0; i < WEIGHT_SLICE; i += 4) {
      const Quad q = *(const Quad*)(weights + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) quad[i + j] = q.value[j];
    }
#pragma unroll
    for (int kd = 0; kd < AXIS_D.kernel; ++kd) {
      const accum_t* slab = corner + (src_offset(AXIS_D, kd) - first_offset(AXIS_D)) * t.slab;
      accum_t patch[WINDOW_H][WINDOW_W];
#pragma unroll
      for (int h = 0; h < WINDOW_H; ++h)
#pragma unroll
        for (int w = 0; w < WINDOW_W; ++w) patch[h][w] = slab[h * t.row + w % SRC_W * t.phase_pitch + w / SRC_W];
#pragma unroll
      for (int kh = 0; kh < AXIS_H.kernel; ++kh)
#pragma unroll
        for (int kw = 0; kw < AXIS_W.kernel; ++kw)
#pragma unroll
          for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
            for (int cell_w = 0; cell_w < CELLS_W; ++cell_w)
#pragma unroll
              for (int dst = 0; dst < DST_PER_THREAD; ++dst)
                sum[cell_h][dst_offset(AXIS_D, kd)][dst_offset(AXIS_H, kh)]
                   [cell_w * DST_W + dst_offset(AXIS_W, kw)][dst] +=
                    patch[cell_h * SRC_H + src_offset(AXIS_H, kh) - first_offset(AXIS_H)]
                         [cell_w * SRC_W + src_offset(AXIS_W, kw) - first_offset(AXIS_W)] *
                    quad[((kd * AXIS_H.kernel + kh) * AXIS_W.kernel + kw) * DST_PER_THREAD + dst];
    }
  }

  // Sum of all source slices, in slice order, left in slice 0. Every thread of the block comes here.
  __device__ __forceinline__ void reduce(accum_t* shared, int slice, int thread) {
    accum_t* mine = shared + thread;
#pragma unroll 1
    for (int other = 1; other < SRC_SLICES; ++other) {
      if (slice == other) {
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; ++i) mine[i * SLICE_THREADS] = (&sum[0][0][0][0][0])[i];
      }
      __syncthreads();
      if (slice == 0) {
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; ++i) (&sum[0][0][0][0][0])[i] += mine[i * SLICE_THREADS];
      }
      __syncthreads();
    }
  }
};

// The place of a lane's first cell in the destination.
struct Place {
  int d, h, w;     // first destination element
  bool exists;     // false for lanes beyond the tile or the batch
  index_t offset;  // from the tile's batch entry to (d, h, w)
};

__device__ __forceinline__ Place place_of(const Geometry& g, const Tile& t, int lane) {
  Place p;
  const int w = lane % g.lanes[3];
  lane /= g.lanes[3];
  const int h = lane % g.lanes[2];
  lane /= g.lanes[2];
  const int d = lane % g.lanes[1];
  const int n = lane / g.lanes[1];
  p.d = (t.d + d) * DST_D;
  p.h = (t.h + h * CELLS_H) * DST_H;
  p.w = (t.w + w * CELLS_W) * DST_W;
  p.exists = n < g.lanes[0] && t.n + n < g.batch;
  p.offset = n * (index_t)g.dst.stride[0] + p.d * (index_t)g.dst.stride[2] + p.h * (index_t)g.dst.stride[3] +
             p.w * (index_t)g.dst.stride[4];
  return p;
}

// Channels first: a warp writes the rows of its lanes through shared memory, so that neighbouring lanes write
// neighbouring elements whatever the stride.
struct RowWriter {
  index_t offset[RUN];  // of the elements that this lane writes, from the tile's batch entry
  int rows[RUN];        // rows of the destination from each element on; none where it does not exist
  int slabs[RUN];       // likewise along d

  __device__ __forceinline__ void init(const Geometry& g, const Tile& t, int lane) {
    const int in_warp = lane % 32;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const int element = i * 32 + in_warp;  // of the warp's row: RUN elements of each of its lanes
      const Place p = place_of(g, t, lane - in_warp + element / RUN);
      const int w = p.w + element % RUN;
      offset[i] = p.offset + element % RUN * (index_t)g.dst.stride[4];
      rows[i] = p.exists && p.d < g.dst.size[0] && w < g.dst.size[2] ? g.dst.size[1] - p.h : 0;
      slabs[i] = DST_D > 1 ? g.dst.size[0] - p.d : 1;
    }
  }

  __device__ __forceinline__ void store(const Geometry& g, const Accumulators& acc, scalar_t* dst,
                                        const accum_t (&bias)[DST_PER_THREAD], int channels, accum_t* staging,
                                        int in_warp) const {
    accum_t* const mine = staging + in_warp * RUN;
#pragma unroll
    for (int channel = 0; channel < DST_PER_THREAD; ++channel) {
      if (channel >= channels) break;
      scalar_t* const plane = dst + channel * (index_t)g.dst.stride[1];
#pragma unroll
      for (int d = 0; d < DST_D; ++d)
#pragma unroll
        for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
          for (int h = 0; h < DST_H; ++h) {
            const int row = cell_h * DST_H + h;
            scalar_t* const line = plane + d * (index_t)g.dst.stride[2] + row * (index_t)g.dst.stride[3];
            const bool through_shared = RUN > 1 && has_taps(AXIS_D, d) && has_taps(AXIS_H, h);
            if (through_shared) {
              __syncwarp();
#pragma unroll
              for (int i = 0; i < RUN; ++i) mine[i] = acc.sum[cell_h][d][h][i][channel];
              __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
              const accum_t value = through_shared ? staging[i * 32 + in_warp] : acc.sum[cell_h][d][h][i][channel];
              if (row < rows[i] && d < slabs[i]) narrow(value + bias[channel], line[offset[i]]);
            }
          }
    }
  }
};

struct alignas(DST_VECTOR * sizeof(scalar_t)) Vector {
  scalar_t value[DST_VECTOR];
};

// Channels last: a thread's channels are neighbours already.
__device__ __forceinline__ void store_channels(const Geometry& g, const Tile& t, const Accumulators& acc, scalar_t* dst,
                                               const accum_t (&bias)[DST_PER_THREAD], int channels, int lane) {
  const Place p = place_of(g, t, lane);
  if (!p.exists) return;
#pragma unroll
  for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
    for (int d = 0; d < DST_D; ++d)
#pragma unroll
      for (int h = 0; h < DST_H; ++h)
#pragma unroll
        for (int w = 0; w < RUN; ++w) {
          const int row = cell_h * DST_H + h;
          if (p.d + d >= g.dst.size[0] || p.h + row >= g.dst.size[1] || p.w + w >= g.dst.size[2]) continue;
          scalar_t* const pixel = dst + p.offset + d * (index_t)g.dst.stride[2] + row * (index_t)g.dst.stride[3] +
                                  w * (index_t)g.dst.stride[4];
#pragma unroll
          for (int first = 0; first < DST_PER_THREAD; first += DST_VECTOR) {
            if (first >= channels) break;
            Vector vector;
#pragma unroll
            for (int i = 0; i < DST_VECTOR; ++i)
              narrow(acc.sum[cell_h][d][h][w][first + i] + bias[first + i], vector.value[i]);
            *(Vector*)(pixel + first) = vector;
          }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gather_tiled(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                 const scalar_t* __restrict__ bias, scalar_t* __restrict__ dst, const Geometry g) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int thread = threadIdx.x;
  const int lane = thread % LANES;
  const int dst_slice = thread / LANES % DST_SLICES;
  const int src_slice = thread / SLICE_THREADS;

  const int item_blocks = ceil_div(g.items, g.items_per_block);
  const int first_item = blockIdx.x % item_blocks * g.items_per_block;
  const int steps = (min(first_item + g.items_per_block, g.items) - first_item) * STAGES;
  const Tile tile = make_tile(g, blockIdx.x / item_blocks);
  src += tile.n * g.src.stride[0];
  dst += tile.n * g.dst.stride[0];

  accum_t* const weights = (accum_t*)shared_memory;
  accum_t* const planes = weights + 2 * WEIGHT_STAGE;
  accum_t* const epilogue = planes + 2 * STAGE_CHANNELS * tile.plane;

  // The lane's first source element in a plane.
  const int lane_w = lane % g.lanes[3], lane_h = lane / g.lanes[3] % g.lanes[2];
  const int lane_d = lane / (g.lanes[3] * g.lanes[2]) % g.lanes[1];
  const int lane_n = min(lane / (g.lanes[3] * g.lanes[2] * g.lanes[1]), g.lanes[0] - 1);  // lanes beyond the tile idle
  const int corner =
      lane_n * tile.image + lane_d * SRC_D * tile.slab + lane_h * CELLS_H * SRC_H * tile.row + lane_w * CELLS_W;

  SourceLoader source;
  WeightLoader taps;
  RowWriter rows;
  Accumulators acc;
  source.init(g, tile, thread);
  if (!DST_CHANNELS_LAST && STAGES <= 4) rows.init(g, tile, lane);  // else its registers serve the stages better
  acc.clear();

  auto load = [&](int step) {
    const int item = first_item + step / STAGES, stage = step % STAGES, group = item / DST_BLOCKS;
    source.load(src + (long long)group * SRC_CHANNELS * g.src.stride[1], (index_t)g.src.stride[1], stage);
    taps.load(weight + (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS, item % DST_BLOCKS, stage, thread);
  };

  load(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    accum_t* const stage_planes = planes + step % 2 * STAGE_CHANNELS * tile.plane;
    accum_t* const stage_weights = weights + step % 2 * WEIGHT_STAGE;
    source.store(stage_planes, tile.plane);
    taps.store(stage_weights, thread);
    __syncthreads();
    if (step + 1 < steps) load(step + 1);
#pragma unroll 1
    for (int i = 0; i < SLICE_CHANNELS; ++i) {
      const int channel = src_slice * SLICE_CHANNELS + i;
      acc.accumulate(stage_planes + channel * tile.plane + corner,
                     stage_weights + channel * WEIGHT_CHANNEL + dst_slice * WEIGHT_SLICE, tile);
    }
    if (step % STAGES < STAGES - 1) continue;

    const int item = first_item + step / STAGES;
    const int first_dst = item % DST_BLOCKS * BLOCK_DST + dst_slice * DST_PER_THREAD;
    const int channels = DST_CHANNELS - first_dst;  // that exist, from this slice's first on
    const long long first_channel = (long long)(item / DST_BLOCKS) * DST_CHANNELS + first_dst;
    if (SRC_SLICES > 1) acc.reduce(epilogue, src_slice, thread % SLICE_THREADS);
    if (src_slice == 0 && channels > 0) {
      accum_t biases[DST_PER_THREAD];
#pragma unroll
      for (int i = 0; i < DST_PER_THREAD; ++i)
        biases[i] = HAS_BIAS && i < channels ? widen(read(bias + first_channel + i)) : (accum_t)0;
      scalar_t* const item_dst = dst + first_channel * g.dst.stride[1];
      if (DST_CHANNELS_LAST) {
        store_channels(g, tile, acc, item_dst, biases, channels, lane);
      } else {
        if (STAGES > 4) rows.init(g, tile, lane);
        rows.store(g, acc, item_dst, biases, channels, epilogue + thread / 32 * (32 * RUN), lane % 32);
      }
    }
    acc.clear();
  }
}
