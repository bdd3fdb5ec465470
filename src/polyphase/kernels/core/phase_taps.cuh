// All phases of a cell as one product: rows are pairs of a phase that has taps and one of OUT_CHUNK output channels, k
// are the pixels that these read; some pairs of phase and pixel have no tap.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"

// One dimension: outputs of a cell that have taps, pixels that these read, and the tap of each pair, -1 for none.
template <int KERNEL, int STRIDE>
struct Dimension {
  int phases = 0, pixels = 0;
  int phase[STRIDE] = {}, pixel[KERNEL] = {}, tap[STRIDE][KERNEL] = {};
  int number[STRIDE] = {};  // a phase's number among those with taps; -1 for a phase without

  __host__ __device__ constexpr Dimension(Axis axis) {
    for (int i = 0; i < STRIDE; ++i) {
      number[i] = has_taps(axis, i) ? phases : -1;
      if (has_taps(axis, i)) phase[phases++] = i;
    }
    for (int i = KERNEL - 1; i >= 0; --i)  // the last tap reads the first pixel
      if (pixels == 0 || pixel[pixels - 1] != src_offset(axis, i)) pixel[pixels++] = src_offset(axis, i);
    for (int i = 0; i < STRIDE * KERNEL; ++i) {
      tap[i / KERNEL][i % KERNEL] = -1;
      for (int j = 0; j < KERNEL; ++j)
        if (i / KERNEL < phases && i % KERNEL < pixels && phase_of(axis, j) == phase[i / KERNEL] &&
            src_offset(axis, j) == pixel[i % KERNEL])
          tap[i / KERNEL][i % KERNEL] = j;
    }
  }
};
__device__ constexpr Dimension<AXIS_D.kernel, AXIS_D.stride> ALONG_D(AXIS_D);
__device__ constexpr Dimension<AXIS_H.kernel, AXIS_H.stride> ALONG_H(AXIS_H);
__device__ constexpr Dimension<AXIS_W.kernel, AXIS_W.stride> ALONG_W(AXIS_W);

constexpr int PHASES = ALONG_D.phases * ALONG_H.phases * ALONG_W.phases;
constexpr int PIXELS_READ = ALONG_D.pixels * ALONG_H.pixels * ALONG_W.pixels;
constexpr int ROWS = PHASES * OUT_CHUNK, ROW_BLOCKS = ceil_div(ROWS, 16);

// The tap of a phase (among those with taps) and a pixel (among those that are read); -1 for none.
__device__ constexpr int tap_of(int phase, int pixel) {
  const int d = ALONG_D.tap[phase / (ALONG_H.phases * ALONG_W.phases)][pixel / (ALONG_H.pixels * ALONG_W.pixels)];
  const int h = ALONG_H.tap[phase / ALONG_W.phases % ALONG_H.phases][pixel / ALONG_W.pixels % ALONG_H.pixels];
  const int w = ALONG_W.tap[phase % ALONG_W.phases][pixel % ALONG_W.pixels];
  return d < 0 || h < 0 || w < 0 ? -1 : (d * AXIS_H.kernel + h) * AXIS_W.kernel + w;
}

// Which row blocks have a tap at a pixel.
struct Entries {
  int count = 0;
  int pixel[PIXELS_READ * ROW_BLOCKS] = {}, block[PIXELS_READ * ROW_BLOCKS] = {};
  int of[PIXELS_READ][ROW_BLOCKS] = {};  // -1 for none
  int first[ROW_BLOCKS] = {};            // a block's first pixel

  __device__ constexpr Entries() {
    for (int i = 0; i < PIXELS_READ; ++i)
      for (int j = 0; j < ROW_BLOCKS; ++j) {
        bool any = false;
        for (int k = 16 * j / OUT_CHUNK; k <= (16 * j + 15) / OUT_CHUNK && k < PHASES; ++k) any |= tap_of(k, i) >= 0;
        of[i][j] = any ? count : -1;
        if (!any) continue;
        bool before = false;
        for (int k = 0; k < i; ++k) before |= of[k][j] >= 0;
        if (!before) first[j] = i;
        pixel[count] = i, block[count] = j;
        ++count;
      }
  }
};
__device__ constexpr Entries ENTRIES;
