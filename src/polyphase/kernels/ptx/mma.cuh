// mma.sync, the tensor cores' instruction for a warp, from sm_80 on, and ldmatrix, which loads its operands.

#pragma once

#include "core/types.cuh"

// Loads four matrices of 8 rows by 16 bytes. A lane gives the address of row lane % 8 of matrix lane / 8, and gets from
// each matrix the four bytes `lane % 4` of row lane / 4; TRANSPOSED, for elements of 16 bits, those of column lane / 4.
template <bool TRANSPOSED = false>
__device__ __forceinline__ void ldmatrix(unsigned (&to)[4], unsigned address) {
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
}

// c += A · B with 16 rows and 8 columns; k is 32 bytes, two chunks of 16. Of each chunk a thread holds the four bytes
// `lane % 4`: of A in rows lane / 4 and lane / 4 + 8, of B in column lane / 4. c[i] is at row lane / 4 + i / 2 · 8 and
// column lane % 4 · 2 + i % 2. Operands are of type T: float as TF32, float16 or bfloat16.
template <class T>
__device__ __forceinline__ void mma(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
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
}
