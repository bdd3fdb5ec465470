// The window of the output gradient: what a tile of input positions meets of it, its halo included. It lies in shared
// memory as it does in the tensor, [output channel][n][d][h][w], and serves every tap: the element that a position
// meets at a tap is the sum of two offsets, one of the position, one of the output channel and the tap.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "mainloop/multistage.cuh"

// Bytes from the window's first element to what the first tap of a position meets, or those of a tap beyond the first.
__device__ __forceinline__ int window_bytes(const Part& window, int n, int d, int h, int w) {
  return (((n * window.extent[1] + d) * window.extent[2] + h) * window.extent[3] + w) * ELEMENT;
}
__device__ __forceinline__ int channel_bytes(const Part& window) { return window.pitch; }

template <class Box>
__device__ __forceinline__ int offset_of_tap(const Box& window, int channel, int tap) {
  return channel * channel_bytes(window) +
         window_bytes(window, 0, tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation,
                      tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation, tap % AXIS_W.kernel * AXIS_W.dilation);
}

// The offsets of `count` positions of a tile of lanes[4], by the block's first threads; beyond the tile they are the
// first.
template <int LISTING = THREADS, class Box>
__device__ __forceinline__ void list_positions(int* offsets, int count, const Box& window, const int (&lanes)[4],
                                               int skew) {
  for (int i = threadIdx.x; i < count; i += LISTING) {
    int at[4];
    decode(lanes, i, at);
    if (at[0] >= lanes[0]) at[0] = at[1] = at[2] = at[3] = 0;
    offsets[i] =
        window_bytes(window, at[0], at[1] * AXIS_D.stride, at[2] * AXIS_H.stride, at[3] * AXIS_W.stride + skew);
  }
}

// The first element of the window of the tile whose first position is `origin`.
__device__ __forceinline__ void to_window(int (&origin)[4], int skew) {
  origin[1] = origin[1] * AXIS_D.stride - AXIS_D.padding;
  origin[2] = origin[2] * AXIS_H.stride - AXIS_H.padding;
  origin[3] = origin[3] * AXIS_W.stride - AXIS_W.padding - skew;
}
