// The forms of wgmma that a kernel uses, generated for it (`KernelSource.wgmma`, jit/source.py), as C++ cannot express
// an operand list of variable length. This is an example, for editors: 64 rows by 8 columns of TF32, A by its
// descriptor.
//
// sums = (add ? sums : 0) + A · B; descriptors are of matrices in shared memory. Some forms take A from registers.

#pragma once

__device__ __forceinline__ void wgmma(float (&sums)[4], unsigned long long a, unsigned long long b, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3}, %4, %5, add, 1, 1; }"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "l"(a), "l"(b), "r"((int)add));
}
