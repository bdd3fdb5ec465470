// The forms of wgmma. A kernel's own, with names of their own, are called by what tests/emulator appends.

#pragma once

#include "core/types.cuh"
#include "emulator/tensor_cores.cuh"

// Rows lane / 4 and lane / 4 + 8 of a warp's 16, from shared memory.
template <class T, bool TRANSPOSED>
struct RowsInMemory {
  unsigned long long descriptor;

  emulator::Line line(int half) const {
    const emulator::Matrix rows = {descriptor, operand_of<T>, TRANSPOSED};
    return rows.line(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * half);
  }
};

// The same from registers: they are read where the four lanes of a row have them, and no sooner than hardware may do
// so.
struct RowsInRegisters {
  const unsigned* lanes[4];

  explicit RowsInRegisters(const unsigned (&a)[4]) {
    const auto all = emulator::all_lanes(~0u, (const unsigned*)a);
    for (int i = 0; i < 4; ++i) lanes[i] = all.of[threadIdx.x % 32 / 4 * 4 + i];
  }
  emulator::Line line(int half) const {
    emulator::Line line;
    for (int word = 0; word < 8; ++word) line.words[word] = lanes[word % 4][half + word / 4 * 2];
    return line;
  }
};

template <class T, bool TRANSPOSE_B, int COUNT, class Rows>
inline void wgmma_later(float (&sums)[COUNT], const Rows& rows, unsigned long long b, bool add) {
  float* const to = sums;
  emulator::later(emulator::Async::products, [=] {
    emulator::wgmma(to, COUNT, add, {rows.line(0), rows.line(1)}, {b, operand_of<T>, TRANSPOSE_B});
  });
}
