#pragma once

// Address of a byte that TMA writes, and wgmma reads, swizzled: 16-byte chunks are permuted within `bytes`, which are
// 32, 64, 128, or 16 for no swizzle. Bits 7 and up of the address choose the order of chunks.
__device__ __forceinline__ unsigned swizzled(unsigned address, int bytes) {
  return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}
