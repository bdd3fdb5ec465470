// The copy engine, and the barriers between those who fill shared memory and those who read it.

// The copy engine that came with Hopper.
#if __CUDA_ARCH__ >= 900 || (defined(EMULATOR) && WGMMA_INSTRUCTION)
#define BULK_COPY 1
#else
#define BULK_COPY 0
#endif
// It brings boxes where Hopper's matrix instruction is used.
#define BOX_COPY (BULK_COPY && WGMMA_INSTRUCTION)

// A tensor of five dimensions, innermost first, and the box of it that the copy engine brings at once (Boxes in
// program/tensor_map.py); encoded by the driver.
struct alignas(64) TensorMap {
#ifndef EMULATOR
  unsigned char encoded[128];
#else
  long long strides[4];  // in bytes, of all dimensions but the first
  int sizes[5], box[5];
  int swizzle;   // bytes within which chunks change places
  int tf32;      // whether float32 is rounded on its way
  int steps[5];  // from one element that is brought to the next
  unsigned char unused[28];
#endif
};

#ifndef EMULATOR

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barriers_publish() {
#if BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives when the thread's copies to shared memory (copy_async.cuh) have come that it has begun so far.
__device__ __forceinline__ void barrier_arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// The same barrier of another block of the cluster. (With a scope of the cluster it would wait for all stores before.)
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, int block) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(block)
      : "memory");
}
#if BULK_COPY
// A word to another block's shared memory, or to this one's, where the barrier is told of its bytes.
__device__ __forceinline__ void store_async(unsigned to, int value, unsigned barrier, int block) {
  asm volatile(
      "{ .reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [barrier]; }" ::"r"(to),
      "r"(value), "r"(barrier), "r"(block)
      : "memory");
}
#endif
// All threads of the cluster's blocks but those that have exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Threads of one named barrier of the block.
__device__ __forceinline__ void threads_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

#else

__device__ __forceinline__ emulator::Barrier* barrier_at(unsigned barrier) {
  return (emulator::Barrier*)__cvta_shared_to_generic(barrier);
}
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  emulator::barrier_init(barrier_at(barrier), arrivals);
}
__device__ __forceinline__ void barriers_publish() {}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) { emulator::barrier_arrive(barrier_at(barrier)); }
__device__ __forceinline__ void barrier_arrive_with_copies(unsigned barrier) {
  copies_commit();
  copies_wait<0>();
  barrier_arrive(barrier);
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  emulator::barrier_wait(barrier_at(barrier), parity);
}
// A block of a cluster runs alone, and does what the others would do for it.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, int) { barrier_arrive(barrier); }
__device__ __forceinline__ void cluster_sync() {}
__device__ __forceinline__ void threads_sync(int name, int threads) { emulator::threads_sync(name, threads); }

#endif

// Where the copy engine puts a byte, in rows within whose `bytes` it swizzles chunks of 16: 32, 64, 128, or 16 for
// none.
__device__ __forceinline__ unsigned swizzled(unsigned address, int bytes) {
  return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}

// One thread copies contiguous bytes, a multiple of 16; `barrier` completes when they have come.
#if BULK_COPY && !defined(EMULATOR)
// The phase of a barrier does not end before so many bytes more have come.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  barrier_expect(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same where every block of the cluster copies its part to all of them.
template <int BLOCKS>
__device__ __forceinline__ void bulk_copy_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  const unsigned part = bytes / BLOCKS, offset = blockIdx.x % BLOCKS * part;
  barrier_expect(barrier, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to + offset),
      "l"((const char*)from + offset), "r"(part), "r"(barrier), "h"((unsigned short)((1 << BLOCKS) - 1))
      : "memory");
}

// The same for a box of `bytes`, whose first element is at the given place of the tensor, a multiple of 16 bytes along
// the innermost dimension; what lies beside the tensor is zero.
__device__ __forceinline__ void box_copy(unsigned to, const TensorMap& map, const scalar_t*, const int (&place)[5],
                                         unsigned bytes, unsigned barrier) {
  barrier_expect(barrier, bytes);
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4]), "r"(barrier)
      : "memory");
}
#else
#ifdef EMULATOR
__device__ __forceinline__ void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), from, bytes);
}
template <int BLOCKS>
__device__ __forceinline__ void bulk_copy_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  bulk_copy(to, from, bytes, barrier);
}
__device__ __forceinline__ void box_copy(unsigned to, const TensorMap& map, const scalar_t* tensor,
                                         const int (&place)[5], unsigned bytes, unsigned barrier) {
  if (place[0] * (int)sizeof(scalar_t) % 16) __trap();
  unsigned char* const box = (unsigned char*)emulator::scratch(bytes);
  unsigned offset = 0;
  int at[5] = {};
  for (; offset < bytes; offset += sizeof(scalar_t)) {
    bool inside = true;
    long long from = 0;
    for (int i = 0; i < 5; ++i) {
      const int index = place[i] + at[i] * map.steps[i];
      inside = inside && index >= 0 && index < map.sizes[i];
      from += i == 0 ? (long long)index * sizeof(scalar_t) : index * map.strides[i - 1];
    }
    const scalar_t value = inside ? *(const scalar_t*)((const char*)tensor + from) : zero<scalar_t>();
    *(scalar_t*)(box + swizzled(to + offset, map.swizzle) - to) = map.tf32 ? rounded(value) : value;
    for (int i = 0; i < 5 && ++at[i] == map.box[i]; ++i) at[i] = 0;
  }
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), box, bytes);
}
#endif
#endif

// True for one thread of a warp, of which all are here, and always the same one.
__device__ __forceinline__ bool elect() {
#if __CUDA_ARCH__ >= 900
  int chosen;
  asm volatile("{ .reg .pred chosen; elect.sync _|chosen, 0xffffffff; selp.b32 %0, 1, 0, chosen; }" : "=r"(chosen));
  return chosen;
#else
  return threadIdx.x % 32 == 0;
#endif
}
// What all threads of a warp have, for the compiler to know that it is the same.
__device__ __forceinline__ int uniform(int value) {
#if __CUDA_ARCH__ >= 900
  return __reduce_max_sync(~0u, value);
#else
  return value;
#endif
}

// Loaders need few registers, those who multiply need many: the block's registers change hands. All that are claimed
// must have been there when the block began, or those who claim them wait for ever.
__host__ __device__ constexpr bool registers_suffice(int multipliers, int claimed, int loaders, int kept) {
  const int threads = multipliers + loaders, at_launch = 65536 / threads / 8 * 8;
  return multipliers * claimed + loaders * kept <= threads * at_launch;
}
#if WGMMA_INSTRUCTION && !defined(EMULATOR)
template <int KEPT>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KEPT));
}
template <int CLAIMED>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CLAIMED));
}
#else
template <int>
__device__ __forceinline__ void registers_release() {}
template <int>
__device__ __forceinline__ void registers_claim() {}
#endif
