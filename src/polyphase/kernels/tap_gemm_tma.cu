// The forward pass and the input gradient of any layer by TMA and wgmma:
//
//   destination[cd, cell·DST + phase] = bias[cd] + Σ over taps of the phase and cs of
//                                                  w[cs, cd, tap] · source[cs, cell·SRC + offset of the tap]
//
// with cells and phases of core/geometry.cuh. Rows are a tile of cells, columns are destination channels, and k runs
// over the phase's tap groups: CHUNK source channels at one tap. The source has its channels innermost; for each tap
// group TMA loads one box of it, every SRC-th element, with zeros outside the tensor. No thread computes the address of
// a tap, and after the first read elements come from L2. The destination may have any strides.
//
// With RUNS the source was written as padded rows (core/run_groups.cuh), which the tensor map describes as a tensor
// that overlaps itself: its innermost dimension is the run of elements that one cell reads, the next one cells. k is
// padded once for a run instead of once for each tap, and the stride may be any.
//
// Index mapping. Two consumer warpgroups multiply, each ROW_TILES tiles of 64 rows by COLUMNS columns; one producer
// thread issues TMA. Blocks are persistent and take every gridDim-th work tile (column block fastest, then phase, tile,
// group, split). With split-K each split stores a plane of partial sums (steps/reduce_splits.cu).
//
// float32 is read as TF32, or split into two parts of TF32: the source's parts are channels of their own
// (steps/transpose.cu), those of the weights follow one another (steps/pack_tap_groups.cu). Three products of parts are
// added.
//
// Tensor-core accumulation truncates at every step. So accumulators are flushed: after FLUSH stages they are added in
// float32 to a second set of registers, where there are more stages.
//
// Shared memory: BUFFERS stages (mainloop/k_major_product.cuh), whose rows are CHUNK elements.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"
#include "core/pipeline.cuh"
#include "core/run_groups.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "mainloop/k_major_product.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

struct Params {
  TensorMap source_box, shorter_box;  // the latter of runs in phases of fewer taps along the width
  Tensor5 dst;
  int batch, groups;
  int lanes[4];     // cells of a tile along n, d, h, w; their product is at most the rows of a block
  int tiles[4];     // tiles along n, d, h, w
  int splits;       // of a work tile's stages
  int sums;         // whether results stay accum_t, a plane for each split
  int vector;       // whether two neighbouring channels are stored together
  long long plane;  // elements of a plane of partial sums
};

constexpr int COLUMN_BLOCKS = ceil_div(DST_CHANNELS, COLUMNS);
static_assert(PITCH == CHUNK * (int)sizeof(scalar_t), "a row of a stage is a tap group");

// What a block computes before it stores.
struct WorkTile {
  int split, group, phase, column_block;
  int first[4];  // cell along n, d, h, w

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    const int tiles = params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3];
    column_block = index % COLUMN_BLOCKS, index /= COLUMN_BLOCKS;
    phase = index % PHASES, index /= PHASES;
    tile_origin(params.tiles, params.lanes, index % tiles, first);
    index /= tiles;
    group = index % params.groups, split = index / params.groups;
  }
  static __device__ __forceinline__ int count(const Params& params) {
    return params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3] * PHASES * COLUMN_BLOCKS *
           params.groups * params.splits;
  }
};

// The stages of a work tile: tap groups of its phase.
struct Stages {
  int first, count;

  __device__ __forceinline__ Stages(const Params& params, const WorkTile& work, const Phase& phase) {
    const int all = JOINED ? RunGroup::count(phase) : CHUNKS * phase.taps, each = ceil_div(all, params.splits);
    first = work.split * each, count = max(0, min(each, all - first));
  }
};

// By one thread: the boxes of a tap group.
__device__ __forceinline__ void load_source(const Params& params, const scalar_t* src, const WorkTile& work,
                                            const Phase& phase, int index, unsigned to, unsigned full) {
  const int box_bytes = params.lanes[0] * params.lanes[1] * params.lanes[2] * params.lanes[3] * PITCH;
  if (RUNS) {
    const RunPlace at(phase, index);
    const TensorMap& box = phase.w.count < RUN_TAPS ? params.shorter_box : params.source_box;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int plane = (part * params.groups + work.group) * (PLANES_D * PLANES_H) + at.plane;
      const int from[5] = {at.element, work.first[3] + at.w, work.first[2] + at.h, work.first[1] + at.d,
                           plane * params.batch + work.first[0]};
      tma_load_box(to + part * A_BYTES, box, src, from, box_bytes, full);
    }
    return;
  }
  const TapGroup at(phase, index);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int from[5] = {(work.group * PARTS + part) * PADDED_CHANNELS + at.channel,
                         work.first[3] * src_cell(AXIS_W) + phase.w.src + at.tap.w,
                         work.first[2] * src_cell(AXIS_H) + phase.h.src + at.tap.h,
                         work.first[1] * src_cell(AXIS_D) + phase.d.src + at.tap.d, work.first[0]};
    tma_load_box(to + part * A_BYTES, params.source_box, src, from, box_bytes, full);
  }
}

// By one thread: the boxes and weights of all stages of the block's work tiles.
__device__ __forceinline__ void load_items(const Params& params, const scalar_t* src, const unsigned char* packed,
                                           PipelineBarriers<BUFFERS>& ring, const unsigned char* buffers) {
  griddepcontrol_wait();
  PipelineState<BUFFERS> state;
  const int items = WorkTile::count(params);
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const WorkTile work(params, index);
    const Phase phase(work.phase);
    const Stages stages(params, work, phase);
    const unsigned char* weights =
        packed + ((((long long)work.group * PHASES + work.phase) * COLUMN_BLOCKS + work.column_block) * PACKED_STAGES +
                  stages.first) *
                     (PARTS * B_BYTES);
#pragma unroll 1
    for (int stage = 0; stage < stages.count; ++stage, weights += PARTS * B_BYTES) {
      const unsigned to = shared_address(buffers + state.index * STAGE_BYTES);
      const unsigned full = shared_address(ring.full + state.index);
      mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
      load_source(params, src, work, phase, stages.first + stage, to, full);
      tma_load_bytes(to + PARTS * A_BYTES, weights, PARTS * B_BYTES, full);
      mbarrier_arrive(full);
      state.next();
    }
  }
}

// The outputs of a work tile.
__device__ __forceinline__ void store(const Params& params, const WorkTile& work, const Phase& phase, const Sums& sums,
                                      const EpilogueOperands& operands, scalar_t* dst) {
  long long targets[2 * ROW_TILES];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    int cell[4];
    decode(params.lanes, Sums::row(i), cell);
    const bool in_tile = cell[0] < params.lanes[0];
#pragma unroll
    for (int j = 0; j < 4; ++j) cell[j] += work.first[j];
    targets[i] = dst_element(params.dst, phase, cell, in_tile && cell[0] < params.batch);
  }
  const long long apart = params.dst.stride[1];
  accum_t* const partial = (accum_t*)dst + work.split * params.plane;
#pragma unroll
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    const int channel = work.column_block * COLUMNS + 8 * tile + fragment_column();
    const int of_all = work.group * DST_CHANNELS + channel;
    const bool exists[2] = {channel < DST_CHANNELS, channel + 1 < DST_CHANNELS};
    const bool biased = work.split == 0;
    const ChannelTerms terms[2] = {channel_terms(operands, ONE_BIAS ? 0 : of_all, biased && exists[0]),
                                   channel_terms(operands, ONE_BIAS ? 0 : of_all + 1, biased && exists[1])};
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      if (targets[i] < 0) continue;
      const float* const pair = sums.of[i / 2] + 4 * tile + i % 2 * 2;
      const long long to = targets[i] + of_all * apart;
      if (params.sums && params.vector) {
        const Vector<accum_t, 2> both = {{add_bias(pair[0], terms[0]), add_bias(pair[1], terms[1])}};
        if (exists[0]) *(Vector<accum_t, 2>*)(partial + to) = both;
      } else if (params.sums) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (exists[j]) partial[to + j * apart] = add_bias(pair[j], terms[j]);
      } else {
        Vector<scalar_t, 2> both;
#pragma unroll
        for (int j = 0; j < 2; ++j)
          narrow(finish(pair[j], terms[j], exists[j] ? dst + to + j * apart : nullptr), both.value[j]);
        if (params.vector) {
          if (exists[0]) *(Vector<scalar_t, 2>*)(dst + to) = both;
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (exists[j]) dst[to + j * apart] = both.value[j];
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tap_gemm_tma(const scalar_t* __restrict__ src, const unsigned char* __restrict__ packed,
                 const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                 const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  __shared__ __align__(8) PipelineBarriers<BUFFERS> ring;
  if (threadIdx.x == 0) ring.init(1, CONSUMER_THREADS / 32);
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMER_THREADS) load_items(params, src, packed, ring, shared_memory);
    return;
  }
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  PipelineState<BUFFERS> state;
  const int items = WorkTile::count(params);
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const WorkTile work(params, index);
    const Phase phase(work.phase);
    const Stages stages(params, work, phase);
    Sums sums, total;
    if (FLUSH > 0) {
      total.clear();
#pragma unroll 1
      for (int stage = 0; stage < stages.count; stage += FLUSH) {
        sums.multiply(min(FLUSH, stages.count - stage), ring, state, shared_memory);
        total.take(sums, stage == 0);
      }
    } else {
      sums.multiply(stages.count, ring, state, shared_memory);
      if (stages.count == 0) sums.clear();
    }
    store(params, work, phase, FLUSH > 0 ? total : sums, operands, dst);
  }
}
