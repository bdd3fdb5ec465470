// Dynamic tile scheduler of a persistent kernel. A block's first `own` work tiles are static, every n-th; then it takes
// the next free work tile from an atomic counter, some work tiles before it loads that one. So neighbouring tiles are
// computed at the same time even if blocks differ in speed, and the data that they share (halos, partly written
// sectors) is still in L2. With static scheduling alone blocks would drift apart, and ever faster: slow ones would miss
// L2.
//
// One thread of a block, or of a cluster, takes work tiles. The counters are stored before the packed weights: packing
// sets them to zero, then only atomic operations access them. There is one counter, or with RESIDENT one for each row
// group. The other threads read work tiles from a ring of QUEUE entries in shared memory, each with an mbarrier; every
// thread reads all entries, also those of work tiles that others compute.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "mainloop/gemm_tile.cuh"

// Work tiles by which an entry is written before the taking thread itself reaches it. A producer group waits for its
// next work tile before it transposes the stage that it holds; the first group, whose thread takes work tiles, gets
// there a stage later, and may have to wait for a slot that is freed only when that stage has been multiplied.
constexpr int FURTHER = ceil_div(LOADER_GROUPS - 1, TILE_STAGES);
// Entries in use: ping-pong consumers may wait for a work tile two after the one that is being multiplied; beyond it
// pixels are loaded ahead, as many stages as there are slots of both kinds.
constexpr int QUEUE = ceil_div(2 * STAGES + RAW_SLOTS + 2 * LOADER_GROUPS, TILE_STAGES) + 4;
static_assert(2 + ceil_div(STAGES + RAW_SLOTS + LOADER_GROUPS, TILE_STAGES) + FURTHER < QUEUE, "a short ring");

struct SchedulerMemory {
  unsigned long long known[QUEUE];  // mbarriers: the entry is written
  int work[QUEUE];
};

struct TileScheduler {
  const Params& params;
  unsigned* counters;
  SchedulerMemory& memory;
  int next = 0;          // for the taking thread: the first work tile without an entry
  int bands = 1;         // with SCALED (operand/scales.cuh): how often a work tile's stages run
  float scale = 1;       // and the pixels' scale in the last band
  bool gathers = false;  // whether producers gather pixels from the source, as its copy in float16 is inexact

  __device__ __forceinline__ int stages() const { return SCALED ? bands * TILE_STAGES : TILE_STAGES; }

  // Called by one thread, before the others begin.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < QUEUE; ++i) mbarrier_init(shared_address(memory.known + i), 1);
  }
  // Called by the same thread once the barriers are initialised. In a cluster each barrier waits for one arrival of the
  // block itself: work tiles may arrive before it.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < QUEUE; ++i) expect(i);
  }

  // The block's work tile number `ordinal`; params.work_tiles or more after the last.
  __device__ __forceinline__ int of(int ordinal) const {
    if (ordinal < params.own) return first_work_tile() + ordinal * work_tile_step();
    const int entry = ordinal - params.own;
    mbarrier_wait(shared_address(memory.known + entry % QUEUE), entry / QUEUE & 1);
    return *(volatile int*)(memory.work + entry % QUEUE);
  }

  // Writes the entry of the work tile FURTHER after number `ordinal`. Called by the taking thread, in order, from
  // number 1 on: `own` is at least FURTHER + 2.
  __device__ __forceinline__ void take(int ordinal) {
    const int entry = ordinal + FURTHER - params.own;
    if (entry >= 0) broadcast_word(memory.work + entry % QUEUE, next, memory.known + entry % QUEUE);
    if (entry >= -1) next = claim();
  }
  // Called by the taking thread at the end: a block must not exit while work tiles may still be written to it.
  __device__ __forceinline__ void settle(int ordinal) const {
    for (int i = 1; CLUSTER > 1 && i <= FURTHER; ++i) of(ordinal + i);
  }
  // Called by the taking thread after `of` has returned the work tile.
  __device__ __forceinline__ void taken(int ordinal) const {
    if (ordinal >= params.own) expect((ordinal - params.own) % QUEUE);
  }

 private:
  // The counter's value is not used before the next call, which hides its latency.
  __device__ __forceinline__ int claim() const {
    const int first = params.own * work_tile_step(), row_group = RESIDENT ? (int)blockIdx.x % params.tile_shares : 0;
    if (!leads_cluster()) return 0;  // the cluster's first block writes all entries
    unsigned* const counter = counters + row_group + leader_index();
    griddepcontrol_wait();
    return first + (int)atomicAdd(counter, 1u) * (RESIDENT ? params.tile_shares.value : 1) + row_group;
  }

  // The barrier's next phase completes when the work tile is written.
  __device__ __forceinline__ void expect(int slot) const { expect_word(memory.known + slot); }
};

// A work tile and one of its stages; `index` is params.work_tiles or more after the last.
struct Cursor {
  int index, stage = 0, ordinal = 0;

  __device__ __forceinline__ Cursor() : index(first_work_tile()) {}

  // Advances by `count` stages; true if that reaches another work tile.
  __device__ __forceinline__ bool skip(const TileScheduler& scheduler, int count) {
    return walk(count, scheduler, [&]() { return scheduler.of(ordinal); });
  }
  // The same, following another cursor, which often has read the entry already.
  __device__ __forceinline__ bool skip_behind(const Cursor& ahead, const TileScheduler& scheduler, int count) {
    return walk(count, scheduler, [&]() { return ordinal == ahead.ordinal ? ahead.index : scheduler.of(ordinal); });
  }
  // The same for a warp whose first lane takes the work tiles.
  __device__ __forceinline__ bool skip_and_take(TileScheduler& scheduler, int count, bool takes) {
    return walk(count, scheduler, [&]() {
      if (takes) scheduler.take(ordinal);
      __syncwarp();
      const int work_tile = scheduler.of(ordinal);
      if (takes) scheduler.taken(ordinal);
      return work_tile;
    });
  }

 private:
  template <class Next>
  __device__ __forceinline__ bool walk(int count, const TileScheduler& scheduler, const Next& next) {
    const int before = ordinal, stages = scheduler.stages();
#pragma unroll 1
    for (stage += count; stage >= stages && index < scheduler.params.work_tiles; stage -= stages) {
      ++ordinal;
      index = uniform(next());
    }
    return ordinal != before;
  }
};
