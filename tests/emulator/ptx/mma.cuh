// A warp's matrix instructions: lanes show one another their operands.

#pragma once

#include "core/types.cuh"
#include "emulator/tensor_cores.cuh"

template <bool TRANSPOSED = false>
inline void ldmatrix(unsigned (&to)[4], unsigned address) {
  typedef Vector<unsigned short, 8> Row;
  const auto addresses = emulator::all_lanes(~0u, address);
  const int major = threadIdx.x % 32 / 4, minor = threadIdx.x % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned halves[2];
    for (int i = 0; i < 2; ++i) {
      const int row = TRANSPOSED ? minor + i : major, column = TRANSPOSED ? major : minor + i;
      halves[i] = ((const Row*)__cvta_shared_to_generic(addresses.of[8 * matrix + row]))->value[column];
    }
    to[matrix] = halves[0] | halves[1] << 16;
  }
}

template <class T>
inline void mma(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned mine[] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(emulator::warp_slots[emulator::lane()].bytes, mine, sizeof mine);
  __syncwarp();
  emulator::mma_of_slots(c, operand_of<T>);
  __syncwarp();
}
