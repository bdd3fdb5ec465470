// The layer on a grid of cells, one formula for the forward pass and the input gradient.
//
// The layer relates input element i and output element o by  o = i·stride + tap·dilation - padding.  Cut both into
// cells of one input element and `stride` output elements. With "source" for what a pass reads and "destination" for
// what it writes, either pass is, per dimension,
//
//     destination[cell·DST + dst_offset(tap)] += source[cell·SRC + src_offset(tap)] · weight[tap]
//
//     forward         DST = stride, SRC = 1       dst_offset = the tap's phase   src_offset = -(the tap's shift)
//     input gradient  DST = 1,      SRC = stride  dst_offset = 0                 src_offset = tap·dilation - padding
//
// The specialisation defines AXIS_D, AXIS_H, AXIS_W (a missing dimension is a kernel of one tap) and INPUT_GRAD.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"

__host__ __device__ constexpr int shift_of(Axis axis, int tap) {
  return floor_div(tap * axis.dilation - axis.padding, axis.stride);
}
__host__ __device__ constexpr int phase_of(Axis axis, int tap) {
  return tap * axis.dilation - axis.padding - shift_of(axis, tap) * axis.stride;
}

// Elements of a cell.
__host__ __device__ constexpr int dst_cell(Axis axis) { return INPUT_GRAD ? 1 : axis.stride; }
__host__ __device__ constexpr int src_cell(Axis axis) { return INPUT_GRAD ? axis.stride : 1; }

__host__ __device__ constexpr int dst_offset(Axis axis, int tap) { return INPUT_GRAD ? 0 : phase_of(axis, tap); }
__host__ __device__ constexpr int src_offset(Axis axis, int tap) {
  return INPUT_GRAD ? tap * axis.dilation - axis.padding : -shift_of(axis, tap);
}

// The first and the last source offset of any tap: offsets rise with the tap in the input gradient and fall in the
// forward pass.
__host__ __device__ constexpr int first_offset(Axis axis) { return src_offset(axis, INPUT_GRAD ? 0 : axis.kernel - 1); }
__host__ __device__ constexpr int last_offset(Axis axis) { return src_offset(axis, INPUT_GRAD ? axis.kernel - 1 : 0); }

// Source elements that `cells` neighbouring cells read.
__host__ __device__ constexpr int window(Axis axis, int cells) {
  return (cells - 1) * src_cell(axis) + last_offset(axis) - first_offset(axis) + 1;
}

// Whether any tap writes destination element `offset` of a cell; an element without taps is bias alone.
__host__ __device__ constexpr bool has_taps(Axis axis, int offset) {
  for (int tap = 0; tap < axis.kernel; ++tap)
    if (dst_offset(axis, tap) == offset) return true;
  return false;
}

[[maybe_unused]] constexpr int TAPS = AXIS_D.kernel * AXIS_H.kernel * AXIS_W.kernel;

// Sizes and strides of a tensor; strides in elements, in the order batch, channel, depth, height, width.
struct Tensor5 {
  long long stride[5];
  int size[3];
  int channels;
};

// Takes the index along the fastest of some dimensions off `index`, which keeps that of the others.
template <class Index, class Extent>
__device__ __forceinline__ int next_index(Index& index, Extent extent) {
  const int place = (int)(index % extent);
  index = index / extent;  // with /= a Divisor would be its value
  return place;
}

// Bytes from a tensor's first element of a channel to one of its positions; offset_t has 32 bits where those suffice.
template <class T>
__device__ __forceinline__ offset_t byte_offset(const Tensor5& t, int n, int d, int h, int w) {
  return (offset_t)sizeof(T) * ((offset_t)n * (offset_t)t.stride[0] + (offset_t)d * (offset_t)t.stride[2] +
                                (offset_t)h * (offset_t)t.stride[3] + (offset_t)w * (offset_t)t.stride[4]);
}

// Elements of a box, or tiles of a tensor.
__device__ __forceinline__ int volume(const int (&extent)[4]) { return extent[0] * extent[1] * extent[2] * extent[3]; }

// Indices along n, d, h and w of element `index` of a box; an index beyond the box is beyond along n.
template <class Index, class Extent>
__device__ __forceinline__ void decode(const Extent (&extent)[4], Index index, int (&at)[4]) {
#pragma unroll
  for (int i = 3; i > 0; --i) {
    at[i] = (int)(index % extent[i]);
    index = index / extent[i];  // with /= a Divisor would be its value
  }
  at[0] = (int)index;
}

// The first cell or position of tile `index`, of `tiles` whose extents along n, d, h and w are `extent`.
template <class Tiles, class Extent>
__device__ __forceinline__ void tile_origin(const Tiles (&tiles)[4], const Extent (&extent)[4], int index,
                                            int (&first)[4]) {
  decode(tiles, index, first);
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] *= extent[i];
}

// Advances the indices to the next element, without a division; after the last AROUND to the first, else one beyond.
template <bool AROUND = true, class Extent>
__device__ __forceinline__ void advance(const Extent (&extent)[4], int (&at)[4]) {
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    if (++at[i] < extent[i] || (!AROUND && i == 0)) break;
    at[i] = 0;
  }
}

// Elements from a tensor's first element of a channel to the position `at` along n, d, h and w.
__device__ __forceinline__ long long offset_of(const Tensor5& t, const int (&at)[4]) {
  return at[0] * t.stride[0] + at[1] * t.stride[2] + at[2] * t.stride[3] + at[3] * t.stride[4];
}

template <class T>
__device__ __forceinline__ T* at(T* base, offset_t bytes) {
  return (T*)((char*)base + bytes);
}

// Element offset of one weight of a group; IN and OUT are the layer's input and output channel. The specialisation
// defines the strides: weights come as (C_in, C_out / groups, D, H, W) contiguous, or with channels last.
__device__ __forceinline__ int weight_offset(int in, int out, int tap) {
  return in * WEIGHT_STRIDE_IN + out * WEIGHT_STRIDE_OUT + tap * WEIGHT_STRIDE_TAP;
}
