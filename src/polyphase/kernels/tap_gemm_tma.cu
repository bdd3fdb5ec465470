// The forward pass and the input gradient of any layer by TMA and wgmma:
//
//   destination[cd, cell·DST + phase] = bias[cd] + Σ over taps of the phase and cs of
//                                                  w[cs, cd, tap] · source[cs, cell·SRC + offset of the tap]
//
// with cells and phases of core/geometry.cuh. Rows are a tile of cells, columns are destination channels, and k runs
// over the phase's tap groups: CHUNK source channels at one tap. The source has its channels innermost; for each stage
// TMA loads one box of it, every SRC-th element, with zeros outside the tensor. No thread computes the address of a
// tap, and after the first read elements come from L2. The destination may have any strides.
//
// A stage has the tap groups of up to WINDOW taps along the width, which read neighbouring elements of its box. The box
// has HALO more cells along the width than the tile, and the A descriptor of each tap starts some box rows further:
// TMA's swizzle depends on address bits alone. A descriptor reads eight rows, then the next eight at distance SBO. So
// with WINDOW > 1 a tile is cut into runs of eight cells along the width. If the tile is one line, SBO leads to the
// next run; if it has a multiple of eight lines, to the same columns one line below.
//
// Columns may also be outputs of a cell (core/merged_phases.cuh): layers of few channels then read each box once for
// all phases, and store results that are neighbours in memory together.
//
// With RUNS the source was written as padded rows (core/run_groups.cuh), which the tensor map describes as a tensor
// that overlaps itself: its innermost dimension is the run of elements that one cell reads, the next one cells. k is
// padded once for a run instead of once for each tap, and the stride may be any.
//
// Index mapping. Two consumer warpgroups multiply, each ROW_TILES tiles of 64 rows by COLUMNS columns; one producer
// thread issues TMA. Blocks are persistent and take work tiles from an atomic counter (column block fastest, then
// phase, tile, group, split), since work tiles differ in length: a tap that meets only zeros in all of a tile is
// skipped. With split-K each split stores a partial plane (steps/reduce_splits.cu).
//
// steps/pack_tap_groups.cu packs the weights and sets the counter to zero. In an input gradient the weights may already
// have their source channels innermost: with WEIGHT_BOXES TMA loads them in place, and blocks take every n-th work
// tile.
//
// Results of an input gradient fill whole sectors. In NHWC lanes exchange them so that each has eight bytes of
// neighbouring channels; in NCHW so that each has neighbouring positions, or they pass through shared memory.
//
// float32 is read as TF32, or split into two parts of TF32. The two parts of the source are separate channels
// (steps/transpose.cu), the two parts of the weights are adjacent blocks. Three products of parts are added.
//
// Tensor-core accumulation truncates at every step. So accumulators are flushed: after FLUSH stages they are added in
// float32 to a second set of registers.
//
// Shared memory: STAGES stages, each [part][cell of the box][k], then [tap][part][column][k], rows of CHUNK elements.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/merged_phases.cuh"
#include "core/phase.cuh"
#include "core/pipeline.cuh"
#include "core/run_groups.cuh"
#include "core/shared_address.cuh"
#include "core/tap_window.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "epilogue/store_gradient.cuh"
#include "mainloop/k_major_product.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

struct Params {
  TensorMap source_box, second_box;  // second: weights, or with RUNS the source for phases with fewer taps along w
  Tensor5 dst;
  int source_size[3];
  int batch, groups;
  int tile_extent[4];  // cells of a tile along n, d, h, w; their product is at most the rows of a block
  int tiles[4];        // tiles along n, d, h, w
  int splits;          // split-K: shares of the stages
  int sums;            // whether results stay accum_t, a partial plane for each split
  int vector;          // whether neighbouring columns are stored together
  long long plane;     // elements of a partial plane
};

constexpr int COLUMN_BLOCKS = ceil_div(DST_CHANNELS, COLUMNS);
// Accumulators of a consumer thread, twice as many if flushed to a second set. Producers get the remaining registers.
constexpr int HELD_SUMS = ROW_TILES * COLUMNS / 2 * (FLUSH > 0 ? 2 : 1);
constexpr int PRODUCER_REGISTERS = HELD_SUMS > 160 ? 40 : 56, CONSUMER_REGISTERS = HELD_SUMS > 160 ? 232 : 224;
static_assert(registers_suffice(CONSUMER_THREADS, CONSUMER_REGISTERS, 128, PRODUCER_REGISTERS), "too few registers");
static_assert(PITCH == CHUNK * (int)sizeof(scalar_t), "a row of a stage is a tap group");
static_assert(WINDOW == 1 || !RUNS, "the taps of a run are one group");
static_assert(!WEIGHT_BOXES || (INPUT_GRAD && PARTS == 1 && !RUNS), "weights that TMA reads in place have k innermost");

// Bytes of one part of a stage's source box, of all parts of a tap's weights, and of a stage.
constexpr int BOX_BYTES = BOX_ROWS * PITCH, TAP_BYTES = PARTS * B_BYTES;
constexpr int WINDOW_BYTES = round_up(PARTS * BOX_BYTES + WINDOW * TAP_BYTES, 1024);

constexpr unsigned NOWHERE = ~0u;

// Maps rows of the GEMM tile to rows of the loaded box.
struct BoxRows {
  int lines, pitch;  // lines of cells along the width; box rows from one line to the next

  __device__ __forceinline__ explicit BoxRows(const int (&tile_extent)[4])
      : lines(tile_extent[0] * tile_extent[1] * tile_extent[2]), pitch(tile_extent[3] + HALO) {}

  // Box row where the 64-row tile `index` begins. next_eight(): distance to its second eight rows (SBO).
  __device__ __forceinline__ int tile(int index) const {
    if (WINDOW == 1) return 64 * index;
    const int column = 8 * index / lines;
    return (8 * index - column * lines) * pitch + 8 * column;
  }
  __device__ __forceinline__ int next_eight() const { return WINDOW == 1 || lines == 1 ? 8 : pitch; }

  // The cell of a row, relative to the tile's first: n, d, h and w, a byte each. NOWHERE past the tile.
  static __device__ __forceinline__ unsigned place(const int (&tile_extent)[4], int row) {
    int at[4];
    if (WINDOW == 1) {
      decode(tile_extent, row, at);
    } else {
      const int in_order[4] = {ceil_div(tile_extent[3], 8), tile_extent[0], tile_extent[1], tile_extent[2]};
      int run[4];
      decode(in_order, row / 8, run);
      at[0] = run[0] < in_order[0] ? run[1] : tile_extent[0], at[1] = run[2], at[2] = run[3],
      at[3] = 8 * run[0] + row % 8;
    }
    return at[0] < tile_extent[0] ? at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3] : NOWHERE;
  }
};

struct WorkTile {
  int split, group, phase, column_block;
  int first[4];  // first cell along n, d, h, w

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    const int tiles = volume(params.tiles);
    column_block = index % COLUMN_BLOCKS, index /= COLUMN_BLOCKS;
    phase = index % PHASES, index /= PHASES;
    tile_origin(params.tiles, params.tile_extent, index % tiles, first);
    index /= tiles;
    group = index % params.groups, split = index / params.groups;
  }
  static __device__ __forceinline__ int count(const Params& params) {
    return volume(params.tiles) * PHASES * COLUMN_BLOCKS * params.groups * params.splits;
  }
};

// Whether a work tile may skip taps that meet only zeros. With RUNS, taps along w form one run and stay; in an input
// gradient with RUNS the planes are numbered by tap, so none is skipped.
constexpr bool LEAVES_OUT = !(RUNS && INPUT_GRAD), LEAVES_OUT_W = LEAVES_OUT && !RUNS;

// The taps of a work tile's phase that meet the source in at least one cell, and the stages of its split.
struct TileTaps {
  Phase met;
  int all, slab, row;  // taps of the phase; of them at one d; of them at one d and h
  int skipped = 0;     // taps before the first that is met
  int first, count;    // stages

  __device__ __forceinline__ TileTaps(const Params& params, const WorkTile& work) : met(work.phase) {
    row = JOINED ? 1 : met.w.count, slab = met.h.count * row, all = met.d.count * slab;
    if (LEAVES_OUT) {
      skipped = slab * keep_met(met.d, AXIS_D, work.first[1], params.tile_extent[1], params.source_size[0]) +
                row * keep_met(met.h, AXIS_H, work.first[2], params.tile_extent[2], params.source_size[1]);
      if (LEAVES_OUT_W) skipped += keep_met(met.w, AXIS_W, work.first[3], params.tile_extent[3], params.source_size[2]);
      met.multiply_counts();
    }
    const int stages = JOINED ? RunGroup::count(met) : TapWindow::count(met), each = ceil_div(stages, params.splits);
    first = work.split * each, count = max(0, min(each, stages - first));
  }

  // Index of the packed weights of a stage's first tap; skipped tap groups count.
  __device__ __forceinline__ int packed(const TapWindow& at, int index) const {
    if (!LEAVES_OUT) return index;
    if (JOINED) {
      const RunGroup of_run(met, index);
      return of_run.element / CHUNK * all + of_run.at_d * slab + of_run.at_h;
    }
    return at.channel / CHUNK * all + at.at_d * slab + at.at_h * row + at.at_w;
  }

 private:
  // Returns the number of taps skipped before the first that is met.
  template <class PhaseAxis>
  static __device__ __forceinline__ int keep_met(PhaseAxis& taps, Axis axis, int cell, int cells, int size) {
    const int first = cell * src_cell(axis) + taps.src;
    return taps.keep_met(first, first + (cells - 1) * src_cell(axis), size);
  }
};

// Queue of work tiles and their stage counts, from the producer thread to the consumer warps. Several entries, so that
// short work tiles are loaded ahead.
constexpr int QUEUE = 4;
struct WorkQueue {
  PipelineBarriers<QUEUE> ring;
  int work[QUEUE], stages[QUEUE];
};

// Run by one thread: loads the source boxes of a stage.
__device__ __forceinline__ void load_source(const Params& params, const scalar_t* src, const WorkTile& work,
                                            const Phase& phase, const TapWindow& at, int index, unsigned to,
                                            unsigned full) {
  const int box_bytes =
      params.tile_extent[0] * params.tile_extent[1] * params.tile_extent[2] * (params.tile_extent[3] + HALO) * PITCH;
  if constexpr (RUNS) {
    const RunPlace run(phase, index);
    const TensorMap& box = phase.w.count < RUN_TAPS ? params.second_box : params.source_box;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int plane = (part * params.groups + work.group) * (PLANES_D * PLANES_H) + run.plane;
      const int from[5] = {run.element, work.first[3] + run.w, work.first[2] + run.h, work.first[1] + run.d,
                           plane * params.batch + work.first[0]};
      tma_load_box(to + part * BOX_BYTES, box, src, from, box_bytes, full);
    }
  } else {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int from[5] = {(work.group * PARTS + part) * PADDED_CHANNELS + at.channel,
                           work.first[3] * src_cell(AXIS_W) + phase.w.src + at.w(),
                           work.first[2] * src_cell(AXIS_H) + phase.h.src + at.at_h * TapsH::SRC_STEP,
                           work.first[1] * src_cell(AXIS_D) + phase.d.src + at.at_d * TapsD::SRC_STEP, work.first[0]};
      tma_load_box(to + part * BOX_BYTES, params.source_box, src, from, box_bytes, full);
    }
  }
}

// Run by one thread: loads the weights of a stage's taps; `packed` is the index of the first tap's packed weights.
__device__ __forceinline__ void load_weights(const Params& params, const unsigned char* weights, const WorkTile& work,
                                             const Phase& phase, const TapWindow& at, int packed, unsigned to,
                                             unsigned full) {
  const int taps = RUNS ? 1 : at.taps;
  if (WEIGHT_BOXES) {
    const int line = (phase.d.tap + at.at_d) * AXIS_H.kernel + phase.h.tap + at.at_h;
    const int first = work.group * DST_CHANNELS + work.column_block * COLUMNS;
#pragma unroll 1
    for (int tap = 0; tap < taps; ++tap) {
      const int of_row = phase.w.tap + at.at_w + tap * TapWindow::STEP;
      const int from[5] = {at.channel, first, line * AXIS_W.kernel + of_row, 0, 0};
      tma_load_box(to + tap * TAP_BYTES, params.second_box, (const scalar_t*)weights, from, TAP_BYTES, full);
    }
  } else {
    weights += COUNTER_BYTES + (long long)packed * TAP_BYTES;
    if (TapWindow::STEP == 1) {
      tma_load_bytes(to, weights, taps * TAP_BYTES, full);
    } else {
#pragma unroll 1
      for (int tap = 0; tap < taps; ++tap)
        tma_load_bytes(to + tap * TAP_BYTES, weights + tap * (TapWindow::STEP * TAP_BYTES), TAP_BYTES, full);
    }
  }
}

// Run by one thread: takes work tiles, and loads the boxes and weights of all their stages.
__device__ __forceinline__ void load_items(const Params& params, const scalar_t* src, unsigned char* weights,
                                           PipelineBarriers<STAGES>& ring, WorkQueue& queue, int (&taps_of)[STAGES],
                                           const unsigned char* buffers) {
  griddepcontrol_wait();
  PipelineState<STAGES> state;
  PipelineState<QUEUE> place;
  int index = blockIdx.x;
  const auto give = [&](int stages) {
    mbarrier_wait(shared_address(queue.ring.empty + place.index), place.parity ^ 1);
    *(volatile int*)(queue.work + place.index) = index;
    *(volatile int*)(queue.stages + place.index) = stages;
    mbarrier_arrive(shared_address(queue.ring.full + place.index));
    place.next();
  };
#pragma unroll 1
  while (true) {
    if (index >= WorkTile::count(params)) return give(0);
    const WorkTile work(params, index);
    const TileTaps taps(params, work);
    give(taps.count);
    const int block = (work.group * PHASES + work.phase) * COLUMN_BLOCKS + work.column_block;
    const int before = block * PACKED_STAGES + taps.skipped;  // tap groups whose weights are packed before these
    TapWindow at(taps.met, taps.first);
#pragma unroll 1
    for (int stage = taps.first; stage < taps.first + taps.count; ++stage) {
      const unsigned to = shared_address(buffers + state.index * WINDOW_BYTES);
      const unsigned full = shared_address(ring.full + state.index);
      mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
      load_source(params, src, work, taps.met, at, stage, to, full);
      const int packed = before + taps.packed(at, stage);
      load_weights(params, weights, work, taps.met, at, packed, to + PARTS * BOX_BYTES, full);
      if (WINDOW > 1) taps_of[state.index] = at.taps;
      mbarrier_arrive(full);
      state.next();
      at.next(taps.met);
    }
    index = WEIGHT_BOXES ? index + (int)gridDim.x : (int)(gridDim.x + atomicAdd((unsigned*)weights, 1u));
  }
}

// Overwrites the sums with the products of `stages` stages.
__device__ __forceinline__ void multiply(Sums& sums, int stages, const BoxRows& box, PipelineBarriers<STAGES>& ring,
                                         PipelineState<STAGES>& state, const int (&taps_of)[STAGES],
                                         const unsigned char* buffers) {
  const auto products = [&](int stage) { return WINDOW == 1 ? 1 : *(const volatile int*)(taps_of + stage); };
  const auto add = [&](int index, int tap, bool more) {
    const unsigned stage = shared_address(buffers) + index * WINDOW_BYTES;
    const int shift = WINDOW == 1 ? 0 : (INPUT_GRAD ? tap : products(index) - 1 - tap) * TapWindow::SHIFT;
    unsigned rows[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
      rows[tile] = stage + (box.tile(threadIdx.x / 128 * ROW_TILES + tile) + shift) * PITCH;
    sums.add<BOX_BYTES>(rows, box.next_eight() * PITCH, stage + PARTS * BOX_BYTES + tap * TAP_BYTES, more);
  };
  consume_stages(stages, ring, state, products, add, [&] { wgmma_wait<0>(), pin(sums.of); });
}

// The `i`-th row that a thread stores: its accumulators' row or, for an input gradient in NCHW, that of
// epilogue/store_gradient.cuh.
constexpr bool BY_COLUMNS = INPUT_GRAD && !DST_CHANNELS_LAST;
__device__ __forceinline__ int row_of_thread(bool pairs, int i) {
  return BY_COLUMNS ? threadIdx.x / 128 * GROUP_ROWS + i / 2 * 64 + stored_row(pairs, i % 2) : Sums::row(i);
}

// Where the results of a row are stored: those of its cell.
struct Target {
  long long at;      // offset of the cell's first output, which may not exist
  unsigned outputs;  // those that exist (Column::bits)

  __device__ __forceinline__ bool has(const Column& column) const {
    return MERGED == 1 ? at >= 0 : (outputs & column.bits()) == column.bits();
  }
};

__device__ __forceinline__ Target target_of(const Params& params, const Phase& phase, const int (&cell)[4],
                                            bool exists) {
  const Tensor5& dst = params.dst;
  if (MERGED == 1) return {dst_element(dst, phase, cell, exists), 0};
  const int d = cell[1] * LAYER_D.stride + phase.d.place - cropped(LAYER_D, MERGED_D);
  const int h = cell[2] * LAYER_H.stride + phase.h.place - cropped(LAYER_H, MERGED_H);
  const int w = cell[3] * LAYER_W.stride + phase.w.place - cropped(LAYER_W, MERGED_W);
  const unsigned outputs = Column::inside(d, MERGED_D, dst.size[0]) |
                           Column::inside(h, MERGED_H, dst.size[1]) << MERGED_D |
                           Column::inside(w, MERGED_W, dst.size[2]) << (MERGED_D + MERGED_H);
  return {cell[0] * dst.stride[0] + d * dst.stride[2] + h * dst.stride[3] + w * dst.stride[4], exists ? outputs : 0};
}

// Stores a work tile of an input gradient. `dst`: the first column. `staged`: memory of the warpgroup, whose threads
// call this together.
template <class Stored>
__device__ __forceinline__ void store_gradient(const Params& params, const Sums& sums,
                                               const Target (&targets)[2 * ROW_TILES], int columns, Stored* dst,
                                               bool pairs, unsigned char* staged) {
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    constexpr bool WHOLE = DST_CHANNELS % COLUMNS == 0;
    Stored* to[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) to[j] = targets[2 * i + j].at < 0 ? nullptr : dst + targets[2 * i + j].at;
    if constexpr (BY_COLUMNS) {
      if (pairs)
        store_row_pair<WHOLE>(sums.of[i], to, params.dst.stride[1], columns);
      else
        store_columns<WHOLE, ROW_TILES>(sums.of[i], i, to, params.dst.stride[1], columns, staged);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (params.vector)
          store_pixel<WHOLE, true>(sums.of[i], j, to[j], to[j] ? columns : 0);
        else
          store_pixel<WHOLE, false>(sums.of[i], j, to[j], to[j] ? columns : 0);
    }
  }
}

// Stores a work tile of a forward pass.
__device__ __forceinline__ void store_outputs(const Params& params, const WorkTile& work, const Sums& sums,
                                              const Target (&targets)[2 * ROW_TILES], const EpilogueOperands& operands,
                                              scalar_t* dst) {
  accum_t* const partial = (accum_t*)dst + work.split * params.plane;
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    const int first = work.column_block * COLUMNS + 8 * tile + fragment_column();
    const Column columns[2] = {Column(first), Column(first + 1)};
    const bool exists[2] = {first < DST_CHANNELS, first + 1 < DST_CHANNELS}, biased = work.split == 0;
    long long offset[2];
    ChannelTerms terms[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int channel = work.group * CHANNELS + columns[j].channel;
      terms[j] = channel_terms(operands, ONE_BIAS ? 0 : channel, biased && exists[j]);
      offset[j] = channel * params.dst.stride[1];
      if (MERGED > 1)
        offset[j] += columns[j].d * params.dst.stride[2] + columns[j].h * params.dst.stride[3] +
                     columns[j].w * params.dst.stride[4];
    }
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      const Target& target = targets[i];
      const bool stored[2] = {exists[0] && target.has(columns[0]), exists[1] && target.has(columns[1])};
      const float* const pair = sums.of[i / 2] + 4 * tile + i % 2 * 2;
      if (params.sums && params.vector) {
        const Vector<accum_t, 2> both = {{add_bias(pair[0], terms[0]), add_bias(pair[1], terms[1])}};
        if (stored[0]) *(Vector<accum_t, 2>*)(partial + target.at + offset[0]) = both;
      } else if (params.sums) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (stored[j]) partial[target.at + offset[j]] = add_bias(pair[j], terms[j]);
      } else {
        Vector<scalar_t, 2> both;
#pragma unroll
        for (int j = 0; j < 2; ++j)
          narrow(finish(pair[j], terms[j], stored[j] ? dst + target.at + offset[j] : nullptr), both.value[j]);
        if (params.vector) {
          if (stored[0]) *(Vector<scalar_t, 2>*)(dst + target.at + offset[0]) = both;
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (stored[j]) dst[target.at + offset[j]] = both.value[j];
        }
      }
    }
  }
}

// Stores a work tile; `places` are the cells of the thread's rows (BoxRows::place).
__device__ __forceinline__ void store(const Params& params, const WorkTile& work, const Phase& phase, const Sums& sums,
                                      const unsigned (&places)[2 * ROW_TILES], const EpilogueOperands& operands,
                                      scalar_t* dst, bool pairs, unsigned char* staged) {
  Target targets[2 * ROW_TILES];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    int cell[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) cell[j] = work.first[j] + (int)(places[i] >> (24 - 8 * j) & 255);
    targets[i] = target_of(params, phase, cell, places[i] != NOWHERE && cell[0] < params.batch);
  }
  const int first = work.column_block * COLUMNS, columns = DST_CHANNELS - first;
  if constexpr (INPUT_GRAD) {
    const long long at = (work.group * DST_CHANNELS + first) * (DST_CHANNELS_LAST ? 1 : params.dst.stride[1]);
    if (sizeof(scalar_t) == sizeof(accum_t) || params.sums)
      store_gradient(params, sums, targets, columns, (accum_t*)dst + work.split * params.plane + at, pairs, staged);
    else
      store_gradient(params, sums, targets, columns, dst + at, pairs, staged);
  } else {
    store_outputs(params, work, sums, targets, operands, dst);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tap_gemm_tma(const scalar_t* __restrict__ src, unsigned char* __restrict__ weights,
                 const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                 const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  __shared__ __align__(8) PipelineBarriers<STAGES> ring;
  __shared__ __align__(8) WorkQueue queue;
  __shared__ int taps_of[STAGES];
  __shared__ __align__(16) unsigned char staged[CONSUMER_GROUPS][BY_COLUMNS ? STAGED_BYTES : 1];
  if (threadIdx.x == 0) {
    ring.init(1, CONSUMER_THREADS / 32);
    queue.ring.init(1, CONSUMER_THREADS / 32);
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMER_THREADS) load_items(params, src, weights, ring, queue, taps_of, shared_memory);
    return;
  }
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  PipelineState<STAGES> state;
  PipelineState<QUEUE> place;
  const int work_tiles = WorkTile::count(params);
  const BoxRows box(params.tile_extent);
  const bool pairs = BY_COLUMNS && in_pairs(params.dst, dst, params.tile_extent[3]);
  unsigned places[2 * ROW_TILES];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) places[i] = BoxRows::place(params.tile_extent, row_of_thread(pairs, i));
#pragma unroll 1
  while (true) {
    mbarrier_wait(shared_address(queue.ring.full + place.index), place.parity);
    const volatile int& index = queue.work[place.index];
    if (index >= work_tiles) return;
    const int stages = *(const volatile int*)(queue.stages + place.index);
    Sums sums, total;
    if (FLUSH > 0) {
      total.clear();
#pragma unroll 1
      for (int stage = 0; stage < stages; stage += FLUSH) {
        multiply(sums, min(FLUSH, stages - stage), box, ring, state, taps_of, shared_memory);
        total.take(sums, stage == 0);
      }
    } else {
      multiply(sums, stages, box, ring, state, taps_of, shared_memory);
      if (stages == 0) sums.clear();
    }
    const WorkTile work(params, index);  // computed again, so that it holds no registers during the products
    store(params, work, Phase(work.phase), FLUSH > 0 ? total : sums, places, operands, dst, pairs,
          staged[threadIdx.x / 128]);
    queue.ring.release(place.index);
    place.next();
  }
}
