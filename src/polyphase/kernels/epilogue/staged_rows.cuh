// Rows of the destination that lie in shared memory as they are to lie in memory, and are written from there, on Hopper
// by TMA. A sector of 32 bytes that two stores share costs the L2 cache far more than its bytes
// (docs/notebook.md), so rows are as long as they come, and written from a sector's first byte on. To that end they
// begin as far behind a sector's first byte in shared memory as they will.

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

// TMA stores, where the specialisation says BULK_STORES: on Hopper. What the thread has written to shared memory is
// there for TMA after this.
__device__ __forceinline__ void publish_rows() {
  if (BULK_STORES) fence_proxy_async();
}
__device__ __forceinline__ void bulk_stores_commit() {
  if (BULK_STORES) tma_store_commit();
}
// Until TMA has read all that the thread has committed.
__device__ __forceinline__ void bulk_stores_wait() {
  if (BULK_STORES) tma_store_wait_read();
}

// What of a row lies in sectors of its own.
struct Body {
  int head, length;  // elements before it, and its own

  __device__ __forceinline__ Body(const scalar_t* to, int row)
      : head(min(row, (SECTOR - misalignment(to)) % SECTOR)), length((row - head) / SECTOR * SECTOR) {}
};

// That of a row of `length` elements, by TMA, or by a warp.
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

// The rest of it, by as many lanes as may be needed. Neighbouring rows that share a sector, written by one instruction,
// write it whole.
constexpr int END_LANES = 2 * SECTOR, ENDS_AT_ONCE = 32 / END_LANES;
__device__ __forceinline__ void write_ends(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  const int lane = threadIdx.x % END_LANES, tail = body.head + body.length;
  const int end = lane < SECTOR ? body.head : length, edge = lane < SECTOR ? lane : tail + lane - SECTOR;
  if (edge < end) to[edge] = from[edge];
}

// A row whose elements are `stride` apart in memory.
__device__ __forceinline__ void write_apart(scalar_t* to, const scalar_t* from, int length, long long stride) {
  for (int i = threadIdx.x % 32; i < length; i += 32) to[i * stride] = from[i];
}

// Calls write(to, from, length) with the row of each of a warp's first `count` lanes, of AT_ONCE in parts of the warp.
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

// A row of each of a warp's first `count` lanes, of 0 elements for the others.
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
