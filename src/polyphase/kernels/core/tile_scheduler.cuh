// Dynamic tile scheduler of a persistent kernel. A block's first `own` work tiles are static, every n-th; behind these
// it takes the next that no block has, from an atomic counter, some work tiles before it loads that one. So what is
// computed at a time is neighbours, however fast each block is, and what tiles share (halos, sectors of which each
// stores a part) is still in the L2 cache when the other one wants it. Blocks that each took every n-th work tile would
// drift apart, and ever faster: those behind would find nothing there.
//
// One thread of a block, or of a cluster, takes work tiles. Counters lie in front of the packed weights: packing sets
// them to zero, and only atomic operations touch them then; there is one, or with RESIDENT one for each of the row
// groups that blocks stay with. The other threads learn of work tiles through a ring of QUEUE entries in shared memory,
// with an mbarrier each, and walk through all, whichever they work on.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "mainloop/gemm_tile.cuh"

// How many work tiles earlier the others learn of one than that thread comes to it. A producer group waits for its
// next work tile before it transposes the stage that it has; the first group comes there a stage later, and may have to
// wait for a slot that is free only when that stage has been multiplied.
constexpr int FURTHER = ceil_div(LOADER_GROUPS - 1, TILE_STAGES);
// Consumers in ping-pong may have a work tile to learn of that is two behind the one whose pixels have not been
// multiplied; from there on pixels are loaded ahead, as many stages as there are slots of both kinds.
constexpr int QUEUE = ceil_div(2 * STAGES + RAW_SLOTS + 2 * LOADER_GROUPS, TILE_STAGES) + 4;
static_assert(2 + ceil_div(STAGES + RAW_SLOTS + LOADER_GROUPS, TILE_STAGES) + FURTHER < QUEUE, "a short ring");

struct SchedulerMemory {
  unsigned long long known[QUEUE];  // barriers
  int work[QUEUE];
};

struct TileScheduler {
  const Params& params;
  unsigned* counters;
  SchedulerMemory& memory;
  int next = 0;     // of the thread that takes them: the work tile behind those that are known
  int bands = 1;    // with SCALED (operand/scales.cuh): a work tile's stages come so many times,
  float scale = 1;  // and by what pixels are multiplied in the last

  __device__ __forceinline__ int stages() const { return SCALED ? bands * TILE_STAGES : TILE_STAGES; }

  // By one thread, before the others begin.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < QUEUE; ++i) mbarrier_init(shared_address(memory.known + i), 1);
  }
  // By the same one, when barriers are ready. In a cluster the one arrival that a barrier waits for is the block's own:
  // work tiles may come before.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < QUEUE; ++i) expect(i);
  }

  // The block's work tile number `ordinal`; not below params.work_tiles behind the last.
  __device__ __forceinline__ int of(int ordinal) const {
    if (ordinal < params.own) return first_work_tile() + ordinal * work_tile_step();
    const int entry = ordinal - params.own;
    mbarrier_wait(shared_address(memory.known + entry % QUEUE), entry / QUEUE & 1);
    return *(volatile int*)(memory.work + entry % QUEUE);
  }

  // Makes the work tile known that is FURTHER behind number `ordinal`, by the one thread, which takes them in order,
  // from number 1 on: `own` is at least FURTHER + 2.
  __device__ __forceinline__ void take(int ordinal) {
    const int entry = ordinal + FURTHER - params.own;
    if (entry >= 0) publish(entry % QUEUE);
    if (entry >= -1) next = claim();
  }
  // By the same one, behind the last: a block must not end while work tiles are on their way to it.
  __device__ __forceinline__ void settle(int ordinal) const {
    for (int i = 1; CLUSTER > 1 && i <= FURTHER; ++i) of(ordinal + i);
  }
  // By the same one, when it has learnt of it from `of`.
  __device__ __forceinline__ void taken(int ordinal) const {
    if (ordinal >= params.own) expect((ordinal - params.own) % QUEUE);
  }

 private:
  // The compiler waits for the counter where the work tile is used, at the next one.
  __device__ __forceinline__ int claim() const {
    const int first = params.own * work_tile_step(), row_group = RESIDENT ? (int)blockIdx.x % params.tile_shares : 0;
    if (!leads_cluster()) return 0;  // the leader tells
    unsigned* const counter = counters + row_group + leader_index();
    griddepcontrol_wait();
    return first + (int)atomicAdd(counter, 1u) * (RESIDENT ? params.tile_shares.value : 1) + row_group;
  }

  __device__ __forceinline__ void publish(int slot) const {
    broadcast_word(memory.work + slot, next, memory.known + slot);
  }
  // The barrier's next phase ends with the work tile.
  __device__ __forceinline__ void expect(int slot) const { expect_word(memory.known + slot); }
};

// A work tile and a stage of it; `index` is not below params.work_tiles behind the last.
struct Cursor {
  int index, stage = 0, ordinal = 0;

  __device__ __forceinline__ Cursor() : index(first_work_tile()) {}

  // `count` stages on; true where that is another work tile.
  __device__ __forceinline__ bool skip(const TileScheduler& scheduler, int count) {
    return walk(count, scheduler, [&]() { return scheduler.of(ordinal); });
  }
  // The same behind another cursor, which often knows already.
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
