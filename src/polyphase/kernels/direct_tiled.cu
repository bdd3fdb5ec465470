// Direct kernel of the forward pass and the input gradient: all phases of a tile in one block, without tensor cores.
//
//   destination[n, cd, cell·DST + dst_offset(tap)]  =
//       bias[cd]  +  Σ source[n, cs, cell·SRC + src_offset(tap)] · w[cs, cd, tap]
//
// summed over the source channels cs of the group and over all taps (core/geometry.cuh has the offsets). For layers
// whose taps unroll: weights × cells of a thread are straight-line code.
//
// Index mapping. A block owns a tile of cells in (n, d, h, w) and one or more work tiles, one after the other: a work
// tile is a group and BLOCK_DST of its destination channels. The threads are SRC_SLICES × DST_SLICES × LANES: a lane is
// CELLS_H × CELLS_W cells of the tile, lanes running along w, then h, d, n in extents chosen at launch; a destination
// slice is DST_PER_THREAD channels; a source slice is its share of every stage's source channels, summed at the end of
// a work tile. A thread keeps every phase of its cells in registers: CELLS_H × CELLS_W × (DST per cell) ×
// DST_PER_THREAD accumulators, of which those without taps cost nothing.
//
// Sums have two levels, so that rounding does not grow with the number of source channels: after CHAIN stages a thread
// adds its accumulators to its lane's sums in shared memory, and starts again from zero. Source slices share these
// sums, and each adds after a different stage, so that no two add at once.
//
// Shared memory: BUFFERS buffers of weights as [channel][slice][tap][DST_PER_THREAD], padded to 16 bytes a slice;
// BUFFERS buffers of the source tile with its halo, for each of STAGE_CHANNELS channels [n][d][h][w % SPLIT][w /
// SPLIT], with room for the longest tile: rows start at a multiple of four source elements, and are split by residues
// so that lanes read neighbouring words at even strides too; the destination of each element of a lane's row; for each
// warp the elements of its lanes' rows, which it transposes into a line of output; the sums of the lanes.
//
// Synchronisation: steps (a stage of a work tile) are loaded BUFFERS - 1 ahead. With two buffers the next step waits in
// registers while one is computed, and is then stored to the other buffer; with more, cp.async copies to the buffers.
// One barrier a step suffices, since a buffer is written again only after the barrier that follows its last reads. A
// warp's rows are its own.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"
#include "operand/rounding.cuh"

struct Params {
  Tensor5 src, dst;
  int batch;
  int lanes[4];    // lanes along n, d, h, w; their product is at most LANES
  int tiles[4];    // tiles along n, d, h, w
  int work_tiles;  // of a tile: groups × DST_BLOCKS
  int work_tiles_per_block;
  int aligned_src;   // whether quads of the source start at a multiple of their size, and none is cut by an edge
  int aligned_rows;  // whether every RUN elements of the destination start at a multiple of their size
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
constexpr int CHANNELS_AT_ONCE = STRAIGHT ? SLICE_CHANNELS : 1;  // in one piece of straight-line code
constexpr bool CHAINED = CHAIN < STAGES;
constexpr bool ASYNC = BUFFERS > 2;

constexpr int DST_D = dst_cell(AXIS_D), DST_H = dst_cell(AXIS_H), DST_W = dst_cell(AXIS_W);
constexpr int SRC_D = src_cell(AXIS_D), SRC_H = src_cell(AXIS_H), SRC_W = src_cell(AXIS_W);
constexpr int SPLIT = SRC_W == 2 || SRC_W % 4 == 0 ? SRC_W : 1;  // odd strides have no bank conflicts anyway
constexpr int SKEW = first_offset(AXIS_W) - floor_div(first_offset(AXIS_W), 4) * 4;  // columns before the first needed
// Lanes that are an even number of elements apart read pairs.
constexpr int PAIR = SPLIT == 1 && CELLS_W * SRC_W % 2 == 0 ? 2 : 1;
constexpr int WINDOW_H = window(AXIS_H, CELLS_H), WINDOW_W = SKEW % PAIR + window(AXIS_W, CELLS_W);
constexpr int RUN = CELLS_W * DST_W;  // neighbouring destination elements along w that a thread owns
constexpr int ACCUMULATORS = CELLS_H * DST_D * DST_H * RUN * DST_PER_THREAD;
// Quads (four columns or four channels) of a source plane, which is one channel of a stage; elements from one plane to
// the next. Planes of channels that are stored together differ by half the banks.
constexpr int PLANE_QUADS = LOADS * THREADS / STAGE_CHANNELS;  // whole: threads are a multiple of 64
constexpr int PLANE = PLANE_QUADS * 4 + (SRC_CHANNELS_LAST ? 4 : 0);

static_assert(STAGE_CHANNELS % SRC_SLICES == 0, "every source slice takes the same share of a stage");
static_assert(LANES % 32 == 0, "a warp lies in one slice");
static_assert(CHAIN >= SRC_SLICES, "every source slice adds its sums after another stage");
static_assert(!SRC_CHANNELS_LAST || STAGE_CHANNELS % 4 == 0, "a thread loads four channels at once");
static_assert(!ASYNC || (sizeof(scalar_t) == sizeof(accum_t) && SPLIT == 1 && !SRC_CHANNELS_LAST && !ROUNDED),
              "what is copied asynchronously stays as it is");

// The tile of the source, as every thread sees it.
struct Tile {
  int n, d, h, w;              // first batch entry and first cells
  int size_d, size_h, size_w;  // source elements along each dimension, halo included, whole quads along w
  int pitch;                   // elements of one residue of w in a row
  int slab, image;             // pitches of d and n; that of h is size_w
};

__device__ __forceinline__ Tile make_tile(const Params& params, int tile) {
  Tile t;
  t.w = next_index(tile, params.tiles[3]) * params.lanes[3] * CELLS_W;
  t.h = next_index(tile, params.tiles[2]) * params.lanes[2] * CELLS_H;
  t.d = next_index(tile, params.tiles[1]) * params.lanes[1];
  t.n = tile * params.lanes[0];
  t.size_d = window(AXIS_D, params.lanes[1]);
  t.size_h = window(AXIS_H, params.lanes[2] * CELLS_H);
  t.size_w = round_up(SKEW + window(AXIS_W, params.lanes[3] * CELLS_W), SPLIT > 4 ? SPLIT : 4);
  t.pitch = t.size_w / SPLIT;
  t.slab = t.size_w * t.size_h;
  t.image = t.slab * t.size_d;
  return t;
}

// Loads a stage of the source, LOADS quads a thread: four neighbouring columns of a channel, or four neighbouring
// channels of a position. A thread's quads have the same offsets in every stage. Asynchronous copies fill the padding
// with zeros at every stage; else it is zeroed once, and quads in the padding read the first elements and store
// nothing.
struct SourceLoader {
  static constexpr int MASKS = ceil_div(LOADS, 8);

  offset_t offsets[LOADS];  // bytes from the stage's first channel at the tile's first batch entry
  int slots[LOADS];         // offsets in a stage's planes
  int channels[LOADS];      // channels of the stage
  unsigned inside[MASKS];   // four bits for each of eight quads: which elements are not padding
  Quad<scalar_t> values[ASYNC ? 1 : LOADS];

  __device__ __forceinline__ void init(const Params& params, const Tile& t, int thread, accum_t* planes) {
#pragma unroll
    for (int i = 0; i < MASKS; ++i) inside[i] = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int index = thread + i * THREADS;
      channels[i] = SRC_CHANNELS_LAST ? index % (STAGE_CHANNELS / 4) * 4 : index / PLANE_QUADS;
      int position = SRC_CHANNELS_LAST ? index / (STAGE_CHANNELS / 4) : index % PLANE_QUADS * 4;
      offsets[i] = 0;
      slots[i] = SRC_CHANNELS_LAST ? channels[i] * PLANE + position : index * 4;
      if (position >= t.image * params.lanes[0]) continue;
      const int w = position % t.size_w;
      if (SPLIT > 1) slots[i] += w % SPLIT * t.pitch + w / SPLIT - w;
      position /= t.size_w;
      const int h = position % t.size_h;
      position /= t.size_h;
      const int d = position % t.size_d;
      const int n = position / t.size_d;

      const int src_d = t.d * SRC_D + first_offset(AXIS_D) + d;
      const int src_h = t.h * SRC_H + first_offset(AXIS_H) + h;
      const int src_w = t.w * SRC_W + first_offset(AXIS_W) - SKEW + w;
      const bool row_inside = t.n + n < params.batch && (unsigned)src_d < (unsigned)params.src.size[0] &&
                              (unsigned)src_h < (unsigned)params.src.size[1];
      unsigned mask = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (row_inside && (unsigned)(src_w + (SRC_CHANNELS_LAST ? 0 : j)) < (unsigned)params.src.size[2])
          mask |= 1u << j;
      inside[i / 8] |= mask << (4 * (i % 8));
      if (mask) {
        offsets[i] = byte_offset<scalar_t>(params.src, n, src_d, src_h, src_w) +
                     (offset_t)channels[i] * (offset_t)(params.src.stride[1] * sizeof(scalar_t));
      } else if (!ASYNC) {
        put(planes + slots[i], t, Vector<accum_t, 4>{});
        put(planes + slots[i] + STAGE_CHANNELS * PLANE, t, Vector<accum_t, 4>{});
      }
    }
  }

  // `inside`, made opaque, since the compiler would keep each bit in a register of its own.
  struct Inside {
    unsigned masks[MASKS];

    __device__ __forceinline__ explicit Inside(const unsigned (&inside)[MASKS]) {
#pragma unroll
      for (int i = 0; i < MASKS; ++i) masks[i] = opaque(inside[i]);
    }
    // Whether element j of quad i exists; `channel`: its channel in the stage, of which `remaining` exist.
    __device__ __forceinline__ bool has(int i, int j, int channel, int remaining) const {
      const bool exists = SRC_CHANNELS % STAGE_CHANNELS == 0 || channel < remaining;
      return exists && masks[i / 8] >> (4 * (i % 8) + j) & 1u;
    }
  };

  // Copies the stage at `src` asynchronously to `planes`; `remaining` channels exist.
  __device__ __forceinline__ void copy(const Params& params, const scalar_t* src, int remaining,
                                       accum_t* planes) const {
    const Inside mask(inside);
    const unsigned to = shared_address(planes);
    constexpr int SIZE = sizeof(scalar_t), AT_ONCE = 16 / SIZE;
    if (params.aligned_src) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int j = 0; j < 4; j += AT_ONCE)
          cp_async<16>(to + (slots[i] + j) * SIZE, at(src, offsets[i]) + j, mask.has(i, j, channels[i], remaining));
    } else {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          cp_async<SIZE>(to + (slots[i] + j) * SIZE, at(src, offsets[i]) + j * params.src.stride[4],
                         mask.has(i, j, channels[i], remaining));
    }
  }

  // Loads the stage to registers, from which `store` writes it.
  __device__ __forceinline__ void load(const Params& params, const scalar_t* src, int remaining) {
    const Inside mask(inside);
    if (params.aligned_src) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (SRC_CHANNELS % STAGE_CHANNELS == 0 || channels[i] < remaining)
          values[i].load(at(src, offsets[i]));
        else
          values[i].clear();
      }
    } else {
      const long long step = SRC_CHANNELS_LAST ? params.src.stride[1] : params.src.stride[4];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        values[i].clear();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (mask.has(i, j, channels[i] + (SRC_CHANNELS_LAST ? j : 0), remaining))
            values[i].load(j, at(src, offsets[i]) + j * step);
      }
    }
  }

  __device__ __forceinline__ void store(const Params& params, const Tile& t, accum_t* planes) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (inside[i / 8] >> (4 * (i % 8)) & 0xfu) {
        Vector<accum_t, 4> wide;
#pragma unroll
        for (int j = 0; j < 4; ++j) wide.value[j] = operand(widen(values[i].get(j, params.aligned_src)));
        put(planes + slots[i], t, wide);
      }
  }

  static __device__ __forceinline__ void put(accum_t* slot, const Tile& t, const Vector<accum_t, 4>& quad) {
    if (!SRC_CHANNELS_LAST && SPLIT == 1) {
      *(Vector<accum_t, 4>*)slot = quad;
    } else if (!SRC_CHANNELS_LAST && SPLIT == 2) {
      *(Vector<accum_t, 2>*)slot = Vector<accum_t, 2>{quad.value[0], quad.value[2]};
      *(Vector<accum_t, 2>*)(slot + t.pitch) = Vector<accum_t, 2>{quad.value[1], quad.value[3]};
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) slot[j * (SRC_CHANNELS_LAST ? PLANE : t.pitch)] = quad.value[j];
    }
  }
};

// Loads a stage of the weights, in memory order.
struct WeightLoader {
  static constexpr int COUNT = STAGE_CHANNELS * BLOCK_DST * TAPS;
  static constexpr int CHANNEL_STRIDE = INPUT_GRAD ? WEIGHT_STRIDE_OUT : WEIGHT_STRIDE_IN;
  static constexpr int DST_STRIDE = INPUT_GRAD ? WEIGHT_STRIDE_IN : WEIGHT_STRIDE_OUT;

  unsigned offsets[WEIGHT_ITEMS];  // bytes from the stage's first weight
  int slots[WEIGHT_ITEMS];         // offsets in a stage's weights; -1 for nothing to store
  scalar_t values[ASYNC ? 1 : WEIGHT_ITEMS];

  static __device__ __forceinline__ void locate(int item, int& channel, int& dst, int& tap) {
    if (INPUT_GRAD) {
      tap = item % TAPS, channel = item / TAPS % STAGE_CHANNELS, dst = item / (TAPS * STAGE_CHANNELS);
    } else if (WEIGHT_STRIDE_OUT == 1) {
      dst = item % BLOCK_DST, tap = item / BLOCK_DST % TAPS, channel = item / (BLOCK_DST * TAPS);
    } else {
      tap = item % TAPS, dst = item / TAPS % BLOCK_DST, channel = item / (TAPS * BLOCK_DST);
    }
  }

  __device__ __forceinline__ void init(int thread) {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i) {
      int channel, dst, tap;
      locate(thread + i * THREADS, channel, dst, tap);
      const bool exists = thread + i * THREADS < COUNT;
      offsets[i] =
          exists ? (channel * CHANNEL_STRIDE + dst * DST_STRIDE + tap * WEIGHT_STRIDE_TAP) * sizeof(scalar_t) : 0;
      slots[i] = exists ? channel * WEIGHT_CHANNEL + dst / DST_PER_THREAD * WEIGHT_SLICE + tap * DST_PER_THREAD +
                              dst % DST_PER_THREAD
                        : -1;
    }
  }

  static __device__ __forceinline__ bool exists(int item, int dst_block, int remaining) {
    if (SRC_CHANNELS % STAGE_CHANNELS == 0 && DST_CHANNELS % BLOCK_DST == 0) return true;
    int channel, dst, tap;
    locate(item, channel, dst, tap);
    return channel < remaining && dst + dst_block * BLOCK_DST < DST_CHANNELS;
  }

  // Loads the stage at `weight`, of which `remaining` source channels exist: asynchronously to `weights`, or to
  // registers, from which `store` writes it.
  __device__ __forceinline__ void load(const scalar_t* weight, int dst_block, int remaining, int thread,
                                       accum_t* weights) {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i) {
      const bool exist = exists(thread + i * THREADS, dst_block, remaining);
      if constexpr (ASYNC) {
        if (slots[i] >= 0)
          cp_async<sizeof(scalar_t)>(shared_address(weights) + slots[i] * sizeof(scalar_t), at(weight, offsets[i]),
                                     exist);
      } else {
        values[i] = exist ? read(at(weight, offsets[i])) : zero<scalar_t>();
      }
    }
  }

  __device__ __forceinline__ void store(accum_t* weights) const {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i)
      if (slots[i] >= 0) weights[slots[i]] = operand(widen(values[i]));
  }
};

// Whether any tap adds to accumulator `i` of a thread.
__device__ __forceinline__ constexpr bool has_taps(int i) {
  const int row = i / (DST_PER_THREAD * RUN);
  return has_taps(AXIS_D, row / DST_H % DST_D) && has_taps(AXIS_H, row % DST_H) &&
         has_taps(AXIS_W, i / DST_PER_THREAD % DST_W);
}

// A thread's cells: accumulators as [cell h][phase d][phase h][run along w][destination channel].
struct Accumulators {
  accum_t sum[CELLS_H][DST_D][DST_H][RUN][DST_PER_THREAD];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) (&sum[0][0][0][0][0])[i] = 0;
  }

  // Adds one source channel. `corner`: the thread's first source element; `weights`: its slice's taps.
  __device__ __forceinline__ void accumulate(const accum_t* corner, const accum_t* weights, const Tile& t) {
    accum_t tap_weights[WEIGHT_SLICE];
    load_vectors<4>(weights, tap_weights);
#pragma unroll
    for (int kd = 0; kd < AXIS_D.kernel; ++kd) {
      const accum_t* slab = corner + (src_offset(AXIS_D, kd) - first_offset(AXIS_D)) * t.slab;
      accum_t patch[WINDOW_H][round_up(WINDOW_W, PAIR)];
#pragma unroll
      for (int h = 0; h < WINDOW_H; ++h)
#pragma unroll
        for (int w = 0; w < WINDOW_W; w += PAIR) {
          const int column = SKEW / PAIR * PAIR + w;
          *(Vector<accum_t, PAIR>*)&patch[h][w] =
              *(const Vector<accum_t, PAIR>*)(slab + h * t.size_w + column % SPLIT * t.pitch + column / SPLIT);
        }
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
                sum[cell_h][dst_offset(AXIS_D, kd)][dst_offset(AXIS_H, kh)][cell_w * DST_W + dst_offset(AXIS_W, kw)]
                   [dst] += patch[cell_h * SRC_H + src_offset(AXIS_H, kh) - first_offset(AXIS_H)]
                                 [SKEW % PAIR + cell_w * SRC_W + src_offset(AXIS_W, kw) - first_offset(AXIS_W)] *
                            tap_weights[((kd * AXIS_H.kernel + kh) * AXIS_W.kernel + kw) * DST_PER_THREAD + dst];
    }
  }

  // Adds the lane's sums in shared memory.
  __device__ __forceinline__ void add(const accum_t* sums) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i += 4) {
      const Vector<accum_t, 4> four = *(const Vector<accum_t, 4>*)(sums + i * SLICE_THREADS);
#pragma unroll
      for (int j = 0; j < 4 && i + j < ACCUMULATORS; ++j)
        if (has_taps(i + j)) (&sum[0][0][0][0][0])[i + j] += four.value[j];
    }
  }

  // Adds the accumulators to the lane's sums, or with `first` overwrites these, and clears the accumulators.
  __device__ __forceinline__ void flush(accum_t* sums, bool first) {
    if (!first) add(sums);
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i += 4) {
      Vector<accum_t, 4> four = {};
#pragma unroll
      for (int j = 0; j < 4 && i + j < ACCUMULATORS; ++j) four.value[j] = (&sum[0][0][0][0][0])[i + j];
      *(Vector<accum_t, 4>*)(sums + i * SLICE_THREADS) = four;
    }
    clear();
  }

  // Leaves the total of the lane's sums and of all source slices in slice 0. Called by every thread of the block.
  __device__ __forceinline__ void reduce(accum_t* sums, int slice) {
#pragma unroll 1
    for (int other = 1; other < SRC_SLICES; ++other) {
      if (slice == other) flush(sums, !CHAINED && other == 1);
      __syncthreads();
    }
    if (slice == 0) add(sums);
  }
};

// A lane's first cell in the destination.
struct Target {
  offset_t offset;           // bytes from the tile's first batch entry
  int slabs, rows, columns;  // extents of the destination from there on; 0 for lanes beyond the tile or the batch

  __device__ __forceinline__ void init(const Params& params, const Tile& t, int lane) {
    const int w = (t.w + next_index(lane, params.lanes[3]) * CELLS_W) * DST_W;
    const int h = (t.h + next_index(lane, params.lanes[2]) * CELLS_H) * DST_H;
    const int d = (t.d + next_index(lane, params.lanes[1])) * DST_D, n = lane;
    offset = byte_offset<scalar_t>(params.dst, n, d, h, w);
    slabs = n < params.lanes[0] && t.n + n < params.batch ? params.dst.size[0] - d : 0;
    rows = params.dst.size[1] - h;
    columns = params.dst.size[2] - w;
  }
  __device__ __forceinline__ bool is_whole() const {
    return slabs >= DST_D && rows >= CELLS_H * DST_H && columns >= RUN;
  }
};

// One element of a destination row: its offset, and in how many of the lane's rows (low half) and slabs it exists.
struct Element {
  offset_t offset;
  unsigned limits;
};

// Channels first. Every lane owns RUN neighbouring elements of a row. If rows are aligned it stores them as one vector;
// else a warp transposes the rows of its lanes in shared memory, so that neighbouring lanes store neighbouring
// elements: either way whole lines are written. `elements` has the destination of each element of the transposed rows.
constexpr bool VECTORS = (RUN == 2 || RUN == 4 || RUN == 8) && RUN * sizeof(scalar_t) <= 16;

__device__ __forceinline__ void describe_row(const Params& params, const Target& target, Element* elements) {
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    const unsigned rows = i < target.columns ? max(0, min(target.rows, CELLS_H * DST_H)) : 0;
    const unsigned slabs = max(0, min(target.slabs, DST_D));
    elements[i] = Element{target.offset + i * (offset_t)(params.dst.stride[4] * sizeof(scalar_t)), rows | slabs << 16};
  }
}

// WHOLE: all elements of the warp's lanes exist, so that none is tested.
template <bool WHOLE>
__device__ __forceinline__ void store_rows(const Params& params, const Target& target, const Accumulators& acc,
                                           scalar_t* dst, const ChannelTerms (&terms)[DST_PER_THREAD], int channels,
                                           accum_t* staging, const Element* elements, int in_warp) {
  const bool vectors = VECTORS && params.aligned_rows;
  constexpr bool KEPT = WHOLE && RUN <= 8;  // offsets stay in registers
  offset_t offsets[KEPT ? RUN : 1];
#pragma unroll
  for (int i = 0; KEPT && RUN > 1 && i < RUN; ++i) offsets[i] = elements[i * 32 + in_warp].offset;
#pragma unroll
  for (int channel = 0; channel < DST_PER_THREAD; ++channel) {
    if (channel >= channels) break;
    scalar_t* const plane = dst + channel * params.dst.stride[1];
#pragma unroll
    for (int d = 0; d < DST_D; ++d)
#pragma unroll
      for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
        for (int h = 0; h < DST_H; ++h) {
          const int row = cell_h * DST_H + h;
          scalar_t* const line = plane + d * params.dst.stride[2] + row * params.dst.stride[3];
          accum_t value[RUN];
#pragma unroll
          for (int i = 0; i < RUN; ++i) value[i] = add_bias(acc.sum[cell_h][d][h][i][channel], terms[channel]);
          if (RUN == 1 || vectors) {
            typedef Vector<scalar_t, RUN == 1 || VECTORS ? RUN : 1> Run;
            Run run;
            const bool exists = d < target.slabs && row < target.rows && target.columns > 0;
#pragma unroll
            for (int i = 0; i < (int)(sizeof(Run) / sizeof(scalar_t)); ++i)
              narrow(operate(value[i], terms[channel], place_if(exists, at(line, target.offset) + i)), run.value[i]);
            if (exists) *(Run*)at(line, target.offset) = run;
            continue;
          }
          if (has_taps(AXIS_D, d) && has_taps(AXIS_H, h)) {  // else all elements of the row are equal
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RUN; ++i) staging[in_warp * RUN + i] = value[i];
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RUN; ++i) value[i] = staging[i * 32 + in_warp];
          }
#pragma unroll
          for (int i = 0; i < RUN; ++i) {
            if constexpr (WHOLE) {
              scalar_t* const to = at(line, KEPT ? offsets[i] : elements[i * 32 + in_warp].offset);
              narrow(operate(value[i], terms[channel], to), *to);
            } else {
              const Element element = elements[i * 32 + in_warp];
              if (row < (int)(element.limits & 0xffffu) && d < (int)(element.limits >> 16)) {
                scalar_t* const to = at(line, element.offset);
                narrow(operate(value[i], terms[channel], to), *to);
              }
            }
          }
        }
  }
}

// Channels last: a thread's channels are contiguous.
__device__ __forceinline__ void store_channels(const Params& params, const Target& target, const Accumulators& acc,
                                               scalar_t* dst, const ChannelTerms (&terms)[DST_PER_THREAD],
                                               int channels) {
#pragma unroll
  for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
    for (int d = 0; d < DST_D; ++d)
#pragma unroll
      for (int h = 0; h < DST_H; ++h)
#pragma unroll
        for (int w = 0; w < RUN; ++w) {
          const int row = cell_h * DST_H + h;
          if (d >= target.slabs || row >= target.rows || w >= target.columns) continue;
          scalar_t* const pixel =
              at(dst + d * params.dst.stride[2] + row * params.dst.stride[3] + w * params.dst.stride[4], target.offset);
#pragma unroll
          for (int first = 0; first < DST_PER_THREAD; first += DST_VECTOR) {
            if (first >= channels) break;
            Vector<scalar_t, DST_VECTOR> vector;
#pragma unroll
            for (int i = 0; i < DST_VECTOR; ++i)
              narrow(finish(acc.sum[cell_h][d][h][w][first + i], terms[first + i],
                            place_if(first + i < channels, pixel + first + i)),
                     vector.value[i]);
            *(Vector<scalar_t, DST_VECTOR>*)(pixel + first) = vector;
          }
        }
}

// `whole`: all elements of the warp's lanes exist.
__device__ __forceinline__ void store(const Params& params, const Target& target, const Accumulators& acc,
                                      scalar_t* dst, const ChannelTerms (&terms)[DST_PER_THREAD], int channels,
                                      accum_t* staging, const Element* elements, int lane, bool whole) {
  if (DST_CHANNELS_LAST)
    store_channels(params, target, acc, dst, terms, channels);
  else if (RUN > 1 && !VECTORS && whole)
    store_rows<true>(params, target, acc, dst, terms, channels, staging, elements, lane);
  else
    store_rows<false>(params, target, acc, dst, terms, channels, staging, elements, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_tiled(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                 const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                 const Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  const int thread = threadIdx.x;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // so that the compiler knows it is uniform
  const int lane = thread % LANES;
  const int dst_slice = warp / (LANES / 32) % DST_SLICES;
  const int src_slice = warp / (SLICE_THREADS / 32);

  const int tile_index = blockIdx.z * gridDim.y + blockIdx.y;
  if (tile_index >= params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3]) return;
  const int first_work_tile = blockIdx.x * params.work_tiles_per_block;
  const int work_tiles = min(params.work_tiles_per_block, params.work_tiles - first_work_tile);
  const Tile tile = make_tile(params, tile_index);
  src += tile.n * params.src.stride[0];
  dst += tile.n * params.dst.stride[0];

  accum_t* const weights = (accum_t*)shared_memory;
  accum_t* const planes = weights + BUFFERS * WEIGHT_STAGE;
  Element* const elements = (Element*)(planes + BUFFERS * STAGE_CHANNELS * PLANE);
  accum_t* const rows = (accum_t*)(elements + (RUN > 1 ? LANES * RUN : 0));
  accum_t* const sums = rows + SLICE_THREADS * RUN + thread % SLICE_THREADS * 4;

  // The lane's first source element in a plane.
  const int lane_w = lane % params.lanes[3], lane_h = lane / params.lanes[3] % params.lanes[2];
  const int lane_d = lane / (params.lanes[3] * params.lanes[2]) % params.lanes[1];
  const int lane_n = min(lane / (params.lanes[3] * params.lanes[2] * params.lanes[1]),
                         params.lanes[0] - 1);  // lanes beyond the tile idle
  const int corner = lane_n * tile.image + lane_d * SRC_D * tile.slab + lane_h * CELLS_H * SRC_H * tile.size_w +
                     lane_w * CELLS_W * (SRC_W / SPLIT);

  SourceLoader source;
  WeightLoader taps;
  Target target;
  Accumulators acc;
  source.init(params, tile, thread, planes);
  taps.init(thread);
  target.init(params, tile, lane);
  if (!DST_CHANNELS_LAST && RUN > 1 && warp < LANES / 32) describe_row(params, target, elements + lane * RUN);
  const bool whole = __all_sync(0xffffffffu, target.is_whole());

  int group = first_work_tile / DST_BLOCKS, dst_block = first_work_tile % DST_BLOCKS;
  // The next step to load, and the number of steps left.
  int ahead_group = group, ahead_block = dst_block, ahead_stage = 0, ahead = work_tiles * STAGES;
  const scalar_t *ahead_src = src, *ahead_weight = weight;
  auto load = [&](int buffer) {
    if (ahead-- > 0) {
      if (ahead_stage == 0) {
        ahead_src = src + (long long)ahead_group * SRC_CHANNELS * params.src.stride[1];
        ahead_weight = weight + (long long)ahead_group * SRC_CHANNELS * DST_CHANNELS * TAPS +
                       ahead_block * BLOCK_DST * WeightLoader::DST_STRIDE;
      }
      const int remaining = SRC_CHANNELS - ahead_stage * STAGE_CHANNELS;
      if constexpr (ASYNC)
        source.copy(params, ahead_src, remaining, planes + buffer * STAGE_CHANNELS * PLANE);
      else
        source.load(params, ahead_src, remaining);
      taps.load(ahead_weight, ahead_block, remaining, thread, weights + buffer * WEIGHT_STAGE);
      ahead_src += STAGE_CHANNELS * params.src.stride[1];
      ahead_weight += STAGE_CHANNELS * WeightLoader::CHANNEL_STRIDE;
      if (++ahead_stage == STAGES) {
        ahead_stage = 0;
        if (++ahead_block == DST_BLOCKS) ahead_block = 0, ++ahead_group;
      }
    }
    if constexpr (ASYNC) cp_async_commit();
  };

#pragma unroll 1
  for (int step = 0; step < BUFFERS - 1; ++step) load(step);
  int buffer = 0;
#pragma unroll 1
  for (int work_tile = 0; work_tile < work_tiles; ++work_tile) {
    acc.clear();
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
      accum_t* const stage_planes = planes + buffer * STAGE_CHANNELS * PLANE;
      accum_t* const stage_weights = weights + buffer * WEIGHT_STAGE;
      if constexpr (ASYNC) {
        cp_async_wait<BUFFERS - 2>();
      } else {
        source.store(params, tile, stage_planes);
        taps.store(stage_weights);
      }
      __syncthreads();
      load(buffer == 0 ? BUFFERS - 1 : buffer - 1);
#pragma unroll(CHANNELS_AT_ONCE)
      for (int i = 0; i < SLICE_CHANNELS; ++i) {
        const int channel = src_slice * SLICE_CHANNELS + i;
        acc.accumulate(stage_planes + channel * PLANE + corner,
                       stage_weights + channel * WEIGHT_CHANNEL + dst_slice * WEIGHT_SLICE, tile);
      }
      const int first_flush = CHAIN - SRC_SLICES;
      if (CHAINED && stage % CHAIN == first_flush + src_slice && stage + 1 < STAGES)
        acc.flush(sums, stage == first_flush);
      buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
    }

    const int first_dst = dst_block * BLOCK_DST + dst_slice * DST_PER_THREAD;
    const int channels = DST_CHANNELS - first_dst;  // channels that exist from this slice's first on
    const long long first_channel = (long long)group * DST_CHANNELS + first_dst;
    if (CHAINED || SRC_SLICES > 1) acc.reduce(sums, src_slice);
    if (src_slice == 0 && channels > 0) {
      ChannelTerms terms[DST_PER_THREAD];
#pragma unroll
      for (int i = 0; i < DST_PER_THREAD; ++i) terms[i] = channel_terms(operands, first_channel + i, i < channels);
      scalar_t* const item_dst = dst + first_channel * params.dst.stride[1];
      if (STAGES > 4) target.init(params, tile, lane);  // again, so that it holds no registers during the stages
      accum_t* const staging = rows + warp * (32 * RUN);
      const Element* const of_warp = elements + lane / 32 * (32 * RUN);
      store(params, target, acc, item_dst, terms, channels, staging, of_warp, lane % 32, whole);
    }
    if (++dst_block == DST_BLOCKS) dst_block = 0, ++group;
  }
}
