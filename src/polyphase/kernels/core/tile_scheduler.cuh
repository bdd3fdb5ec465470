// Which items a block computes. The first `own` are its own; behind these it takes the next that no block has, some
// items before it loads that one. So what is being computed at a time is neighbours, however fast each block is, and
// what tiles share (halos, sectors of which each stores a part) is still in the L2 cache when the other one wants it.
// Blocks that each took every n-th item would drift apart, and ever faster: those behind would find nothing there.
//
// One thread of a block, or of a cluster, takes items: from a counter in front of the packed weights, which packing
// sets to zero and only atomic operations touch then, or from one for each of the row groups that blocks stay with. The
// others learn of them through a ring, and walk through all, whichever they work on.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "mainloop/gemm_tile.cuh"

// How many items earlier the others learn of one than that thread comes to it. A group of loaders waits for its next
// item before it turns the stage around that it has; the first group comes there a stage later, and may have to wait
// for a slot that is free only when that stage has been multiplied.
constexpr int FURTHER = ceil_div(LOADER_GROUPS - 1, STAGES_OF_ITEM);
// Those who multiply in turns may have an item to learn of that is two behind the one whose pixels have not been
// multiplied; from there on pixels are loaded ahead, as many stages as there are slots of both kinds.
constexpr int QUEUE = ceil_div(2 * STAGES + RAW_SLOTS + 2 * LOADER_GROUPS, STAGES_OF_ITEM) + 4;
static_assert(2 + ceil_div(STAGES + RAW_SLOTS + LOADER_GROUPS, STAGES_OF_ITEM) + FURTHER < QUEUE, "a short ring");

struct QueueMemory {
  unsigned long long known[QUEUE];  // barriers
  int items[QUEUE];
};

struct Items {
  const Geometry& g;
  unsigned* counters;
  QueueMemory& memory;
  int next = 0;     // of the thread that takes them: the item behind those that are known
  int bands = 1;    // with SCALED (operand/scales.cuh): an item's stages come so many times,
  float scale = 1;  // and by what pixels are multiplied in the last

  __device__ __forceinline__ int stages() const { return SCALED ? bands * STAGES_OF_ITEM : STAGES_OF_ITEM; }

  // By one thread, before the others begin.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < QUEUE; ++i) mbarrier_init(shared_address(memory.known + i), 1);
  }
  // By the same one, when barriers are ready. In a cluster the one arrival that a barrier waits for is the block's own:
  // items may come before.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < QUEUE; ++i) expect(i);
  }

  // The block's item number `ordinal`; not below g.items behind the last.
  __device__ __forceinline__ int of(int ordinal) const {
    if (ordinal < g.own) return first_item() + ordinal * item_step();
    const int turn = ordinal - g.own;
    mbarrier_wait(shared_address(memory.known + turn % QUEUE), turn / QUEUE & 1);
    return *(volatile int*)(memory.items + turn % QUEUE);
  }

  // Makes the item known that is FURTHER behind number `ordinal`, by the one thread, which takes them in order, from
  // number 1 on: `own` is at least FURTHER + 2.
  __device__ __forceinline__ void take(int ordinal) {
    const int turn = ordinal + FURTHER - g.own;
    if (turn >= 0) publish(turn % QUEUE);
    if (turn >= -1) next = claim();
  }
  // By the same one, behind the last: a block must not end while items are on their way to it.
  __device__ __forceinline__ void settle(int ordinal) const {
    for (int i = 1; CLUSTER > 1 && i <= FURTHER; ++i) of(ordinal + i);
  }
  // By the same one, when it has learnt of it from `of`.
  __device__ __forceinline__ void taken(int ordinal) const {
    if (ordinal >= g.own) expect((ordinal - g.own) % QUEUE);
  }

 private:
  // The compiler waits for the counter where the item is used, at the next one.
  __device__ __forceinline__ int claim() const {
    const int first = g.own * item_step(), row_group = RESIDENT ? (int)blockIdx.x % g.tile_items : 0;
    if (!leads_cluster()) return 0;  // the leader tells
    unsigned* const counter = counters + row_group + leader_index();
    griddepcontrol_wait();
    return first + (int)atomicAdd(counter, 1u) * (RESIDENT ? g.tile_items.value : 1) + row_group;
  }

  __device__ __forceinline__ void publish(int slot) const {
    broadcast_word(memory.items + slot, next, memory.known + slot);
  }
  // The barrier's next phase ends with the item.
  __device__ __forceinline__ void expect(int slot) const { expect_word(memory.known + slot); }
};

// An item and a stage of it; `index` is not below g.items behind the last.
struct Cursor {
  int index, stage = 0, ordinal = 0;

  __device__ __forceinline__ Cursor() : index(first_item()) {}

  // `count` stages on; true where that is another item.
  __device__ __forceinline__ bool skip(const Items& items, int count) {
    return walk(count, items, [&]() { return items.of(ordinal); });
  }
  // The same behind another cursor, which often knows already.
  __device__ __forceinline__ bool skip_behind(const Cursor& ahead, const Items& items, int count) {
    return walk(count, items, [&]() { return ordinal == ahead.ordinal ? ahead.index : items.of(ordinal); });
  }
  // The same for a warp whose first lane takes the items.
  __device__ __forceinline__ bool skip_and_take(Items& items, int count, bool takes) {
    return walk(count, items, [&]() {
      if (takes) items.take(ordinal);
      __syncwarp();
      const int item = items.of(ordinal);
      if (takes) items.taken(ordinal);
      return item;
    });
  }

 private:
  template <class Next>
  __device__ __forceinline__ bool walk(int count, const Items& items, const Next& next) {
    const int before = ordinal, stages = items.stages();
#pragma unroll 1
    for (stage += count; stage >= stages && index < items.g.items; stage -= stages) {
      ++ordinal;
      index = uniform(next());
    }
    return ordinal != before;
  }
};
