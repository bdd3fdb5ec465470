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
  typedef Vector<T, 4 / sizeof(T)> Word;
  struct Operands {
    unsigned a[4], b[2];
  } const mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto lanes = emulator::all_lanes(~0u, mine);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 8; ++k) {
      const Operands& left = lanes.of[lane / 4 * 4 + k % 4];
      const Operands& right = lanes.of[(lane % 4 * 2 + i % 2) * 4 + k % 4];
      const Word& row = *(const Word*)&left.a[i / 2 + k / 4 * 2];
      const Word& column = *(const Word*)&right.b[k / 4];
      for (int j = 0; j < (int)(4 / sizeof(T)); ++j)
        c[i] += operand_value(row.value[j]) * operand_value(column.value[j]);
    }
}
