#pragma once

// Where TMA puts a byte, and the tensor cores look for it, in rows of `bytes` within which 16-byte chunks are swizzled:
// 32, 64, 128, or 16 for no swizzle. Bits 7 and up of the address choose the order of chunks.
__device__ __forceinline__ unsigned swizzled(unsigned address, int bytes) {
  return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}
