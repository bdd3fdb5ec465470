// Columns and steps of direct_wgrad_long.cu, which explains them, and of direct_wgrad_long_mma.cu. PIECE elements of g
// are loaded at once.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"

struct Params {
  Tensor5 x, g;
  int groups, column_blocks;
  int steps, split_length, flush;  // steps of all images, of a split, and of a chain
  Divisor along[3];                // steps of a row, rows of a slab, slabs of an image
  long long plane;                 // elements of one plane of `partial`: all weights
};

constexpr int RESIDUES = AXIS_W.kernel < AXIS_W.stride ? AXIS_W.kernel : AXIS_W.stride;
constexpr int SKEW = (PIECE - AXIS_W.padding % PIECE) % PIECE;  // elements of the first column before r = 0
constexpr int VECTORS = ceil_div(RESIDUES + SKEW, VECTOR);      // columns of a row of the kernel
constexpr int LINES = AXIS_D.kernel * AXIS_H.kernel;
constexpr int ALONG = ceil_div(AXIS_W.kernel, AXIS_W.stride);  // j
constexpr int IN_BLOCKS = ceil_div(IN_CHANNELS, IN_HELD), TAP_BLOCKS = ceil_div(ALONG, TAPS_HELD);
static_assert(AXIS_W.dilation == 1 && VECTOR % PIECE == 0, "columns are neighbours in memory, in whole pieces");

// What a block computes.
struct Block {
  int tap, in, column, group, split;  // first j, input channel and column

  __device__ __forceinline__ explicit Block(const Params& params) {
    int block = blockIdx.x;
    tap = block % TAP_BLOCKS * TAPS_HELD;
    block /= TAP_BLOCKS;
    in = block % IN_BLOCKS * IN_HELD;
    block /= IN_BLOCKS;
    column = block % params.column_blocks * LANES;
    block /= params.column_blocks;
    group = block % params.groups, split = block / params.groups;
  }
};

struct Column {
  int channel, d, h, first;  // first r

  __device__ __forceinline__ explicit Column(int column) {
    first = column % VECTORS * VECTOR - SKEW;
    const int line = column / VECTORS % LINES;
    channel = column / (VECTORS * LINES), d = line / AXIS_H.kernel, h = line % AXIS_H.kernel;
  }
  // Where the weight of input channel `in` at element `i` of the column and at j lies in its group; below zero where
  // there is none.
  __device__ __forceinline__ long long weight(int in, int i, int j) const {
    const int residue = first + i, tap = j * AXIS_W.stride + residue;
    const bool exists =
        channel < OUT_CHANNELS && in < IN_CHANNELS && residue >= 0 && residue < RESIDUES && tap < AXIS_W.kernel;
    const int line = d * AXIS_H.kernel + h;
    return exists ? ((long long)in * OUT_CHANNELS + channel) * TAPS + line * AXIS_W.kernel + tap : -1;
  }
};

// Moves the operands to what a thread reads of its column, and `partial` to the plane and group of its block. Returns
// the place in a row of g that its first r meets at y = 0 of its first j.
template <class T>
__device__ __forceinline__ int go_to(const Params& params, const Block& block, const Column& at,
                                     const scalar_t* __restrict__& x, const scalar_t* __restrict__& grad, T*& partial) {
  x += ((long long)block.group * IN_CHANNELS + block.in) * params.x.stride[1];
  grad += ((long long)block.group * OUT_CHANNELS + at.channel) * params.g.stride[1];
  partial += block.split * params.plane + (long long)block.group * IN_CHANNELS * (OUT_CHANNELS * TAPS);
  return block.tap * AXIS_W.stride + at.first - AXIS_W.padding;
}

// Where a step lies.
struct Rows {
  long long image;       // elements to its row of x
  int first;             // y - j of its first y and the block's first j
  const scalar_t* grad;  // its row of g
  bool exists;           // whether there is one

  // `grad` is of the column's channel.
  __device__ __forceinline__ Rows(const Params& params, const scalar_t* grad, const Column& at, int step) {
    int place = step / params.along[0];
    first = (step - place * params.along[0].value) * POSITIONS;
    const int h = place % params.along[1];
    place = place / params.along[1];
    const int d = place % params.along[2], n = place / params.along[2];
    image = n * params.x.stride[0] + d * params.x.stride[2] + h * params.x.stride[3];
    const int grad_d = d * AXIS_D.stride + at.d * AXIS_D.dilation - AXIS_D.padding;
    const int grad_h = h * AXIS_H.stride + at.h * AXIS_H.dilation - AXIS_H.padding;
    exists = (unsigned)grad_d < (unsigned)params.g.size[0] && (unsigned)grad_h < (unsigned)params.g.size[1];
    this->grad = grad + n * params.g.stride[0] + grad_d * params.g.stride[2] + grad_h * params.g.stride[3];
  }
};
