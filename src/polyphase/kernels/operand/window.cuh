// The window of the output gradient: the elements that the taps of a tile of input positions read, halo included. In
// shared memory it has the tensor's order, [output channel][n][d][h][w], and serves every tap: the offset of the
// element that a position reads at a tap is the sum of one offset of the position, and one of the output channel and
// the tap.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "mainloop/multistage.cuh"

// Bytes from the window's first element to the one at (n, d, h, w) in a channel.
__device__ __forceinline__ int window_offset(const StageBox& window, int n, int d, int h, int w) {
  return (((n * window.extent[1] + d) * window.extent[2] + h) * window.extent[3] + w) * ELEMENT;
}
__device__ __forceinline__ int channel_pitch(const StageBox& window) { return window.pitch; }

template <class Box>
__device__ __forceinline__ int offset_of_tap(const Box& window, int channel, int tap) {
  return channel * channel_pitch(window) +
         window_offset(window, 0, tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation,
                       tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation, tap % AXIS_W.kernel * AXIS_W.dilation);
}

// Lists the window's offsets of `count` positions of a tile; run by the block's first threads. Positions past the tile
// get the first one's offset.
template <int LISTING = THREADS, class Box>
__device__ __forceinline__ void list_positions(int* offsets, int count, const Box& window, const int (&tile_extent)[4],
                                               int skew) {
  for (int i = threadIdx.x; i < count; i += LISTING) {
    int at[4];
    decode(tile_extent, i, at);
    if (at[0] >= tile_extent[0]) at[0] = at[1] = at[2] = at[3] = 0;
    offsets[i] =
        window_offset(window, at[0], at[1] * AXIS_D.stride, at[2] * AXIS_H.stride, at[3] * AXIS_W.stride + skew);
  }
}

// Turns a tile's first position (in x) into the first element of its window (in g), in place.
__device__ __forceinline__ void to_window(int (&origin)[4], int skew) {
  origin[1] = origin[1] * AXIS_D.stride - AXIS_D.padding;
  origin[2] = origin[2] * AXIS_H.stride - AXIS_H.padding;
  origin[3] = origin[3] * AXIS_W.stride - AXIS_W.padding - skew;
}

// A position in its tile along n, d, h and w; n is negative for a position past the tile.
struct alignas(8) RowPlace {
  short at[4];
};

// Offset in the input `x` of a position of the tile that begins at `first`; -1 if it does not exist.
__device__ __forceinline__ long long target_of(const Tensor5& x, int batch, const int (&first)[4],
                                               const RowPlace& place) {
  int at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i] = first[i] + place.at[i];
  const bool is = place.at[0] >= 0 && exists(x, batch, at[0], at[1], at[2], at[3]);
  return is ? offset_of(x, at) : -1;
}
