// The tensor cores' instruction for a warp, of sm_80 and later, and how its operands come from shared memory.

#pragma once

#include "specialisation.cuh"
#include "common/types.cuh"

// Four matrices of 8 rows by 16 bytes; a lane gives the address of row lane % 8 of matrix lane / 8, and gets of each
// the four bytes `lane % 4` of row lane / 4; TRANSPOSED, for elements of 16 bits, those of column lane / 4.
template <bool TRANSPOSED = false>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
#ifndef EMULATOR
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
#else
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
#endif
}

#ifdef EMULATOR
// Operands as the cores see them: TF32 is float32 without its last 13 bits.
template <class T>
__device__ __forceinline__ float operand(T value) {
  float wide = widen(value);
  if (sizeof(T) == 4) wide = __uint_as_float(__float_as_uint(wide) & 0xffffe000u);
  return wide;
}
#endif

// c += A · B of 16 rows and 8 columns, 32 bytes deep. A thread holds of A, for each of two chunks of 16 bytes, the four
// bytes `lane % 4` of rows lane / 4 and lane / 4 + 8, of B those of column lane / 4, and in c[i] row
// lane / 4 + i / 2 · 8 and column lane % 4 · 2 + i % 2. Operands are of type T: float as TF32, float16 or bfloat16.
template <class T = scalar_t>
__device__ __forceinline__ void mma(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifndef EMULATOR
  if constexpr (is_same<T, float>)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else if constexpr (is_same<T, bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
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
      for (int j = 0; j < (int)(4 / sizeof(T)); ++j) c[i] += operand(row.value[j]) * operand(column.value[j]);
    }
#endif
}
