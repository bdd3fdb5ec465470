// One k-step: a warpgroup adds A · B to its accumulators, A of m64 and B of PIXELS columns, each two chunks of 16 bytes
// along K, in shared memory. Rows are 16 bytes apart, the second chunk is `A_CHUNK` or `b_chunk` bytes after the first
// (no swizzle). So the next pixel is 16 bytes further, and a tap is an address offset.
//
// With TMA_OPERANDS a column is all chunks of its pixel, PIXEL_PITCH bytes, swizzled by TMA. The swizzle depends on
// address bits alone, so B may begin at any pixel. In NCHW B is MN_MAJOR: a box is 64 pixels of every channel of a
// stage, 128 bytes a channel, swizzled; wgmma reads such operands in half types.
//
// Accumulators as in accumulators.cuh; warp `w` has the rows from 16·w on.

#pragma once

#include "specialisation.cuh"
#include "core/row_blocks.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "mainloop/accumulators.cuh"

constexpr int A_CHUNK = 64 * 16;
constexpr int SUMS = PIXELS / 2;  // accumulators of a thread
constexpr int PIXEL_PITCH = TMA_OPERANDS ? 32 * K_STEPS : 16;
constexpr bool MN_MAJOR = TMA_OPERANDS && !SRC_CHANNELS_LAST;
constexpr int BOX_PIXELS = 64, BOX_BYTES = BOX_PIXELS * PIXEL_PITCH;  // an MN_MAJOR box
constexpr int BOX_STEP = MN_MAJOR ? STEP_CHANNELS * 128 : 32;         // from a step's channels to the next one's
static_assert(!MN_MAJOR || (sizeof(operand_t) == 2 && PIXELS % BOX_PIXELS == 0), "columns are whole boxes");
static_assert(!MN_MAJOR || BOX_BYTES % 1024 == 0, "swizzled rows begin with eight of them");

// Sets to zero at this point. The compiler might else do so between the products, and serialise them.
__device__ __forceinline__ void clear(float& sum) {
  sum = 0;
  materialize(sum);
}

__device__ __forceinline__ void add_product(float (&sums)[SUMS], unsigned a, unsigned b, unsigned b_chunk, bool add) {
#if WGMMA
  const unsigned long long columns =
      MN_MAJOR ? matrix_descriptor<128>(b, BOX_BYTES) : matrix_descriptor<PIXEL_PITCH>(b, b_chunk);
  wgmma(sums, matrix_descriptor<16>(a, A_CHUNK), columns, add);
#else
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (!add) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
  }
  unsigned rows[4];  // rows 0-7 and 8-15 of the first chunk, then of the second
  ldmatrix(rows, a + lane / 16 * A_CHUNK + (16 * warp + lane % 16) * 16);
#pragma unroll
  for (int j = 0; j < PIXELS / 8; j += 2) {
    unsigned columns[4];  // 8 columns of both chunks, then the next 8
    ldmatrix(columns, b + lane / 8 % 2 * b_chunk + (8 * j + lane / 16 * 8 + lane % 8) * 16);
    mma<operand_t>(sums + 4 * j, rows, columns[0], columns[1]);
    if (j + 1 < PIXELS / 8) mma<operand_t>(sums + 4 * (j + 1), rows, columns[2], columns[3]);
  }
#endif
}
