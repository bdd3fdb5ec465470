// Writes rows of the destination that are staged in shared memory in their final order, on Hopper by TMA. A sector of
// 32 bytes that two stores share costs the L2 cache far more than its bytes (docs/notebook.md), so rows are as long as
// possible, and written from a sector's first byte on. So a staged row has the same offset in a sector as its
// destination.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"

constexpr int SECTOR = 32 / (int)sizeof(scalar_t);  // elements

// Elements from the first of the address's sector.
__device__ __forceinline__ int misalignment(const scalar_t* address) {
  return (unsigned)(unsigned long long)address / (unsigned)sizeof(scalar_t) % SECTOR;
}

// Makes the thread's writes to shared memory visible to TMA stores (BULK_STORES, on Hopper).
__device__ __forceinline__ void publish_rows() {
  if (BULK_STORES) fence_proxy_async();
}
__device__ __forceinline__ void bulk_stores_commit() {
  if (BULK_STORES) tma_store_commit();
}
// Waits until TMA has read the shared memory of all stores that the thread has committed.
__device__ __forceinline__ void bulk_stores_wait() {
  if (BULK_STORES) tma_store_wait_read();
}

// The part of a row that fills whole sectors.
struct Body {
  int head, length;  // elements before it; its elements

  __device__ __forceinline__ Body(const scalar_t* to, int row)
      : head(min(row, (SECTOR - misalignment(to)) % SECTOR)), length((row - head) / SECTOR * SECTOR) {}
};

// Writes the body of a row of `length` elements: by TMA, issued by one thread, or by a warp.
__device__ __forceinline__ void bulk_store_body(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  if (body.length > 0) tma_store_bytes(to + body.head, from + body.head, body.length * (unsigned)sizeof(scalar_t));
}
__device__ __forceinline__ void write_body(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  typedef Vector<scalar_t, SECTOR / 2> Wide;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < body.length / (SECTOR / 2); i += 32)
    ((Wide*)(to + body.head))[i] = ((const Wide*)(from + body.head))[i];
}

// Writes the rest of a row, by END_LANES lanes. Neighbouring rows that share a sector are written by one instruction,
// so the sector is written whole.
constexpr int END_LANES = 2 * SECTOR, ENDS_AT_ONCE = 32 / END_LANES;
__device__ __forceinline__ void write_ends(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  const int lane = threadIdx.x % END_LANES, tail = body.head + body.length;
  const int end = lane < SECTOR ? body.head : length, edge = lane < SECTOR ? lane : tail + lane - SECTOR;
  if (edge < end) to[edge] = from[edge];
}

// Writes a row whose elements are `stride` apart in memory.
__device__ __forceinline__ void write_apart(scalar_t* to, const scalar_t* from, int length, long long stride) {
  for (int i = threadIdx.x % 32; i < length; i += 32) to[i * stride] = from[i];
}

// Calls write(to, from, length) for the row of each of a warp's first `count` lanes. AT_ONCE rows are written together,
// each by its part of the warp.
template <int AT_ONCE, class Write>
__device__ __forceinline__ void for_rows(scalar_t* to, const scalar_t* from, int length, int count,
                                         const Write& write) {
#pragma unroll 2
  for (int i = 0; i < count; i += AT_ONCE) {
    const int lane = i + threadIdx.x % 32 / (32 / AT_ONCE);
    const int of_lane = __shfl_sync(~0u, length, lane);
    scalar_t* const row = (scalar_t*)__shfl_sync(~0u, (long long)to, lane);
    write(row, (const scalar_t*)__cvta_shared_to_generic(__shfl_sync(~0u, shared_address(from), lane)), of_lane);
  }
}

// Writes the row of each of a warp's first `count` lanes; other lanes have rows of 0 elements.
__device__ __forceinline__ void write_rows(scalar_t* to, const scalar_t* from, int length, int count,
                                           long long stride) {
  if (stride != 1) {
    for_rows<1>(to, from, length, count,
                [=](scalar_t* to, const scalar_t* from, int length) { write_apart(to, from, length, stride); });
    return;
  }
  if (BULK_STORES)
    bulk_store_body(to, from, length), bulk_stores_commit();
  else
    for_rows<1>(to, from, length, count, write_body);
  if (!__all_sync(~0u, Body(to, length).length == length)) for_rows<ENDS_AT_ONCE>(to, from, length, count, write_ends);
}
