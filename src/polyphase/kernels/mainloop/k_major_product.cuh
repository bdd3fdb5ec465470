// Products of two matrices that TMA brings with k innermost (K-major), by wgmma:
//
//     sum[row, column]  +=  Σ_k  A[row, k] · B[k, column]
//
// Index mapping. Two warpgroups multiply, each ROW_TILES tiles of 64 rows by COLUMNS columns; a third one loads.
//
// Shared memory: BUFFERS stages, each [part][row][k], then [part][column][k], rows of PITCH bytes, swizzled. Three
// products of two PARTS each are added.

#pragma once

#include "specialisation.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "mainloop/accumulators.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

constexpr int GROUPS = 2, CONSUMER_THREADS = 128 * GROUPS, THREADS = CONSUMER_THREADS + 128;
constexpr int GROUP_ROWS = 64 * ROW_TILES, ROWS = GROUPS * GROUP_ROWS;
constexpr int STEPS = PITCH / 32;  // instructions of a stage
constexpr int A_BYTES = ROWS * PITCH, B_BYTES = COLUMNS * PITCH, STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);

struct Sums : Accumulators<ROW_TILES, COLUMNS / 2> {
  static __device__ __forceinline__ int row(int i) {  // of 2 · ROW_TILES
    return threadIdx.x / 128 * GROUP_ROWS + i / 2 * 64 + threadIdx.x / 32 % 4 * 16 + fragment_row() + i % 2 * 8;
  }

  // The products of `stages` stages, to sums that begin with them.
  __device__ __forceinline__ void multiply(int stages, PipelineBarriers<BUFFERS>& ring, PipelineState<BUFFERS>& state,
                                           const unsigned char* buffers) {
    const auto add = [&](int index, bool more) { add_stage(shared_address(buffers) + index * STAGE_BYTES, more); };
    consume_stages(stages, ring, state, add, [&] { wgmma_wait<0>(), pin(of); });
  }

 private:
  // Adds a stage, or begins with it, when those before have come to an end.
  __device__ __forceinline__ void add_stage(unsigned stage, bool more) {
    const unsigned rows = stage + threadIdx.x / 128 * (GROUP_ROWS * PITCH), columns = stage + PARTS * A_BYTES;
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < (PARTS == 2 ? 3 : 1); ++product) {  // low · high, high · low, high · high
      const unsigned a = rows + (PARTS == 2 && product == 0 ? A_BYTES : 0);
      const unsigned b = columns + (PARTS == 2 && product == 1 ? B_BYTES : 0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
          wgmma(of[tile], matrix_descriptor<PITCH>(a + tile * (64 * PITCH) + step * 32, 0),
                matrix_descriptor<PITCH>(b + step * 32, 0), more || product > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
};
