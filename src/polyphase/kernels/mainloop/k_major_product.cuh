// Products of two K-major matrices that TMA loads, by wgmma:
//
//     sum[row, column]  +=  Σ_k  A[row, k] · B[k, column]
//
// Index mapping. Two consumer warpgroups multiply, each ROW_TILES tiles of 64 rows by COLUMNS columns; a third
// produces.
//
// Shared memory: STAGES stages, each [part][row][k], then [part][column][k], rows of PITCH bytes, swizzled. Three
// products of two PARTS each are added.

#pragma once

#include "specialisation.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "mainloop/accumulators.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

constexpr int CONSUMER_GROUPS = 2, CONSUMER_THREADS = 128 * CONSUMER_GROUPS, THREADS = CONSUMER_THREADS + 128;
constexpr int GROUP_ROWS = 64 * ROW_TILES, ROWS = CONSUMER_GROUPS * GROUP_ROWS;
constexpr int STEPS = PITCH / 32;  // instructions of a stage
constexpr int A_BYTES = ROWS * PITCH, B_BYTES = COLUMNS * PITCH, STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);

struct Sums : Accumulators<ROW_TILES, COLUMNS / 2> {
  static __device__ __forceinline__ int row(int i) {  // of 2 · ROW_TILES
    return threadIdx.x / 128 * GROUP_ROWS + i / 2 * 64 + threadIdx.x / 32 % 4 * 16 + fragment_row() + i % 2 * 8;
  }

  // Overwrites the sums with the products of `stages` stages.
  __device__ __forceinline__ void multiply(int stages, PipelineBarriers<STAGES>& ring, PipelineState<STAGES>& state,
                                           const unsigned char* buffers) {
    const auto add = [&](int index, bool more) {
      const unsigned stage = shared_address(buffers) + index * STAGE_BYTES;
      unsigned rows[ROW_TILES];
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
        rows[tile] = stage + threadIdx.x / 128 * (GROUP_ROWS * PITCH) + tile * (64 * PITCH);
      this->add<A_BYTES>(rows, 8 * PITCH, stage + PARTS * A_BYTES, more);
    };
    consume_stages(stages, ring, state, add, [&] { wgmma_wait<0>(), pin(of); });
  }

  // Adds a product, or overwrites the sums with it. Row tiles begin at `rows`, those of the second part PART_BYTES
  // further; `sbo`: distance from eight rows to the next eight.
  template <int PART_BYTES>
  __device__ __forceinline__ void add(const unsigned (&rows)[ROW_TILES], unsigned sbo, unsigned columns, bool more) {
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < (PARTS == 2 ? 3 : 1); ++product) {  // low · high, high · low, high · high
      const unsigned part = PARTS == 2 && product == 0 ? PART_BYTES : 0;
      const unsigned b = columns + (PARTS == 2 && product == 1 ? B_BYTES : 0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
          wgmma(of[tile], matrix_descriptor<PITCH>(rows[tile] + part + step * 32, 0, sbo),
                matrix_descriptor<PITCH>(b + step * 32, 0), more || product > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
};
