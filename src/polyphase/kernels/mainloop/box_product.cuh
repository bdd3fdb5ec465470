// Mainloop over operands that TMA loads in boxes and wgmma reads in place, in NHWC:
//
//     sum[m, n]  +=  Σ_k  A[m, k] · B[k, n]
//
// If K are channels both operands are K-major: a row of A, or a column of B, is a row of a box. If K are positions they
// are MN_MAJOR: a row of a box is one k, and holds ROW_PITCH bytes of A's rows or COLUMN_PITCH bytes of B's columns.
// TMA swizzles 16-byte chunks within a row. The swizzle depends on address bits alone, so an operand may begin at any
// row of a box.
//
// wgmma has no MN-major operands of 32 bits: with BY_THREADS warps read those into registers for mma.sync.
//
// Consumer warpgroups, ROW_GROUPS along M or COLUMN_GROUPS along N, each have ROW_TILES m64 tiles by LINES times
// COLUMNS columns, which are N of one wgmma. Of the LOADERS producer threads some issue TMA. A stage is STEPS k-steps
// deep.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "core/swizzle.cuh"
#include "core/types.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"
#include "mainloop/accumulators.cuh"

constexpr int ELEMENT = sizeof(scalar_t);
constexpr int OPERATION = 32 / ELEMENT;  // k of one instruction
constexpr int CONSUMER_THREADS = 128 * ROW_GROUPS * COLUMN_GROUPS, THREADS = CONSUMER_THREADS + LOADERS;
constexpr int GROUP_ROWS = 64 * ROW_TILES;
__device__ __forceinline__ int row_group() { return COLUMN_GROUPS == 1 ? (int)threadIdx.x / 128 : 0; }
__device__ __forceinline__ int column_group() { return COLUMN_GROUPS == 1 ? 0 : (int)threadIdx.x / 128; }
static_assert(ROW_GROUPS == 1 || COLUMN_GROUPS == 1, "groups differ in one of both");

// setmaxnreg moves registers to consumers if a whole warpgroup produces; else all threads have equal shares.
constexpr int PRODUCER_REGISTERS = CONSUMER_THREADS > 256 ? 32 : 40,
              CONSUMER_REGISTERS = CONSUMER_THREADS > 256 ? 160 : 232;
static_assert(LOADERS == 32 || registers_suffice(CONSUMER_THREADS, CONSUMER_REGISTERS, LOADERS, PRODUCER_REGISTERS),
              "too few registers");
template <bool MULTIPLIES>
__device__ __forceinline__ void reallocate_registers() {
  if constexpr (LOADERS == 128 && MULTIPLIES) setmaxnreg_inc<CONSUMER_REGISTERS>();
  if constexpr (LOADERS == 128 && !MULTIPLIES) setmaxnreg_dec<PRODUCER_REGISTERS>();
}

// Bytes of a box of an MN-major operand, and the rows or columns in it.
__host__ __device__ constexpr int box_bytes(int pitch) { return STEPS * OPERATION * pitch; }
constexpr int ROW_BOX = ROW_PITCH / ELEMENT, COLUMN_BOX = COLUMN_PITCH / ELEMENT;
// Bytes of a row tile, and of all row tiles of a stage, after which its columns are stored.
constexpr int A_TILE = MN_MAJOR ? 64 / ROW_BOX * box_bytes(ROW_PITCH) : 64 * ROW_PITCH;
constexpr int A_BYTES = ROW_GROUPS * ROW_TILES * A_TILE;
static_assert(MN_MAJOR ? COLUMNS % COLUMN_BOX == 0 : ROW_PITCH == 32 * STEPS && COLUMN_PITCH == 32 * STEPS,
              "operands are whole boxes, or whole operations deep");

// BY_THREADS: the warps of a warpgroup that share rows and have different columns, so that operands are read less
// often. With several row tiles a warp reads its columns once for all of them.
#if BY_THREADS
constexpr int ABREAST = ROW_TILES > 1 ? 1 : COLUMNS % 32 == 0 ? 4 : COLUMNS % 16 == 0 ? 2 : 1;
#else
constexpr int ABREAST = 1;
#endif
// Strips of 16 rows of a tile that a warp has, without empty strips.
constexpr int STRIPS = ABREAST == 4 && IN_CHANNELS <= 48 ? ceil_div(IN_CHANNELS, 16) : ABREAST;
constexpr int SUMS = COLUMNS / 8 / ABREAST * STRIPS * 4;  // accumulators of a thread for a row tile by a line

// Bytes of a stage; class Columns has the layout of its columns (`Sums::multiply`).
template <class Columns>
__host__ __device__ constexpr int stage_bytes() {
  return round_up(A_BYTES + Columns::BYTES, 1024);
}

// A thread's accumulators: ROW_TILES row tiles by LINES lines. Element i is at row `row(tile, i)` of the block and
// column `column(i)` of the line.
struct Sums : Accumulators<ROW_TILES * LINES, SUMS> {
  static __device__ __forceinline__ int row(int tile, int i) {
    const int warp = threadIdx.x / 32 % 4, strip = warp / ABREAST * STRIPS + i / 4 % STRIPS;
    return row_group() * GROUP_ROWS + tile * 64 + strip * 16 + fragment_row() + i / 2 % 2 * 8;
  }
  static __device__ __forceinline__ int column(int i) {
    const int eight = threadIdx.x / 32 % ABREAST * (COLUMNS / 8 / ABREAST) + i / 4 / STRIPS;
    return eight * 8 + fragment_column() + i % 2;
  }

  // Multiplies `k_tiles` K-tiles into accumulators that start from zero. Columns describes B in a stage, BYTES in all:
  // the warpgroup's line i is at `line(i)`, its k-step i `step(i)` further; the next eight k are EIGHT bytes, and the
  // next COLUMN_BOX columns BESIDE bytes apart.
  template <class Columns>
  __device__ __forceinline__ void multiply(int k_tiles, PipelineBarriers<STAGES>& ring, PipelineState<STAGES>& state,
                                           const unsigned char* stage_memory) {
    const auto add = [&](int index, bool more) {
      const unsigned char* const a = stage_memory + index * stage_bytes<Columns>();
      add_stage<Columns>(a + row_group() * ROW_TILES * A_TILE, a + A_BYTES, more);
    };
    consume_stages(k_tiles, ring, state, add, [&] { wgmma_wait<0>(), pin(of); });
  }

 private:
#if BY_THREADS
  // Adds a stage, or with the first one overwrites the sums. Of eight positions a lane reads two neighbours, so that a
  // warp has no bank conflicts. (A product may permute k, as long as both operands agree.)
  template <class Columns>
  __device__ __forceinline__ void add_stage(const unsigned char* a, const unsigned char* b, bool more) {
    if (!more) clear();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      unsigned rows[ROW_TILES][STRIPS][4];
      const int lane[2] = {held(place_of_lane<ROW_PITCH>(0)), held(place_of_lane<ROW_PITCH>(1))};
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4 * STRIPS; ++i)
          rows[tile][i / 4][i % 4] =
              element<ROW_PITCH>(a + tile * A_TILE + step * OPERATION * ROW_PITCH, row_of_warp(i / 4) + i % 2 * 8,
                                 box_bytes(ROW_PITCH), lane[i % 4 / 2]);
#pragma unroll
      for (int line = 0; line < LINES; ++line)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8 / ABREAST; ++j) {
          unsigned columns[2];
          if constexpr (ABREAST == 1 && Columns::ALIGNED) {
#pragma unroll
            for (int k = 0; k < 2; ++k)
              columns[k] = element<COLUMN_PITCH>(b + Columns::line(line) + Columns::step(step), 8 * j, Columns::BESIDE,
                                                 place_of_lane<COLUMN_PITCH>(k));
          } else {
            const int at = held(column_of_warp<Columns>(line, j)) + Columns::step(step);
#pragma unroll
            for (int k = 0; k < 2; ++k)
              columns[k] = *(const unsigned*)(b + swizzled(at + k * COLUMN_PITCH, COLUMN_PITCH));
          }
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip)
              mma<scalar_t>(of[tile * LINES + line] + 4 * (j * STRIPS + strip), rows[tile][strip], columns[0],
                            columns[1]);
        }
    }
    __syncwarp();
  }
  // The value, made opaque if warps share rows, so that the compiler does not keep all steps' addresses in registers.
  static __device__ __forceinline__ int held(int value) { return ABREAST == 1 ? value : (int)opaque(value); }
  static __device__ __forceinline__ int row_of_warp(int strip) {
    return (threadIdx.x / 32 % 4 / ABREAST * STRIPS + strip) * 16;
  }
  // Bytes to the lane's element, at the first k, of the warp's j-th eight columns.
  template <class Columns>
  static __device__ __forceinline__ int column_of_warp(int line, int j) {
    const int column = (threadIdx.x / 32 % ABREAST * (COLUMNS / 8 / ABREAST) + j) * 8, lane = threadIdx.x % 32;
    return Columns::line(line) + column / COLUMN_BOX * Columns::BESIDE + column % COLUMN_BOX * ELEMENT +
           lane % 4 * 2 * COLUMN_PITCH + lane / 4 * ELEMENT;
  }
  // Bytes to the lane's element, at its first or second k of eight, of the first eight rows or columns.
  template <int PITCH>
  static __device__ __forceinline__ int place_of_lane(int k) {
    return swizzled((threadIdx.x % 4 * 2 + k) * PITCH + threadIdx.x % 32 / 4 * ELEMENT, PITCH);
  }
  // The lane's element of the eight rows or columns from `i` on, in boxes that are `beside` bytes apart.
  template <int PITCH>
  static __device__ __forceinline__ unsigned element(const unsigned char* boxes, int i, int beside, int lane) {
    constexpr int BOX = PITCH / ELEMENT;
    return *(const unsigned*)(boxes + i / BOX * beside + (lane ^ i % BOX * ELEMENT));  // neither carries into the other
  }
#else
  // Adds a stage, or with the first one overwrites the sums, once earlier wgmmas have completed.
  template <class Columns>
  __device__ __forceinline__ void add_stage(const unsigned char* a, const unsigned char* b, bool more) {
    constexpr int ROW_STEP = MN_MAJOR ? OPERATION * ROW_PITCH : 32;
    const unsigned rows = shared_address(a), columns = shared_address(b);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int line = 0; line < LINES; ++line)
          add_product<Columns>(of[tile * LINES + line], rows + tile * A_TILE + step * ROW_STEP,
                               columns + Columns::line(line) + Columns::step(step), more || step > 0);
    wgmma_commit();
    wgmma_wait<1>();
  }
  template <class Columns>
  static __device__ __forceinline__ void add_product(float (&sums)[COLUMNS / 2], unsigned a, unsigned b, bool add) {
    wgmma(sums, matrix_descriptor<ROW_PITCH>(a, MN_MAJOR ? box_bytes(ROW_PITCH) : 0),
          matrix_descriptor<COLUMN_PITCH>(b, Columns::BESIDE, Columns::EIGHT), add);
  }
#endif
};
