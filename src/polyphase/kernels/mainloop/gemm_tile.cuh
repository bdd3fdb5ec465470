// Work tiles of implicit_gemm, and the run of pixels of a tile.

#pragma once

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/row_blocks.cuh"
#include "ptx/tma.cuh"
#include "mainloop/tile_product.cuh"

constexpr int LOADERS = LOADER_THREADS / LOADER_GROUPS;  // threads that load one stage
constexpr int THREADS = LOADER_THREADS + CONSUMERS * 128;
constexpr int SHARERS = PING_PONG ? 1 : CONSUMERS;       // warpgroups that work on one work tile
constexpr int GROUP_CELLS = PIXEL_BLOCKS * PIXELS;       // cells of a warpgroup
constexpr int ROW_SHARES = COOPERATIVE ? CONSUMERS : 1;  // row groups of a work tile
constexpr int CELL_SHARES = SHARERS / ROW_SHARES;
constexpr int STAGE_CHANNELS = K_STEPS * STEP_CHANNELS;
constexpr int STAGE_CHUNKS = 2 * K_STEPS;
constexpr int TILE_STAGES = STEPS / K_STEPS;
constexpr int WEIGHT_STAGE = K_STEPS * OPERATIONS * OPERATION_BYTES;  // bytes of a row group's weights in a stage
constexpr long long TILE_WEIGHT_BYTES = (long long)TILE_STAGES * WEIGHT_STAGE;  // and in all stages
constexpr int WEIGHT_SLOT = RESIDENT ? 0 : ROW_SHARES * WEIGHT_STAGE;
constexpr int RESIDENT_WEIGHTS = RESIDENT ? ROW_SHARES * (int)TILE_WEIGHT_BYTES : 0;
constexpr bool IN_PLACE = SRC_CHANNELS_LAST || TMA_OPERANDS;  // pixels are copied to where they are used
static_assert(!TMA_OPERANDS || (WGMMA && PARTS == 1), "not by TMA");
static_assert(!COPIED || (TMA_OPERANDS && SRC_CHANNELS_LAST), "copies are loaded by TMA");
static_assert(CLUSTER == 1 || (WGMMA && !RESIDENT), "no weights to share");
static_assert(!WHOLE_IMAGES || TAPS_IN_ROWS, "a halo is left out where rows are taps");
constexpr int RAW_SLOTS = LOADER_GROUPS * RAW_STAGES;  // for stages that are not transposed yet
constexpr int TRANSPOSE_WARPS =
    (LOADER_THREADS / 32 - 1) / TRANSPOSE_GROUPS;  // warps that transpose a stage of boxes together
// Stages that a producer group copies ahead of the one it transposes, counting its own stages only.
constexpr int LOOKAHEAD = TMA_OPERANDS ? 1 : IN_PLACE ? (STAGES - 2) / LOADER_GROUPS : RAW_STAGES - 1;
// A stage is freed when the next one is full, so a producer group that waits for a free stage must not owe that next
// one.
static_assert(LOOKAHEAD >= 1 && STAGES >= 2, "too few stages");
// A parity bit distinguishes only two successive phases, so nobody may wait further ahead.
static_assert(STAGES >= LOADER_GROUPS && STAGES >= TRANSPOSE_GROUPS, "too few stages");
static_assert(RAW_SLOTS % TRANSPOSE_GROUPS == 0, "boxes come in any order: those of a slot are for the same group");
static_assert(OPERATIONS <= (TAPS_IN_ROWS ? ROW_BLOCKS : CHANNEL_BLOCKS * TAPS), "an operation is a tap");
constexpr int DST_D = AXIS_D.stride, DST_H = AXIS_H.stride, DST_W = AXIS_W.stride;
constexpr int REACH_D = last_offset(AXIS_D) - first_offset(AXIS_D);
constexpr int REACH_H = last_offset(AXIS_H) - first_offset(AXIS_H);

struct Params {
  TensorMap box;  // the source's pixels
  Tensor5 src, dst;
  int batch;
  int images;           // batch entries of a tile
  Divisor cells[3];     // of a tile, along depth, height and width
  Divisor tiles[4];     // along batch, depth, height and width
  Divisor tile_shares;  // work tiles of a tile, or of a cluster's tiles: row groups / ROW_SHARES
  Divisor pitch[3];     // pixels of the run from one image, slab and row to the next
  int work_tiles;       // tiles (CLUSTER at a time) × tile_shares
  int run_pixels;       // pixels of the run, halo included: those that are loaded
  int raw_pitch;        // pixels of the run in a copied stage, or of a box there
  int chunk_bytes;      // bytes of a chunk of the run in a stage
  int skew;             // columns before the first that is needed, so that copies are aligned
  int copy_bytes;       // bytes of one copy: 16, 8, 4 or 2
  int store_vector;     // elements of a store
  int boxes;            // boxes of a stage, next to each other along the width; 0 if threads copy
  int box_pixels;       // pixels of a box; the halo after the last box is padding
  int run;  // cells of a tile that is a run across rows and up to `images` images, if no tap needs a halo; else 0
  int own;  // static work tiles of a block; at least FURTHER + 2 (core/tile_scheduler.cuh)
};

// Strides and alignment of the tensors decide how they are loaded and stored, and may differ between launches. A kernel
// compiled for one case (STORE_VECTOR is not zero) has half the code; there COPY_BYTES is zero for boxes.
constexpr bool ONE_WAY = STORE_VECTOR != 0;
__device__ __forceinline__ int store_vector(const Params& params) {
  return ONE_WAY ? STORE_VECTOR : params.store_vector;
}
__device__ __forceinline__ int copy_bytes(const Params& params) { return ONE_WAY ? COPY_BYTES : params.copy_bytes; }
__device__ __forceinline__ bool takes_boxes(const Params& params) {
  return ONE_WAY ? COPY_BYTES == 0 : params.boxes != 0;
}

// Position of a pixel in a run.
struct Pixel {
  int n, d, h, w;

  __device__ __forceinline__ void locate(const Params& params, int index) {
    n = index / params.pitch[0], index -= n * params.pitch[0];
    d = index / params.pitch[1], index -= d * params.pitch[1];
    h = index / params.pitch[2], w = index - h * params.pitch[2];
  }
  __device__ __forceinline__ unsigned packed() const { return n << 26 | d << 20 | h << 10 | w; }
  __device__ __forceinline__ void unpack(unsigned bits) {
    n = bits >> 26, d = bits >> 20 & 63, h = bits >> 10 & 1023, w = bits & 1023;
  }
};
constexpr unsigned NOWHERE = 0xffffffffu;
constexpr offset_t PADDING = ~(offset_t)0;

// Elements from a tensor's first element of a channel to a position; offset_t has 32 bits if those suffice.
__device__ __forceinline__ offset_t offset_of(const Tensor5& t, int n, int d, int h, int w) {
  return byte_offset<char>(t, n, d, h, w);
}

// Blocks of a cluster take neighbouring tiles, each work tile together, and share its weights.
__device__ __forceinline__ int first_work_tile() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ int work_tile_step() { return gridDim.x / CLUSTER; }

struct WorkTile {
  int n, d, h, w;  // the tile's first cell; n is past the batch if the last cluster has a tile too many
  int first;       // in a run: the first cell, counted in batch entry n
  int group, channel_group, line_group, row_group;

  // `share`: index of the row group in the work tile.
  __device__ __forceinline__ void locate(const Params& params, int index, int share) {
    row_group = index % params.tile_shares * ROW_SHARES + share, index = index / params.tile_shares;
    line_group = row_group % LINE_GROUPS;
    channel_group = row_group / LINE_GROUPS % CHANNEL_GROUPS;
    group = row_group / (LINE_GROUPS * CHANNEL_GROUPS);
    index = index * CLUSTER + blockIdx.x % CLUSTER;
    const int column = index % params.tiles[3];
    index = index / params.tiles[3];
    h = index % params.tiles[2] * params.cells[1], index = index / params.tiles[2];
    d = index % params.tiles[1] * params.cells[0], index = index / params.tiles[1];
    if (params.run) {
      const int cell = column * params.run, image = cell / params.pitch[0];
      n = index * params.images + image, first = cell - image * params.pitch[0], w = 0;
    } else {
      n = index * params.images, first = 0, w = column * params.cells[2];
    }
    if (CLUSTER > 1 && index >= params.tiles[0]) n = params.batch;
  }
};

typedef float BlockSums[PIXEL_BLOCKS][SUMS];
typedef BlockSums Sums[ROW_BLOCKS];

template <class Function>
__device__ __forceinline__ void for_each(Function function, BlockSums& sums, BlockSums& totals) {
#pragma unroll
  for (int pixel_block = 0; pixel_block < PIXEL_BLOCKS; ++pixel_block)
#pragma unroll
    for (int i = 0; i < SUMS; ++i) function(sums[pixel_block][i], totals[pixel_block][i]);
}
template <class Function>
__device__ __forceinline__ void for_each(Function function, Sums& sums, Sums& totals) {
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block) for_each(function, sums[block], totals[block]);
}
