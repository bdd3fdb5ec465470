// The forms of wgmma. A kernel's own, with names of their own, are called by what tests/emulator appends.

#pragma once

#include "core/swizzle.cuh"
#include "core/types.cuh"
#include "emulator/tensor_cores.cuh"

// A matrix in shared memory, by its descriptor: rows of A, or columns of B, by k.
template <class T, bool TRANSPOSED>
struct DescribedMatrix {
  unsigned start, lbo, sbo;
  int pitch;

  explicit DescribedMatrix(unsigned long long bits)
      : start(((unsigned)bits & 0x3fff) << 4),
        lbo(((unsigned)(bits >> 16) & 0x3fff) << 4),
        sbo(((unsigned)(bits >> 32) & 0x3fff) << 4),
        pitch(bits >> 62 == 0 ? 16 : 256 >> (bits >> 62)) {}

  // Elements that lie side by side: of one row, unless rows are columns of what is stored.
  static constexpr int RUN = TRANSPOSED ? 1 : 16 / (int)sizeof(T);

  template <int DEPTH>
  void read(float (&to)[DEPTH], int row) const {
    for (int k = 0; k < DEPTH; k += RUN) {
      const auto& run = *(const Vector<T, RUN>*)place(row, k);
      for (int i = 0; i < RUN; ++i) to[k + i] = operand_value(run.value[i]);
    }
  }
  const void* place(int row, int k) const {
    const int along = (TRANSPOSED ? row : k) * (int)sizeof(T), across = TRANSPOSED ? k : row;
    const unsigned address = start + across / 8 * sbo + across % 8 * pitch + along / pitch * lbo + along % pitch;
    return __cvta_shared_to_generic(swizzled(address, pitch));
  }
};

// Rows lane / 4 and lane / 4 + 8 of a warp's 16, from shared memory.
template <class T, bool TRANSPOSED>
struct RowsInMemory {
  DescribedMatrix<T, TRANSPOSED> matrix;
  int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;

  template <int DEPTH>
  void read(float (&to)[DEPTH], int half) const {
    matrix.read(to, first + 8 * half);
  }
};

// The same from registers: they are read where the four lanes of a row have them, and no sooner than hardware may do
// so.
template <class T>
struct RowsInRegisters {
  const unsigned* lanes[4];

  explicit RowsInRegisters(const unsigned (&a)[4]) {
    const auto all = emulator::all_lanes(~0u, (const unsigned*)a);
    for (int i = 0; i < 4; ++i) lanes[i] = all.of[threadIdx.x % 32 / 4 * 4 + i];
  }
  template <int DEPTH>
  void read(float (&to)[DEPTH], int half) const {
    constexpr int WORD = 4 / (int)sizeof(T);  // k of four bytes
    typedef Vector<T, WORD> Word;
    for (int k = 0; k < DEPTH; ++k)
      to[k] = operand_value(((const Word*)(lanes[k / WORD % 4] + half + k / WORD / 4 * 2))->value[k % WORD]);
  }
};

template <class T, bool TRANSPOSE_B, int COUNT, class Rows>
inline void wgmma_later(float (&sums)[COUNT], const Rows& rows, unsigned long long b, bool add) {
  float* const to = sums;
  emulator::later(emulator::Async::products, [=, first = threadIdx.x % 4 * 2] {
    constexpr int DEPTH = 32 / (int)sizeof(T);
    const DescribedMatrix<T, TRANSPOSE_B> columns(b);
    float row[2][DEPTH], column[DEPTH];
    rows.read(row[0], 0), rows.read(row[1], 1);
    for (int i = 0; i < COUNT; i += 4)
      for (int j = i; j < i + 2; ++j) {
        columns.read(column, i / 4 * 8 + first + j % 2);
        for (int half = 0; half < 2; ++half) {
          float& sum = to[j + 2 * half];
          if (!add) sum = 0;
          for (int k = 0; k < DEPTH; ++k) sum += row[half][k] * column[k];
        }
      }
  });
}
