// The forward pass as an implicit GEMM on tensor cores, all phases of a tile in one block; persistent and
// warp-specialised.
//
//   y[co, i·stride + phase]  =  bias[co]  +  Σ_ci Σ_tap of phase   w[ci, co, tap] · x[ci, i + src_offset(tap)]
//
// GEMM. M = output channels of a phase (core/row_blocks.cuh), N = cells i, K = (tap, input channel) pairs.
// A tile of cells and the halo around it lie in shared memory as one flat run of pixels, every row of the halo behind
// the one before: 16 bytes (CHUNK channels) a pixel, chunk by chunk. In that run a tap is a constant distance, so the
// pixels that a tap needs for PIXELS neighbouring cells are the B operand of one instruction, at another address
// (mainloop/tile_product.cuh), and a tile is read once for all its taps. Cells of the run that lie in the halo are
// computed and not stored. With TAPS_IN_ROWS a tap is no distance but a row of M: N are all pixels of the run, halo
// included, and epilogue/store_overlap.cuh (col2im) takes the place of epilogue/store_phases.cuh.
//
// Work tiles (mainloop/gemm_tile.cuh) are a tile of cells and a group of row blocks. Blocks are persistent, and a
// dynamic tile scheduler deals work tiles out (core/tile_scheduler.cuh): the next one is loaded while the last one is
// stored.
//
// Warp roles. CONSUMERS warpgroups multiply and run the epilogue: each on its share of the tile's cells; or on all
// cells and its own row group (COOPERATIVE); or each on a work tile of its own, and one stores while the other
// multiplies (PING_PONG). LOADER_THREADS produce, in one of three ways:
//   - LOADER_GROUPS groups of threads copy pixels by cp.async, LOOKAHEAD stages ahead, in the order of memory, then
//     transpose them within shared memory (channels innermost) and round them;
//   - where TMA can load boxes of the source (params.boxes), one warp issues TMA and the others only transpose,
//     TRANSPOSE_GROUPS groups of them, round-robin over stages;
//   - with TMA_OPERANDS TMA writes B directly: NHWC, or NCHW in 16 bit (MN_MAJOR) if no tap shifts B. With COPIED it
//     loads a checked copy of the float32 source in float16 (operand/half_copies.cuh); if that is inexact, producers
//     gather pixels from the source, or (REPLACED) another kernel computes the result again.
//
// Shared memory: STAGES stages of weights (unless RESIDENT: then they stay, and the work tiles of a block have the same
// row groups) and pixels; the RESIDENT weights; RAW_SLOTS stages of boxes or rows that are not transposed yet; the
// epilogue's staging; the coordinates of a tile's pixels; `Shared`.
//
// Barriers. full[stage]: producers' writes, TMA's bytes; consumers wait. Every thread of a producer group arrives, or
// the TMA warp, or that and the warps that transpose. empty[stage]: consumers release it, those of all CLUSTER blocks
// where weights are multicast; producers wait. raw_full, raw_empty[slot]: between the TMA warp and those that
// transpose. order[warpgroup]: PING_PONG consumers multiply one after the other. resident: weights that stay. The
// scheduler's: a work tile is known. Named barrier 1 + group: a producer group; from 6 on: the epilogue's.
//
// The kernel may start while its weights are still being packed (programmatic dependent launch), and waits for them
// after it has issued the first pixel loads; with SCALED before them, as it must know the number of bands
// (operand/scales.cuh).

#include "specialisation.cuh"
#include "core/pipeline.cuh"
#include "core/row_blocks.cuh"
#include "core/shared_address.cuh"
#include "core/tile_scheduler.cuh"
#include "ptx/arch.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "operand/pixel_loader.cuh"
#include "mainloop/gemm_tile.cuh"
#include "mainloop/tile_product.cuh"
#if SCALED
#include "operand/measured_bands.cuh"
#include "operand/scales.cuh"
#endif
#if TAPS_IN_ROWS
#include "epilogue/store_overlap.cuh"
#else
#include "epilogue/store_phases.cuh"
#endif

// What the block keeps in shared memory, apart from the stages.
struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  unsigned long long order[CONSUMERS];      // the consumer warpgroup may multiply (PING_PONG)
  unsigned long long resident;              // the RESIDENT weights have arrived
  unsigned long long raw_full[RAW_SLOTS];   // the slot's box has arrived
  unsigned long long raw_empty[RAW_SLOTS];  // the slot's box has been transposed
  SchedulerMemory queue;
  int operations[OPERATIONS * LINE_GROUPS + 1];  // distance of each operation's pixels, in bytes
  int counts[ROW_BLOCKS * LINE_GROUPS];          // operations of each row block
};

// Registers a thread (setmaxnreg). Of 64K, two consumer warpgroups with 224 leave 56 for 128 producers; with 208 they
// leave 48 for 256. If the kernel spills it is recompiled with the next pair of `_SHARES`
// (schedules/implicit_gemm/schedule.py): GIVEN_REGISTERS registers are taken from every consumer thread and given to
// the producers (negative: the other way).
constexpr int PRODUCER_REGISTERS = LOADER_THREADS == 128 ? 56 + 2 * GIVEN_REGISTERS : 48 + GIVEN_REGISTERS;
constexpr int CONSUMER_REGISTERS = (LOADER_THREADS == 128 ? 224 : 208) - GIVEN_REGISTERS;
static_assert(!WGMMA || registers_suffice(CONSUMERS * 128, CONSUMER_REGISTERS, LOADER_THREADS, PRODUCER_REGISTERS),
              "too few registers");

// A consumer warpgroup frees a stage: one arrival with wgmma, which all its warps issue together; one of each warp with
// mma.sync.
constexpr int ARRIVALS_PER_WARPGROUP = WGMMA ? 1 : 4;
__device__ __forceinline__ void release(unsigned barrier) {
  if (ARRIVALS_PER_WARPGROUP > 1) __syncwarp();
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x % 128 < CLUSTER) mbarrier_arrive_cluster(barrier, threadIdx.x % 128);
  } else if (threadIdx.x % (128 / ARRIVALS_PER_WARPGROUP) == 0)
    mbarrier_arrive(barrier);
}

// STRAIGHT: the products of a stage are unrolled without a branch, so that wgmma's are issued back to back. With a
// branch among them the assembler puts a fence before each. (NVRTC 13.0 warns of it, C7519; 13.5 does not.) So on
// Hopper there is code for each kind of line group.
constexpr Kinds KINDS = find_kinds();
constexpr bool ALIKE = KINDS.next[0] == LINE_GROUPS;
constexpr bool STRAIGHT = K_STEPS * KINDS.operations <= (ALIKE ? 128 : WGMMA ? 256 : 0);
constexpr int UNROLLED = STRAIGHT ? KINDS.most : 2;

// Tensor cores truncate sums, and the error grows with every addition. With PARTS = 2 accumulators are added to a
// second set in float32, which rounds, after each stage; in straight code of one kind (else the assembler serialises
// products) also after at most CHAIN operations.
constexpr int CHAIN = 16;
__host__ __device__ constexpr int chain_of(int operations) { return ceil_div(operations, ceil_div(operations, CHAIN)); }
constexpr bool CHAINED = PARTS == 2 && ALIKE && STRAIGHT && K_STEPS * KINDS.most > CHAIN;

// A work tile's stages run once per magnitude band, smallest first. These split the running stage number into stage and
// band.
__device__ __forceinline__ int stage_of_band(const TileScheduler& scheduler, int stage) {
  return SCALED && scheduler.bands > 1 ? stage % TILE_STAGES : stage;
}
__device__ __forceinline__ PixelBand band_of(const TileScheduler& scheduler, int stage) {
#if SCALED
  return PixelBand(scheduler.scale, scheduler.bands, scheduler.bands > 1 ? stage / TILE_STAGES : 0);
#else
  return {};
#endif
}

// How the pixels of a work tile's stage become operands.
__device__ __forceinline__ StageInput input_of(const Params& params, const TileScheduler& scheduler,
                                               const PrologueOperands& operands, const Cursor& now) {
  const int row_group = now.index % params.tile_shares * ROW_SHARES, group = row_group / (LINE_GROUPS * CHANNEL_GROUPS);
  const int channel = stage_of_band(scheduler, now.stage) * STAGE_CHANNELS;
  return {band_of(scheduler, now.stage), {operands, group * SRC_CHANNELS + channel, SRC_CHANNELS - channel}};
}

#if BULK_COPY
// Run by one thread: copies a stage's weights of a row group.
__device__ __forceinline__ void copy_weights(unsigned to, const unsigned char* from, unsigned barrier) {
  if constexpr (CLUSTER > 1)
    tma_load_bytes_multicast<CLUSTER>(to, from, WEIGHT_STAGE, barrier);
  else
    tma_load_bytes(to, from, WEIGHT_STAGE, barrier);
}
#endif

#if BOX_COPY
// The warp that issues TMA. Pixels run PIXEL_SLOTS ahead: into stages with TMA_OPERANDS, else into slots of their own,
// from which they are transposed. Weights go to stages. The first pixels are loaded before the wait for packed weights.
constexpr int PIXEL_SLOTS = TMA_OPERANDS ? STAGES : RAW_SLOTS;

__device__ __forceinline__ void load_boxes(const Params& params, TileScheduler& scheduler, const boxed_t* src,
                                           const unsigned char* packed, unsigned char* stages, int stage_bytes,
                                           unsigned char* pixels, int pixel_bytes, unsigned full, unsigned empty,
                                           unsigned raw_full, unsigned raw_empty) {
  BoxLoader loader(params, src);
  const bool first_lane = threadIdx.x % 32 == 0;
  Cursor ahead, now;
  PipelineState<PIXEL_SLOTS> slot_ahead;
  auto load_pixels = [&]() {
    if (ahead.stage == 0) loader.locate(ahead.index);
    const unsigned barrier = (TMA_OPERANDS ? full : raw_full) + 8 * slot_ahead.index;
    if (elect()) {
      loader.load(stage_of_band(scheduler, ahead.stage), pixels + slot_ahead.index * pixel_bytes, barrier);
      if (!TMA_OPERANDS) mbarrier_arrive(barrier);
    }
    __syncwarp();
    ahead.skip_and_take(scheduler, 1, first_lane), slot_ahead.skip(1);
  };
  for (int i = 0; i < PIXEL_SLOTS && ahead.index < params.work_tiles; ++i) load_pixels();
  griddepcontrol_wait();
  PipelineState<STAGES> slot;
  int loaded = 0;  // stages, up to PIXEL_SLOTS
  for (; now.index < params.work_tiles; now.skip_behind(ahead, scheduler, 1)) {
    mbarrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
    if (TMA_OPERANDS && loaded == PIXEL_SLOTS) load_pixels();
    if (TMA_OPERANDS && loaded < PIXEL_SLOTS) ++loaded;
    const unsigned char* const weights = packed + now.index % params.tile_shares * (ROW_SHARES * TILE_WEIGHT_BYTES) +
                                         stage_of_band(scheduler, now.stage) * WEIGHT_STAGE;
    if (elect()) {
      for (int share = 0; !RESIDENT && share < ROW_SHARES; ++share)
        copy_weights(shared_address(stages + slot.index * stage_bytes + share * WEIGHT_STAGE),
                     weights + share * TILE_WEIGHT_BYTES, full + 8 * slot.index);
      mbarrier_arrive(full + 8 * slot.index);
    }
    __syncwarp();
    slot.skip(1);
    if (!TMA_OPERANDS && ahead.index < params.work_tiles) {
      mbarrier_wait(raw_empty + 8 * slot_ahead.index, slot_ahead.parity ^ 1);
      load_pixels();
    }
  }
  if (first_lane) scheduler.settle(ahead.ordinal);
}

#if COPIED
// The producers if the copy is inexact: all threads gather a stage's pixels, one loads its weights.
__device__ __forceinline__ void gather_stages(const Params& params, TileScheduler& scheduler, const scalar_t* src,
                                              const unsigned char* packed, unsigned char* stages, int stage_bytes,
                                              unsigned full, unsigned empty) {
  const int thread = (int)threadIdx.x - CONSUMERS * 128;
  Cursor now;
  PipelineState<STAGES> slot;
  for (; now.index < params.work_tiles; now.skip_and_take(scheduler, 1, thread == 0), slot.skip(1)) {
    WorkTile work;
    work.locate(params, now.index, 0);
    const int stage = stage_of_band(scheduler, now.stage);
    unsigned char* const to = stages + slot.index * stage_bytes;
    mbarrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
    gather_pixels(params, src, work, band_of(scheduler, now.stage), stage, to + WEIGHT_SLOT, thread);
    fence_proxy_async();
    named_barrier_sync(1, LOADERS);
    if (thread == 0) {
      const unsigned char* const weights =
          packed + now.index % params.tile_shares * (ROW_SHARES * TILE_WEIGHT_BYTES) + stage * WEIGHT_STAGE;
      for (int share = 0; !RESIDENT && share < ROW_SHARES; ++share)
        copy_weights(shared_address(to + share * WEIGHT_STAGE), weights + share * TILE_WEIGHT_BYTES,
                     full + 8 * slot.index);
      mbarrier_arrive(full + 8 * slot.index);
    }
  }
  if (thread == 0) scheduler.settle(now.ordinal);
}
#endif

// One of the warps that transpose boxes. A group of TRANSPOSE_WARPS takes every TRANSPOSE_GROUPS-th stage; its warps do
// not wait for one another.
__device__ __forceinline__ void transpose_stages(const Params& params, const TileScheduler& scheduler,
                                                 const PrologueOperands& operands, int warp, unsigned char* stages,
                                                 int stage_bytes, const unsigned char* raw, int raw_stage,
                                                 unsigned full, unsigned empty, unsigned raw_full, unsigned raw_empty) {
  const int group = warp / TRANSPOSE_WARPS;
  Cursor now;
  PipelineState<STAGES> slot;
  PipelineState<RAW_SLOTS> slot_raw;
  now.skip(scheduler, group), slot.skip(group), slot_raw.skip(group);
  while (now.index < params.work_tiles) {
    mbarrier_wait(raw_full + 8 * slot_raw.index, slot_raw.parity);
    mbarrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
    transpose_boxes<TRANSPOSE_WARPS>(params, raw + slot_raw.index * raw_stage,
                                     stages + slot.index * stage_bytes + WEIGHT_SLOT, warp % TRANSPOSE_WARPS,
                                     input_of(params, scheduler, operands, now));
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full + 8 * slot.index), mbarrier_arrive(raw_empty + 8 * slot_raw.index);
    now.skip(scheduler, TRANSPOSE_GROUPS), slot.skip(TRANSPOSE_GROUPS), slot_raw.skip(TRANSPOSE_GROUPS);
  }
}
#endif

#if SCALED
// The pixels' bands: one if a copy is exact.
__device__ __forceinline__ void take_bands(TileScheduler& scheduler, const Scales& scales,
                                           [[maybe_unused]] const HalfCopies* copies) {
#if COPIED
  scheduler.gathers = !REPLACED && copies->inexact != 0;
  const Band band = scheduler.gathers ? find_bands(copies->measured) : Band{copies->scale[0], 1};
#else
  const Band band = scales.first_band();
#endif
  scheduler.scale = band.scale, scheduler.bands = band.bands;
}

// Scale factors of the thread's rows. The sums are unscaled by these and by the pixels' scale.
struct RowFactors {
  float of[ROW_BLOCKS][2];

  __device__ __forceinline__ void load(const float* rows) {
    const int row = threadIdx.x / 32 % 4 * 16 + fragment_row();
#pragma unroll
    for (int i = 0; i < 2 * ROW_BLOCKS; ++i) of[i / 2][i % 2] = rows[i / 2 * ROWS + i % 2 * 8 + row];
  }
  __device__ __forceinline__ void unscale(Sums& sums, float scale) const {
    const float of_pixels = unscale_pixel(scale);
#pragma unroll
    for (int i = 0; i < 2 * ROW_BLOCKS; ++i) {
      const float of_row = of[i / 2][i % 2];
      const float smaller = fminf(of_row, of_pixels),
                  larger = fmaxf(of_row, of_pixels);  // this order does not overflow
#pragma unroll
      for (int pixel_block = 0; pixel_block < PIXEL_BLOCKS; ++pixel_block)
#pragma unroll
        for (int j = 0; j < SUMS / 2; ++j) {
          float& sum = sums[i / 2][pixel_block][j / 2 * 4 + i % 2 * 2 + j % 2];
          sum = sum * smaller * larger;
        }
    }
  }
};
#endif

__device__ __forceinline__ void promote(float& sum, float& total) { total += sum, clear(sum); }

// The kind whose row blocks have `counts` operations. (A kind's properties are constants here and below, so that they
// are not computed at run time between wgmma instructions.)
template <int KIND = 0>
__device__ __forceinline__ int kind_of(const int (&counts)[ROW_BLOCKS]) {
  if constexpr (KINDS.next[KIND] < LINE_GROUPS) {
    constexpr Counts of_kind = counts_of(KIND);
    bool other = false;
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) other |= counts[block] != of_kind.of[block];
    if (other) return kind_of<KINDS.next[KIND]>(counts);
  }
  return KIND;
}

// Shared-memory addresses of a stage's operands.
struct Operands {
  int stages_before;  // stages of the work tile before this one; 0 overwrites the accumulators (scale-d)
  unsigned weights, pixels;
  const int* distances;
};

// The products of a stage, for a line group of kind KIND; if kinds have no code of their own, `counts` gives the
// operations.
template <int KIND>
__device__ __forceinline__ void multiply(const Params& params, const Operands& of, const int (&counts)[ROW_BLOCKS],
                                         Sums& sums, Sums& totals) {
  constexpr Counts of_kind = counts_of(KIND);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    unsigned a = of.weights + step * OPERATIONS * OPERATION_BYTES;
    const int* distances = of.distances;
    int distance = *distances;
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
#pragma unroll(UNROLLED)
      for (int i = 0; i < (STRAIGHT || ALIKE ? of_kind.of[block] : counts[block]); ++i) {
        const unsigned b = of.pixels + step * (TMA_OPERANDS ? BOX_STEP : 2 * params.chunk_bytes) + distance;
        distance = *++distances;  // prefetched for the next operation
        const bool add = PARTS == 2 || of.stages_before + step + i > 0;
#pragma unroll
        for (int pixel_block = 0; pixel_block < PIXEL_BLOCKS; ++pixel_block) {
          float (&to)[SUMS] = sums[block][pixel_block];
          const unsigned from = b + pixel_block * (PIXELS * PIXEL_PITCH);
          if (PARTS ==
              2) {  // A·B_lo + A_lo·B + A·B, small terms first; A_lo is 2 chunks behind A, B_lo STAGE_CHUNKS behind B
            add_product(to, a, from + STAGE_CHUNKS * params.chunk_bytes, params.chunk_bytes, add);
            add_product(to, a + 2 * A_CHUNK, from, params.chunk_bytes, true);
          }
          add_product(to, a, from, params.chunk_bytes, add);
        }
        a += OPERATION_BYTES;
        if constexpr (CHAINED) {
          const int all = K_STEPS * of_kind.of[block], done = step * of_kind.of[block] + i + 1;
          if (done % chain_of(all) == 0 && done < all) {
            wgmma_commit();
            wgmma_wait<0>();
            for_each(promote, sums[block], totals[block]);
            wgmma_fence();
          }
        }
      }
    }
  }
  wgmma_commit();
}
template <int KIND = 0>
__device__ __forceinline__ void multiply_kind(int kind, const Params& params, const Operands& of,
                                              const int (&counts)[ROW_BLOCKS], Sums& sums, Sums& totals) {
  if constexpr (STRAIGHT && KINDS.next[KIND] < LINE_GROUPS)
    if (kind != KIND) return multiply_kind<KINDS.next[KIND]>(kind, params, of, counts, sums, totals);
  multiply<KIND>(params, of, counts, sums, totals);
}

// Writes the table of each operation's B offset (its tap's shift in the run of pixels), and the operations of each row
// block.
__device__ __forceinline__ void list_operations(const Params& params, Shared& shared) {
  const int thread = threadIdx.x;
  for (int i = thread; i < OPERATIONS * LINE_GROUPS; i += THREADS) {
    Operation o;
    int pixels = 0;
    if (!TAPS_IN_ROWS && find_operation(i % OPERATIONS, i / OPERATIONS * LINES, o))
      pixels = (o.depth_offset() - first_offset(AXIS_D)) * params.pitch[1] +
               (o.height_offset() - first_offset(AXIS_H)) * params.pitch[2] + src_offset(AXIS_W, o.width_tap) -
               first_offset(AXIS_W) + params.skew;
    shared.operations[i] = pixels * PIXEL_PITCH;
  }
  for (int i = thread; i < ROW_BLOCKS * LINE_GROUPS; i += THREADS)
    shared.counts[i] = operations_of(i % ROW_BLOCKS, i / ROW_BLOCKS * LINES);
}

// Zeros the pixels of all stages that no box fills.
__device__ __forceinline__ void clear_padding(const Params& params, unsigned char* pixels, int stage_bytes) {
  for (int i = params.boxes * params.box_pixels * PIXEL_PITCH + (int)threadIdx.x * 16;
       i < params.run_pixels * PIXEL_PITCH; i += THREADS * 16)
    for (int stage = 0; stage < STAGES; ++stage)
      *(Vector<unsigned, 4>*)(pixels + stage * stage_bytes + i) = Vector<unsigned, 4>{};
  fence_proxy_async();
}

#if BOX_COPY
// The producers where TMA loads pixels: the last warp issues it, the others transpose.
__device__ __forceinline__ void produce_by_tma(const Params& params, TileScheduler& scheduler,
                                               const scalar_t* __restrict__ src, const boxed_t* __restrict__ boxed,
                                               const PrologueOperands& operands,
                                               const unsigned char* __restrict__ packed, Shared& shared,
                                               unsigned char* stages, int stage_bytes, unsigned char* raw,
                                               int raw_stage) {
  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  setmaxnreg_dec<PRODUCER_REGISTERS>();
  const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - CONSUMERS * 4, 0);
  const unsigned raw_full = shared_address(shared.raw_full), raw_empty = shared_address(shared.raw_empty);
#if COPIED
  if (!REPLACED && scheduler.gathers)
    return gather_stages(params, scheduler, src, packed, stages, stage_bytes, full, empty);
#endif
  if (warp < TRANSPOSE_GROUPS * TRANSPOSE_WARPS && !TMA_OPERANDS) {
    transpose_stages(params, scheduler, operands, warp, stages, stage_bytes, raw, raw_stage, full, empty, raw_full,
                     raw_empty);
  } else if (warp == LOADER_THREADS / 32 - 1) {
    unsigned char* const pixels = TMA_OPERANDS ? stages + WEIGHT_SLOT : raw;
    load_boxes(params, scheduler, boxed, packed, stages, stage_bytes, pixels, TMA_OPERANDS ? stage_bytes : raw_stage,
               full, empty, raw_full, raw_empty);
  }
}
#endif

// Loads the RESIDENT weights by one thread, and waits for them; without bulk copies they have been loaded already.
__device__ __forceinline__ void load_resident(const Params& params, const unsigned char* packed,
                                              unsigned char* resident, Shared& shared) {
#if BULK_COPY
  const unsigned resident_full = shared_address(&shared.resident);
  if (threadIdx.x == 0) {
    griddepcontrol_wait();
    tma_load_bytes(shared_address(resident),
                   packed + (long long)((int)blockIdx.x % params.tile_shares) * RESIDENT_WEIGHTS, RESIDENT_WEIGHTS,
                   resident_full);
    mbarrier_arrive(resident_full);
  }
  mbarrier_wait(resident_full, 0);
#endif
}

// Waits for the pixel copies of a stage (cp.async), and loads its weights, number `number` of a row group's, by a
// producer group. With bulk copies the weights arrive at `full`, else they are waited for with the next cp.async.
__device__ __forceinline__ void wait_pixels_load_weights(unsigned char* stage, const unsigned char* weights, int number,
                                                         int thread, unsigned full, int slot) {
#if BULK_COPY
  if (!RESIDENT && thread == 0)
    for (int share = 0; share < ROW_SHARES; ++share)
      copy_weights(shared_address(stage + share * WEIGHT_STAGE),
                   weights + share * TILE_WEIGHT_BYTES + number * WEIGHT_STAGE, full + 8 * slot);
  cp_async_wait<LOOKAHEAD - 1>();
#else
  cp_async_wait<LOOKAHEAD - 1>();
  for (int i = thread * 16; i < WEIGHT_SLOT; i += LOADERS * 16)
    cp_async<16>(shared_address(stage + i),
                 weights + i / WEIGHT_STAGE * TILE_WEIGHT_BYTES + number * WEIGHT_STAGE + i % WEIGHT_STAGE, true);
  cp_async_commit();
#endif
}

// Operands of stage `stage`, loaded to `at`. `stages_before` counts stages of all bands; only whether it is 0 matters.
__device__ __forceinline__ Operands operands_of(const Shared& shared, const WorkTile& work, const unsigned char* at,
                                                const unsigned char* resident, int row_share, int cell_share, int stage,
                                                int stages_before) {
  const unsigned held = shared_address(at);
  const unsigned weights = RESIDENT
                               ? shared_address(resident) + row_share * (int)TILE_WEIGHT_BYTES + stage * WEIGHT_STAGE
                               : held + row_share * WEIGHT_STAGE;
  return {stages_before, weights, held + WEIGHT_SLOT + cell_share * (GROUP_CELLS * PIXEL_PITCH),
          shared.operations + work.line_group * OPERATIONS};
}

// The epilogue of a consumer warpgroup's part of a work tile.
__device__ __forceinline__ Epilogue epilogue_of(const Params& params, const WorkTile& work, const Sums& sums,
                                                int cell_share, result_t* dst, const EpilogueOperands& operands,
                                                unsigned char* memory) {
  const int channel = work.group * DST_CHANNELS;
  result_t* const to = dst + work.n * params.dst.stride[0] + channel * params.dst.stride[1];
  return Epilogue(params, work, sums, cell_share * GROUP_CELLS, to, operands + channel, memory);
}

// Prefetches a work tile's residuals to L2, before its first product. The epilogue made for this reads no accumulators.
__device__ __forceinline__ void prefetch_residuals(const Params& params, const WorkTile& work, const Sums& sums,
                                                   int cell_share, result_t* dst, const EpilogueOperands& operands,
                                                   unsigned char* memory) {
  if (EPILOGUE_PREFETCHES && work.n < params.batch)
    epilogue_of(params, work, sums, cell_share, dst, operands, memory).prefetch_lines();
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER)
#else
#define CLUSTERED
#endif

// All threads wait for what they all read of earlier steps: scales, or a source that is a copy.
__device__ __forceinline__ void wait_for_source() {
  if (SCALED || SRC_WRITTEN) griddepcontrol_wait();
}

#if COPIED
#define COPIES_PARAMETER , const operand_t* __restrict__ copy, const HalfCopies* copies
#define COPIES copies
#define BOXED(src) copy
#else
#define COPIES_PARAMETER
#define COPIES nullptr
#define BOXED(src) src
#endif
#if SRC_WRITTEN
#define SRC_RESTRICT
#else
#define SRC_RESTRICT __restrict__
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, MIN_BLOCKS)
    implicit_gemm(const scalar_t* SRC_RESTRICT src COPIES_PARAMETER, const unsigned char* __restrict__ packed,
                  const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS PROLOGUE_PARAMETERS, result_t* __restrict__ dst,
                  const __grid_constant__ Params params) {
  extern __shared__ __align__(TMA_OPERANDS ? 1024 : 128) unsigned char shared_memory[];
  __shared__ __align__(8) Shared shared;
  const int thread = threadIdx.x;
  const int warp_group = __shfl_sync(0xffffffffu, thread / 128, 0);
  const int pixel_stage = PARTS * STAGE_CHUNKS * params.chunk_bytes;  // bytes
  const int stage_bytes = WEIGHT_SLOT + pixel_stage;
  const int raw_stage = STAGE_CHANNELS * params.raw_pitch * max(params.boxes, 1) * (int)sizeof(scalar_t);
  unsigned char* const resident = shared_memory + STAGES * stage_bytes;
  unsigned char* raw = resident + RESIDENT_WEIGHTS;
  unsigned char* const store_memory = raw + (IN_PLACE ? 0 : RAW_SLOTS * raw_stage);
  unsigned* const pixel_table = (unsigned*)(store_memory + STORE_BYTES);

  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  const unsigned order = shared_address(shared.order);
  TileScheduler scheduler{params, (unsigned*)packed, shared.queue};
  packed += COUNTER_BYTES;
#if SCALED
  const Scales scales((unsigned char*)packed);
  packed += SCALES_BYTES;
#endif
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, !takes_boxes(params) ? LOADERS : TMA_OPERANDS ? 1 : TRANSPOSE_WARPS + 1);
      mbarrier_init(empty + 8 * i, SHARERS * ARRIVALS_PER_WARPGROUP * CLUSTER);
    }
    for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(order + 8 * i, 1);
    mbarrier_init(shared_address(&shared.resident), 1);
    for (int i = 0; i < RAW_SLOTS; ++i) {
      mbarrier_init(shared_address(shared.raw_full + i), 1);
      mbarrier_init(shared_address(shared.raw_empty + i), TRANSPOSE_WARPS);
    }
    scheduler.init();
    fence_mbarrier_init();
    scheduler.begin();
  }
  // Coordinates of the run's pixels, relative to a tile's first cell: the same for every tile.
  const int copied = SRC_CHANNELS_LAST ? 1 : copy_bytes(params) / (int)sizeof(scalar_t);
  if (!takes_boxes(params))
    for (int i = thread; i * copied < params.run_pixels; i += THREADS) {
      Pixel p;
      p.locate(params, i * copied);
      const bool inside = p.n < params.images && p.d < params.cells[0] + REACH_D && p.h < params.cells[1] + REACH_H;
      pixel_table[i] = inside ? p.packed() : NOWHERE;
    }
  Epilogue::prepare(params, store_memory);
  list_operations(params, shared);
  if (TMA_OPERANDS) clear_padding(params, shared_memory + WEIGHT_SLOT, stage_bytes);
#if !BULK_COPY
  for (int i = thread * 16; i < RESIDENT_WEIGHTS; i += THREADS * 16)
    *(Vector<unsigned, 4>*)(resident + i) = *(
        const Vector<unsigned, 4>*)(packed + (long long)((int)blockIdx.x % params.tile_shares) * RESIDENT_WEIGHTS + i);
#endif
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  wait_for_source();
#if SCALED
  take_bands(scheduler, scales, COPIES);
#endif

#if BOX_COPY
  if (takes_boxes(params) && warp_group >= CONSUMERS) {
    produce_by_tma(params, scheduler, src, BOXED(src), PROLOGUE_OPERANDS, packed, shared, shared_memory, stage_bytes,
                   raw, raw_stage);
    return;
  }
#endif
  if (warp_group >= CONSUMERS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    // The producer groups take stages in turn.
    const int loader_thread = thread - CONSUMERS * 128;
    const int loader_group = __shfl_sync(0xffffffffu, loader_thread / LOADERS, 0);
    raw += loader_group * RAW_STAGES * raw_stage;
    const int table = ceil_div(params.run_pixels, copied);
    const Loader loader{params, pixel_table, (offset_t*)(pixel_table + round_up(table, 2)) + loader_group * table,
                        loader_thread % LOADERS};
    Cursor ahead, now;
    ahead.skip(scheduler, loader_group), now.skip(scheduler, loader_group);
    PipelineState<STAGES> slot, slot_ahead;
    slot.skip(loader_group), slot_ahead.skip(loader_group);
    PipelineState<RAW_STAGES> copy_ahead, copy_now;
    const scalar_t* base = src;
    const unsigned char* weights = packed;
    bool new_work = true, new_weights = true;
    auto start_copy = [&]() {
      if (ahead.index < params.work_tiles) {
        if (new_work) {
          WorkTile work;
          work.locate(params, ahead.index, 0);
          base = src + (CLUSTER == 1 || work.n < params.batch ? work.n : 0) * params.src.stride[0] +
                 (long long)work.group * SRC_CHANNELS * params.src.stride[1];
          named_barrier_sync(1 + loader_group, LOADERS);  // before find_pixels overwrites the last tile's addresses
          loader.find_pixels(work);
          named_barrier_sync(1 + loader_group, LOADERS);
        }
        if (IN_PLACE) {
          mbarrier_wait(empty + 8 * slot_ahead.index, slot_ahead.parity ^ 1);
          loader.load(base, stage_of_band(scheduler, ahead.stage),
                      shared_memory + slot_ahead.index * stage_bytes + WEIGHT_SLOT);
          slot_ahead.skip(LOADER_GROUPS);
        } else {
          loader.load(base, stage_of_band(scheduler, ahead.stage), raw + copy_ahead.index * raw_stage);
          copy_ahead.skip(1);
        }
        new_work = ahead.skip_and_take(scheduler, LOADER_GROUPS, loader_thread == 0);
      }
      cp_async_commit();
    };
    // The prologue's rounds only start copies. One loop for both: start_copy is inlined once.
    for (int round = -LOOKAHEAD; round < 0 || now.index < params.work_tiles; ++round) {
      unsigned char* const stage = shared_memory + slot.index * stage_bytes;
      if (round >= 0) {
        if (round == 0) griddepcontrol_wait();
        if (new_weights) weights = packed + now.index % params.tile_shares * (ROW_SHARES * TILE_WEIGHT_BYTES);
        if (!IN_PLACE) mbarrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
        wait_pixels_load_weights(stage, weights, stage_of_band(scheduler, now.stage), loader.thread, full, slot.index);
        named_barrier_sync(1 + loader_group, LOADERS);
      }
      start_copy();
      if (round < 0) continue;
      loader.convert(IN_PLACE ? stage + WEIGHT_SLOT : raw + copy_now.index * raw_stage, stage + WEIGHT_SLOT,
                     input_of(params, scheduler, PROLOGUE_OPERANDS, now));
#if !BULK_COPY
      cp_async_wait<1>();
#endif
      fence_proxy_async();
      mbarrier_arrive(full + 8 * slot.index);
      slot.skip(LOADER_GROUPS), copy_now.skip(1);
      new_weights = now.skip_behind(ahead, scheduler, LOADER_GROUPS);
    }
    cp_async_wait<0>();
    if (loader_thread == 0) scheduler.settle(ahead.ordinal);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    PipelineState<STAGES> slot;
    Sums sums, totals;  // the latter for PARTS = 2
    const int position = PING_PONG ? warp_group : 0;
    const int row_share = ROW_SHARES > 1 ? warp_group : 0, cell_share = CELL_SHARES > 1 ? warp_group : 0;
    slot.skip(position * scheduler.stages());
    unsigned order_parity = 0;
    if (RESIDENT) load_resident(params, packed, resident, shared);
    Cursor now;
    for (now.skip(scheduler, position * scheduler.stages()); now.index < params.work_tiles;
         now.skip(scheduler, CONSUMERS / SHARERS * scheduler.stages())) {
      WorkTile work;
      work.locate(params, now.index, row_share);
      int counts[ROW_BLOCKS];
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS; ++i)
        counts[i] = ALIKE ? 0 : __shfl_sync(~0u, shared.counts[work.line_group * ROW_BLOCKS + i], 0);
      const int kind = STRAIGHT && !ALIKE ? kind_of(counts) : 0;
      int previous = -1;
      prefetch_residuals(params, work, sums, cell_share, dst, EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]),
                         store_memory);
      // A parity bit distinguishes only two successive phases: a ping-pong consumer, one ahead at most, waits its turn.
      if (PING_PONG) mbarrier_wait(order + 8 * position, order_parity ^ (position == 0));
      order_parity ^= 1;
      if constexpr (PARTS == 2) for_each([](float& sum, float& total) { total = 0, clear(sum); }, sums, totals);
#pragma unroll 1
      for (int band = 1;; ++band) {
#pragma unroll 1
        for (int stage = 0; stage < TILE_STAGES; ++stage) {
          mbarrier_wait(full + 8 * slot.index, slot.parity);
          const Operands operands = operands_of(shared, work, shared_memory + slot.index * stage_bytes, resident,
                                                row_share, cell_share, stage, stage + band - 1);
          multiply_kind(kind, params, operands, counts, sums, totals);
          if constexpr (PARTS == 2) {
            wgmma_wait<0>();
            for_each(promote, sums, totals);
          } else {
            wgmma_wait<1>();
          }
          if (previous >= 0) release(empty + 8 * previous);
          previous = slot.index;
          slot.skip(1);
        }
#if SCALED
        if (band < scheduler.bands) {
          wgmma_wait<0>();
          for_each([](float& sum, float& total) { (PARTS == 2 ? total : sum) *= power_of_two(127 - BAND); }, sums,
                   totals);
          continue;
        }
#endif
        break;
      }
      const Epilogue store = epilogue_of(params, work, sums, cell_share, dst,
                                         EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]), store_memory);
#if SCALED
      const float* const of_rows = scales.rows() + (long long)work.row_group * (ROW_BLOCKS * ROWS);
      RowFactors rows;
      if (!TAPS_IN_ROWS) rows.load(of_rows);  // with TAPS_IN_ROWS later, or a register spills
#endif
      wgmma_wait<0>();
      if constexpr (PARTS == 2) for_each([](float& sum, float& total) { sum = total; }, sums, totals);
      release(empty + 8 * previous);
#if SCALED
      if (TAPS_IN_ROWS) rows.load(of_rows);
      rows.unscale(sums, scheduler.scale);
#endif
      if (PING_PONG) {
        slot.skip(scheduler.stages());
        if (thread % 128 == 0) mbarrier_arrive(order + 8 * (CONSUMERS - 1 - position));
      }
      // Always true without clusters; without the branch the assembler hoists reads of accumulators above the wait, and
      // then serialises the products.
      if (work.n < params.batch) store();
    }
    if (CLUSTER > 1) cluster_sync();  // other blocks may still arrive at this one's barriers
  }
}
