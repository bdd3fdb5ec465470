// Rows of the destination that lie in shared memory as they are to lie in memory, and are written from there, on Hopper
// by the copy engine. A sector of 32 bytes that two stores share costs the L2 cache far more than its bytes
// (docs/performance.md), so rows are as long as they come, and written from a sector's first byte on. To that end they
// begin as far behind a sector's first byte in shared memory as they will.

constexpr int SECTOR = 32 / (int)sizeof(scalar_t);  // elements

// Elements from the first of the address's sector.
__device__ __forceinline__ int misalignment(const scalar_t* address) {
  return (unsigned)(unsigned long long)address / (unsigned)sizeof(scalar_t) % SECTOR;
}

// The copy engine's; the specialisation says BULK_STORES where there is one.
#ifndef EMULATOR
// `bytes`, a multiple of 16, from shared to global memory, while the thread goes on.
__device__ __forceinline__ void bulk_store(scalar_t* to, const scalar_t* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
// What the thread has written to shared memory is there for the copy engine.
__device__ __forceinline__ void publish_rows() {
  if (BULK_STORES) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void bulk_stores_commit() {
  if (BULK_STORES) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the copy engine has read all that the thread has committed.
__device__ __forceinline__ void bulk_stores_wait() {
  if (BULK_STORES) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#else
__device__ __forceinline__ void bulk_store(scalar_t* to, const scalar_t* from, unsigned bytes) {
  emulator::bulk_store(to, from, bytes);
}
__device__ __forceinline__ void publish_rows() {}
__device__ __forceinline__ void bulk_stores_commit() { emulator::commit(emulator::Async::stores); }
__device__ __forceinline__ void bulk_stores_wait() { emulator::wait(emulator::Async::stores, 0); }
#endif

// What of a row lies in sectors of its own.
struct Body {
  int head, length;  // elements before it, and its own

  __device__ __forceinline__ Body(const scalar_t* to, int row)
      : head(min(row, (SECTOR - misalignment(to)) % SECTOR)), length((row - head) / SECTOR * SECTOR) {}
};

// That of a row of `length` elements, by the copy engine. Whether there is nothing besides.
__device__ __forceinline__ bool write_body(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  if (body.length > 0) bulk_store(to + body.head, from + body.head, body.length * (unsigned)sizeof(scalar_t));
  return body.length == length;
}

// The rest of it, or all of it where there is no copy engine, by a warp.
__device__ __forceinline__ void write_row(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  const int lane = threadIdx.x % 32, tail = body.head + body.length;
  if (!BULK_STORES) {
    typedef Vector<scalar_t, SECTOR / 2> Wide;
#pragma unroll 4
    for (int i = lane; i < body.length / (SECTOR / 2); i += 32)
      ((Wide*)(to + body.head))[i] = ((const Wide*)(from + body.head))[i];
  }
  const int end = lane < SECTOR ? body.head : length, edge = lane < SECTOR ? lane : tail + lane - SECTOR;
  if (lane < 2 * SECTOR && edge < end) to[edge] = from[edge];
}

// A row whose elements are `stride` apart in memory.
__device__ __forceinline__ void write_apart(scalar_t* to, const scalar_t* from, int length, long long stride) {
  for (int i = threadIdx.x % 32; i < length; i += 32) to[i * stride] = from[i];
}
