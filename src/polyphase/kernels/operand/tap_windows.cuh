// B of window_wgrad_tma.cu: windows of the output gradient, as TMA loads them.
//
// Along each dimension every `tap_step`-th tap reads the same residue of the stride, `element_step` positions after the
// previous one. Such taps share a window, WINDOW_D · WINDOW_H · WINDOW_W of them: the tile of TILE_D · TILE_H · TILE_W
// positions with its halo, every stride-th element of some output channels. A row of a window is a position, and each
// tap starts at another row. Along a dimension a window has all taps of a residue, or a single tap and no halo.
//
// N of the GEMM. Windows of a group are numbered by channel block, then by their first tap along w, h and d. A unit is
// a window's channels at one tap; a line is LINE_UNITS units at equal distances, and is N of one wgmma.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "mainloop/box_product.cuh"

// Windows along a dimension that have `taps` taps each; the first tap of each is its index.
__host__ __device__ constexpr int windows(Axis axis, int taps) {
  return taps > 1 && tap_step(axis) < axis.kernel ? tap_step(axis) : axis.kernel;
}
// Positions along a dimension of the window of `taps` taps for `tile` positions of a tile.
__host__ __device__ constexpr int extent(Axis axis, int tile, int taps) {
  return tile + (taps - 1) * element_step(axis);
}

constexpr int UNIT = COLUMN_PITCH / (int)sizeof(scalar_t);  // output channels
constexpr int WINDOW_TAPS = WINDOW_D * WINDOW_H * WINDOW_W;
constexpr int ROW_EXTENT = extent(AXIS_W, TILE_W, WINDOW_W), SLAB_EXTENT = extent(AXIS_H, TILE_H, WINDOW_H);
constexpr int WINDOW_BOX = extent(AXIS_D, TILE_D, WINDOW_D) * SLAB_EXTENT * ROW_EXTENT * COLUMN_PITCH;
constexpr int WINDOW_BYTES = round_up(WINDOW_BOX, 1024);

constexpr int CHANNEL_BLOCKS = ceil_div(OUT_CHANNELS, UNIT);
constexpr int WINDOWS_W = windows(AXIS_W, WINDOW_W), WINDOWS_H = windows(AXIS_H, WINDOW_H);
constexpr int WINDOWS = windows(AXIS_D, WINDOW_D) * WINDOWS_H * WINDOWS_W * CHANNEL_BLOCKS;

constexpr int LINE_UNITS = COLUMNS / UNIT, BLOCK_UNITS = COLUMN_GROUPS * LINES * LINE_UNITS;
constexpr int BLOCK_WINDOWS = BLOCK_UNITS / WINDOW_TAPS;
static_assert(BLOCK_UNITS % WINDOW_TAPS == 0, "a block has whole windows");
static_assert(WINDOW_TAPS == 1 || LINE_UNITS == (WINDOW_W > 1   ? WINDOW_W
                                                 : WINDOW_H > 1 ? WINDOW_H
                                                                : WINDOW_D),
              "a line is the innermost taps of a window");

// Window row of position `index` of a tile at the first tap; row_of_tap(): rows by which tap `index` is further.
__host__ __device__ constexpr int row_of_position(int index) {
  return (index / TILE_W / TILE_H * SLAB_EXTENT + index / TILE_W % TILE_H) * ROW_EXTENT + index % TILE_W;
}
__host__ __device__ constexpr int row_of_tap(int index) {
  return (index / WINDOW_W / WINDOW_H * element_step(AXIS_D) * SLAB_EXTENT +
          index / WINDOW_W % WINDOW_H * element_step(AXIS_H)) *
             ROW_EXTENT +
         index % WINDOW_W * element_step(AXIS_W);
}
__host__ __device__ constexpr int unit_offset(int unit) {
  return unit / WINDOW_TAPS * WINDOW_BYTES + row_of_tap(unit % WINDOW_TAPS) * COLUMN_PITCH;
}

// Layout of B in a stage, for `Sums::multiply`.
struct WindowColumns {
  static constexpr int DEPTH = 32 / (int)sizeof(scalar_t);  // k of an operation
  static constexpr int BYTES = BLOCK_WINDOWS * WINDOW_BYTES;
  static constexpr int BESIDE = unit_offset(1),
                       EIGHT = DEPTH > 8 ? row_of_position(8) * COLUMN_PITCH : 8 * COLUMN_PITCH;
  static constexpr bool ALIGNED = WINDOW_TAPS == 1;  // all operations begin at a multiple of the swizzle's rows
  static_assert(TILE_W % 8 == 0 && (TILE_W % DEPTH == 0 || TILE_H % 2 == 0), "eight rows lie together");

  static __device__ __forceinline__ int line(int index) {
    return unit_offset((column_group() * LINES + index) * LINE_UNITS);
  }
  static __host__ __device__ constexpr int step(int index) { return row_of_position(index * DEPTH) * COLUMN_PITCH; }
};

// A window: its first channel in the group, and its first tap along d, h, w.
struct TapWindow {
  int channel, tap[3];

  __device__ __forceinline__ explicit TapWindow(int index) {
    channel = index % CHANNEL_BLOCKS * UNIT;
    index /= CHANNEL_BLOCKS;
    tap[2] = index % WINDOWS_W;
    tap[1] = index / WINDOWS_W % WINDOWS_H;
    tap[0] = index / WINDOWS_W / WINDOWS_H;
  }
  // The weight's tap that is the window's tap `index`; negative for none.
  __device__ __forceinline__ int weight_tap(int index) const {
    const int d = tap[0] + index / WINDOW_W / WINDOW_H * tap_step(AXIS_D);
    const int h = tap[1] + index / WINDOW_W % WINDOW_H * tap_step(AXIS_H),
              w = tap[2] + index % WINDOW_W * tap_step(AXIS_W);
    const bool exists = d < AXIS_D.kernel && h < AXIS_H.kernel && w < AXIS_W.kernel;
    return exists ? (d * AXIS_H.kernel + h) * AXIS_W.kernel + w : -1;
  }
};
