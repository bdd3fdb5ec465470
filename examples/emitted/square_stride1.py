# examples/square_stride1.py, emitted by polyphase 0.1.0: a model whose transposed convolutions are computed by CUDA
# kernels of their own, in one file that needs PyTorch and what that builds extensions with: nvcc, a C++ compiler and
# ninja.
#
# ModelNew, at the end, has the constructor, parameters, state_dict and random numbers of Model. It takes inputs of any
# batch and image size and of any strides, in the dtype below, on GPUs of the architectures below, and gives first
# derivatives. The kernels are built when they are first needed, which takes about a minute; PyTorch keeps what it has
# built. Made for PyTorch 1.13 and newer on Python 3.8 and newer, and for nvcc 11.7 and newer; sm_90a takes nvcc 12 and
# PyTorch 2.2, newer architectures take versions that know them.
#
# Layer conv_transpose2d: 8×64×1024×1024 → 64, k=3, float32
#     sm_90a, forward: implicit_gemm(pixels=144, pixel_blocks=2, channel_blocks=1, lines=1, k_steps=1, stages=4,
#         parts=1, split=turns, resident=False, loader_groups=2, wgmma=True, row_channels=0, boxes=False,
#         whole_images=False, raw_slots=4, cluster=2, piece_bytes=256, width_parts=1, scaled=False)
#     sm_90a, input_grad: implicit_gemm(pixels=160, pixel_blocks=2, channel_blocks=1, lines=1, k_steps=1, stages=4,
#         parts=1, split=turns, resident=False, loader_groups=2, wgmma=True, row_channels=0, boxes=False,
#         whole_images=False, raw_slots=4, cluster=2, piece_bytes=256, width_parts=1, scaled=False)
#     sm_90a, weight_grad: weight_grad_gemm(row_tiles=4, column_tiles=4, row_warps=1, out_chunk=22, positions=64,
#         buffers=4, min_blocks=2)
#     The forward pass rounds float32 to TF32 as PyTorch's own does by default, and gradients may, whatever PyTorch's
#         switches say when this runs (--strict-fp32: nowhere)
#
# It was made, and is made again, by
#
#     python -m polyphase emit examples/square_stride1.py --arch sm_90a -o examples/emitted/square_stride1.py
#
# Apache License 2.0, as polyphase, but for the model's own source. Not to be edited: the package is the place.

import hashlib
import itertools
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

if TYPE_CHECKING:  # for annotations
    Four = tuple[int, int, int, int]
    Strides = tuple[int, int, int, int, int]
    Constant = bool | int | Axis

UNLISTED = __name__ not in sys.modules
if UNLISTED:
    sys.modules[__name__] = type(sys)(__name__)

# =====================================================================================================================
# The kernels, as they are in polyphase/kernels
# =====================================================================================================================

FILES = {}
FILES["common/types.cuh"] = r"""
// Storage types of 16 bits without any header, and their conversion to and from the type of the accumulator.
// Every kernel computes in accum_t (float, or double for double) whatever the tensors hold.

struct bfloat16 {
  unsigned short bits;
};
struct float16 {
  unsigned short bits;
};

__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float widen(bfloat16 value) {
  union {
    unsigned int bits;
    float number;
  } wide = {(unsigned int)value.bits << 16};
  return wide.number;
}

__device__ __forceinline__ float widen(float16 value) {
#ifndef EMULATOR
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  union {
    unsigned short bits;
    _Float16 number;
  } half = {value.bits};
  return (float)half.number;
#endif
}

// narrow: round to nearest, ties to even.
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

__device__ __forceinline__ void narrow(float value, bfloat16& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  union {
    float number;
    unsigned int bits;
  } wide = {value};
  const bool nan = (wide.bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = nan ? 0x7fff : (unsigned short)((wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ void narrow(float value, float16& out) {
#ifndef EMULATOR
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  union {
    _Float16 number;
    unsigned short bits;
  } half = {(_Float16)value};
  out.bits = half.bits;
#endif
}

// A zero of any storage type is all bits zero.
template <class T>
__device__ __forceinline__ T zero() {
  return T{};
}

// Reads that no thread writes go through the read-only path.
template <class T>
__device__ __forceinline__ T read(const T* address) {
#ifndef EMULATOR
  return __ldg(address);
#else
  return *address;
#endif
}

#ifndef EMULATOR
__device__ __forceinline__ bfloat16 read(const bfloat16* address) {
  return bfloat16{__ldg((const unsigned short*)address)};
}
__device__ __forceinline__ float16 read(const float16* address) {
  return float16{__ldg((const unsigned short*)address)};
}
#endif

// The same value, of which the compiler knows nothing: it keeps in no registers what follows from it.
__device__ __forceinline__ unsigned opaque(unsigned value) {
#ifndef EMULATOR
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// COUNT neighbouring elements, moved at once.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T)) Vector {
  T value[COUNT];
};

// Four elements on their way from global memory, either one vector or four loads. They stay as they were loaded until
// they are used: to take a vector of 16-bit elements apart would wait for the load.
template <class T>
struct Quad {
  Vector<T, 4> elements;

  __device__ __forceinline__ void clear() { elements = Vector<T, 4>{}; }
  __device__ __forceinline__ void load(const T* from) { elements = *(const Vector<T, 4>*)from; }
  __device__ __forceinline__ void load(int i, const T* from) { elements.value[i] = read(from); }
  __device__ __forceinline__ T get(int i, bool /* whole */) const { return elements.value[i]; }
};

template <class T>
struct Quad16 {
  unsigned int words[4];  // two packed words, or one element each

  __device__ __forceinline__ void clear() { words[0] = words[1] = words[2] = words[3] = 0; }
  __device__ __forceinline__ void load(const T* from) {
    const Vector<unsigned int, 2> packed = *(const Vector<unsigned int, 2>*)from;
    words[0] = packed.value[0];
    words[1] = packed.value[1];
  }
  __device__ __forceinline__ void load(int i, const T* from) { words[i] = read(from).bits; }
  __device__ __forceinline__ T get(int i, bool whole) const {
    return T{(unsigned short)(whole ? words[i / 2] >> (16 * (i % 2)) : words[i])};
  }
};

template <>
struct Quad<bfloat16> : Quad16<bfloat16> {};
template <>
struct Quad<float16> : Quad16<float16> {};

// To the nearest TF32, ties away from zero, as PyTorch's convolutions round: float32 with 11 significant bits. GPUs
// before compute capability 8.0 have none, and keep the value.
__device__ __forceinline__ float round_tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return value;
#elif !defined(EMULATOR)
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
#else
  union {
    float number;
    unsigned bits;
  } word = {value};
  if ((word.bits & 0x7f800000u) != 0x7f800000u) word.bits = (word.bits + 0x1000u) & 0xffffe000u;
  return word.number;
#endif
}
"""
FILES["common/axis.cuh"] = r"""
// One spatial dimension of the layer, and the integer arithmetic of compile-time constants.

struct Axis {
  int kernel, stride, padding, dilation;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
"""
FILES["common/geometry.cuh"] = r"""
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

// Whether any tap writes destination element `offset` of a cell; the others are bias alone.
__host__ __device__ constexpr bool has_taps(Axis axis, int offset) {
  for (int tap = 0; tap < axis.kernel; ++tap)
    if (dst_offset(axis, tap) == offset) return true;
  return false;
}

constexpr int TAPS = AXIS_D.kernel * AXIS_H.kernel * AXIS_W.kernel;

// Where tensors lie and how far they reach; strides in elements, in the order batch, channel, depth, height, width.
struct Tensor5 {
  long long stride[5];
  int size[3];
  int channels;
};

// Bytes from a tensor's first element of a channel to one of its positions; offset_t has 32 bits where those suffice.
template <class T>
__device__ __forceinline__ offset_t byte_offset(const Tensor5& t, int n, int d, int h, int w) {
  return (offset_t)sizeof(T) * ((offset_t)n * (offset_t)t.stride[0] + (offset_t)d * (offset_t)t.stride[2] +
                                (offset_t)h * (offset_t)t.stride[3] + (offset_t)w * (offset_t)t.stride[4]);
}

// Indices along n, d, h and w of element `index` of a box; what is beyond the box lies beyond along n.
template <class Index, class Extent>
__device__ __forceinline__ void decode(const Extent (&extent)[4], Index index, int (&at)[4]) {
#pragma unroll
  for (int i = 3; i > 0; --i) {
    at[i] = (int)(index % extent[i]);
    index = index / extent[i];  // with /= a Divisor would be its value
  }
  at[0] = (int)index;
}

// The first cell or position of tile `index`, of `tiles` whose extents along n, d, h and w are `lanes`.
__device__ __forceinline__ void tile_origin(const int (&tiles)[4], const int (&lanes)[4], int index, int (&first)[4]) {
  decode(tiles, index, first);
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] *= lanes[i];
}

// Those of the next element, without a division; the first again behind the last.
template <class Extent>
__device__ __forceinline__ void advance(const Extent (&extent)[4], int (&at)[4]) {
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    if (++at[i] < extent[i]) break;
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
"""
FILES["common/tensor_float.cuh"] = r"""
// float32 as the tensor cores take it: TF32 keeps 11 significant bits. PARTS = 1 rounds to nearest (the cores would
// truncate); PARTS = 2 keeps what rounding lost in a second TF32, and three products give float32's accuracy.

__device__ __forceinline__ float rounded(float value) { return round_tf32(value); }
template <class T>
__device__ __forceinline__ T rounded(T value) {
  return value;
}

__device__ __forceinline__ void split_tf32(float value, float& high, float& low) {
  high = round_tf32(value);
  if (PARTS == 1) return;
  const float magnitude = value < 0 ? -value : value;
  if (magnitude < 3.4e38f)
    low = round_tf32(value - high);
  else if (magnitude <= 3.402823466e38f)
    high = value, low = 0;  // would round to Inf; the cores truncate
  else
    high = 0, low = value;  // Inf meets the other operand's high part alone: the low one may be 0, or of another sign
}

// Element `i` of a chunk of weights, in all parts.
template <class T>
__device__ __forceinline__ void prepare(T value, T (&parts)[PARTS][8], int i) {
  parts[0][i] = value;
}
__device__ __forceinline__ void prepare(float value, float16 (&parts)[PARTS][8], int i) {
  const bool all = PARTS == 1 || fabsf(value) <= __uint_as_float(0x7f7fffffu);  // as in split_tf32
  narrow(all ? value : 0.f, parts[0][i]);
  if (PARTS == 2) narrow(value - widen(parts[0][i]), parts[PARTS - 1][i]);
}
__device__ __forceinline__ void prepare(float value, float (&parts)[PARTS][4], int i) {
  float low = 0;
  split_tf32(value, parts[0][i], low);
  if (PARTS == 2) parts[PARTS - 1][i] = low;
}
"""
FILES["common/scaled_half.cuh"] = r"""
// float32 as float16 instead of TF32: both keep 11 significant bits, and the cores multiply float16 twice as
// fast. What float16 lacks is exponents. So numbers that are added up, a pixel's channels or a column's weights, are
// first multiplied by a power of two, which is exact, so that the largest is 2^14 or more and less than 2^15 (a pixel's
// below 2^-98, or a column's below 2^-113, stays smaller). Those down to 2^-28 of that keep all 11 bits; what smaller
// ones lose is less than 2^-39 of the largest. Sums of a pixel's magnitudes must stay below 2^127.

// Operands of the cores.
template <class T, bool AS_HALVES>
struct OperandOf {
  typedef T type;
};
template <>
struct OperandOf<float, true> {
  typedef float16 type;
};
typedef OperandOf<scalar_t, SCALED>::type operand_t;

// 2^(bits - 127), of normal numbers.
__device__ __forceinline__ float power_of_two(int bits) { return __uint_as_float((unsigned)bits << 23); }
// The same bits of a number.
__device__ __forceinline__ int exponent_bits(float magnitude) { return (int)(__float_as_uint(magnitude) >> 23); }

// By what a pixel's channels, or a column's weights, are multiplied. What a product of both is divided by is taken from
// them in shares that are normal numbers: a column's is the power of two of its largest weight. Where it is not finite
// the rest does not matter.
__device__ __forceinline__ float scale_of_pixel(float largest) {
  return power_of_two(268 - max(exponent_bits(largest), 29));
}
__device__ __forceinline__ float unscale_pixel(float scale) { return power_of_two(240 - exponent_bits(scale)); }
__device__ __forceinline__ float scale_of_column(float largest) {
  return power_of_two(268 - max(exponent_bits(largest), 14));
}
__device__ __forceinline__ float unscale_column(float largest) {
  return power_of_two(min(max(exponent_bits(largest), 14), 254));
}

__device__ __forceinline__ float larger_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }

__device__ __forceinline__ void scaled(float value, float scale, float16& out) { narrow(value * scale, out); }
template <class T>
__device__ __forceinline__ void scaled(T value, float, T& out) {
  out = value;
}

// Two numbers to the nearest float16, the first in the lower half.
__device__ __forceinline__ unsigned to_halves(float first, float second) {
#ifndef EMULATOR
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
#else
  float16 halves[2];
  narrow(first, halves[0]), narrow(second, halves[1]);
  return halves[0].bits | (unsigned)halves[1].bits << 16;
#endif
}
"""
FILES["common/row_blocks.cuh"] = r"""
// How the forward pass becomes products of matrices: rows of weights, blocks of rows, and the taps of each block.
//
// A phase of the output that owns taps is a product of its own: 64 output channels (rows) by input channels, summed
// over the taps of the phase. A row block is 64 channels of one phase. A thread block computes CHANNEL_BLOCKS · LINES ·
// LINE_PHASES of them: all phases along the width, so that lines of the output are written whole, or one of WIDTH_PARTS
// of these, as if its elements were a line of their own; LINES of the phases along depth and height that own taps.
//
// An operation is one tap of one row block. `find_operation` numbers those of a thread block.
//
// Where output channels are few most of such a block would be empty, and where images are tiny most of the cells are
// halo. With TAPS_IN_ROWS a row is one tap of one channel instead, for all taps of LINES of those phases: row blocks
// are one operation each, and what a pixel adds to the outputs that it reaches is added up afterwards
// (store_overlap.cuh). As few row blocks as hold the taps of ROW_CHANNELS are a set, and a thread block computes
// CHANNEL_BLOCKS sets. The rows of a set are ordered by line, channel, tap along depth, height and width.

constexpr int ROWS = 64;

__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// The taps of a phase are first, first + step, first + 2·step ...
__host__ __device__ constexpr int tap_step(Axis axis) { return axis.stride / gcd(axis.stride, axis.dilation); }
__host__ __device__ constexpr int first_tap(Axis axis, int phase) {
  for (int tap = 0; tap < axis.kernel; ++tap)
    if (phase_of(axis, tap) == phase) return tap;
  return axis.kernel;
}
__host__ __device__ constexpr int tap_count(Axis axis, int phase) {
  return ceil_div(axis.kernel - first_tap(axis, phase), tap_step(axis));
}

// The phases of an axis that own taps, in rising order.
__host__ __device__ constexpr int owned_phases(Axis axis) {
  int count = 0;
  for (int phase = 0; phase < axis.stride; ++phase) count += has_taps(axis, phase);
  return count;
}
__host__ __device__ constexpr int owned_before(Axis axis, int phase) {
  int count = 0;
  for (int other = 0; other < phase; ++other) count += has_taps(axis, other);
  return count;
}
__host__ __device__ constexpr int owned_phase(Axis axis, int index) {
  for (int phase = 0; phase < axis.stride; ++phase)
    if (has_taps(axis, phase) && index-- == 0) return phase;
  return axis.stride;
}

constexpr int OWNED_H = owned_phases(AXIS_H), OWNED_W = owned_phases(AXIS_W);
constexpr int LINE_PHASES = OWNED_W / WIDTH_PARTS;
constexpr int OWNED_LINES = owned_phases(AXIS_D) * OWNED_H * WIDTH_PARTS;  // phases along depth and height, in parts
constexpr int LINE_GROUPS = ceil_div(OWNED_LINES, LINES);

// The phases of a line along depth and height, and along the width that of one of its row blocks.
__host__ __device__ constexpr int depth_of_line(int line) { return owned_phase(AXIS_D, line / WIDTH_PARTS / OWNED_H); }
__host__ __device__ constexpr int height_of_line(int line) { return owned_phase(AXIS_H, line / WIDTH_PARTS % OWNED_H); }
__host__ __device__ constexpr int width_of_block(int line, int block) {
  return owned_phase(AXIS_W, line % WIDTH_PARTS * LINE_PHASES + block % LINE_PHASES);
}

// Parts are alike: as many taps, without elements that own none.
__host__ __device__ constexpr bool parts_are_alike() {
  for (int phase = 0; phase < AXIS_W.stride; ++phase)
    if (tap_count(AXIS_W, phase) * AXIS_W.stride != AXIS_W.kernel) return false;
  return OWNED_LINES == AXIS_D.stride * AXIS_H.stride * WIDTH_PARTS && OWNED_W % WIDTH_PARTS == 0;
}
static_assert(WIDTH_PARTS == 1 || parts_are_alike(), "a layer whose phases along the width are one part");

// Taps along depth and height of a line.
__host__ __device__ constexpr int taps_of_line(int line) {
  if (line >= OWNED_LINES) return 0;
  return tap_count(AXIS_D, depth_of_line(line)) * tap_count(AXIS_H, height_of_line(line));
}

// With TAPS_IN_ROWS, rows of the lines from `first` to before `last`, and of the group of lines that has most.
__host__ __device__ constexpr int rows_of_lines(int first, int last) {
  int rows = 0;
  for (int line = first; line < last; ++line) rows += taps_of_line(line) * AXIS_W.kernel * ROW_CHANNELS;
  return rows;
}
__host__ __device__ constexpr int most_rows() {
  int most = 0;
  for (int first = 0; first < OWNED_LINES; first += LINES) {
    const int rows = rows_of_lines(first, first + LINES);
    most = rows > most ? rows : most;
  }
  return most;
}

constexpr int SET_BLOCKS = TAPS_IN_ROWS ? ceil_div(most_rows(), ROWS) : LINES * LINE_PHASES;
constexpr int ROW_BLOCKS = CHANNEL_BLOCKS * SET_BLOCKS;
constexpr int GROUP_CHANNELS = CHANNEL_BLOCKS * (TAPS_IN_ROWS ? ROW_CHANNELS : ROWS);
constexpr int CHANNEL_GROUPS = ceil_div(DST_CHANNELS, GROUP_CHANNELS);

struct Operation {
  int channel_block, depth_tap, height_tap, width_tap;
};

// Taps of row block `block` of a thread block whose first line is `first_line`.
__host__ __device__ constexpr int operations_of(int block, int first_line) {
  if (TAPS_IN_ROWS) return 1;
  const int line = first_line + block / LINE_PHASES % LINES;
  return taps_of_line(line) * tap_count(AXIS_W, width_of_block(line, block));
}

// `taps_of_line` of all lines at once: compilers evaluate only so much.
struct LineTaps {
  int of[OWNED_LINES];
};
__host__ __device__ constexpr LineTaps taps_of_lines() {
  LineTaps taps{};
  int depth[AXIS_D.stride]{}, height[AXIS_H.stride]{}, line = 0;
  for (int tap = 0; tap < AXIS_D.kernel; ++tap) ++depth[phase_of(AXIS_D, tap)];
  for (int tap = 0; tap < AXIS_H.kernel; ++tap) ++height[phase_of(AXIS_H, tap)];
  for (int d = 0; d < AXIS_D.stride; ++d)
    for (int h = 0; h < AXIS_H.stride; ++h)
      for (int part = 0; depth[d] * height[h] > 0 && part < WIDTH_PARTS; ++part) taps.of[line++] = depth[d] * height[h];
  return taps;
}

// Operations of the row blocks of a group of lines.
struct Counts {
  int of[ROW_BLOCKS];
};
__host__ __device__ constexpr Counts counts_of(int group) {
  const LineTaps taps = taps_of_lines();
  Counts counts{};
  for (int block = 0; block < ROW_BLOCKS; ++block) {
    const int line = group * LINES + block / LINE_PHASES % LINES, width = width_of_block(line, block);
    counts.of[block] = TAPS_IN_ROWS ? 1 : line < OWNED_LINES ? taps.of[line] * tap_count(AXIS_W, width) : 0;
  }
  return counts;
}

static_assert(OWNED_LINES % LINES == 0, "groups of lines are whole");

// Groups of lines are of one kind where their row blocks have as many operations. A kind is the first such group.
struct Kinds {
  int next[LINE_GROUPS];  // behind a kind; LINE_GROUPS behind the last
  int operations;         // of one group of each kind
  int most;               // of the row block that has most
};
__host__ __device__ constexpr Kinds find_kinds() {
  const LineTaps taps = taps_of_lines();
  Kinds kinds{};
  int last = 0;
  for (int group = 0; group < LINE_GROUPS; ++group) {
    int kind = 0;
    for (int i = 0; !TAPS_IN_ROWS && i < LINES && group * LINES + i < OWNED_LINES; ++i)
      if (taps.of[kind * LINES + i] != taps.of[group * LINES + i]) ++kind, i = -1;
    if (kind != group) continue;
    kinds.next[last] = group, kinds.next[group] = LINE_GROUPS, last = group;
    const Counts counts = counts_of(group);
    for (int block = 0; block < ROW_BLOCKS; ++block) {
      kinds.operations += counts.of[block];
      if (counts.of[block] > kinds.most) kinds.most = counts.of[block];
    }
  }
  return kinds;
}

// Operation `index` of a thread block; false behind the last.
__device__ __forceinline__ bool find_operation(int index, int first_line, Operation& operation) {
  for (int block = 0; block < ROW_BLOCKS; ++block) {
    const int count = operations_of(block, first_line);
    if (index >= count) {
      index -= count;
      continue;
    }
    const int line = first_line + block / LINE_PHASES % LINES;
    const int depth = depth_of_line(line), height = height_of_line(line), width = width_of_block(line, block);
    const int along_w = tap_count(AXIS_W, width), along_h = tap_count(AXIS_H, height);
    operation.channel_block = block / (LINE_PHASES * LINES);
    operation.width_tap = first_tap(AXIS_W, width) + index % along_w * tap_step(AXIS_W);
    operation.height_tap = first_tap(AXIS_H, height) + index / along_w % along_h * tap_step(AXIS_H);
    operation.depth_tap = first_tap(AXIS_D, depth) + index / (along_w * along_h) * tap_step(AXIS_D);
    return true;
  }
  return false;
}

// Operands lie in shared memory as chunks of 16 bytes, CHUNK neighbouring channels of one row or pixel. Two chunks are
// the depth of one instruction.
constexpr int CHUNK = 16 / (int)sizeof(operand_t);
constexpr int STEP_CHANNELS = 2 * CHUNK;
constexpr int STEPS = round_up(ceil_div(SRC_CHANNELS, STEP_CHANNELS), K_STEPS);
constexpr int OPERATION_BYTES = PARTS * 2 * ROWS * 16;  // the weights of one operation and step

// The channel, of a block of 64, that a row of the matrix holds. A thread's accumulators are rows r and r + 8: where
// channels come last in the destination those are made neighbours.
__device__ __forceinline__ int channel_of_row(int row) {
  return DST_CHANNELS_LAST ? row / 16 * 16 + row % 8 * 2 + row / 8 % 2 : row;
}

// Element offset of a group's first weight. In a mirrored layer (gather.py) taps come in falling order.
__device__ __forceinline__ long long group_offset(int group) {
  return (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS +
         (WEIGHT_STRIDE_TAP < 0 ? weight_offset(0, 0, 1 - TAPS) : 0);
}
"""
FILES["common/dependent.cuh"] = r"""
// Two kernels in a row, of which the second may start before the first has ended (programmatic dependent launch, from
// Hopper on). Where it was launched otherwise, both do nothing.

// The first kernel: all its blocks run, so that those of the second may be placed beside them.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The second: what the first has written is there.
__device__ __forceinline__ void wait_for_prologue() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
"""
FILES["common/counters.cuh"] = r"""
// Counters in front of the packed weights, by which blocks share their work (item_queue.cuh). Packing sets them to
// zero.

// Where the weights begin, for the kernel that packs them.
__device__ __forceinline__ unsigned char* clear_counters(unsigned char* packed) {
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i * (int)sizeof(unsigned) < COUNTER_BYTES; i += blockDim.x) ((unsigned*)packed)[i] = 0;
  return packed + COUNTER_BYTES;
}
"""
FILES["pack_weights.cu"] = r"""
// The weights as the tensor cores take them (row_blocks.cuh): for every group, block of channels and group of lines
//
//     [step][operation][part][chunk of two][row of 64][16 bytes]
//
// Rows, channels and operations that do not exist are zero.
//
// A thread block takes a slab through shared memory: CHUNK input channels, SLAB_CHANNELS output channels, SLAB_TAPS
// taps. It reads the slab in the order in which weights lie in memory, so that each is read once, and writes a run of
// SLAB_CHANNELS rows for every tap. Both loops give an output channel and a tap to a thread: the first moves the input
// channels of the pair one by one, the second makes them a chunk.

constexpr int THREADS = SLAB_THREADS;
constexpr int ROW_SLABS = CHANNEL_GROUPS * CHANNEL_BLOCKS * (ROWS / SLAB_CHANNELS);
constexpr int CHANNEL_OPERATIONS = OPERATIONS / CHANNEL_BLOCKS;  // of a block of channels and a group of lines
constexpr int PLACES = LINE_GROUPS * CHANNEL_OPERATIONS;         // the taps, and operations that do not exist
constexpr int TAP_SLABS = ceil_div(PLACES, SLAB_TAPS);
constexpr int STAGED = SLAB_TAPS < TAPS ? SLAB_TAPS : TAPS;
constexpr int PAIRS = SLAB_CHANNELS * STAGED;
constexpr int BATCH = PAIRS > 3 * THREADS ? 4 : ceil_div(PAIRS, THREADS);  // pairs that a thread reads at once
constexpr bool TAPS_INNERMOST = WEIGHT_STRIDE_TAP <= WEIGHT_STRIDE_OUT;
constexpr int BANK = 4 / (int)sizeof(scalar_t);             // elements of a bank
constexpr int PITCH = (ceil_div(STAGED, BANK) | 1) * BANK;  // odd in banks: a warp's rows lie in different ones
static_assert(SLAB_CHANNELS % 16 == 0, "channel_of_row keeps 16 rows together");

// The output channel and the tap of a slab's pair, in the order in which weights lie in memory.
__device__ __forceinline__ int out_of(int pair) { return TAPS_INNERMOST ? pair / STAGED : pair % SLAB_CHANNELS; }
__device__ __forceinline__ int tap_of(int pair) { return TAPS_INNERMOST ? pair % STAGED : pair / SLAB_CHANNELS; }

constexpr int LINE_TAPS = AXIS_W.kernel / WIDTH_PARTS;  // along the width

// A tap of an axis, and the phases that own taps.
struct Standing {
  int phase;   // how many come before its own
  int before;  // taps of those
  int index;   // taps of its own phase that come before it
  int count;   // taps of its own phase
};

__device__ __forceinline__ Standing standing_of(Axis axis, int tap) {
  const int step = tap_step(axis);
  Standing standing = {0, 0, tap / step, ceil_div(axis.kernel - tap % step, step)};
  for (int first = 0; first < step && first < axis.kernel; ++first)  // the first taps of all phases
    if (phase_of(axis, first) < phase_of(axis, tap)) {
      ++standing.phase;
      standing.before += ceil_div(axis.kernel - first, step);
    }
  return standing;
}

// Operations of a block of channels and a group of lines that exist.
__device__ __forceinline__ int existing_operations(int line_group) {
  int taps = 0;
  for (int i = 0; i < LINES; ++i) taps += taps_of_line(line_group * LINES + i);
  return LINE_GROUPS == 1 ? TAPS : taps * LINE_TAPS;
}

// The inverse of `find_operation`: the operation of a tap, counted from the first of the first group of lines as the
// packed weights of one step are. Behind the last tap follow the operations that do not exist.
__device__ __forceinline__ int place_of(int tap, int channel_block) {
  constexpr int LINE_GROUP = STEPS * OPERATIONS;
  if (tap >= TAPS) {
    int index = tap - TAPS;
    for (int line_group = 0;; ++line_group) {
      const int existing = existing_operations(line_group), missing = CHANNEL_OPERATIONS - existing;
      if (index < missing) return line_group * LINE_GROUP + CHANNEL_BLOCKS * existing + channel_block * missing + index;
      index -= missing;
    }
  }
  const Standing d = standing_of(AXIS_D, tap / (AXIS_H.kernel * AXIS_W.kernel));
  const Standing h = standing_of(AXIS_H, tap / AXIS_W.kernel % AXIS_H.kernel);
  const Standing w = standing_of(AXIS_W, tap % AXIS_W.kernel);
  const int part = w.phase / LINE_PHASES;
  const int line = (d.phase * OWNED_H + h.phase) * WIDTH_PARTS + part, line_group = line / LINES;
  int before = 0;
  for (int other = line_group * LINES; other < line; ++other) before += taps_of_line(other);
  const int index = (d.index * h.count + h.index) * w.count + w.index;
  return line_group * LINE_GROUP + channel_block * existing_operations(line_group) + before * LINE_TAPS +
         d.count * h.count * (w.before - part * LINE_TAPS) + index;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_weights(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  __shared__ scalar_t slab[CHUNK][SLAB_CHANNELS * PITCH];
  __shared__ int places[SLAB_TAPS];
  let_dependents_start();
  packed = clear_counters(packed);
#if SCALED
  wait_for_prologue();
  __shared__ float scale[SLAB_CHANNELS];
  const Scales scales(packed);
  packed += SCALES_BYTES;
  write_first_band(scales);
#endif
  const int row_slab = blockIdx.x % ROW_SLABS, tap_slab = blockIdx.x / ROW_SLABS % TAP_SLABS;
  const int chunk = blockIdx.x / (ROW_SLABS * TAP_SLABS) % (2 * STEPS);
  const int group = blockIdx.x / (ROW_SLABS * TAP_SLABS) / (2 * STEPS);
  const int first_in = chunk * CHUNK, first_out = row_slab * SLAB_CHANNELS, first_place = tap_slab * SLAB_TAPS;
  const int channel_block = first_out / ROWS % CHANNEL_BLOCKS;
#if SCALED
  for (int i = threadIdx.x; i < SLAB_CHANNELS; i += THREADS) {
    const bool exists = first_out + i < DST_CHANNELS;
    scale[i] = exists ? scale_of_column(scales.largest_weight(group * DST_CHANNELS + first_out + i)) : 0;
  }
  __syncthreads();
#endif

  const scalar_t* const origin =
      weight + group_offset(group) + (long long)first_in * WEIGHT_STRIDE_IN + weight_offset(0, first_out, first_place);
  for (int first = threadIdx.x; first < PAIRS; first += BATCH * THREADS) {
    scalar_t values[BATCH][CHUNK];  // on their way together
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const int pair = first + k * THREADS, out = out_of(pair), tap = tap_of(pair);
      const bool inside = pair < PAIRS && first_out + out < DST_CHANNELS && first_place + tap < TAPS;
      const scalar_t* const from = origin + weight_offset(0, out, tap);
#pragma unroll
      for (int in = 0; in < CHUNK; ++in) {
        const bool exists = inside && first_in + in < SRC_CHANNELS;
        values[k][in] = exists ? read(from + (long long)in * WEIGHT_STRIDE_IN) : zero<scalar_t>();
      }
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const int pair = first + k * THREADS;
      if (pair >= PAIRS) break;
#pragma unroll
      for (int in = 0; in < CHUNK; ++in) {
#if SCALED
        values[k][in] *= scale[out_of(pair)];
#endif
        slab[in][out_of(pair) * PITCH + tap_of(pair)] = values[k][in];
      }
    }
  }
  // The last threads have the fewest weights to read.
  for (int i = THREADS - 1 - (int)threadIdx.x; i < SLAB_TAPS && first_place + i < PLACES; i += THREADS)
    places[i] = place_of(first_place + i, channel_block);
  __syncthreads();

  const int outer = group * CHANNEL_GROUPS + first_out / (CHANNEL_BLOCKS * ROWS);
#if SCALED
  for (int i = threadIdx.x; chunk == 0 && tap_slab == 0 && i < SLAB_CHANNELS * LINE_GROUPS * SET_BLOCKS; i += THREADS) {
    const int row = i % SLAB_CHANNELS, out = first_out + channel_of_row(row), block = i / SLAB_CHANNELS;
    const int row_block = (outer * LINE_GROUPS + block / SET_BLOCKS) * ROW_BLOCKS + channel_block * SET_BLOCKS;
    const float largest = out < DST_CHANNELS ? scales.largest_weight(group * DST_CHANNELS + out) : 0;
    scales.rows()[(row_block + block % SET_BLOCKS) * ROWS + first_out % ROWS + row] = unscale_column(largest);
  }
#endif
  unsigned char* const target = packed +
                                ((long long)outer * LINE_GROUPS * STEPS + chunk / 2) * OPERATIONS * OPERATION_BYTES +
                                (chunk % 2 * ROWS + first_out % ROWS) * 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < SLAB_CHANNELS * SLAB_TAPS; i += THREADS) {
    const int row = i % SLAB_CHANNELS, tap = i / SLAB_CHANNELS;
    if (first_place + tap >= PLACES) break;
    const bool exists = first_place + tap < TAPS;
    scalar_t values[CHUNK];
#pragma unroll
    for (int in = 0; in < CHUNK; ++in)
      values[in] = exists ? slab[in][channel_of_row(row) * PITCH + tap] : zero<scalar_t>();
    alignas(16) operand_t parts[PARTS][CHUNK];
#pragma unroll
    for (int in = 0; in < CHUNK; ++in) prepare(values[in], parts, in);
    unsigned char* const to = target + (long long)places[tap] * OPERATION_BYTES + row * 16;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      *(Vector<operand_t, CHUNK>*)(to + part * (2 * ROWS * 16)) = *(const Vector<operand_t, CHUNK>*)parts[part];
  }
}
"""
FILES["common/copy_async.cuh"] = r"""
// Copies of single elements or quads from global to shared memory that pass no registers (cp.async, from compute
// capability 8.0 on). Each thread waits for its own, in the groups it has committed.

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

#ifndef EMULATOR

// 16, 8 or 4 bytes from global to shared memory; zeros where `exists` is false.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool exists) {
  const int size = exists ? BYTES : 0;
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else

template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool exists) {
  typedef Vector<unsigned, BYTES / 4> Bytes;
  emulator::copy_later((Bytes*)__cvta_shared_to_generic(to), exists ? *(const Bytes*)from : Bytes{});
}
__device__ __forceinline__ void copies_commit() { emulator::commit(emulator::Async::copies); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  emulator::wait(emulator::Async::copies, PENDING);
}

#endif
"""
FILES["common/wgmma.cuh"] = r"""
// Hopper's matrix instruction: what surrounds it. The specialisation has the instruction itself.

// Ordinary writes to shared memory are seen by the tensor cores and the copy engine after this.
#if __CUDA_ARCH__ >= 900 && !defined(EMULATOR)
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
__device__ __forceinline__ void publish_shared() {}
#endif

#if WGMMA_INSTRUCTION && !defined(EMULATOR)
// A matrix whose rows are 16 bytes of each of two chunks: PITCH bytes apart, and the second chunk `chunk_bytes` behind
// the first; with more than 16 of PITCH all chunks of a row are neighbours, whose order the copy engine has changed.
// Of a transposed matrix, 64 of whose columns are the 128 bytes of PITCH, the next 64 are `chunk_bytes` behind. Eight
// rows are `eight_bytes` behind the eight before.
template <int PITCH>
__device__ __forceinline__ unsigned long long describe_matrix(unsigned address, unsigned chunk_bytes,
                                                              unsigned eight_bytes = 8 * PITCH) {
  constexpr unsigned long long swizzle = PITCH == 128 ? 1 : PITCH == 64 ? 2 : PITCH == 32 ? 3 : 0;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(chunk_bytes >> 4) << 16 |
         (unsigned long long)(eight_bytes >> 4) << 32 | swizzle << 62;
}
// The same of rows of `pitch` bytes, 32, 64 or 128, whose chunks are all neighbours. One that begins so many bytes
// later is described by a sixteenth of them more.
__device__ __forceinline__ unsigned long long describe_rows(unsigned address, int pitch, unsigned chunk_bytes) {
  const unsigned long long swizzle = pitch == 128 ? 1 : pitch == 64 ? 2 : 3;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(chunk_bytes >> 4) << 16 |
         (unsigned long long)(pitch / 2) << 32 | swizzle << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#elif WGMMA_INSTRUCTION
// The four warps of a group are one: when the products of one are done, so are those of all.
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() { emulator::commit(emulator::Async::products); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  emulator::wait(emulator::Async::products, PENDING);
  emulator::threads_sync(16 + threadIdx.x / 128, 128);
}
#else
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() {}
template <int PENDING>
__device__ __forceinline__ void products_wait() {}
#endif

// Operands of products that run stay where they are, and what comes of them is not read before.
#if WGMMA_INSTRUCTION && !defined(EMULATOR)
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)::"memory"); }
template <class T, int COUNT>
__device__ __forceinline__ void pin(T (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) pin(values[i]);
}
#else
template <class T>
__device__ __forceinline__ void pin(T&) {}
#endif
"""
FILES["common/async.cuh"] = r"""
// The copy engine, and the barriers between those who fill shared memory and those who read it.

// The copy engine that came with Hopper.
#if __CUDA_ARCH__ >= 900 || (defined(EMULATOR) && WGMMA_INSTRUCTION)
#define BULK_COPY 1
#else
#define BULK_COPY 0
#endif
// It brings boxes where Hopper's matrix instruction is used.
#define BOX_COPY (BULK_COPY && WGMMA_INSTRUCTION)

// A tensor of five dimensions, innermost first, and the box of it that the copy engine brings at once (Boxes in
// algorithms/base.py); encoded by the driver.
struct alignas(64) TensorMap {
#ifndef EMULATOR
  unsigned char encoded[128];
#else
  long long strides[4];  // in bytes, of all dimensions but the first
  int sizes[5], box[5];
  int swizzle;   // bytes within which chunks change places
  int tf32;      // whether float32 is rounded on its way
  int steps[5];  // from one element that is brought to the next
  unsigned char unused[28];
#endif
};

#ifndef EMULATOR

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barriers_publish() {
#if BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives when the thread's copies to shared memory (copy_async.cuh) have come that it has begun so far.
__device__ __forceinline__ void barrier_arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// The same barrier of another block of the cluster. (With a scope of the cluster it would wait for all stores before.)
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, int block) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(block)
      : "memory");
}
#if BULK_COPY
// A word to another block's shared memory, or to this one's, where the barrier is told of its bytes.
__device__ __forceinline__ void store_async(unsigned to, int value, unsigned barrier, int block) {
  asm volatile(
      "{ .reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [barrier]; }" ::"r"(to),
      "r"(value), "r"(barrier), "r"(block)
      : "memory");
}
#endif
// All threads of the cluster's blocks but those that have exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Threads of one named barrier of the block.
__device__ __forceinline__ void threads_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

#else

__device__ __forceinline__ emulator::Barrier* barrier_at(unsigned barrier) {
  return (emulator::Barrier*)__cvta_shared_to_generic(barrier);
}
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  emulator::barrier_init(barrier_at(barrier), arrivals);
}
__device__ __forceinline__ void barriers_publish() {}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) { emulator::barrier_arrive(barrier_at(barrier)); }
__device__ __forceinline__ void barrier_arrive_with_copies(unsigned barrier) {
  copies_commit();
  copies_wait<0>();
  barrier_arrive(barrier);
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  emulator::barrier_wait(barrier_at(barrier), parity);
}
// A block of a cluster runs alone, and does what the others would do for it.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, int) { barrier_arrive(barrier); }
__device__ __forceinline__ void cluster_sync() {}
__device__ __forceinline__ void threads_sync(int name, int threads) { emulator::threads_sync(name, threads); }

#endif

// Where the copy engine puts a byte, in rows within whose `bytes` it swizzles chunks of 16: 32, 64, 128, or 16 for
// none.
__device__ __forceinline__ unsigned swizzled(unsigned address, int bytes) {
  return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}

// One thread copies contiguous bytes, a multiple of 16; `barrier` completes when they have come.
#if BULK_COPY && !defined(EMULATOR)
// The phase of a barrier does not end before so many bytes more have come.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  barrier_expect(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same where every block of the cluster copies its part to all of them.
template <int BLOCKS>
__device__ __forceinline__ void bulk_copy_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  const unsigned part = bytes / BLOCKS, offset = blockIdx.x % BLOCKS * part;
  barrier_expect(barrier, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to + offset),
      "l"((const char*)from + offset), "r"(part), "r"(barrier), "h"((unsigned short)((1 << BLOCKS) - 1))
      : "memory");
}

// The same for a box of `bytes`, whose first element is at the given place of the tensor, a multiple of 16 bytes along
// the innermost dimension; what lies beside the tensor is zero.
__device__ __forceinline__ void box_copy(unsigned to, const TensorMap& map, const scalar_t*, const int (&place)[5],
                                         unsigned bytes, unsigned barrier) {
  barrier_expect(barrier, bytes);
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4]), "r"(barrier)
      : "memory");
}
#else
#ifdef EMULATOR
__device__ __forceinline__ void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), from, bytes);
}
template <int BLOCKS>
__device__ __forceinline__ void bulk_copy_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  bulk_copy(to, from, bytes, barrier);
}
__device__ __forceinline__ void box_copy(unsigned to, const TensorMap& map, const scalar_t* tensor,
                                         const int (&place)[5], unsigned bytes, unsigned barrier) {
  if (place[0] * (int)sizeof(scalar_t) % 16) __trap();
  unsigned char* const box = (unsigned char*)emulator::scratch(bytes);
  unsigned offset = 0;
  int at[5] = {};
  for (; offset < bytes; offset += sizeof(scalar_t)) {
    bool inside = true;
    long long from = 0;
    for (int i = 0; i < 5; ++i) {
      const int index = place[i] + at[i] * map.steps[i];
      inside = inside && index >= 0 && index < map.sizes[i];
      from += i == 0 ? (long long)index * sizeof(scalar_t) : index * map.strides[i - 1];
    }
    const scalar_t value = inside ? *(const scalar_t*)((const char*)tensor + from) : zero<scalar_t>();
    *(scalar_t*)(box + swizzled(to + offset, map.swizzle) - to) = map.tf32 ? rounded(value) : value;
    for (int i = 0; i < 5 && ++at[i] == map.box[i]; ++i) at[i] = 0;
  }
  emulator::bulk_copy(barrier_at(barrier), __cvta_shared_to_generic(to), box, bytes);
}
#endif
#endif

// True for one thread of a warp, of which all are here, and always the same one.
__device__ __forceinline__ bool elect() {
#if __CUDA_ARCH__ >= 900
  int chosen;
  asm volatile("{ .reg .pred chosen; elect.sync _|chosen, 0xffffffff; selp.b32 %0, 1, 0, chosen; }" : "=r"(chosen));
  return chosen;
#else
  return threadIdx.x % 32 == 0;
#endif
}
// What all threads of a warp have, for the compiler to know that it is the same.
__device__ __forceinline__ int uniform(int value) {
#if __CUDA_ARCH__ >= 900
  return __reduce_max_sync(~0u, value);
#else
  return value;
#endif
}

// Loaders need few registers, those who multiply need many: the block's registers change hands. All that are claimed
// must have been there when the block began, or those who claim them wait for ever.
__host__ __device__ constexpr bool registers_suffice(int multipliers, int claimed, int loaders, int kept) {
  const int threads = multipliers + loaders, at_launch = 65536 / threads / 8 * 8;
  return multipliers * claimed + loaders * kept <= threads * at_launch;
}
#if WGMMA_INSTRUCTION && !defined(EMULATOR)
template <int KEPT>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KEPT));
}
template <int CLAIMED>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CLAIMED));
}
#else
template <int>
__device__ __forceinline__ void registers_release() {}
template <int>
__device__ __forceinline__ void registers_claim() {}
#endif
"""
FILES["common/mma.cuh"] = r"""
// The tensor cores' instruction for a warp, of sm_80 and later, and how its operands come from shared memory.

// Four matrices of 8 rows by 16 bytes; a lane gives the address of row lane % 8 of matrix lane / 8, and gets of each
// the four bytes `lane % 4` of row lane / 4; TRANSPOSED, for elements of 16 bits, those of column lane / 4.
template <bool TRANSPOSED = false>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
#ifndef EMULATOR
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
#else
  typedef Vector<unsigned short, 8> Row;
  const auto addresses = emulator::all_lanes(~0u, address);
  const int major = threadIdx.x % 32 / 4, minor = threadIdx.x % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned halves[2];
    for (int i = 0; i < 2; ++i) {
      const int row = TRANSPOSED ? minor + i : major, column = TRANSPOSED ? major : minor + i;
      halves[i] = ((const Row*)__cvta_shared_to_generic(addresses.of[8 * matrix + row]))->value[column];
    }
    to[matrix] = halves[0] | halves[1] << 16;
  }
#endif
}

#ifdef EMULATOR
// Operands as the cores see them: TF32 is float32 without its last 13 bits.
template <class T>
__device__ __forceinline__ float operand(T value) {
  float wide = widen(value);
  if (sizeof(T) == 4) wide = __uint_as_float(__float_as_uint(wide) & 0xffffe000u);
  return wide;
}
#endif

// c += A · B of 16 rows and 8 columns, 32 bytes deep. A thread holds of A, for each of two chunks of 16 bytes, the four
// bytes `lane % 4` of rows lane / 4 and lane / 4 + 8, of B those of column lane / 4, and in c[i] row
// lane / 4 + i / 2 · 8 and column lane % 4 · 2 + i % 2. Operands are what tensors hold, or bfloat16 in its place.
template <class T = scalar_t>
__device__ __forceinline__ void mma(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifndef EMULATOR
  if constexpr (sizeof(T) != sizeof(scalar_t))
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned." MMA_SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  typedef Vector<T, 4 / sizeof(T)> Word;
  struct Operands {
    unsigned a[4], b[2];
  } const mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto lanes = emulator::all_lanes(~0u, mine);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 8; ++k) {
      const Operands& left = lanes.of[lane / 4 * 4 + k % 4];
      const Operands& right = lanes.of[(lane % 4 * 2 + i % 2) * 4 + k % 4];
      const Word& row = *(const Word*)&left.a[i / 2 + k / 4 * 2];
      const Word& column = *(const Word*)&right.b[k / 4];
      for (int j = 0; j < (int)(4 / sizeof(T)); ++j) c[i] += operand(row.value[j]) * operand(column.value[j]);
    }
#endif
}
"""
FILES["common/matrix.cuh"] = r"""
// Products on tensor cores: a group of 128 threads adds A · B to its accumulators, where A is 64 rows and B is PIXELS
// columns of two chunks each, 16 bytes a row and chunk, in shared memory. Rows are 16 bytes apart, the second chunk
// `A_CHUNK` or `b_chunk` bytes behind the first. So a column (pixel) that starts later starts 16 bytes later: a tap is
// an address.
//
// With BOXES a column is all chunks of its pixel, PIXEL_PITCH bytes, whose order the copy engine changes (swizzling) so
// that those of neighbours lie in different banks. The cores undo that by the bits of the address, wherever B begins.
// Of a source whose pixels are innermost (TRANSPOSED) a box is 64 pixels of every channel of a stage, 128 bytes a
// channel, swizzled; the cores take columns so in half precision, 64 by 64.
//
// Accumulator 4·j + i of a thread holds row  16·warp + lane / 4 + i / 2 · 8  and column  8·j + lane % 4 · 2 + i % 2.

constexpr int A_CHUNK = 64 * 16;
constexpr int SUMS = PIXELS / 2;  // accumulators of a thread
constexpr int PIXEL_PITCH = BOXES ? 32 * K_STEPS : 16;
constexpr bool TRANSPOSED = BOXES && !SRC_CHANNELS_LAST;
constexpr int BOX_PIXELS = 64, BOX_BYTES = BOX_PIXELS * PIXEL_PITCH;  // of those
constexpr int BOX_STEP = TRANSPOSED ? STEP_CHANNELS * 128 : 32;       // from a step's channels to the next one's
static_assert(!TRANSPOSED || (sizeof(operand_t) == 2 && PIXELS % BOX_PIXELS == 0), "columns are whole boxes");
static_assert(!TRANSPOSED || BOX_BYTES % 1024 == 0, "swizzled rows begin with eight of them");

// Zero, here and now: left to itself the compiler would do so amid the products, which would wait for one another.
__device__ __forceinline__ void clear(float& sum) {
  sum = 0;
#ifndef EMULATOR
  asm volatile("" : "+f"(sum));
#endif
}

#ifdef EMULATOR
// The host computes each thread's accumulators one by one.
__device__ __forceinline__ void add_products(float* sums, unsigned a, unsigned b, unsigned b_chunk, bool add) {
  typedef Vector<operand_t, 16 / sizeof(operand_t)> Chunk;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int index = 0; index < SUMS; ++index) {
    const int row = 16 * warp + lane / 4 + index % 4 / 2 * 8, column = index / 4 * 8 + lane % 4 * 2 + index % 2;
    float sum = add ? sums[index] : 0;
    for (int chunk = 0; chunk < 2; ++chunk) {
      const Chunk& left = *(const Chunk*)__cvta_shared_to_generic(a + chunk * A_CHUNK + row * 16);
      for (int i = 0; i < (int)(sizeof(Chunk) / sizeof(operand_t)); ++i) {
        const int size = sizeof(operand_t), channel = chunk * (16 / size) + i;
        const unsigned right = TRANSPOSED
                                   ? swizzled(b + column / 64 * BOX_BYTES + channel * 128 + column % 64 * size, 128)
                               : BOXES ? swizzled(b + column * PIXEL_PITCH + chunk * 16, PIXEL_PITCH) + i * size
                                       : b + chunk * b_chunk + column * 16 + i * size;
        sum += operand(left.value[i]) * operand(*(const operand_t*)__cvta_shared_to_generic(right));
      }
    }
    sums[index] = sum;
  }
}
#if WGMMA_INSTRUCTION
__device__ __forceinline__ void add_product(float (&sums)[SUMS], unsigned a, unsigned b, unsigned b_chunk, bool add) {
  float* const to = sums;
  emulator::later(emulator::Async::products, [=] { add_products(to, a, b, b_chunk, add); });
}
#else
__device__ __forceinline__ void add_product(float (&sums)[SUMS], unsigned a, unsigned b, unsigned b_chunk, bool add) {
  add_products(sums, a, b, b_chunk, add);
  __syncwarp();
}
#endif
#elif WGMMA_INSTRUCTION
__device__ __forceinline__ void add_product(float (&sums)[SUMS], unsigned a, unsigned b, unsigned b_chunk, bool add) {
  const unsigned long long columns =
      TRANSPOSED ? describe_matrix<128>(b, BOX_BYTES) : describe_matrix<PIXEL_PITCH>(b, b_chunk);
  wgmma(sums, describe_matrix<16>(a, A_CHUNK), columns, add);
}
#else
__device__ __forceinline__ void add_product(float (&sums)[SUMS], unsigned a, unsigned b, unsigned b_chunk, bool add) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (!add) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
  }
  unsigned rows[4];  // rows 0-7 and 8-15 of the first chunk, then of the second
  load_matrices(rows, a + lane / 16 * A_CHUNK + (16 * warp + lane % 16) * 16);
#pragma unroll
  for (int j = 0; j < PIXELS / 8; j += 2) {
    unsigned columns[4];  // 8 columns of both chunks, then the next 8
    load_matrices(columns, b + lane / 8 % 2 * b_chunk + (8 * j + lane / 16 * 8 + lane % 8) * 16);
    mma(sums + 4 * j, rows, columns[0], columns[1]);
    if (j + 1 < PIXELS / 8) mma(sums + 4 * (j + 1), rows, columns[2], columns[3]);
  }
}
#endif
"""
FILES["common/divisor.cuh"] = r"""
// A number that numbers from 0 to 2³¹ - 1 are divided by, known when the kernel is launched.
struct Divisor {
  int value;
  unsigned reciprocal;  // 2^shift / value, rounded up
  int shift;            // 31 and the logarithm of the value to the base of 2, rounded up
  __device__ __forceinline__ operator int() const { return value; }
};
__device__ __forceinline__ int operator/(int number, const Divisor& by) {
  return (int)((unsigned long long)(unsigned)number * by.reciprocal >> by.shift);
}
__device__ __forceinline__ int operator%(int number, const Divisor& by) { return number - number / by * by.value; }
"""
FILES["common/gemm_tile.cuh"] = r"""
// Items of work for implicit_gemm, and the run of pixels that each of them is made of.

constexpr int LOADERS = LOADER_THREADS / LOADER_GROUPS;  // threads that load one stage
constexpr int THREADS = LOADER_THREADS + CONSUMERS * 128;
constexpr int SHARERS = TAKE_TURNS ? 1 : CONSUMERS;    // warp groups that work on one item
constexpr int GROUP_CELLS = PIXEL_BLOCKS * PIXELS;     // cells of a warp group
constexpr int ROW_PARTS = SPLIT_ROWS ? CONSUMERS : 1;  // row groups of an item
constexpr int CELL_PARTS = SHARERS / ROW_PARTS;
constexpr int STAGE_CHANNELS = K_STEPS * STEP_CHANNELS;
constexpr int STAGE_CHUNKS = 2 * K_STEPS;
constexpr int STAGES_OF_ITEM = STEPS / K_STEPS;
constexpr int WEIGHT_STAGE = K_STEPS * OPERATIONS * OPERATION_BYTES;  // bytes of a row group's weights in a stage
constexpr long long WEIGHT_ITEM = (long long)STAGES_OF_ITEM * WEIGHT_STAGE;  // and in all stages
constexpr int WEIGHT_SLOT = RESIDENT ? 0 : ROW_PARTS * WEIGHT_STAGE;
constexpr int RESIDENT_WEIGHTS = RESIDENT ? ROW_PARTS * (int)WEIGHT_ITEM : 0;
constexpr bool IN_PLACE = SRC_CHANNELS_LAST || BOXES;  // pixels are copied to where they are used
static_assert(!BOXES || (WGMMA_INSTRUCTION && PARTS == 1), "not by the copy engine");
static_assert(CLUSTER == 1 || (WGMMA_INSTRUCTION && !RESIDENT), "no weights to share");
static_assert(!WHOLE_IMAGES || TAPS_IN_ROWS, "a halo is left out where rows are taps");
constexpr int RAW_SLOTS = LOADER_GROUPS * RAW_STAGES;                // for stages that are not turned around yet
constexpr int TURNERS = (LOADER_THREADS / 32 - 1) / TURNING_GROUPS;  // warps that turn a stage of boxes around together
// Stages of its own that a loading group copies ahead of the one it turns around.
constexpr int LOOKAHEAD = BOXES ? 1 : IN_PLACE ? (STAGES - 2) / LOADER_GROUPS : RAW_STAGES - 1;
// A stage is given back when the next one is there, so a group that waits for a free one must not owe that next one.
static_assert(LOOKAHEAD >= 1 && STAGES >= 2, "too few stages");
// The parity of a barrier tells its last use from the one before only, so nobody may wait further ahead.
static_assert(STAGES >= LOADER_GROUPS && STAGES >= TURNING_GROUPS, "too few stages");
static_assert(RAW_SLOTS % TURNING_GROUPS == 0, "boxes come in any order: those of a slot are for the same group");
static_assert(OPERATIONS <= (TAPS_IN_ROWS ? ROW_BLOCKS : CHANNEL_BLOCKS * TAPS), "an operation is a tap");
constexpr int DST_D = AXIS_D.stride, DST_H = AXIS_H.stride, DST_W = AXIS_W.stride;
constexpr int REACH_D = last_offset(AXIS_D) - first_offset(AXIS_D);
constexpr int REACH_H = last_offset(AXIS_H) - first_offset(AXIS_H);

struct Geometry {
  TensorMap box;  // of the source's pixels
  Tensor5 src, dst;
  int batch;
  int images;          // batch entries of a tile
  Divisor cells[3];    // of a tile, along depth, height and width
  Divisor tiles[4];    // along batch, depth, height and width
  Divisor tile_items;  // of one tile, or of a cluster's: row groups, ROW_PARTS at a time
  Divisor pitch[3];    // pixels of the run from one image, slab and row to the next
  int items;           // tiles, CLUSTER at a time, by the items of each
  int halo;            // pixels of the run that are loaded
  int raw_pitch;       // pixels of the run in a copied stage, or of a box there
  int chunk_bytes;     // of the run in a stage
  int skew;            // columns before the first that is needed, so that copies are aligned
  int copy_bytes;      // of one copy: 16, 8, 4 or 2
  int store_vector;    // elements of a store
  int boxes;           // of a stage, one behind the other along the width; none where threads copy
  int box_pixels;      // of each; the halo behind the last is padding
  int run;             // cells of tiles that are runs across rows and, up to `images`, images: where no tap reaches out
  int own;             // items of a block that no other can take; at least FURTHER + 2 (item_queue.cuh)
};

// How tensors lie decides how they are loaded and stored, and may differ from launch to launch. A kernel that is
// compiled for one way alone (STORE_VECTOR is not zero) has half the code; COPY_BYTES is zero there for boxes.
constexpr bool ONE_WAY = STORE_VECTOR != 0;
__device__ __forceinline__ int store_vector(const Geometry& g) { return ONE_WAY ? STORE_VECTOR : g.store_vector; }
__device__ __forceinline__ int copy_bytes(const Geometry& g) { return ONE_WAY ? COPY_BYTES : g.copy_bytes; }
__device__ __forceinline__ bool takes_boxes(const Geometry& g) { return ONE_WAY ? COPY_BYTES == 0 : g.boxes != 0; }

// Position of a pixel in a run.
struct Pixel {
  int n, d, h, w;

  __device__ __forceinline__ void locate(const Geometry& g, int index) {
    n = index / g.pitch[0], index -= n * g.pitch[0];
    d = index / g.pitch[1], index -= d * g.pitch[1];
    h = index / g.pitch[2], w = index - h * g.pitch[2];
  }
  __device__ __forceinline__ unsigned packed() const { return n << 26 | d << 20 | h << 10 | w; }
  __device__ __forceinline__ void unpack(unsigned bits) {
    n = bits >> 26, d = bits >> 20 & 63, h = bits >> 10 & 1023, w = bits & 1023;
  }
};
constexpr unsigned NOWHERE = 0xffffffffu;
constexpr offset_t PADDING = ~(offset_t)0;

// Elements from a tensor's first of a batch entry and channel; offset_t has 32 bits where those suffice.
__device__ __forceinline__ offset_t offset_of(const Tensor5& t, int n, int d, int h, int w) {
  return byte_offset<char>(t, n, d, h, w);
}

// Blocks of a cluster take neighbouring tiles, each item together, and share its weights.
__device__ __forceinline__ int first_item() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ int item_step() { return gridDim.x / CLUSTER; }

struct Item {
  int n, d, h, w;  // the tile's first cell; n is behind the batch where the last cluster has a tile too many
  int first;       // in a run: of the cells of batch entry n
  int group, channel_group, line_group, row_group;

  // `part` is the row group among the item's.
  __device__ __forceinline__ void locate(const Geometry& g, int index, int part) {
    row_group = index % g.tile_items * ROW_PARTS + part, index = index / g.tile_items;
    line_group = row_group % LINE_GROUPS;
    channel_group = row_group / LINE_GROUPS % CHANNEL_GROUPS;
    group = row_group / (LINE_GROUPS * CHANNEL_GROUPS);
    index = index * CLUSTER + blockIdx.x % CLUSTER;
    const int column = index % g.tiles[3];
    index = index / g.tiles[3];
    h = index % g.tiles[2] * g.cells[1], index = index / g.tiles[2];
    d = index % g.tiles[1] * g.cells[0], index = index / g.tiles[1];
    if (g.run) {
      const int cell = column * g.run, image = cell / g.pitch[0];
      n = index * g.images + image, first = cell - image * g.pitch[0], w = 0;
    } else {
      n = index * g.images, first = 0, w = column * g.cells[2];
    }
    if (CLUSTER > 1 && index >= g.tiles[0]) n = g.batch;
  }
};

typedef float BlockSums[PIXEL_BLOCKS][SUMS];
typedef BlockSums Sums[ROW_BLOCKS];

template <class Function>
__device__ __forceinline__ void for_each(Function function, BlockSums& sums, BlockSums& totals) {
#pragma unroll
  for (int part = 0; part < PIXEL_BLOCKS; ++part)
#pragma unroll
    for (int i = 0; i < SUMS; ++i) function(sums[part][i], totals[part][i]);
}
template <class Function>
__device__ __forceinline__ void for_each(Function function, Sums& sums, Sums& totals) {
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block) for_each(function, sums[block], totals[block]);
}
"""
FILES["common/item_queue.cuh"] = r"""
// Which items a block computes. The first `own` are its own; behind these it takes the next that no block has, some
// items before it loads that one. So what is being computed at a time is neighbours, however fast each block is, and
// what tiles share (halos, sectors of which each stores a part) is still in the L2 cache when the other one wants it.
// Blocks that each took every n-th item would drift apart, and ever faster: those behind would find nothing there.
//
// One thread of a block, or of a cluster, takes items: from a counter in front of the packed weights, which packing
// sets to zero and only atomic operations touch then, or from one for each of the row groups that blocks stay with. The
// others learn of them through a ring, and walk through all, whichever they work on.

// How many items earlier the others learn of one than that thread comes to it. A group of loaders waits for its next
// item before it turns the stage around that it has; the first group comes there a stage later, and may have to wait
// for a slot that is free only when that stage has been multiplied.
constexpr int FURTHER = ceil_div(LOADER_GROUPS - 1, STAGES_OF_ITEM);
// Those who multiply in turns may have an item to learn of that is two behind the one whose pixels have not been
// multiplied; from there on pixels are loaded ahead, as many stages as there are slots of both kinds.
constexpr int QUEUE = ceil_div(2 * STAGES + RAW_SLOTS + 2 * LOADER_GROUPS, STAGES_OF_ITEM) + 4;
static_assert(2 + ceil_div(STAGES + RAW_SLOTS + LOADER_GROUPS, STAGES_OF_ITEM) + FURTHER < QUEUE, "a short ring");

struct QueueMemory {
  unsigned long long known[QUEUE];  // barriers
  int items[QUEUE];
};

struct Items {
  const Geometry& g;
  unsigned* counters;
  QueueMemory& memory;
  int next = 0;     // of the thread that takes them: the item behind those that are known
  int bands = 1;    // with SCALED (scales.cuh): an item's stages come so many times,
  float scale = 1;  // and by what pixels are multiplied in the last

  __device__ __forceinline__ int stages() const { return SCALED ? bands * STAGES_OF_ITEM : STAGES_OF_ITEM; }

  // By one thread, before the others begin.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < QUEUE; ++i) barrier_init(shared_address(memory.known + i), 1);
  }
  // By the same one, when barriers are ready. In a cluster the one arrival that a barrier waits for is the block's own:
  // items may come before.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < QUEUE; ++i) expect(i);
  }

  // The block's item number `ordinal`; not below g.items behind the last.
  __device__ __forceinline__ int of(int ordinal) const {
    if (ordinal < g.own) return first_item() + ordinal * item_step();
    const int turn = ordinal - g.own;
    barrier_wait(shared_address(memory.known + turn % QUEUE), turn / QUEUE & 1);
    return *(volatile int*)(memory.items + turn % QUEUE);
  }

  // Makes the item known that is FURTHER behind number `ordinal`, by the one thread, which takes them in order, from
  // number 1 on: `own` is at least FURTHER + 2.
  __device__ __forceinline__ void take(int ordinal) {
    const int turn = ordinal + FURTHER - g.own;
    if (turn >= 0) publish(turn % QUEUE);
    if (turn >= -1) next = claim();
  }
  // By the same one, behind the last: a block must not end while items are on their way to it.
  __device__ __forceinline__ void settle(int ordinal) const {
    for (int i = 1; CLUSTER > 1 && i <= FURTHER; ++i) of(ordinal + i);
  }
  // By the same one, when it has learnt of it from `of`.
  __device__ __forceinline__ void taken(int ordinal) const {
    if (ordinal >= g.own) expect((ordinal - g.own) % QUEUE);
  }

 private:
  // The compiler waits for the counter where the item is used, at the next one.
  __device__ __forceinline__ int claim() const {
    const int first = g.own * item_step(), row_group = RESIDENT ? (int)blockIdx.x % g.tile_items : 0;
#ifndef EMULATOR
    if (blockIdx.x % CLUSTER) return 0;  // the first block tells
    unsigned* const counter = counters + row_group;
#else
    unsigned* const counter = counters + row_group + blockIdx.x % CLUSTER;  // each for itself
#endif
    wait_for_prologue();
    return first + (int)atomicAdd(counter, 1u) * (RESIDENT ? g.tile_items.value : 1) + row_group;
  }

#if CLUSTER == 1 || !BULK_COPY || defined(EMULATOR)
  __device__ __forceinline__ void publish(int slot) const {
    *(volatile int*)(memory.items + slot) = next;
    barrier_arrive(shared_address(memory.known + slot));
  }
  __device__ __forceinline__ void expect(int) const {}
#else
  __device__ __forceinline__ void publish(int slot) const {
    if (blockIdx.x % CLUSTER == 0)
      for (int block = 0; block < CLUSTER; ++block)
        store_async(shared_address(memory.items + slot), next, shared_address(memory.known + slot), block);
  }
  // The barrier's next phase ends with the item.
  __device__ __forceinline__ void expect(int slot) const {
    barrier_expect(shared_address(memory.known + slot), sizeof(int));
    barrier_arrive(shared_address(memory.known + slot));
  }
#endif
};

// An item and a stage of it; `index` is not below g.items behind the last.
struct Cursor {
  int index, stage = 0, ordinal = 0;

  __device__ __forceinline__ Cursor() : index(first_item()) {}

  // `count` stages on; true where that is another item.
  __device__ __forceinline__ bool skip(const Items& items, int count) {
    return walk(count, items, [&]() { return items.of(ordinal); });
  }
  // The same behind another cursor, which often knows already.
  __device__ __forceinline__ bool skip_behind(const Cursor& ahead, const Items& items, int count) {
    return walk(count, items, [&]() { return ordinal == ahead.ordinal ? ahead.index : items.of(ordinal); });
  }
  // The same for a warp whose first lane takes the items.
  __device__ __forceinline__ bool skip_and_take(Items& items, int count, bool takes) {
    return walk(count, items, [&]() {
      if (takes) items.take(ordinal);
      __syncwarp();
      const int item = items.of(ordinal);
      if (takes) items.taken(ordinal);
      return item;
    });
  }

 private:
  template <class Next>
  __device__ __forceinline__ bool walk(int count, const Items& items, const Next& next) {
    const int before = ordinal, stages = items.stages();
#pragma unroll 1
    for (stage += count; stage >= stages && index < items.g.items; stage -= stages) {
      ++ordinal;
      index = uniform(next());
    }
    return ordinal != before;
  }
};
"""
FILES["common/pixel_loader.cuh"] = r"""
// From the source tensor to the operands of tensor cores: a stage of an item's pixels, loaded by one group of threads,
// or by the copy engine where the tensor's strides allow it to take boxes.

#if BOX_COPY
// Boxes of an item's pixels: with BOXES as the cores take them, else to be turned around; channels last pixel by pixel,
// and else channel by channel.
struct BoxLoader {
  const Geometry& g;
  const scalar_t* src;
  int channel, w, h, d, n;  // where the item's first box begins

  __device__ __forceinline__ BoxLoader(const Geometry& g, const scalar_t* src) : g(g), src(src) {}

  __device__ __forceinline__ void locate(int index) {
    Item item;
    item.locate(g, index, 0);
    const bool one_row = g.run != 0;  // of all pixels: of an image, with channels last of the tensor
    channel = item.group * SRC_CHANNELS;
    w = one_row ? item.first + (SRC_CHANNELS_LAST ? item.n * g.pitch[0] : 0) : item.w + first_offset(AXIS_W) - g.skew;
    h = one_row ? 0 : item.h + first_offset(AXIS_H);
    d = one_row ? 0 : item.d + first_offset(AXIS_D);
    n = one_row && SRC_CHANNELS_LAST ? 0 : item.n;
  }
  // Of stage `stage` of the item; the barrier is told to wait for them.
  __device__ __forceinline__ void load(int stage, unsigned char* to, unsigned barrier) const {
    const int bytes = g.box_pixels * STAGE_CHANNELS * (int)sizeof(scalar_t), from = channel + stage * STAGE_CHANNELS;
#pragma unroll 1
    for (int i = 0; i < g.boxes; ++i) {
      // There is one box, or one row; or as operands whole images are boxes.
      const bool images = TRANSPOSED && WHOLE_IMAGES;
      const int column = images ? w : w + i * g.box_pixels, image = images ? n + i : n;
      if (SRC_CHANNELS_LAST)
        box_copy(shared_address(to + i * bytes), g.box, src, {from, column, h, d, n}, bytes, barrier);
      else
        box_copy(shared_address(to + i * bytes), g.box, src, {column, h, d, image, from}, bytes, barrier);
    }
  }
};
#endif

// Copied pixels as the tensor cores take them: a warp turns TURNED pixels of a chunk around at a time.
constexpr int TURNED = 128 / (int)sizeof(scalar_t);

// The upper or the lower halves of two words, the first one's below.
__device__ __forceinline__ unsigned join_halves(unsigned first, unsigned second, bool upper) {
#ifndef EMULATOR
  return __byte_perm(first, second, upper ? 0x7632 : 0x5410);
#else
  return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
#endif
}

__device__ __forceinline__ void store_rounded(const Geometry& g, unsigned char* to, const Vector<float, 4>& channels) {
  Vector<float, 4> high, low;
#pragma unroll
  for (int k = 0; k < 4; ++k) split_tf32(channels.value[k], high.value[k], low.value[k]);
  *(Vector<float, 4>*)to = high;
  if (PARTS == 2) *(Vector<float, 4>*)(to + STAGE_CHUNKS * g.chunk_bytes) = low;
}

#if SCALED
typedef StageBand PixelBand;
#else
struct PixelBand {};
#endif

// Of the pixels the first `filled` were copied, and the first `wanted` are used. With WHOLE all were copied, and
// rounded.
template <bool WHOLE>
__device__ __forceinline__ void turn_pixels(const Geometry& g, unsigned char* to, const scalar_t* from, int filled,
                                            int wanted, const PixelBand& band) {
  const int lane = threadIdx.x % 32;
#if SCALED
  Vector<unsigned, 4> channels[PARTS];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      pair[j] = band.of(WHOLE || lane < filled ? ((const float*)from)[(2 * k + j) * g.raw_pitch + lane] : 0.f);
    split_halves(pair[0], pair[1], channels, k);
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    ((Vector<unsigned, 4>*)(to + part * (STAGE_CHUNKS * g.chunk_bytes)))[lane] = channels[part];
#else
  if constexpr (sizeof(scalar_t) == 4) {
    Vector<float, 4> channels;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      channels.value[k] = WHOLE || lane < filled ? ((const float*)from)[k * g.raw_pitch + lane] : 0.f;
    if (WHOLE && PARTS == 1)
      ((Vector<float, 4>*)to)[lane] = channels;
    else
      store_rounded(g, to + lane * 16, channels);
  } else {
    // Lanes take two neighbouring pixels each, and in turns the first or the second first, for the banks' sake.
    const bool second = lane & 4, exists = WHOLE || 2 * lane < filled;
    Vector<unsigned, 4> pixels[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) pair[j] = exists ? ((const unsigned*)(from + (2 * k + j) * g.raw_pitch))[lane] : 0u;
      pixels[0].value[k] = join_halves(pair[0], pair[1], second);
      pixels[1].value[k] = join_halves(pair[0], pair[1], !second);
    }
    if (!WHOLE && 2 * lane >= wanted) return;
    ((Vector<unsigned, 4>*)to)[2 * lane + second] = pixels[0];
    ((Vector<unsigned, 4>*)to)[2 * lane + !second] = pixels[1];
  }
#endif
}

// float32 with channels last, where it lies.
__device__ __forceinline__ void round_pixels(const Geometry& g, unsigned char* pixels) {
  unsigned char* const mine = pixels + threadIdx.x % 32 * 16;
  store_rounded(g, mine, *(const Vector<float, 4>*)mine);
}

// A stage of boxes, a part of it for each of WARPS; what boxes do not fill is zero.
template <int WARPS>
__device__ __forceinline__ void turn_boxes(const Geometry& g, const unsigned char* copied, unsigned char* to, int warp,
                                           const PixelBand& band) {
  const scalar_t* box = (const scalar_t*)copied;
  const int whole = g.box_pixels / TURNED * STAGE_CHUNKS;
  int i = warp, before = 0;  // pixels of the boxes before
  for (int j = 0; j < g.boxes; ++j) {
#pragma unroll 2
    for (i = warp; i < whole; i += WARPS) {
      const int chunk = i % STAGE_CHUNKS, pixel = i / STAGE_CHUNKS * TURNED;
      turn_pixels<true>(g, to + chunk * g.chunk_bytes + (before + pixel) * 16,
                        box + chunk * CHUNK * g.raw_pitch + pixel, 0, 0, band);
    }
    if (j + 1 < g.boxes) box += STAGE_CHANNELS * g.box_pixels, before += g.box_pixels;
  }
  const int wanted = g.halo - before;
  for (; i < ceil_div(wanted, TURNED) * STAGE_CHUNKS; i += WARPS) {
    const int chunk = i % STAGE_CHUNKS, pixel = i / STAGE_CHUNKS * TURNED;
    turn_pixels<false>(g, to + chunk * g.chunk_bytes + (before + pixel) * 16, box + chunk * CHUNK * g.raw_pitch + pixel,
                       g.box_pixels - pixel, wanted - pixel, band);
  }
}

struct Loader {
  const Geometry& g;
  const unsigned* halo;  // position of each copied run of pixels, or NOWHERE
  offset_t* offsets;     // and where it lies in the source, from the tile's batch entry and channel, in elements
  int thread;

  __device__ __forceinline__ void find_pixels(const Item& item) const {
    const int copied = SRC_CHANNELS_LAST ? 1 : copy_bytes(g) / (int)sizeof(scalar_t);
    for (int i = thread; i * copied < g.halo; i += LOADERS) {
      const unsigned position = g.run ? 0 : halo[i];
      Pixel p;
      if (g.run)
        p.locate(g, item.first + i * copied);
      else
        p.unpack(position);
      const int d = g.run ? p.d : item.d + p.d + first_offset(AXIS_D);
      const int h = g.run ? p.h : item.h + p.h + first_offset(AXIS_H);
      const int w = g.run ? p.w : item.w + p.w + first_offset(AXIS_W) - g.skew;
      const bool inside = position != NOWHERE && p.n < g.images && item.n + p.n < g.batch &&
                          (unsigned)d < (unsigned)g.src.size[0] && (unsigned)h < (unsigned)g.src.size[1] &&
                          (unsigned)w < (unsigned)g.src.size[2];
      offsets[i] = inside ? offset_of(g.src, p.n, d, h, w) : PADDING;
    }
  }

  // Channels first: COUNT neighbouring pixels of every channel of the stage. Lanes take pixels, warps channels.
  template <int BYTES>
  __device__ __forceinline__ void copy_rows(const scalar_t* base, int channel, scalar_t* raw) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t), WARPS = LOADERS / 32;
    const int warp = thread / 32;
    const scalar_t* const first = base + warp * g.src.stride[1];
    raw += warp * g.raw_pitch;
    for (int v = thread % 32; v * COUNT < g.halo; v += 32) {
      const offset_t offset = offsets[v];
      const scalar_t* from = first + (offset == PADDING ? 0 : offset);
      unsigned char* to = (unsigned char*)(raw + v * COUNT);
#pragma unroll 4
      for (int i = 0; i < STAGE_CHANNELS / WARPS; ++i) {
        const bool exists =
            offset != PADDING && (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel + warp + i * WARPS < SRC_CHANNELS);
        copy_async<BYTES>(shared_address(to), exists ? from : base, exists);
        from += WARPS * g.src.stride[1];
        to += WARPS * g.raw_pitch * (int)sizeof(scalar_t);
      }
    }
  }

  // Channels last: the chunks of every pixel, whole or (float32) piece by piece.
  template <int BYTES>
  __device__ __forceinline__ void copy_pixels(const scalar_t* base, int channel, unsigned char* to) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t);
    const int chunk = thread % STAGE_CHUNKS;
    const scalar_t* const from = base + chunk * CHUNK;
    to += chunk * g.chunk_bytes;
#pragma unroll 4
    for (int pixel = thread / STAGE_CHUNKS; pixel < g.halo; pixel += LOADERS / STAGE_CHUNKS) {
      const offset_t offset = offsets[pixel];
#pragma unroll
      for (int i = 0; i < CHUNK; i += COUNT) {
        const bool exists = offset != PADDING && channel + chunk * CHUNK + i < SRC_CHANNELS;
        copy_async<BYTES>(shared_address(to + pixel * 16 + i * (int)sizeof(scalar_t)),
                          exists ? from + offset + i : base, exists);
      }
    }
  }

  // Single elements of two bytes are too small for asynchronous copies and pass through registers. MOVED are loaded
  // before the first is stored: as many loads are on their way at once.
  static constexpr int MOVED = 16;

  __device__ __forceinline__ void move_rows(const scalar_t* base, int channel, scalar_t* raw) const {
    constexpr int WARPS = LOADERS / 32, ROWS = STAGE_CHANNELS / WARPS, RUNS = ceil_div(MOVED, ROWS);
    const int warp = thread / 32;
    base += warp * g.src.stride[1], raw += warp * g.raw_pitch, channel += warp;
    for (int first = thread % 32; first < g.halo; first += 32 * RUNS) {
      scalar_t elements[RUNS][ROWS];
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        const offset_t offset = first + run * 32 < g.halo ? offsets[first + run * 32] : PADDING;
        const scalar_t* from = base + (offset == PADDING ? 0 : offset);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const bool exists =
              offset != PADDING && (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel + i * WARPS < SRC_CHANNELS);
          elements[run][i] = exists ? read(from) : zero<scalar_t>();
          from += WARPS * g.src.stride[1];
        }
      }
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
          if (first + run * 32 < g.halo) raw[i * WARPS * g.raw_pitch + first + run * 32] = elements[run][i];
    }
  }

  // A chunk is what the registers allow here.
  __device__ __forceinline__ void move_pixels(const scalar_t* base, int channel, unsigned char* to) const {
    const int chunk = thread % STAGE_CHUNKS;
    base += chunk * CHUNK, channel += chunk * CHUNK;
    to += chunk * g.chunk_bytes;
    for (int pixel = thread / STAGE_CHUNKS; pixel < g.halo; pixel += LOADERS / STAGE_CHUNKS) {
      const offset_t offset = offsets[pixel];
      const scalar_t* const from = base + (offset == PADDING ? 0 : offset);
      Vector<scalar_t, CHUNK> elements;
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        const bool exists = offset != PADDING && channel + i < SRC_CHANNELS;
        elements.value[i] = exists ? read(from + i) : zero<scalar_t>();
      }
      *(Vector<scalar_t, CHUNK>*)(to + pixel * 16) = elements;
    }
  }

  template <int BYTES>
  __device__ __forceinline__ void copy_stage(const scalar_t* base, int channel, unsigned char* to) const {
    if constexpr (SRC_CHANNELS_LAST && BYTES >= 4)
      copy_pixels<BYTES>(base, channel, to);
    else if constexpr (SRC_CHANNELS_LAST)
      move_pixels(base, channel, to);
    else if constexpr (BYTES >= 4)
      copy_rows<BYTES>(base, channel, (scalar_t*)to);
    else
      move_rows(base, channel, (scalar_t*)to);
  }

  // A stage of the tile that `find_pixels` has seen; `base` is its first channel's first element.
  __device__ __forceinline__ void load(const scalar_t* base, int stage, unsigned char* to) const {
    const int channel = stage * STAGE_CHANNELS;
    base += channel * g.src.stride[1];
    if (copy_bytes(g) == 16)
      copy_stage<16>(base, channel, to);
    else if (!SRC_CHANNELS_LAST && copy_bytes(g) == 8)
      copy_stage<8>(base, channel, to);
    else if (!SRC_CHANNELS_LAST && sizeof(scalar_t) == 2 && copy_bytes(g) == 4)
      copy_stage<4>(base, channel, to);
    else
      copy_stage<sizeof(scalar_t)>(base, channel, to);
  }

  // A copied stage as the tensor cores take it.
  __device__ __forceinline__ void convert(const unsigned char* copied, unsigned char* to, const PixelBand& band) const {
    if constexpr (!IN_PLACE || sizeof(scalar_t) == 4) {
#pragma unroll(sizeof(scalar_t) == 4 ? 2 : 1)
      for (int i = thread / 32; i < ceil_div(g.halo, TURNED) * STAGE_CHUNKS; i += LOADERS / 32) {
        const int chunk = i % STAGE_CHUNKS, pixel = i / STAGE_CHUNKS * TURNED;
        unsigned char* const target = to + chunk * g.chunk_bytes + pixel * 16;
        const scalar_t* const row = (const scalar_t*)copied + chunk * CHUNK * g.raw_pitch + pixel;
        if constexpr (IN_PLACE)
          round_pixels(g, target);
        else
          turn_pixels<false>(g, target, row, g.halo - pixel, g.halo - pixel, band);
      }
    }
  }
};
"""
FILES["common/store_phases.cuh"] = r"""
// From accumulators to the destination tensor, where a row block is channels of one phase.

// PIECE cells of the run are stored at once.
constexpr int PIECES = ceil_div(GROUP_CELLS, PIECE);
constexpr int WIDE = 16 / (int)sizeof(scalar_t);  // elements of the widest store
constexpr int COLUMNS = DST_W / WIDTH_PARTS;      // elements of a cell's line, or of its part of the width
static_assert(WIDTH_PARTS == 1 || !DST_CHANNELS_LAST, "parts of lines of pixels");
// Whether an item's two warp groups have the two parts of the same lines: two warps then turn these around together.
constexpr bool JOINT = WIDTH_PARTS > 1 && WIDTH_PARTS == ROW_PARTS;
constexpr int ROW_COLUMNS = JOINT ? DST_W : COLUMNS;  // of a cell, that are stored together
// Elements that a thread puts down at once, of the 2 · COLUMNS neighbours of a row that are its own.
constexpr int STAGED = gcd(JOINT ? COLUMNS : 2 * COLUMNS, WIDE);
// What a warp turns around at a time, 8 channels of a piece; channels last a warp group, the 64 channels of its cells.
// A pitch lets neighbours lie in different banks.
constexpr int STAGING_PITCH =
    DST_CHANNELS_LAST ? ROWS + WIDE
                      : round_up(PIECE * ROW_COLUMNS, (PIECE * ROW_COLUMNS > 16 * WIDE ? 32 : 16) * WIDE) + 4 * STAGED;
constexpr int STAGING = (DST_CHANNELS_LAST ? PIECE : 8) * STAGING_PITCH;
constexpr int STAGERS = DST_CHANNELS_LAST ? 128 : 32;  // threads that share it
constexpr int STAGING_BYTES = CONSUMERS * (128 / STAGERS) * STAGING * (int)sizeof(scalar_t);

// Where a cell's first element goes, from the tile's batch entry and the channel; and how many elements are ours from
// there on along depth, height and width: none of a cell that is not stored.
struct Place {
  offset_t offset;
  unsigned reach;
  static __device__ __forceinline__ unsigned reach_of(int slabs, int rows, int columns) {
    return min(slabs, DST_D) << 20 | min(rows, DST_H) << 10 | min(columns, 1023);
  }
  static __device__ __forceinline__ int columns(unsigned reach) { return reach & 1023; }
  static __device__ __forceinline__ bool has_line(unsigned reach, int depth, int height) {
    return height < (reach >> 10 & 1023) && depth < reach >> 20;
  }
};
static_assert(DST_D < 1024 && DST_H < 1024 && DST_W + 8 < 1024, "ten bits each");
constexpr int STORE_BYTES = STAGING_BYTES + CONSUMERS * GROUP_CELLS * (int)sizeof(Place);

// The bits of COUNT elements, as words.
template <int BYTES>
struct BitsOf {
  typedef Vector<unsigned, BYTES / 4> Type;
};
template <>
struct BitsOf<2> {
  typedef Vector<unsigned short, 1> Type;
};
template <int COUNT>
using Bits = typename BitsOf<COUNT*(int)sizeof(scalar_t)>::Type;

// One store, without a branch. (The compiler may take a vector apart where another path stores the same elements one by
// one, and store those that both have together.)
#ifndef EMULATOR
#define STORE_IF "{ .reg .pred exists; setp.ne.b32 exists, %0, 0; @exists st.global."
__device__ __forceinline__ void store_if(bool exists, void* to, const Vector<unsigned, 4>& bits) {
  asm volatile(STORE_IF "v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"((int)exists), "l"(to), "r"(bits.value[0]),
               "r"(bits.value[1]), "r"(bits.value[2]), "r"(bits.value[3])
               : "memory");
}
__device__ __forceinline__ void store_if(bool exists, void* to, const Vector<unsigned, 2>& bits) {
  asm volatile(STORE_IF "v2.b32 [%1], {%2, %3}; }" ::"r"((int)exists), "l"(to), "r"(bits.value[0]), "r"(bits.value[1])
               : "memory");
}
__device__ __forceinline__ void store_if(bool exists, void* to, const Vector<unsigned, 1>& bits) {
  asm volatile(STORE_IF "b32 [%1], %2; }" ::"r"((int)exists), "l"(to), "r"(bits.value[0]) : "memory");
}
__device__ __forceinline__ void store_if(bool exists, void* to, const Vector<unsigned short, 1>& bits) {
  asm volatile(STORE_IF "b16 [%1], %2; }" ::"r"((int)exists), "l"(to), "h"(bits.value[0]) : "memory");
}
#else
template <class Bits>
__device__ __forceinline__ void store_if(bool exists, void* to, const Bits& bits) {
  if (exists) *(Bits*)to = bits;
}
#endif

// Stores what one warp has summed: 16 channels of each row block, all cells of its warp group's part of the run.
struct Store {
  const Geometry& g;
  const Item& item;
  const Sums& sums;
  int first_cell;                   // of the warp group, among the tile's
  scalar_t* dst;                    // the item's first channel, the tile's first batch entry
  scalar_t* staging;                // of the warp, or the warp group
  Place* places;                    // of the warp group's cells
  float starts[CHANNEL_BLOCKS][2];  // the bias of the thread's rows

  __device__ __forceinline__ Store(const Geometry& g, const Item& item, const Sums& sums, int first_cell, scalar_t* dst,
                                   const scalar_t* bias, unsigned char* memory)
      : g(g),
        item(item),
        sums(sums),
        first_cell(first_cell),
        dst(dst),
        staging((scalar_t*)memory + (JOINT ? warp() : threadIdx.x / STAGERS) * STAGING),
        places((Place*)(memory + STAGING_BYTES) + threadIdx.x / 128 * GROUP_CELLS) {
    find_places();
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = channel(block, lane() / 4 + 8 * half);
        starts[block][half] = HAS_BIAS && of < DST_CHANNELS ? widen(read(bias + of)) : 0.f;
        load_now(starts[block][half]);
      }
  }

  // The compiler leaves the load where it stands, long before its result is used.
  static __device__ __forceinline__ void load_now(float& value) {
#ifndef EMULATOR
    if (HAS_BIAS) asm volatile("" : "+f"(value));
#endif
  }

  // Bits in registers of their own before what follows is stored: left to itself the compiler takes the same few for
  // all, and each waits until those before are stored.
  template <class Bits>
  static __device__ __forceinline__ void compute_now(Bits& bits) {
#ifndef EMULATOR
#pragma unroll
    for (int i = 0; i < (int)sizeof(Bits) / 4; ++i) asm volatile("" : "+r"(((unsigned*)&bits)[i]));
#endif
  }

  // What is the same for every item: nothing.
  static __device__ __forceinline__ void prepare(const Geometry&, unsigned char*) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

  __device__ __forceinline__ int channel(int block, int row) const {
    return (item.channel_group * CHANNEL_BLOCKS + block) * ROWS + channel_of_row(16 * warp() + row);
  }
  // The 2 · COLUMNS elements of an output row that a thread's pair of cells gives. A line below zero owns no taps and
  // is bias alone. (Recursion, so that which accumulator holds an element is a constant to the compiler.)
  template <int LINE, int I = 0>
  __device__ __forceinline__ void run(float (&value)[2 * COLUMNS], int block, int j, int half, float start) const {
    constexpr bool owned = LINE >= 0 && (WIDTH_PARTS > 1 || has_taps(AXIS_W, I % COLUMNS));
    constexpr int index = owned_before(AXIS_W, I % COLUMNS);
    value[I] = start;
    if constexpr (owned) {
      const float (&sum)[SUMS] = sums[(block * LINES + LINE) * LINE_PHASES + index][j / (PIXELS / 8)];
      value[I] = sum[j % (PIXELS / 8) * 4 + 2 * half + I / COLUMNS];
      if (HAS_BIAS) value[I] += start;
    }
    if constexpr (I + 1 < 2 * COLUMNS) run<LINE, I + 1>(value, block, j, half, start);
  }
  static constexpr int FIRST_BARRIER = 6;  // of the named barriers; those before are the loaders'

  // How the lanes of a warp share what is stored of a piece, COUNT elements at a time: each row of a channel, or two;
  // channels last, those of a warp group the 64 channels of each cell.
  template <int COUNT>
  struct Share {
    static constexpr int LANES = DST_CHANNELS_LAST ? ROWS / COUNT : PIECE * ROW_COLUMNS <= 16 * COUNT ? 16 : 32;
    static constexpr int AT_ONCE = STAGERS / LANES;  // rows, or cells
    static constexpr int VECTORS = DST_CHANNELS_LAST ? PIECE / AT_ONCE : ceil_div(PIECE * ROW_COLUMNS, LANES* COUNT);
    offset_t offset[VECTORS];
    unsigned reach[VECTORS];  // of the cell; nothing where the vector is not stored

    __device__ __forceinline__ bool has_line(int i, int depth, int height) const {
      return DST_D * DST_H == 1 ? reach[i] != 0 : Place::has_line(reach[i], depth, height);
    }
  };

  // The threads of a warp group.
  static __device__ __forceinline__ void group_sync() { threads_sync(FIRST_BARRIER + threadIdx.x / 128, 128); }
  // The warps that turn the same lines around.
  static __device__ __forceinline__ void lines_sync() {
    if (JOINT)
      threads_sync(FIRST_BARRIER + CONSUMERS + warp(), 32 * ROW_PARTS);
    else
      __syncwarp();
  }

  // By the warp group together, while its last products are on their way.
  __device__ __forceinline__ void find_places() const {
    group_sync();  // the places of the item before are no longer needed
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < GROUP_CELLS; i += 128) {
      Pixel p;
      p.locate(g, item.first + first_cell + i);
      const int d = (item.d + p.d) * DST_D, h = (item.h + p.h) * DST_H, w = (item.w + p.w) * DST_W;
      const int slabs = g.dst.size[0] - d, rows = g.dst.size[1] - h;
      const int columns = min((g.cells[2] - p.w) * DST_W, g.dst.size[2] - w);
      const bool inside = p.n < g.images && p.d < g.cells[0] && p.h < g.cells[1] && item.n + p.n < g.batch;
      const bool exists = (g.run == 0 || first_cell + i < g.run) && slabs > 0 && rows > 0 && columns > 0;
      places[i] = {offset_of(g.dst, p.n, d, h, w), inside && exists ? Place::reach_of(slabs, rows, columns) : 0u};
    }
    group_sync();
  }

  template <int COUNT>
  __device__ __forceinline__ void describe(int piece, int first, Share<COUNT>& share) const {
    constexpr int LANES = Share<COUNT>::LANES, AT_ONCE = Share<COUNT>::AT_ONCE;
#pragma unroll
    for (int i = 0; i < Share<COUNT>::VECTORS; ++i) {
      const int element = (lane() % LANES + LANES * i) * COUNT;
      const int phase = DST_CHANNELS_LAST ? 0 : first + element % ROW_COLUMNS;
      const int of_piece = DST_CHANNELS_LAST ? threadIdx.x % 128 / LANES + AT_ONCE * i : element / ROW_COLUMNS;
      const int cell = piece * PIECE + of_piece;
      const bool ours = of_piece < PIECE && cell < GROUP_CELLS;
      const Place place = places[ours ? cell : 0];
      share.offset[i] = place.offset + phase * (offset_t)g.dst.stride[4];
      share.reach[i] = ours && phase < Place::columns(place.reach) ? place.reach : 0;
    }
  }

  // Channels first. The warp turns PIECE cells of 8 channels at a time around in shared memory, so that its lanes store
  // neighbouring elements of a row: whole lines are written. Where those are JOINT it has the columns from `first` on
  // of all channels, and stores those of some. The host has seen to it (store_vector in implicit_gemm_tile.py) that
  // COUNT elements exist together or not at all.
  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_piece(int piece, int depth, int height, int first) const {
    constexpr int LANES = Share<COUNT>::LANES, AT_ONCE = Share<COUNT>::AT_ONCE, VECTORS = Share<COUNT>::VECTORS;
    constexpr int STORED = JOINT ? 8 / ROW_PARTS : 8;                           // rows
    const int ahead = lane() / LANES + (JOINT ? first / COLUMNS * STORED : 0);  // of those
    scalar_t* to[VECTORS];                                                      // in the warp's first row
    bool exists[VECTORS];
    {
      Share<COUNT> share;
      describe(piece, JOINT ? 0 : first, share);
      scalar_t* const line = dst + depth * g.dst.stride[2] + height * g.dst.stride[3];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        to[i] = line + (channel(0, 0) + ahead) * g.dst.stride[1] + share.offset[i];
        exists[i] = share.has_line(i, depth, height);
      }
    }
    scalar_t* const to_shared =
        staging + lane() / 4 * STAGING_PITCH + lane() % 4 * 2 * ROW_COLUMNS + (JOINT ? first : 0);
    const scalar_t* const from = staging + ahead * STAGING_PITCH + lane() % LANES * COUNT;
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first_channel = channel(block, 8 * half);
        if (DST_CHANNELS % GROUP_CHANNELS && first_channel >= DST_CHANNELS) continue;
        Bits<STAGED> values[PIECE / 8][2 * COLUMNS / STAGED];
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
          float value[2 * COLUMNS];
          alignas(16) scalar_t narrowed[2 * COLUMNS];
          run<LINE>(value, block, piece * (PIECE / 8) + j, half, starts[block][half]);
#pragma unroll
          for (int i = 0; i < 2 * COLUMNS; ++i) narrow(value[i], narrowed[i]);
#pragma unroll
          for (int i = 0; i < 2 * COLUMNS / STAGED; ++i) {
            values[j][i] = *(const Bits<STAGED>*)(narrowed + i * STAGED);
            compute_now(values[j][i]);
          }
        }
        lines_sync();
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
#pragma unroll
          for (int i = 0; i < 2 * COLUMNS / STAGED; ++i)
            *(Bits<STAGED>*)(to_shared + (8 * j + i * STAGED / COLUMNS) * ROW_COLUMNS + i * STAGED % COLUMNS) =
                values[j][i];
        }
        lines_sync();
        constexpr int ROWS_AT_ONCE = ceil_div(STORED / AT_ONCE, VECTORS > 2 ? 4 : VECTORS);
#pragma unroll
        for (int row = 0; row < STORED; row += AT_ONCE * ROWS_AT_ONCE) {
          Bits<COUNT> bits[ROWS_AT_ONCE][VECTORS];
#pragma unroll
          for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
              bits[k][i] = *(const Bits<COUNT>*)(from + (row + k * AT_ONCE) * STAGING_PITCH + LANES * COUNT * i);
#pragma unroll
          for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
              const int ahead_of = ROWS * block + 8 * half + row + k * AT_ONCE;  // the warp's first row
              const bool of_group = DST_CHANNELS % 8 == 0 || channel(0, 0) + ahead + ahead_of < DST_CHANNELS;
              store_if(exists[i] && of_group, to[i] + ahead_of * g.dst.stride[1], bits[k][i]);
            }
        }
      }
  }

  // Channels last: a thread's two rows are neighbouring channels, eight lanes hold 16 of them, and four warps all 64.
  // The warp group turns one phase of a piece around, so that a lane stores 16 bytes, or the COUNT elements that are
  // aligned, and its neighbours those beside them.
  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_pixels(int piece, int depth, int height) const {
    Share<WIDE> share;
    if constexpr (COUNT == WIDE) describe(piece, 0, share);
    scalar_t* const line = dst + depth * g.dst.stride[2] + height * g.dst.stride[3];
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block) {
      const int first_channel = (item.channel_group * CHANNEL_BLOCKS + block) * ROWS;
#pragma unroll
      for (int phase = 0; phase < DST_W; ++phase) {
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
          float value[2][2 * DST_W];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            run<LINE>(value[half], block, piece * (PIECE / 8) + j, half, starts[block][half]);
#pragma unroll
          for (int cell = 0; cell < 2; ++cell) {
            Vector<scalar_t, 2> pair;
#pragma unroll
            for (int half = 0; half < 2; ++half) narrow(value[half][cell * DST_W + phase], pair.value[half]);
            *(Vector<scalar_t, 2>*)(staging + (8 * j + lane() % 4 * 2 + cell) * STAGING_PITCH + 16 * warp() +
                                    lane() / 4 * 2) = pair;
          }
        }
        group_sync();
        scalar_t* const to = line + phase * g.dst.stride[4] + first_channel;
        if constexpr (COUNT == WIDE)
          store_wide(share, to, DST_CHANNELS - first_channel, phase, depth, height);
        else
          store_narrow<COUNT>(piece, to, DST_CHANNELS - first_channel, phase, depth, height);
        group_sync();
      }
    }
  }

  // What a warp group has put down of a phase, 16 bytes at a time.
  __device__ __forceinline__ void store_wide(const Share<WIDE>& share, scalar_t* to, int channels, int phase, int depth,
                                             int height) const {
    constexpr int LANES = Share<WIDE>::LANES, AT_ONCE = Share<WIDE>::AT_ONCE, VECTORS = Share<WIDE>::VECTORS;
    const int of_channel = lane() % LANES * WIDE;
    const scalar_t* const from = staging + threadIdx.x % 128 / LANES * STAGING_PITCH + of_channel;
    to += of_channel;
    bool exists[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      exists[i] = phase < Place::columns(share.reach[i]) && of_channel < channels && share.has_line(i, depth, height);
#pragma unroll
    for (int i = 0; i < VECTORS; i += 2) {  // two vectors on their way together
      const Bits<WIDE> first = *(const Bits<WIDE>*)(from + i * AT_ONCE * STAGING_PITCH);
      const Bits<WIDE> second = *(const Bits<WIDE>*)(from + (i + 1) * AT_ONCE * STAGING_PITCH);
      store_if(exists[i], to + share.offset[i], first);
      store_if(exists[i + 1], to + share.offset[i + 1], second);
    }
  }

  // The same, COUNT elements at a time: lanes run along the channels that there are, and on to the next cell.
  template <int COUNT>
  __device__ __forceinline__ void store_narrow(int piece, scalar_t* to, int channels, int phase, int depth,
                                               int height) const {
    constexpr int OF_CELL = ceil_div(DST_CHANNELS < ROWS ? DST_CHANNELS : ROWS, COUNT);
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < PIECE * OF_CELL; i += 128) {
      const int cell = i / OF_CELL, of_channel = i % OF_CELL * COUNT;
      if (piece * PIECE + cell >= GROUP_CELLS) break;
      const Place place = places[piece * PIECE + cell];
      const bool exists = phase < Place::columns(place.reach) && Place::has_line(place.reach, depth, height);
      store_if(exists && of_channel < channels, to + place.offset + of_channel,
               *(const Bits<COUNT>*)(staging + cell * STAGING_PITCH + of_channel));
    }
  }

  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_line(int piece, int depth, int height, int first) const {
    if constexpr (DST_CHANNELS_LAST)
      store_pixels<COUNT, LINE>(piece, depth, height);
    else
      store_piece<COUNT, LINE>(piece, depth, height, first);
  }

  template <int COUNT, int LINE = 0>
  __device__ __forceinline__ void store_lines(int piece) const {
    const int owned = item.line_group * LINES + LINE;
    if (owned < OWNED_LINES)
      store_line<COUNT, LINE>(piece, depth_of_line(owned), height_of_line(owned), owned % WIDTH_PARTS * COLUMNS);
    if constexpr (LINE + 1 < LINES) store_lines<COUNT, LINE + 1>(piece);
  }

  // The item's lines; and one item stores those that own no taps.
  template <int COUNT>
  __device__ __forceinline__ void store_all() const {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      store_lines<COUNT>(piece);
      if (OWNED_LINES < DST_D * DST_H * WIDTH_PARTS && item.line_group == 0) {
#pragma unroll 1
        for (int phase = 0; phase < DST_D * DST_H; ++phase)
          if (!has_taps(AXIS_D, phase / DST_H) || !has_taps(AXIS_H, phase % DST_H))
            store_line<COUNT, -1>(piece, phase / DST_H, phase % DST_H, 0);
      }
    }
  }

  // Channels last, all elements of a pixel are stored so many at a time, or one by one where they are not aligned.
  static __device__ constexpr bool may_store(int count) {
    return !DST_CHANNELS_LAST || count == gcd(DST_CHANNELS, WIDE);
  }

  __device__ __forceinline__ void operator()() const {
    if constexpr (may_store(WIDE))
      if (store_vector(g) == WIDE) return store_all<WIDE>();
    if constexpr (may_store(WIDE / 2))
      if (store_vector(g) == WIDE / 2) return store_all<WIDE / 2>();
    if constexpr (WIDE > 4 && may_store(2))
      if (store_vector(g) == 2) return store_all<2>();
    store_all<1>();
  }
};
"""
FILES["implicit_gemm.cu"] = r"""
// The forward pass as products of matrices on tensor cores, all phases of a tile in one block.
//
// A tile of cells and the halo around it lie in shared memory as one flat run of pixels, every row of the halo behind
// the one before: 16 bytes (CHUNK channels) a pixel, chunk by chunk. In that run a tap is a constant distance, so the
// pixels that a tap needs for PIXELS neighbouring cells are the operand of one instruction, at another address
// (matrix.cuh), and a tile is read once for all its taps. Cells of the run that lie in the halo are computed and not
// stored.
//
// Some warp groups load: pixels are copied asynchronously LOOKAHEAD stages ahead, in the order in which they lie in
// memory, and then turned around (channels innermost) and rounded on their way from shared to shared memory. Where the
// copy engine can take boxes of the source (g.boxes), one warp has it load and others turn around alone, groups of
// them stages in turn. With BOXES they are operands as they come: channels last, or in half precision where a tap is no
// distance. The others multiply: each its part of the tile's cells; or all cells and its own row group (SPLIT_ROWS); or
// a tile of its own (TAKE_TURNS), and one stores while the other multiplies. Blocks stay, and take one item after the
// other (item_queue.cuh): the next tile is being loaded while the last one is stored. RESIDENT weights stay, too: then
// the items of a block are of the same row groups, and stages are pixels alone. Otherwise a CLUSTER of blocks may share
// weights: each copies a part of them to all, when a slot is free in all of them. The kernel may start while its
// weights are still being packed, and waits for them when the first pixels are on their way; with SCALED before those,
// as it must know how many bands there are (scales.cuh).
//
// Items and their runs are in gemm_tile.cuh, rows and operations in row_blocks.cuh. With TAPS_IN_ROWS a tap is no
// distance but a row: the columns are all pixels of the run, halo included, and store_overlap.cuh takes the place of
// store_phases.cuh.

// What the block keeps in shared memory, apart from the stages.
struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  unsigned long long turn[CONSUMERS];    // of each warp group to multiply
  unsigned long long resident;           // weights have come
  unsigned long long come[RAW_SLOTS];    // boxes that are to be turned around
  unsigned long long turned[RAW_SLOTS];  // and their slots, free again
  QueueMemory queue;
  int operations[OPERATIONS * LINE_GROUPS + 1];  // distance of each operation's pixels, in bytes
  int counts[ROW_BLOCKS * LINE_GROUPS];          // operations of each row block
};

// Of each thread. Where some would spill, those who multiply give GIVEN_REGISTERS each to those who load, or take them.
constexpr int LOADER_REGISTERS = LOADER_THREADS == 128 ? 56 + 2 * GIVEN_REGISTERS : 48 + GIVEN_REGISTERS;
constexpr int MULTIPLIER_REGISTERS = (LOADER_THREADS == 128 ? 224 : 208) - GIVEN_REGISTERS;
static_assert(!WGMMA_INSTRUCTION ||
                  registers_suffice(CONSUMERS * 128, MULTIPLIER_REGISTERS, LOADER_THREADS, LOADER_REGISTERS),
              "too few registers");

// A warp group gives a slot back. Its warps multiply together with wgmma, and each at its own pace with mma.sync.
constexpr int RELEASES = WGMMA_INSTRUCTION ? 1 : 4;
__device__ __forceinline__ void release(unsigned barrier) {
  if (RELEASES > 1) __syncwarp();
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x % 128 < CLUSTER) barrier_arrive_at(barrier, threadIdx.x % 128);
  } else if (threadIdx.x % (128 / RELEASES) == 0)
    barrier_arrive(barrier);
}

// Operations of a row block in a row, without a branch: the cores then take one instruction right after the other. A
// branch amid the products of a stage has the assembler put a fence before each of them. (That of NVRTC 13.0 says so,
// C7519; that of 13.5 does it in silence.) So on Hopper there is code for each kind of groups of lines.
constexpr Kinds KINDS = find_kinds();
constexpr bool ALIKE = KINDS.next[0] == LINE_GROUPS;
constexpr bool STRAIGHT = K_STEPS * KINDS.operations <= (ALIKE ? 128 : WGMMA_INSTRUCTION ? 256 : 0);
constexpr int UNROLLED = STRAIGHT ? KINDS.most : 2;

// The cores cut sums off, and the loss grows with every addition. With PARTS = 2 float32 adds up, and rounds, what they
// make of a stage; and in straight code of one kind (else the assembler makes products wait for one another) of at most
// CHAIN operations.
constexpr int CHAIN = 16;
__host__ __device__ constexpr int chain_of(int operations) { return ceil_div(operations, ceil_div(operations, CHAIN)); }
constexpr bool CHAINED = PARTS == 2 && ALIKE && STRAIGHT && K_STEPS * KINDS.most > CHAIN;

// A slot of a ring, and the parity of its barriers.
template <int SLOTS>
struct Slot {
  int index = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void skip(int count) {
    const int sum = index + count;
    index = sum % SLOTS, parity ^= sum / SLOTS & 1;
  }
};

// A stage of an item among those of its band, and the band: that of the smallest magnitudes comes first.
__device__ __forceinline__ int stage_of_band(const Items& items, int stage) {
  return SCALED && items.bands > 1 ? stage % STAGES_OF_ITEM : stage;
}
__device__ __forceinline__ PixelBand band_of(const Items& items, int stage) {
#if SCALED
  return StageBand(items.scale, items.bands, items.bands > 1 ? stage / STAGES_OF_ITEM : 0);
#else
  return {};
#endif
}

#if BULK_COPY
// A stage's weights of a row group, by one thread.
__device__ __forceinline__ void copy_weights(unsigned to, const unsigned char* from, unsigned barrier) {
  if constexpr (CLUSTER > 1)
    bulk_copy_shared<CLUSTER>(to, from, WEIGHT_STAGE, barrier);
  else
    bulk_copy(to, from, WEIGHT_STAGE, barrier);
}
#endif

#if BOX_COPY
// Where the copy engine brings boxes, one warp tells it to: pixels are as far ahead as they have slots, those of
// stages with BOXES and their own otherwise, weights go to the stages. The first pixels are on their way before weights
// are waited for.
constexpr int PIXEL_SLOTS = BOXES ? STAGES : RAW_SLOTS;

__device__ __forceinline__ void load_boxes(const Geometry& g, Items& items, const scalar_t* src,
                                           const unsigned char* packed, unsigned char* stages, int stage_bytes,
                                           unsigned char* pixels, int pixel_bytes, unsigned full, unsigned empty,
                                           unsigned come, unsigned turned) {
  BoxLoader loader(g, src);
  const bool first_lane = threadIdx.x % 32 == 0;
  Cursor ahead, now;
  Slot<PIXEL_SLOTS> slot_ahead;
  auto load_pixels = [&]() {
    if (ahead.stage == 0) loader.locate(ahead.index);
    const unsigned barrier = (BOXES ? full : come) + 8 * slot_ahead.index;
    if (elect()) {
      loader.load(stage_of_band(items, ahead.stage), pixels + slot_ahead.index * pixel_bytes, barrier);
      if (!BOXES) barrier_arrive(barrier);
    }
    __syncwarp();
    ahead.skip_and_take(items, 1, first_lane), slot_ahead.skip(1);
  };
  for (int i = 0; i < PIXEL_SLOTS && ahead.index < g.items; ++i) load_pixels();
  wait_for_prologue();
  Slot<STAGES> slot;
  int loaded = 0;  // stages, up to PIXEL_SLOTS
  for (; now.index < g.items; now.skip_behind(ahead, items, 1)) {
    barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
    if (BOXES && loaded == PIXEL_SLOTS) load_pixels();
    if (BOXES && loaded < PIXEL_SLOTS) ++loaded;
    const unsigned char* const weights =
        packed + now.index % g.tile_items * (ROW_PARTS * WEIGHT_ITEM) + stage_of_band(items, now.stage) * WEIGHT_STAGE;
    if (elect()) {
      for (int part = 0; !RESIDENT && part < ROW_PARTS; ++part)
        copy_weights(shared_address(stages + slot.index * stage_bytes + part * WEIGHT_STAGE),
                     weights + part * WEIGHT_ITEM, full + 8 * slot.index);
      barrier_arrive(full + 8 * slot.index);
    }
    __syncwarp();
    slot.skip(1);
    if (!BOXES && ahead.index < g.items) {
      barrier_wait(turned + 8 * slot_ahead.index, slot_ahead.parity ^ 1);
      load_pixels();
    }
  }
  if (first_lane) items.settle(ahead.ordinal);
}

// One of the warps that turn boxes around, each at its own pace: of a group of TURNERS that takes every
// TURNING_GROUPS-th stage.
__device__ __forceinline__ void turn_stages(const Geometry& g, const Items& items, int warp, unsigned char* stages,
                                            int stage_bytes, const unsigned char* raw, int raw_stage, unsigned full,
                                            unsigned empty, unsigned come, unsigned turned) {
  const int group = warp / TURNERS;
  Cursor now;
  Slot<STAGES> slot;
  Slot<RAW_SLOTS> slot_raw;
  now.skip(items, group), slot.skip(group), slot_raw.skip(group);
  while (now.index < g.items) {
    barrier_wait(come + 8 * slot_raw.index, slot_raw.parity);
    barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
    turn_boxes<TURNERS>(g, raw + slot_raw.index * raw_stage, stages + slot.index * stage_bytes + WEIGHT_SLOT,
                        warp % TURNERS, band_of(items, now.stage));
    publish_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(full + 8 * slot.index), barrier_arrive(turned + 8 * slot_raw.index);
    now.skip(items, TURNING_GROUPS), slot.skip(TURNING_GROUPS), slot_raw.skip(TURNING_GROUPS);
  }
}
#endif

#if SCALED
// By what the thread's rows are multiplied, beside what all pixels are.
struct RowFactors {
  float of[ROW_BLOCKS][2];

  __device__ __forceinline__ void load(const float* rows) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * ROW_BLOCKS; ++i) of[i / 2][i % 2] = rows[i / 2 * ROWS + i % 2 * 8 + row];
  }
  __device__ __forceinline__ void unscale(Sums& sums, float scale) const {
    const float of_pixels = unscale_pixel(scale);
#pragma unroll
    for (int i = 0; i < 2 * ROW_BLOCKS; ++i) {
      const float of_row = of[i / 2][i % 2];
      const float smaller = fminf(of_row, of_pixels),
                  larger = fmaxf(of_row, of_pixels);  // in this order none overflows
#pragma unroll
      for (int part = 0; part < PIXEL_BLOCKS; ++part)
#pragma unroll
        for (int j = 0; j < SUMS / 2; ++j) {
          float& sum = sums[i / 2][part][j / 2 * 4 + i % 2 * 2 + j % 2];
          sum = sum * smaller * larger;
        }
    }
  }
};
#endif

__device__ __forceinline__ void add_up(float& sum, float& total) { total += sum, clear(sum); }

// The kind whose row blocks have `counts` operations. (What is known of a kind is a constant here and below, lest the
// compiler compute it at run time, amid the products.)
template <int KIND = 0>
__device__ __forceinline__ int kind_of(const int (&counts)[ROW_BLOCKS]) {
  if constexpr (KINDS.next[KIND] < LINE_GROUPS) {
    constexpr Counts of_kind = counts_of(KIND);
    bool other = false;
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) other |= counts[block] != of_kind.of[block];
    if (other) return kind_of<KINDS.next[KIND]>(counts);
  }
  return KIND;
}

// A stage of an item: where its operands lie in shared memory.
struct Operands {
  int stage;
  unsigned weights, pixels;
  const int* distances;
};

// The products of a stage, of a group of lines of KIND; where there is no code for each, of `counts` operations.
template <int KIND>
__device__ __forceinline__ void multiply(const Geometry& g, const Operands& of, const int (&counts)[ROW_BLOCKS],
                                         Sums& sums, Sums& totals) {
  constexpr Counts of_kind = counts_of(KIND);
  products_begin();
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    unsigned a = of.weights + step * OPERATIONS * OPERATION_BYTES;
    const int* distances = of.distances;
    int distance = *distances;
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
#pragma unroll(UNROLLED)
      for (int i = 0; i < (STRAIGHT || ALIKE ? of_kind.of[block] : counts[block]); ++i) {
        const unsigned b = of.pixels + step * (BOXES ? BOX_STEP : 2 * g.chunk_bytes) + distance;
        distance = *++distances;  // in time for the next operation
        const bool add = PARTS == 2 || of.stage + step + i > 0;
#pragma unroll
        for (int part = 0; part < PIXEL_BLOCKS; ++part) {
          float (&to)[SUMS] = sums[block][part];
          const unsigned from = b + part * (PIXELS * PIXEL_PITCH);
          if (PARTS == 2) {
            add_product(to, a, from + STAGE_CHUNKS * g.chunk_bytes, g.chunk_bytes, add);
            add_product(to, a + 2 * A_CHUNK, from, g.chunk_bytes, true);
          }
          add_product(to, a, from, g.chunk_bytes, add);
        }
        a += OPERATION_BYTES;
        if constexpr (CHAINED) {
          const int all = K_STEPS * of_kind.of[block], done = step * of_kind.of[block] + i + 1;
          if (done % chain_of(all) == 0 && done < all) {
            products_commit();
            products_wait<0>();
            for_each(add_up, sums[block], totals[block]);
            products_begin();
          }
        }
      }
    }
  }
  products_commit();
}
template <int KIND = 0>
__device__ __forceinline__ void multiply_kind(int kind, const Geometry& g, const Operands& of,
                                              const int (&counts)[ROW_BLOCKS], Sums& sums, Sums& totals) {
  if constexpr (STRAIGHT && KINDS.next[KIND] < LINE_GROUPS)
    if (kind != KIND) return multiply_kind<KINDS.next[KIND]>(kind, g, of, counts, sums, totals);
  multiply<KIND>(g, of, counts, sums, totals);
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, MIN_BLOCKS)
    implicit_gemm(const scalar_t* __restrict__ src, const unsigned char* __restrict__ packed,
                  const scalar_t* __restrict__ bias, scalar_t* __restrict__ dst, const __grid_constant__ Geometry g) {
  extern __shared__ __align__(BOXES ? 1024 : 128) unsigned char shared_memory[];
  __shared__ __align__(8) Shared shared;
  const int thread = threadIdx.x;
  const int warp_group = __shfl_sync(0xffffffffu, thread / 128, 0);
  const int pixel_stage = PARTS * STAGE_CHUNKS * g.chunk_bytes;  // bytes
  const int stage_bytes = WEIGHT_SLOT + pixel_stage;
  const int raw_stage = STAGE_CHANNELS * g.raw_pitch * max(g.boxes, 1) * (int)sizeof(scalar_t);
  unsigned char* const resident = shared_memory + STAGES * stage_bytes;
  unsigned char* raw = resident + RESIDENT_WEIGHTS;
  unsigned char* const store_memory = raw + (IN_PLACE ? 0 : RAW_SLOTS * raw_stage);
  unsigned* const halo = (unsigned*)(store_memory + STORE_BYTES);

  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  const unsigned turns = shared_address(shared.turn);
  Items items{g, (unsigned*)packed, shared.queue};
  packed += COUNTER_BYTES;
#if SCALED
  const Scales scales((unsigned char*)packed);
  packed += SCALES_BYTES;
#endif
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, !takes_boxes(g) ? LOADERS : BOXES ? 1 : TURNERS + 1);
      barrier_init(empty + 8 * i, SHARERS * RELEASES * CLUSTER);
    }
    for (int i = 0; i < CONSUMERS; ++i) barrier_init(turns + 8 * i, 1);
    barrier_init(shared_address(&shared.resident), 1);
    for (int i = 0; i < RAW_SLOTS; ++i) {
      barrier_init(shared_address(shared.come + i), 1);
      barrier_init(shared_address(shared.turned + i), TURNERS);
    }
    items.init();
    barriers_publish();
    items.begin();
  }
  // Positions are the same for every tile.
  const int copied = SRC_CHANNELS_LAST ? 1 : copy_bytes(g) / (int)sizeof(scalar_t);
  if (!takes_boxes(g))
    for (int i = thread; i * copied < g.halo; i += THREADS) {
      Pixel p;
      p.locate(g, i * copied);
      const bool inside = p.n < g.images && p.d < g.cells[0] + REACH_D && p.h < g.cells[1] + REACH_H;
      halo[i] = inside ? p.packed() : NOWHERE;
    }
  Store::prepare(g, store_memory);
  for (int i = thread; i < OPERATIONS * LINE_GROUPS; i += THREADS) {
    Operation o;
    int pixels = 0;
    if (!TAPS_IN_ROWS && find_operation(i % OPERATIONS, i / OPERATIONS * LINES, o))
      pixels = (src_offset(AXIS_D, o.depth_tap) - first_offset(AXIS_D)) * g.pitch[1] +
               (src_offset(AXIS_H, o.height_tap) - first_offset(AXIS_H)) * g.pitch[2] +
               src_offset(AXIS_W, o.width_tap) - first_offset(AXIS_W) + g.skew;
    shared.operations[i] = pixels * PIXEL_PITCH;
  }
  for (int i = thread; i < ROW_BLOCKS * LINE_GROUPS; i += THREADS)
    shared.counts[i] = operations_of(i % ROW_BLOCKS, i / ROW_BLOCKS * LINES);
  if (BOXES) {  // what none fills
    for (int i = g.boxes * g.box_pixels * PIXEL_PITCH + thread * 16; i < g.halo * PIXEL_PITCH; i += THREADS * 16)
      for (int stage = 0; stage < STAGES; ++stage)
        *(Vector<unsigned, 4>*)(shared_memory + stage * stage_bytes + WEIGHT_SLOT + i) = Vector<unsigned, 4>{};
    publish_shared();
  }
#if !BULK_COPY
  for (int i = thread * 16; i < RESIDENT_WEIGHTS; i += THREADS * 16)
    *(Vector<unsigned, 4>*)(resident + i) =
        *(const Vector<unsigned, 4>*)(packed + (long long)((int)blockIdx.x % g.tile_items) * RESIDENT_WEIGHTS + i);
#endif
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
#if SCALED
  wait_for_prologue();
  items.scale = scales.first_band().scale, items.bands = scales.first_band().bands;
#endif

#if BOX_COPY
  if (takes_boxes(g) && warp_group >= CONSUMERS) {
    registers_release<LOADER_REGISTERS>();
    const int warp = __shfl_sync(0xffffffffu, thread / 32 - CONSUMERS * 4, 0);
    const unsigned come = shared_address(shared.come), turned = shared_address(shared.turned);
    if (warp < TURNING_GROUPS * TURNERS && !BOXES) {
      turn_stages(g, items, warp, shared_memory, stage_bytes, raw, raw_stage, full, empty, come, turned);
    } else if (warp == LOADER_THREADS / 32 - 1) {
      unsigned char* const pixels = BOXES ? shared_memory + WEIGHT_SLOT : raw;
      load_boxes(g, items, src, packed, shared_memory, stage_bytes, pixels, BOXES ? stage_bytes : raw_stage, full,
                 empty, come, turned);
    }
    return;
  }
#endif
  if (warp_group >= CONSUMERS) {
    registers_release<LOADER_REGISTERS>();
    // The loading groups take stages in turn.
    const int loader_thread = thread - CONSUMERS * 128;
    const int loader_group = __shfl_sync(0xffffffffu, loader_thread / LOADERS, 0);
    raw += loader_group * RAW_STAGES * raw_stage;
    const int table = ceil_div(g.halo, copied);
    const Loader loader{g, halo, (offset_t*)(halo + round_up(table, 2)) + loader_group * table,
                        loader_thread % LOADERS};
    Cursor ahead, now;
    ahead.skip(items, loader_group), now.skip(items, loader_group);
    Slot<STAGES> slot, slot_ahead;
    slot.skip(loader_group), slot_ahead.skip(loader_group);
    Slot<RAW_STAGES> copy_ahead, copy_now;
    const scalar_t* base = src;
    const unsigned char* weights = packed;
    bool new_item = true, new_weights = true;
    auto start_copy = [&]() {
      if (ahead.index < g.items) {
        if (new_item) {
          Item item;
          item.locate(g, ahead.index, 0);
          base = src + (CLUSTER == 1 || item.n < g.batch ? item.n : 0) * g.src.stride[0] +
                 (long long)item.group * SRC_CHANNELS * g.src.stride[1];
          threads_sync(1 + loader_group, LOADERS);  // all have copied the tile before
          loader.find_pixels(item);
          threads_sync(1 + loader_group, LOADERS);
        }
        if (IN_PLACE) {
          barrier_wait(empty + 8 * slot_ahead.index, slot_ahead.parity ^ 1);
          loader.load(base, stage_of_band(items, ahead.stage),
                      shared_memory + slot_ahead.index * stage_bytes + WEIGHT_SLOT);
          slot_ahead.skip(LOADER_GROUPS);
        } else {
          loader.load(base, stage_of_band(items, ahead.stage), raw + copy_ahead.index * raw_stage);
          copy_ahead.skip(1);
        }
        new_item = ahead.skip_and_take(items, LOADER_GROUPS, loader_thread == 0);
      }
      copies_commit();
    };
    // The first rounds do nothing but start copies. One loop, since starting them is a lot of code.
    for (int round = -LOOKAHEAD; round < 0 || now.index < g.items; ++round) {
      unsigned char* const stage = shared_memory + slot.index * stage_bytes;
      if (round >= 0) {
        if (round == 0) wait_for_prologue();
        if (new_weights) weights = packed + now.index % g.tile_items * (ROW_PARTS * WEIGHT_ITEM);
        if (!IN_PLACE) barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
#if BULK_COPY
        if (!RESIDENT && loader.thread == 0)
          for (int part = 0; part < ROW_PARTS; ++part)
            copy_weights(shared_address(stage + part * WEIGHT_STAGE),
                         weights + part * WEIGHT_ITEM + stage_of_band(items, now.stage) * WEIGHT_STAGE,
                         full + 8 * slot.index);
        copies_wait<LOOKAHEAD - 1>();
#else
        copies_wait<LOOKAHEAD - 1>();
        for (int i = loader.thread * 16; i < WEIGHT_SLOT; i += LOADERS * 16)
          copy_async<16>(shared_address(stage + i),
                         weights + i / WEIGHT_STAGE * WEIGHT_ITEM + stage_of_band(items, now.stage) * WEIGHT_STAGE +
                             i % WEIGHT_STAGE,
                         true);
        copies_commit();
#endif
        threads_sync(1 + loader_group, LOADERS);
      }
      start_copy();
      if (round < 0) continue;
      loader.convert(IN_PLACE ? stage + WEIGHT_SLOT : raw + copy_now.index * raw_stage, stage + WEIGHT_SLOT,
                     band_of(items, now.stage));
#if !BULK_COPY
      copies_wait<1>();
#endif
      publish_shared();
      barrier_arrive(full + 8 * slot.index);
      slot.skip(LOADER_GROUPS);
      copy_now.skip(1);
      new_weights = now.skip_behind(ahead, items, LOADER_GROUPS);
    }
    copies_wait<0>();
    if (loader_thread == 0) items.settle(ahead.ordinal);
  } else {
    registers_claim<MULTIPLIER_REGISTERS>();
    Slot<STAGES> slot;
    Sums sums, totals;  // the latter for PARTS = 2
    const int turn = TAKE_TURNS ? warp_group : 0;
    const int row_part = ROW_PARTS > 1 ? warp_group : 0, cell_part = CELL_PARTS > 1 ? warp_group : 0;
    slot.skip(turn * items.stages());
    unsigned turn_parity = 0;
#if BULK_COPY
    if (RESIDENT) {
      const unsigned come = shared_address(&shared.resident);
      if (thread == 0) {
        wait_for_prologue();
        bulk_copy(shared_address(resident), packed + (long long)((int)blockIdx.x % g.tile_items) * RESIDENT_WEIGHTS,
                  RESIDENT_WEIGHTS, come);
        barrier_arrive(come);
      }
      barrier_wait(come, 0);
    }
#endif
    Cursor now;
    for (now.skip(items, turn * items.stages()); now.index < g.items;
         now.skip(items, CONSUMERS / SHARERS * items.stages())) {
      Item item;
      item.locate(g, now.index, row_part);
      int counts[ROW_BLOCKS];
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS; ++i)
        counts[i] = ALIKE ? 0 : __shfl_sync(~0u, shared.counts[item.line_group * ROW_BLOCKS + i], 0);
      const int kind = STRAIGHT && !ALIKE ? kind_of(counts) : 0;
      int previous = -1;
      // The parity of a slot tells its last use from the one before only, so nobody may wait further ahead.
      if (TAKE_TURNS) barrier_wait(turns + 8 * turn, turn_parity ^ (turn == 0));
      turn_parity ^= 1;
      if constexpr (PARTS == 2) for_each([](float& sum, float& total) { total = 0, clear(sum); }, sums, totals);
#pragma unroll 1
      for (int band = 1;; ++band) {
#pragma unroll 1
        for (int stage = 0; stage < STAGES_OF_ITEM; ++stage) {
          barrier_wait(full + 8 * slot.index, slot.parity);
          const unsigned held = shared_address(shared_memory + slot.index * stage_bytes);
          const unsigned weights = RESIDENT
                                       ? shared_address(resident) + row_part * (int)WEIGHT_ITEM + stage * WEIGHT_STAGE
                                       : held + row_part * WEIGHT_STAGE;
          const unsigned pixels = held + WEIGHT_SLOT + cell_part * (GROUP_CELLS * PIXEL_PITCH);
          const Operands operands{stage + band - 1, weights, pixels, shared.operations + item.line_group * OPERATIONS};
          multiply_kind(kind, g, operands, counts, sums, totals);
          if constexpr (PARTS == 2) {
            products_wait<0>();
            for_each(add_up, sums, totals);
          } else {
            products_wait<1>();
          }
          if (previous >= 0) release(empty + 8 * previous);
          previous = slot.index;
          slot.skip(1);
        }
#if SCALED
        if (band < items.bands) {
          products_wait<0>();
          for_each([](float& sum, float& total) { (PARTS == 2 ? total : sum) *= power_of_two(127 - BAND); }, sums,
                   totals);
          continue;
        }
#endif
        break;
      }
      const int first_channel = item.group * DST_CHANNELS;
      const Store store(g, item, sums, cell_part * GROUP_CELLS,
                        dst + item.n * g.dst.stride[0] + first_channel * g.dst.stride[1], bias + first_channel,
                        store_memory);
#if SCALED
      const float* const of_rows = scales.rows() + (long long)item.row_group * (ROW_BLOCKS * ROWS);
      RowFactors rows;
      if (!TAPS_IN_ROWS) rows.load(of_rows);  // else a register spills
#endif
      products_wait<0>();
      if constexpr (PARTS == 2) for_each([](float& sum, float& total) { sum = total; }, sums, totals);
      release(empty + 8 * previous);
#if SCALED
      if (TAPS_IN_ROWS) rows.load(of_rows);
      rows.unscale(sums, items.scale);
#endif
      if (TAKE_TURNS) {
        slot.skip(items.stages());
        if (thread % 128 == 0) barrier_arrive(turns + 8 * (CONSUMERS - 1 - turn));
      }
      // Always true without clusters; without the branch the assembler reads sums ahead of the wait, and then makes
      // every product wait for the one before.
      if (item.n < g.batch) store();
    }
    if (CLUSTER > 1) cluster_sync();  // others may still be to give slots back here
  }
}
"""
FILES["common/stages.cuh"] = r"""
// Boxes of tensors on their way to shared memory, stage after stage, by asynchronous copies where pieces have 4 bytes
// or more. The specialisation defines WARPS, and which of a block's load.

constexpr int THREADS = 32 * WARPS;
constexpr int LOADERS = 32 * LOAD_WARPS;
constexpr int ELEMENT = sizeof(scalar_t);
constexpr int OPERATION = 32 / ELEMENT;  // k of one instruction

// What a stage holds of a tensor: of each channel (of the weight: row) a box, moved in pieces.
struct Part {
  int extent[4];  // along n, d, h and w
  int piece;      // elements moved at once: along w, or of neighbouring channels
  int pitch;      // bytes in shared memory from one channel to the next
};

// The thread's number among those that load.
__device__ __forceinline__ int loader() { return threadIdx.x - 32 * FIRST_LOAD_WARP; }

__device__ __forceinline__ int elements(const Part& part) {
  return part.extent[0] * part.extent[1] * part.extent[2] * part.extent[3];
}

__device__ __forceinline__ bool exists(const Tensor5& t, int batch, int n, int d, int h, int w) {
  return n < batch && (unsigned)d < (unsigned)t.size[0] && (unsigned)h < (unsigned)t.size[1] &&
         (unsigned)w < (unsigned)t.size[2];
}

// The pieces of a box that stays where it is.
struct Still {
  long long* offsets;  // from the channel's first element; below zero where there is no piece
  int pieces;          // of a channel

  // Lists those of `count` elements; beyond the box there are none. The box begins at `origin` (n, d, h, w).
  __device__ __forceinline__ void init(const Tensor5& t, const Part& part, long long* list, int count, int along_w,
                                       int batch, const int (&origin)[4]) {
    offsets = list;
    pieces = count / along_w;
    for (int i = loader(); i < pieces; i += LOADERS) {
      int at[4];
      decode(part.extent, i * along_w, at);
      const bool in_box = at[0] < part.extent[0];
#pragma unroll
      for (int j = 0; j < 4; ++j) at[j] += origin[j];
      offsets[i] = in_box && exists(t, batch, at[0], at[1], at[2], at[3]) ? offset_of(t, at) : -16;  // aligned
    }
  }

  __device__ __forceinline__ long long begin(const Tensor5&) const { return 0; }
  // Whether piece `i` exists, and its offset from there.
  __device__ __forceinline__ bool find(const Tensor5&, int i, long long& offset) const {
    offset = offsets[i];
    return offset >= 0;
  }
};

// The pieces of a box that begins elsewhere at each stage.
struct alignas(16) Place {
  short n, d, h, w;  // counted from the box's first element; n is -1 where there is no piece
  long long offset;  // from there
};
struct Moving {
  Place* places;
  int pieces;  // of a channel

  __device__ __forceinline__ void init(const Tensor5& t, const Part& part, Place* list, int count, int along_w) {
    places = list;
    pieces = count / along_w;
    for (int i = loader(); i < pieces; i += LOADERS) {
      int at[4];
      decode(part.extent, i * along_w, at);
      const short n = at[0] < part.extent[0] ? (short)at[0] : -1;
      places[i] = Place{n, (short)at[1], (short)at[2], (short)at[3], offset_of(t, at)};
    }
  }

  // The same for the box that begins at `origin` (n, d, h, w).
  __device__ __forceinline__ long long begin(const Tensor5& t, int /* batch */, const int (&origin)[4]) const {
    return offset_of(t, origin);
  }
  __device__ __forceinline__ bool find(const Tensor5& t, int i, long long& offset, int batch,
                                       const int (&origin)[4]) const {
    const Place place = places[i];
    offset = place.offset;
    return place.n >= 0 &&
           exists(t, batch, origin[0] + place.n, origin[1] + place.d, origin[2] + place.h, origin[3] + place.w);
  }
};

// Where a tensor has its channels; those that come last are turned around on their way.
enum class Channels { first, last };

// One part of a stage on its way to shared memory; up to 1 << SPAN threads go along the pieces of a channel.
template <Channels ORDER, int CHANNELS, class Box, int SPAN = 5>
struct PartLoader {
  static constexpr int VECTOR = CHANNELS % (16 / ELEMENT) == 0 ? 16 / ELEMENT : 1;  // channels at once

  const Tensor5& tensor;
  const Part& part;
  Box box;

  __device__ __forceinline__ PartLoader(const Tensor5& tensor, const Part& part) : tensor(tensor), part(part) {}

  // `list` has room for the pieces of `count` elements, `more` is what the box needs besides.
  template <class Entry, class... More>
  __device__ __forceinline__ void init(Entry* list, int count, const More&... more) {
    box.init(tensor, part, list, count, ORDER == Channels::first ? part.piece : 1, more...);
  }

  // The box in `channels` channels from `from` on; those beyond are zero. `at` is where a moving box is.
  template <class... At>
  __device__ __forceinline__ void load(const scalar_t* from, int channels, char* to, const At&... at) const {
    from += box.begin(tensor, at...);
    if constexpr (ORDER != Channels::first) {
      if (VECTOR > 1 && part.piece > 1)
        load_channels<VECTOR>(from, channels, to, at...);
      else
        load_channels<1>(from, channels, to, at...);
    } else {
      switch (part.piece * ELEMENT) {
        case 16:
          return load_pieces<16>(from, channels, to, at...);
        case 8:
          return load_pieces<8>(from, channels, to, at...);
        case 4:
          return load_pieces<4>(from, channels, to, at...);
        default:
          return load_pieces<ELEMENT>(from, channels, to, at...);
      }
    }
  }

 private:
  // Threads go along a row, and take channels in turn; where rows are short, several channels at once.
  template <int BYTES, class... At>
  __device__ __forceinline__ void load_pieces(const scalar_t* from, int channels, char* to, const At&... at) const {
    if (box.pieces > 1 << (SPAN - 1))
      load_rows<BYTES>(SPAN, from, channels, to, at...);
    else
      load_rows<BYTES>(32 - __clz(box.pieces - 1), from, channels, to, at...);
  }

  // With 1 << `span` lanes along a row.
  template <int BYTES, class... At>
  __device__ __forceinline__ void load_rows(int span, const scalar_t* from, int channels, char* to,
                                            const At&... at) const {
    const int lanes = 1 << span, first = loader() >> span, at_once = LOADERS >> span;  // channels
    const bool whole = (CHANNELS & (at_once - 1)) == 0;
    from += first * tensor.stride[1];
    to += first * part.pitch;
    for (int i = loader() & (lanes - 1); i < box.pieces; i += lanes) {
      long long offset;
      const bool inside = box.find(tensor, i, offset, at...);
      const scalar_t* source = from + offset;
      char* slot = to + i * BYTES;
      if constexpr (BYTES >= 4) {
#pragma unroll 4
        for (int channel = 0; channel < CHANNELS; channel += at_once) {
          if (whole || first + channel < CHANNELS)
            copy_async<BYTES>(shared_address(slot), source, inside && first + channel < channels);
          source += at_once * tensor.stride[1];
          slot += at_once * part.pitch;
        }
      } else {  // too small for asynchronous copies: several are on their way before the first is stored
        constexpr int MOVED = CHANNELS < 8 ? CHANNELS : 8;
#pragma unroll 1
        for (int channel = first; channel < CHANNELS; channel += MOVED * at_once) {
          scalar_t elements[MOVED];
#pragma unroll
          for (int j = 0; j < MOVED; ++j, source += at_once * tensor.stride[1])
            elements[j] = inside && channel + j * at_once < min(CHANNELS, channels) ? read(source) : zero<scalar_t>();
#pragma unroll
          for (int j = 0; j < MOVED; ++j, slot += at_once * part.pitch)
            if (channel + j * at_once < CHANNELS) *(scalar_t*)slot = elements[j];
        }
      }
    }
  }

  // Lanes go along channels.
  template <int WIDTH, class... At>
  __device__ __forceinline__ void load_channels(const scalar_t* from, int channels, char* to, const At&... at) const {
    constexpr int VECTORS = CHANNELS / WIDTH, MOVED = WIDTH == 1 ? 4 : 2;
    const int count = box.pieces * VECTORS;
#pragma unroll 1
    for (int begin = loader(); begin < count; begin += MOVED * LOADERS) {
      Vector<scalar_t, WIDTH> vectors[MOVED] = {};  // all on their way before the first is stored
#pragma unroll
      for (int k = 0; k < MOVED; ++k) {
        const int i = begin + k * LOADERS, channel = i % VECTORS * WIDTH;
        long long offset;
        if (i < count && box.find(tensor, i / VECTORS, offset, at...) && channel < channels)
          vectors[k] = *(const Vector<scalar_t, WIDTH>*)(from + offset + channel);
      }
#pragma unroll
      for (int k = 0; k < MOVED; ++k) {
        const int i = begin + k * LOADERS;
        if (i >= count) break;
        char* const slot = to + i % VECTORS * WIDTH * part.pitch + i / VECTORS * ELEMENT;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) *(scalar_t*)(slot + j * part.pitch) = vectors[k].value[j];
      }
    }
  }
};

// Stages through BUFFERS buffers of `bytes` each: load(stage, buffer) begins copies that compute(buffer) needs. Copies
// run BUFFERS - 1 stages ahead, each into the buffer that the barrier of the stage before has freed.
template <class Load, class Compute>
__device__ __forceinline__ void run_stages(int stages, char* buffers, int bytes, const Load& load,
                                           const Compute& compute) {
#pragma unroll 1
  for (int stage = 1 - BUFFERS; stage < stages; ++stage) {
    if (stage >= 0) {
      copies_wait<BUFFERS - 2>();
      __syncthreads();
    }
    const int ahead = stage + BUFFERS - 1;
    if (ahead < stages) load(ahead, buffers + ahead % BUFFERS * bytes);
    copies_commit();
    if (stage >= 0) compute(buffers + stage % BUFFERS * bytes);
  }
}
"""
FILES["common/window.cuh"] = r"""
// The window of the output gradient: what a tile of input positions meets of it, its halo included. It lies in shared
// memory as it does in the tensor, [output channel][n][d][h][w], and serves every tap: the element that a position
// meets at a tap is the sum of two offsets, one of the position, one of the output channel and the tap.

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
"""
FILES["common/window_product.cuh"] = r"""
// Both gradients as products of matrices on tensor cores, one stage after the other:
//
//     sum[row, column]  +=  Σ_k  A[row, k] · window[offset of k  +  offset of column]
//
// Rows are input channels. In the weight gradient columns are pairs of output channel and tap, k are positions, and A
// is the input; in the input gradient columns are positions, k are pairs of output channel and tap, and A is the
// weight.
//
// A window is what a tile of input positions meets of the output gradient, its halo included. It lies in shared memory
// as it does in the tensor, and serves every tap: the element that a position meets at a tap is the sum of two offsets,
// one of the position, one of the output channel and the tap. So neither operand is ever unfolded.
//
// Index mapping. The warps are ROW_WARPS × the rest; a warp computes 16·ROW_TILES rows and 8·COLUMN_TILES columns, with
// the fragments of common/mma.cuh: A's by ldmatrix, the window's element by element; float32 is rounded to TF32 there.
//
// Shared memory of a stage: A as [row][k], A_PITCH bytes a row, which no eight rows of ldmatrix find in one bank; the
// window as [output channel][n][d][h][w].

constexpr int COLUMN_WARPS = WARPS / ROW_WARPS;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, COLUMNS = 8 * COLUMN_TILES * COLUMN_WARPS;
constexpr int CHUNK_TAPS = OUT_CHUNK * TAPS;
constexpr int DEPTH = INPUT_GRAD ? round_up(CHUNK_TAPS, OPERATION) : POSITIONS;  // k of a stage
constexpr int A_PITCH = DEPTH * ELEMENT + 16;
constexpr int A_BYTES = ROWS * A_PITCH;

static_assert(DEPTH % OPERATION == 0, "a stage is whole operations");

// The sums of a warp.
struct Sums {
  float of[ROW_TILES][COLUMN_TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROW_TILES * COLUMN_TILES * 4; ++i) (&of[0][0][0])[i] = 0;
  }

  // The first row and column of the warp.
  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / COLUMN_WARPS * (16 * ROW_TILES); }
  static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % COLUMN_WARPS * (8 * COLUMN_TILES); }

  // Those of the thread's sums; sum i of a tile lies i / 2 · 8 rows and i % 2 columns on.
  static __device__ __forceinline__ int first_row() { return warp_row() + threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int first_column() { return warp_column() + threadIdx.x % 4 * 2; }

  // The column of tile `j` whose operand the thread reads.
  static __device__ __forceinline__ int operand_column(int j) { return warp_column() + 8 * j + threadIdx.x % 32 / 4; }

  // One stage. `columns` are the window's offsets of each tile's operand column.
  __device__ __forceinline__ void add(const char* a, const char* window, const int* offsets,
                                      const int (&columns)[COLUMN_TILES]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // lanes may have loaded different numbers of pieces
    const unsigned rows_at = shared_address(a) + (warp_row() + lane % 16) * A_PITCH + lane / 16 * 16;
#pragma unroll 2
    for (int operation = 0; operation < DEPTH / OPERATION; ++operation) {
      unsigned rows[ROW_TILES][4];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        load_matrices(rows[i], rows_at + i * 16 * A_PITCH + operation * 32);
        if constexpr (ELEMENT == 4) {
#pragma unroll
          for (int j = 0; j < 4; ++j) rows[i][j] = __float_as_uint(round_tf32(__uint_as_float(rows[i][j])));
        }
      }
      constexpr int EACH = 4 / ELEMENT;  // k of a word
      const char* from[2 * EACH];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Vector<int, EACH> two =
            *(const Vector<int, EACH>*)(offsets + operation * OPERATION + half * (OPERATION / 2) + lane % 4 * EACH);
#pragma unroll
        for (int i = 0; i < EACH; ++i) from[half * EACH + i] = window + two.value[i];
      }
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j) {
        unsigned column[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (ELEMENT == 4)
            column[half] = __float_as_uint(round_tf32(*(const float*)(from[half] + columns[j])));
          else
            column[half] = *(const unsigned short*)(from[half * EACH] + columns[j]) |
                           *(const unsigned short*)(from[half * EACH + EACH - 1] + columns[j]) << 16;
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) mma(of[i][j], rows[i], column[0], column[1]);
      }
    }
  }
};
"""
FILES["weight_grad_gemm.cu"] = r"""
// The weight gradient on tensor cores (common/window_product.cuh):
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// Index mapping. A block owns ROWS input channels and OUT_CHUNK output channels with all their taps, of one group, and
// one contiguous part of the tiles of input positions; a stage is a tile. Blocks on different parts write to different
// planes of `partial`, which the caller sums in order: the result does not depend on timing.
//
// Shared memory: where the pieces of both operands lie, the positions' offsets, then BUFFERS stages.
//
// The cores' sums lose a bit at every step. So FLUSH stages are summed there, and those sums in `partial`.

struct Geometry {
  Tensor5 x, g;
  Part x_part, window;
  int batch, groups;
  int lanes[4];                  // positions of a tile along n, d, h, w; their product is at most POSITIONS
  int tiles[4];                  // tiles along n, d, h, w
  int skew;                      // elements from the window's first to what the first tap of the first position meets
  int table_bytes, stage_bytes;  // of shared memory
  long long part_length;         // tiles of a part
  long long all_tiles;
  long long plane;  // elements of one plane of `partial`: all weights
};

constexpr int ROW_BLOCKS = ceil_div(IN_CHANNELS, ROWS), COLUMN_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr int FLUSH = ceil_div(2048, POSITIONS);

static_assert(CHUNK_TAPS <= COLUMNS, "a block computes all taps of its channels");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_grad_gemm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, float* __restrict__ partial,
                     const Geometry g) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int column_block = block % COLUMN_BLOCKS;
  block /= COLUMN_BLOCKS;
  const int group = block % g.groups;
  const int part = block / g.groups;
  const long long first_tile = part * g.part_length;
  const int stages = (int)(first_tile + g.part_length < g.all_tiles ? g.part_length : g.all_tiles - first_tile);

  const int first_in = row_block * ROWS, first_out = column_block * OUT_CHUNK;
  const int rows = IN_CHANNELS - first_in, channels = OUT_CHANNELS - first_out;  // that exist, from there on

  int* const offsets = (int*)shared_memory;
  Place* const places = (Place*)(offsets + POSITIONS);
  char* const buffers = (char*)shared_memory + g.table_bytes;

  PartLoader<X_CHANNELS_LAST ? Channels::last : Channels::first, ROWS, Moving> x_loader(g.x, g.x_part);
  PartLoader<G_CHANNELS_LAST ? Channels::last : Channels::first, OUT_CHUNK, Moving> g_loader(g.g, g.window);
  x_loader.init(places, POSITIONS);
  g_loader.init(places + x_loader.box.pieces, elements(g.window));
  list_positions(offsets, POSITIONS, g.window, g.lanes, g.skew);
  x += (long long)(group * IN_CHANNELS + first_in) * g.x.stride[1];
  grad += (long long)(group * OUT_CHANNELS + first_out) * g.g.stride[1];
  partial += part * g.plane + (long long)(group * IN_CHANNELS + first_in) * (OUT_CHANNELS * TAPS) + first_out * TAPS;

  int columns[COLUMN_TILES];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; ++j) {
    const int column = Sums::operand_column(j);
    columns[j] = column < CHUNK_TAPS ? offset_of_tap(g.window, column / TAPS, column % TAPS) : 0;
  }

  Sums sums;
  sums.clear();
  bool flushed = false;
  auto flush = [&]() {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = Sums::first_row() + 16 * i + k / 2 * 8, column = Sums::first_column() + 8 * j + k % 2;
          if (row >= rows || column >= min(OUT_CHUNK, channels) * TAPS) continue;
          float* const to = partial + (long long)row * (OUT_CHANNELS * TAPS) + column;
          *to = flushed ? *to + sums.of[i][j][k] : sums.of[i][j][k];
        }
    sums.clear();
    flushed = true;
  };

  int tile[4];  // the next to be loaded
  decode(g.tiles, first_tile, tile);
  auto load = [&](int, char* to) {
    int origin[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) origin[i] = tile[i] * g.lanes[i];
    x_loader.load(x, rows, to, g.batch, origin);
    to_window(origin, g.skew);
    g_loader.load(grad, channels, to + A_BYTES, g.batch, origin);
#pragma unroll
    for (int i = 3; i > 0; --i) {
      if (++tile[i] < g.tiles[i]) return;
      tile[i] = 0;
    }
    ++tile[0];
  };
  int until_flush = FLUSH;
  __syncthreads();
  run_stages(stages, buffers, g.stage_bytes, load, [&](const char* from) {
    sums.add(from, from + A_BYTES, offsets, columns);
    if (--until_flush == 0) {
      flush();
      until_flush = FLUSH;
    }
  });
  flush();
}
"""

# =====================================================================================================================
# What each of them is made from: its name, its constants, its files
# =====================================================================================================================

KERNELS = {}
KERNELS["sm_90a"] = [
    ("pack_weights", r"""
// pack_weights, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 1, 0, 1};
constexpr Axis AXIS_W = {3, 1, 0, 1};
constexpr bool INPUT_GRAD = false;
constexpr int SRC_CHANNELS = 64;
constexpr int DST_CHANNELS = 64;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 576;
constexpr int WEIGHT_STRIDE_OUT = 9;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr int CHANNEL_BLOCKS = 1;
constexpr int LINES = 1;
constexpr int WIDTH_PARTS = 1;
constexpr int K_STEPS = 1;
constexpr int PARTS = 1;
constexpr bool TAPS_IN_ROWS = false;
constexpr int ROW_CHANNELS = 0;
constexpr int OPERATIONS = 9;
constexpr int COUNTER_BYTES = 128;
constexpr int MIN_BLOCKS = 1;
constexpr int SLAB_CHANNELS = 16;
constexpr int SLAB_TAPS = 9;
constexpr int SLAB_THREADS = 160;
#define SCALED 0  // float32 is multiplied as float16
""", ("common/geometry.cuh", "common/tensor_float.cuh", "common/scaled_half.cuh", "common/row_blocks.cuh", "common/dependent.cuh", "common/counters.cuh", "pack_weights.cu")),
    ("implicit_gemm", r"""
// implicit_gemm, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 1, 0, 1};
constexpr Axis AXIS_W = {3, 1, 0, 1};
constexpr bool INPUT_GRAD = false;
constexpr int SRC_CHANNELS = 64;
constexpr int DST_CHANNELS = 64;
constexpr bool HAS_BIAS = false;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 576;
constexpr int WEIGHT_STRIDE_OUT = 9;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr int CHANNEL_BLOCKS = 1;
constexpr int LINES = 1;
constexpr int WIDTH_PARTS = 1;
constexpr int K_STEPS = 1;
constexpr int PARTS = 1;
constexpr bool TAPS_IN_ROWS = false;
constexpr int ROW_CHANNELS = 0;
constexpr int OPERATIONS = 9;
constexpr int COUNTER_BYTES = 128;
constexpr int MIN_BLOCKS = 1;
constexpr bool SRC_CHANNELS_LAST = false;
constexpr bool WHOLE_IMAGES = false;
constexpr bool BOXES = false;
constexpr int PIXELS = 144;
constexpr int PIXEL_BLOCKS = 2;
constexpr int CONSUMERS = 2;
constexpr bool SPLIT_ROWS = false;
constexpr bool TAKE_TURNS = true;
constexpr bool RESIDENT = false;
constexpr int LOADER_GROUPS = 2;
constexpr int LOADER_THREADS = 256;
constexpr int GIVEN_REGISTERS = 0;
constexpr int TURNING_GROUPS = 2;
constexpr int STAGES = 4;
constexpr int STORE_VECTOR = 0;
constexpr int COPY_BYTES = 0;
constexpr int RAW_STAGES = 2;
constexpr int PIECE = 64;
#define MMA_SHAPE "m16n8k8.row.col.f32.tf32.tf32.f32"
#define SCALED 0  // float32 is multiplied as float16
#define WGMMA_INSTRUCTION 1
#define CLUSTER 2  // thread blocks
// sums = (add ? sums : 0) + A · B; descriptors are of matrices in shared memory.
#ifndef EMULATOR
__device__ __forceinline__ void wgmma(float (&sums)[72], unsigned long long a, unsigned long long b, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %74, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n144k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71}, "
      "%72, %73, add, 1, 1; }"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71])
      : "l"(a), "l"(b), "r"((int)add));
}
#endif
""", ("common/geometry.cuh", "common/tensor_float.cuh", "common/scaled_half.cuh", "common/row_blocks.cuh", "common/dependent.cuh", "common/copy_async.cuh", "common/wgmma.cuh", "common/async.cuh", "common/mma.cuh", "common/matrix.cuh", "common/divisor.cuh", "common/gemm_tile.cuh", "common/item_queue.cuh", "common/pixel_loader.cuh", "common/store_phases.cuh", "implicit_gemm.cu")),
    ("pack_weights", r"""
// pack_weights, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 1, 2, 1};
constexpr Axis AXIS_W = {3, 1, 2, 1};
constexpr bool INPUT_GRAD = false;
constexpr int SRC_CHANNELS = 64;
constexpr int DST_CHANNELS = 64;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 9;
constexpr int WEIGHT_STRIDE_OUT = 576;
constexpr int WEIGHT_STRIDE_TAP = -1;
constexpr int CHANNEL_BLOCKS = 1;
constexpr int LINES = 1;
constexpr int WIDTH_PARTS = 1;
constexpr int K_STEPS = 1;
constexpr int PARTS = 1;
constexpr bool TAPS_IN_ROWS = false;
constexpr int ROW_CHANNELS = 0;
constexpr int OPERATIONS = 9;
constexpr int COUNTER_BYTES = 128;
constexpr int MIN_BLOCKS = 1;
constexpr int SLAB_CHANNELS = 16;
constexpr int SLAB_TAPS = 9;
constexpr int SLAB_THREADS = 160;
#define SCALED 0  // float32 is multiplied as float16
""", ("common/geometry.cuh", "common/tensor_float.cuh", "common/scaled_half.cuh", "common/row_blocks.cuh", "common/dependent.cuh", "common/counters.cuh", "pack_weights.cu")),
    ("implicit_gemm", r"""
// implicit_gemm, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 1, 2, 1};
constexpr Axis AXIS_W = {3, 1, 2, 1};
constexpr bool INPUT_GRAD = false;
constexpr int SRC_CHANNELS = 64;
constexpr int DST_CHANNELS = 64;
constexpr bool HAS_BIAS = false;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 9;
constexpr int WEIGHT_STRIDE_OUT = 576;
constexpr int WEIGHT_STRIDE_TAP = -1;
constexpr int CHANNEL_BLOCKS = 1;
constexpr int LINES = 1;
constexpr int WIDTH_PARTS = 1;
constexpr int K_STEPS = 1;
constexpr int PARTS = 1;
constexpr bool TAPS_IN_ROWS = false;
constexpr int ROW_CHANNELS = 0;
constexpr int OPERATIONS = 9;
constexpr int COUNTER_BYTES = 128;
constexpr int MIN_BLOCKS = 1;
constexpr bool SRC_CHANNELS_LAST = false;
constexpr bool WHOLE_IMAGES = false;
constexpr bool BOXES = false;
constexpr int PIXELS = 160;
constexpr int PIXEL_BLOCKS = 2;
constexpr int CONSUMERS = 2;
constexpr bool SPLIT_ROWS = false;
constexpr bool TAKE_TURNS = true;
constexpr bool RESIDENT = false;
constexpr int LOADER_GROUPS = 2;
constexpr int LOADER_THREADS = 256;
constexpr int GIVEN_REGISTERS = 0;
constexpr int TURNING_GROUPS = 2;
constexpr int STAGES = 4;
constexpr int STORE_VECTOR = 0;
constexpr int COPY_BYTES = 0;
constexpr int RAW_STAGES = 2;
constexpr int PIECE = 64;
#define MMA_SHAPE "m16n8k8.row.col.f32.tf32.tf32.f32"
#define SCALED 0  // float32 is multiplied as float16
#define WGMMA_INSTRUCTION 1
#define CLUSTER 2  // thread blocks
// sums = (add ? sums : 0) + A · B; descriptors are of matrices in shared memory.
#ifndef EMULATOR
__device__ __forceinline__ void wgmma(float (&sums)[80], unsigned long long a, unsigned long long b, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %82, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "
      "%80, %81, add, 1, 1; }"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]), "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79])
      : "l"(a), "l"(b), "r"((int)add));
}
#endif
""", ("common/geometry.cuh", "common/tensor_float.cuh", "common/scaled_half.cuh", "common/row_blocks.cuh", "common/dependent.cuh", "common/copy_async.cuh", "common/wgmma.cuh", "common/async.cuh", "common/mma.cuh", "common/matrix.cuh", "common/divisor.cuh", "common/gemm_tile.cuh", "common/item_queue.cuh", "common/pixel_loader.cuh", "common/store_phases.cuh", "implicit_gemm.cu")),
    ("weight_grad_gemm", r"""
// weight_grad_gemm, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned long long offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 1, 0, 1};
constexpr Axis AXIS_W = {3, 1, 0, 1};
constexpr bool INPUT_GRAD = false;
constexpr int IN_CHANNELS = 64;
constexpr int OUT_CHANNELS = 64;
constexpr int WEIGHT_STRIDE_IN = 576;
constexpr int WEIGHT_STRIDE_OUT = 9;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr bool X_CHANNELS_LAST = false;
constexpr bool G_CHANNELS_LAST = false;
constexpr int WARPS = 8;
constexpr int LOAD_WARPS = 8;
constexpr int FIRST_LOAD_WARP = 0;
constexpr int ROW_TILES = 4;
constexpr int COLUMN_TILES = 4;
constexpr int ROW_WARPS = 1;
constexpr int OUT_CHUNK = 22;
constexpr int POSITIONS = 64;
constexpr int BUFFERS = 4;
constexpr int PARTS = 1;
constexpr int MIN_BLOCKS = 2;
#define MMA_SHAPE "m16n8k8.row.col.f32.tf32.tf32.f32"
""", ("common/geometry.cuh", "common/tensor_float.cuh", "common/copy_async.cuh", "common/mma.cuh", "common/stages.cuh", "common/window.cuh", "common/window_product.cuh", "weight_grad_gemm.cu")),
]

# =====================================================================================================================
# From Python to a launch, in C++
# =====================================================================================================================

LAUNCHER = r"""
// The kernels by number, for binding.cpp. POLYPHASE_KERNELS is the list of them.

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

struct Entry {
  const void* kernel;
  std::size_t pointers, geometry_bytes;
};

// Every kernel takes pointers and, last, the sizes of the call as one value, if it needs any.
template <class... Parameters>
Entry entry(void (*kernel)(Parameters...)) {
  Entry found = {(const void*)kernel, 0, 0};
  const bool are_pointers[] = {std::is_pointer<Parameters>::value...};
  const std::size_t sizes[] = {sizeof(Parameters)...};
  for (std::size_t i = 0; i < sizeof...(Parameters); ++i)
    (are_pointers[i] ? found.pointers : found.geometry_bytes) += are_pointers[i] ? 1 : sizes[i];
  return found;
}

static const Entry entries[] = {POLYPHASE_KERNELS};

std::size_t pointers_of(std::size_t number) { return entries[number].pointers; }
std::size_t geometry_bytes_of(std::size_t number) { return entries[number].geometry_bytes; }

cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream) {
  const void* const kernel = entries[number].kernel;
  if (shared_bytes > 32 << 10) {  // beside its own, which a kernel may use; more is to be asked for
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (status != cudaSuccess) return status;
  }
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
"""

BINDING = r"""
// From Python to a launch: checks, the tensors' device, its current stream, the tensor maps of boxes.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

std::size_t pointers_of(std::size_t number);
std::size_t geometry_bytes_of(std::size_t number);
cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream);

// Boxes that the copy engine takes of one of a kernel's tensors, as the driver is told of them: dimensions innermost
// first, strides in bytes, without the first dimension's.
struct Boxes {
  std::uint64_t sizes[5], strides[4];
  std::uint32_t box[5], steps[5], data_type, swizzle, tensor, unused;
};

// The driver's cuTensorMapEncodeTiled. It is found at run time, since nothing here links the driver, and CUDA 11 has
// none of its types.
typedef int (*EncodeTiled)(void* map, unsigned data_type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                           const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                           unsigned interleave, unsigned swizzle, unsigned promotion, unsigned fill);

EncodeTiled find_encode_tiled() {
  void* found = nullptr;
#if CUDART_VERSION >= 13000
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault);
#else
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault);
#endif
  TORCH_CHECK(found, "the CUDA driver or runtime knows no tensor maps: both must be of CUDA 12 or newer");
  return (EncodeTiled)found;
}

// Puts the tensor maps of boxes where the geometry begins.
void place_tensor_maps(std::string& geometry, const std::string& packed, const std::vector<void*>& addresses) {
  static const EncodeTiled encode_tiled = find_encode_tiled();
  alignas(64) char map[128];
  Boxes boxes;
  const std::size_t count = packed.size() / sizeof boxes;
  TORCH_CHECK(packed.size() == count * sizeof boxes && geometry.size() >= count * sizeof map, "boxes are described by ",
              sizeof boxes, " bytes each, and their maps take ", sizeof map, " of the kernel's, given ", packed.size(),
              " bytes and ", geometry.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(&boxes, packed.data() + i * sizeof boxes, sizeof boxes);
    void* address = addresses.at(boxes.tensor);
    if (address == nullptr) address = reinterpret_cast<void*>(sizeof map);  // of an empty tensor no box is brought
    const int status = encode_tiled(map, boxes.data_type, 5, address, boxes.sizes, boxes.strides, boxes.box,
                                    boxes.steps, 0 /* not interleaved */, boxes.swizzle,
                                    2 /* lines of 128 bytes to L2 */, 0 /* zeros beside the tensor */);
    TORCH_CHECK(status == 0, "the CUDA driver makes no tensor map, error ", status, ": data type ", boxes.data_type,
                ", sizes ", c10::ArrayRef<std::uint64_t>(boxes.sizes), ", strides ",
                c10::ArrayRef<std::uint64_t>(boxes.strides), ", box ", c10::ArrayRef<std::uint32_t>(boxes.box),
                ", swizzle ", boxes.swizzle, ", address ", address);
    std::memcpy(&geometry[i * sizeof map], map, sizeof map);
  }
}

// Kernel `number` on `tensors`, of which a missing one is a null pointer, and the bytes of its last parameter.
// These begin with the tensor maps of `boxes`.
void launch(int64_t number, std::string geometry, const std::string& boxes, int64_t grid_x, int64_t grid_y,
            int64_t grid_z, int64_t block, int64_t shared_bytes,
            const std::vector<std::optional<at::Tensor>>& tensors) {
  TORCH_CHECK(tensors.size() == pointers_of(number) && geometry.size() == geometry_bytes_of(number), "kernel ", number,
              " takes ", pointers_of(number), " tensors and ", geometry_bytes_of(number), " bytes, given ",
              tensors.size(), " tensors and ", geometry.size(), " bytes");
  const at::Device device = tensors.front()->device();
  std::vector<void*> addresses, arguments;
  addresses.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    TORCH_CHECK(!tensor || (tensor->is_cuda() && tensor->device() == device),
                "all tensors must be on one CUDA device, got ", device, " and ", tensor ? tensor->device() : device);
    addresses.push_back(tensor ? tensor->data_ptr() : nullptr);
  }
  for (void*& address : addresses) arguments.push_back(&address);
  const c10::cuda::CUDAGuard guard(device);
  if (!boxes.empty()) {
    C10_CUDA_CHECK(cudaSetDevice(device.index()));  // a thread may not have the context yet that the driver asks for
    place_tensor_maps(geometry, boxes, addresses);
  }
  arguments.push_back(geometry.data());
  C10_CUDA_CHECK(launch_kernel(number, dim3(grid_x, grid_y, grid_z), dim3(block), shared_bytes, arguments.data(),
                               c10::cuda::getCurrentCUDAStream()));
}
"""

# =====================================================================================================================
# polyphase/problem.py
# =====================================================================================================================
#
# One transposed convolution, described once: sizes, phases, taps, and the floor in bytes and flops.
#
# Validation, planner, kernels, tests and benchmark all read this description. It needs neither torch nor a GPU.
#
# The layer, per spatial dimension with input size ``n``, kernel ``k``, stride ``s``, padding ``p``, output padding ``op``
# and dilation ``d``::
#
#     output_size = (n - 1)·s - 2·p + d·(k - 1) + op + 1
#     y[o] += x[i]·w[t]     wherever     o = i·s + t·d - p
#
# Write ``o = q·s + u`` with ``0 ≤ u < s``. Tap ``t`` serves phase ``u = (t·d - p) mod s`` alone, and reaches back
# ``shift = (t·d - p) div s`` (rounded down) input positions::
#
#     y[q·s + u] = Σ over the taps t of phase u of   x[q - shift_t]·w[t]
#
# So the layer is ``s`` stride-1 correlations per dimension whose outputs interleave. Only ``s / gcd(s, d)`` phases own
# taps (fewer when the kernel is short); the others are bias alone. Phases are counted from the output, not from the
# padded output, so that phase 0 of a tile starts on an aligned element.

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def accumulator_bytes(dtype: str) -> int:
    """Bytes of a sum: half types are summed in float32."""
    return max(4, DTYPE_BYTES[dtype])


class Pass(Enum):
    """The three linear maps of the layer. Each one's derivatives are the other two."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"


@dataclass(frozen=True)
class Axis:
    """The layer along one spatial dimension, apart from its size."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def output_size(self, input_size: int, output_padding: int = 0) -> int:
        """Elements of the output for ``input_size`` elements of the input; not positive where the layer is illegal."""
        reach = self.dilation * (self.kernel - 1)
        return (input_size - 1) * self.stride - 2 * self.padding + reach + output_padding + 1

    def input_size(self, output_size: int, output_padding: int = 0) -> int:
        """The inverse of `output_size`."""
        reach = self.dilation * (self.kernel - 1)
        return (output_size - 1 + 2 * self.padding - reach - output_padding) // self.stride + 1

    def phase(self, tap: int) -> int:
        """The phase ``u`` that tap ``tap`` serves."""
        return (tap * self.dilation - self.padding) % self.stride

    def shift(self, tap: int) -> int:
        """How many input positions tap ``tap`` reaches back from cell ``q``; negative where it reaches ahead."""
        return (tap * self.dilation - self.padding) // self.stride

    @cached_property
    def taps_by_phase(self) -> "tuple[tuple[int, ...], ...]":
        """The taps of each phase, in ascending order; empty for a phase that is bias alone."""
        taps: list[list[int]] = [[] for _ in range(self.stride)]
        for tap in range(self.kernel):
            taps[self.phase(tap)].append(tap)
        return tuple(map(tuple, taps))

    @cached_property
    def shifts(self) -> "tuple[int, int]":
        """The smallest and the largest shift of any tap."""
        return self.shift(0), self.shift(self.kernel - 1)


@dataclass(frozen=True)
class ConvTransposeProblem:
    # One call of the layer: its constants, and the sizes it meets.
    #
    # Shapes: input ``(batch, in_channels, *input_size)``, weight ``(in_channels, out_channels / groups, *kernel_size)``,
    # output ``(batch, out_channels, *output_size)``. ``dtype`` is the name of a real floating-point type. ``tf32`` says
    # that float32 operands may be rounded to TF32, and is False in any other dtype; ``tf32_as_pytorch`` that the forward
    # pass rounds them wherever PyTorch does, also where exact kernels are as fast. ``channels_last`` is the memory format
    # of the tensors that a call reads. The values are taken to be valid: `polyphase.validate` is the room for errors.

    batch: int
    in_channels: int
    out_channels: int
    input_size: "tuple[int, ...]"
    kernel_size: "tuple[int, ...]"
    stride: "tuple[int, ...]"
    padding: "tuple[int, ...]"
    output_padding: "tuple[int, ...]"
    dilation: "tuple[int, ...]"
    groups: int = 1
    bias: bool = False
    dtype: str = "float32"
    channels_last: bool = False
    tf32: bool = False
    tf32_as_pytorch: bool = False

    def __post_init__(self) -> None:
        if self.tf32 and self.dtype != "float32":
            object.__setattr__(self, "tf32", False)
        if self.tf32_as_pytorch and not self.tf32:
            object.__setattr__(self, "tf32_as_pytorch", False)

    @property
    def uses_tf32(self) -> bool:
        """Whether rounding to TF32 is allowed, and PyTorch does it: it computes narrow groups in full float32."""
        channels = min(self.in_channels_per_group, self.out_channels_per_group)
        return self.tf32 and channels >= (16 if self.groups == 1 else 64)

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel_size)

    @cached_property
    def axes(self) -> "tuple[Axis, ...]":
        """The layer's constants, one `Axis` per spatial dimension."""
        return tuple(map(Axis, self.kernel_size, self.stride, self.padding, self.dilation))

    @cached_property
    def axes3(self) -> "tuple[Axis, Axis, Axis]":
        """`axes` as depth, height and width; a dimension the layer does not have is a kernel of one tap."""
        depth, height, width = (Axis(1),) * (3 - self.dims) + self.axes
        return depth, height, width

    @cached_property
    def output_size(self) -> "tuple[int, ...]":
        """The output's spatial size."""
        return tuple(
            axis.output_size(n, extra) for axis, n, extra in zip(self.axes, self.input_size, self.output_padding)
        )

    @property
    def in_channels_per_group(self) -> int:
        """Input channels of a group."""
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @property
    def input_shape(self) -> "tuple[int, ...]":
        """``(N, C_in, *spatial)``."""
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> "tuple[int, ...]":
        """``(C_in, C_out / groups, *kernel_size)``."""
        return (self.in_channels, self.out_channels_per_group, *self.kernel_size)

    @property
    def output_shape(self) -> "tuple[int, ...]":
        """``(N, C_out, *spatial)``."""
        return (self.batch, self.out_channels, *self.output_size)

    def of_pass(self, pass_: "Pass") -> "ConvTransposeProblem":
        """What the planner is asked about: gradients know no bias, and double precision no memory format.

        (PyTorch's results in double precision are contiguous on a GPU, whatever the operands are.)
        """
        bias, last = self.bias and pass_ is Pass.FORWARD, self.channels_last and self.dtype != "float64"
        return self if (bias, last) == (self.bias, self.channels_last) else replace(self, bias=bias, channels_last=last)

    def mirrored(self) -> "ConvTransposeProblem | None":
        # The layer whose forward pass is the gradient of this one's input, where there is one: the stride is 1.
        #
        # Its input is the gradient of this one's output, its weight this one's with the taps reversed and the channels
        # exchanged. What this one's output is padded by that one's is cut by.
        padding = tuple(d * (k - 1) - p for k, p, d in zip(self.kernel_size, self.padding, self.dilation))
        if set(self.stride) != {1} or min(padding) < 0:
            return None
        return replace(
            self,
            in_channels=self.out_channels,
            out_channels=self.in_channels,
            input_size=self.output_size,
            padding=padding,
            output_padding=tuple(-extra for extra in self.output_padding),  # no element of the input lies there
            bias=False,
        )

    @cached_property
    def taps(self) -> int:
        """Taps of the whole kernel."""
        return math.prod(self.kernel_size)

    @cached_property
    def elements(self) -> "tuple[int, int, int]":
        """Elements of the input, the weight and the output."""
        return math.prod(self.input_shape), math.prod(self.weight_shape), math.prod(self.output_shape)

    @property
    def bytes(self) -> int:
        # The fewest bytes a pass can move: input, weight and output once each, the same for all three passes.
        return sum(self.elements) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        parts = [f"{'×'.join(map(str, self.input_shape))} → {self.out_channels}", f"k={_short(self.kernel_size)}"]
        for name, values, default in (
            ("s", self.stride, 1),
            ("p", self.padding, 0),
            ("op", self.output_padding, 0),
            ("d", self.dilation, 1),
        ):
            if any(value != default for value in values):
                parts.append(f"{name}={_short(values)}")
        if self.groups != 1:
            parts.append(f"g={self.groups}")
        if self.bias:
            parts.append("bias")
        parts.append(self.dtype)
        if self.tf32:
            parts.append("tf32")
        if self.channels_last:
            parts.append("channels_last")
        return ", ".join(parts)


def _short(values: "tuple[int, ...]") -> str:
    return str(values[0]) if len(set(values)) == 1 else "(" + ", ".join(map(str, values)) + ")"

# =====================================================================================================================
# polyphase/errors.py
# =====================================================================================================================
#
# The exceptions of polyphase. Bad arguments raise PyTorch's own types instead (see `polyphase.validate`).

class PolyphaseError(Exception):
    """Base of every exception that polyphase defines."""


class UnsupportedError(PolyphaseError, NotImplementedError):
    """The device, the dtype or the GPU cannot be served.

    Raised instead of a silent detour through another library.
    """

# =====================================================================================================================
# polyphase/device.py
# =====================================================================================================================
#
# What a GPU offers: the figures the planner and the compiler need, known without a GPU present.
#
# The rates serve the cost model alone: they rank candidates, and no result depends on them. The H200's are measured
# (`python -m polyphase bench` measures the ceilings of the machine it runs on); the others are the vendor's.

@dataclass(frozen=True)
class DeviceInfo:
    """One kind of device. ``arch`` is the compiler's name for it, or ``"portable"`` for devices without own kernels."""

    arch: str
    multiprocessors: int = 1
    clock_hz: float = 1e9
    copy_bytes_per_second: float = 1e11
    shared_bytes_per_block: int = 0
    shared_bytes_per_multiprocessor: int = 0

    @property
    def capability(self) -> int:
        """The compute capability of a CUDA device, 90 for 9.0."""
        return capability_of(self.arch)

    @staticmethod
    def of(device: torch.device) -> "DeviceInfo":
        """The device a tensor lives on. Raises `UnsupportedError` for a GPU older than compute capability 7.5."""
        import torch

        if device.type != "cuda" or torch.version.cuda is None:
            return PORTABLE
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)


def capability_of(arch: str) -> int:
    """The compute capability in the compiler's name of an architecture, 90 for ``"sm_90a"``."""
    return int(arch.rstrip("af")[3:])


PORTABLE = DeviceInfo("portable")


_TYPICAL = (
    DeviceInfo("sm_75", 40, 1.6e9, 2.7e11, 64 << 10, 64 << 10),
    DeviceInfo("sm_80", 108, 1.4e9, 1.7e12, 163 << 10, 164 << 10),
    DeviceInfo("sm_86", 82, 1.7e9, 8.0e11, 99 << 10, 100 << 10),
    DeviceInfo("sm_89", 128, 2.4e9, 8.7e11, 99 << 10, 100 << 10),
    DeviceInfo("sm_90a", 132, 1.75e9, 4.28e12, 227 << 10, 228 << 10),
    DeviceInfo("sm_100a", 148, 1.9e9, 7.0e12, 227 << 10, 228 << 10),
    DeviceInfo("sm_120", 170, 2.4e9, 1.6e12, 99 << 10, 100 << 10),
)


#: Architectures with own kernels, as the compiler calls them.
ARCHITECTURES = tuple(info.arch for info in _TYPICAL)


@lru_cache(maxsize=64)
def _of_cuda(index: int) -> "DeviceInfo":
    import torch

    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    if (major, minor) < (7, 5):
        raise UnsupportedError(
            f"{properties.name} has compute capability {major}.{minor}; polyphase's CUDA kernels need 7.5 or newer"
        )
    arch = f"sm_{major}{minor}" + ("a" if major in (9, 10) else "")
    not_newer = (info for info in _TYPICAL if info.capability <= capability_of(arch))
    typical = max(not_newer, key=lambda info: info.capability)
    return DeviceInfo(
        arch=arch,
        multiprocessors=properties.multi_processor_count,
        clock_hz=typical.clock_hz,
        copy_bytes_per_second=typical.copy_bytes_per_second,
        shared_bytes_per_block=getattr(properties, "shared_memory_per_block_optin", typical.shared_bytes_per_block),
        shared_bytes_per_multiprocessor=getattr(
            properties, "shared_memory_per_multiprocessor", typical.shared_bytes_per_multiprocessor
        ),
    )

# =====================================================================================================================
# polyphase/jit/source.py
# =====================================================================================================================
#
# One specialised kernel as text: shared building blocks, the constants of a layer, the kernel file.
#
# The text includes nothing, so that NVRTC needs no headers and one string is the whole identity of a kernel.

# The tensors' type and the accumulator's, by the name of the dtype.
_TYPES = {
    "float64": ("double", "double"),
    "float32": ("float", "float"),
    "float16": ("float16", "float"),
    "bfloat16": ("bfloat16", "float"),
}


#: Files that no constant changes, before everything else.
SHARED_FILES = ("common/types.cuh", "common/axis.cuh")


# Building blocks under kernels/common that a kernel needs behind those that all need.
_BUILDING_BLOCKS = {
    "gather_tiled": ("copy_async", "operand"),
    "gather_channels": ("operand", "taps"),
    "gather_general": ("operand", "taps"),
    "implicit_gemm": (
        "tensor_float", "scaled_half", "row_blocks", "scales", "bands", "dependent", "copy_async", "wgmma", "async",
        "mma", "matrix", "divisor", "gemm_tile", "item_queue", "pixel_loader",
    ),
    "gather_gemm": (
        "tensor_float", "dependent", "divisor", "split", "copy_async", "async", "mma", "stages", "staged_rows",
        "phase_taps",
    ),
    "phase_gemm": ("split", "mma", "taps", "divisor"),
    "pixel_gemm": (
        "tensor_float", "scaled_half", "dependent", "copy_async", "wgmma", "async", "mma", "divisor",
    ),
    "scatter_gemm": ("tensor_float", "split", "copy_async", "mma", "wgmma"),
    "weight_grad": (),
    "weight_grad_channels": (),
    "weight_grad_windows": ("copy_async",),
    "input_grad_gemm": ("tensor_float", "copy_async", "mma", "stages", "window", "window_product"),
    "weight_grad_gemm": ("tensor_float", "copy_async", "mma", "stages", "window", "window_product"),
    "input_grad_wgmma": (
        "tensor_float", "copy_async", "wgmma", "async", "ring", "mma", "stages", "window_rows", "window",
        "window_wgmma",
    ),
    "weight_grad_wgmma": (
        "tensor_float", "copy_async", "wgmma", "async", "ring", "mma", "stages", "window_rows", "window",
        "window_wgmma", "run_loader",
    ),
    "input_grad_dots": (),
    "input_grad_boxes": ("tensor_float", "dependent", "copy_async", "wgmma", "async", "ring", "mma", "box_product"),
    "weight_grad_boxes": (
        "tensor_float", "copy_async", "wgmma", "async", "ring", "mma", "box_product", "tap_windows",
    ),
    "pack_channels": ("dependent",),
    "add_planes": (),
    "turn_channels": ("divisor",),
    "pack_weights": ("tensor_float", "scaled_half", "row_blocks", "scales", "bands", "dependent", "counters"),
    "pack_taps": ("tensor_float", "scaled_half", "row_blocks", "scales", "bands", "dependent", "counters"),
    "measure_scales": ("divisor", "scaled_half", "scales", "dependent"),
    "pack_columns": ("scaled_half", "dependent"),
    "copy_weights": ("dependent", "counters"),
}  # fmt: skip


# Depth in elements and operand type of the tensor cores' instructions.
_OPERANDS = {"float32": (8, "tf32"), "float16": (16, "f16"), "bfloat16": (16, "bf16")}


#: Constants that the compiler settles, by whether registers spill.
SETTLED = ("MIN_BLOCKS", "STRAIGHT", "GIVEN_REGISTERS")


# Constants that the preprocessor must know.
_MACROS = ("WGMMA", "CLUSTER", "BY_THREADS", "SCALED")


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and the constants it is specialised by, in the order in which they are written."""

    kernel: str
    dtype: str
    wide_offsets: bool
    constants: "tuple[tuple[str, Constant], ...]"

    @property
    def min_blocks(self) -> int:
        """Blocks that should be resident on a multiprocessor, for which the compiler limits registers."""
        blocks = dict(self.constants)["MIN_BLOCKS"]
        assert isinstance(blocks, int)
        return blocks

    def with_constants(self, **constants: "Constant") -> "KernelSource":
        """The same kernel with some of its constants changed."""
        return replace(self, constants=tuple({**dict(self.constants), **constants}.items()))

    @property
    def operand(self) -> str:
        """What the tensor cores are given."""
        return "float16" if dict(self.constants).get("SCALED") else self.dtype

    @cached_property
    def specialisation(self) -> str:
        """What this kernel's text has that others of the same file have not: types, constants, instructions."""
        scalar, accumulator = _TYPES[self.dtype]
        lines = [
            f"// {self.kernel}, specialised by:",
            f"typedef {scalar} scalar_t;       // of the tensors",
            f"typedef {accumulator} accum_t;  // of every sum",
            f"typedef unsigned {'long long' if self.wide_offsets else 'int'} offset_t;  // of offsets in bytes",
            *(f"constexpr {_declare(name, value)};" for name, value in self.constants if name not in _MACROS),
        ]
        if "mma" in _BUILDING_BLOCKS[self.kernel]:
            depth, operand = _OPERANDS[self.operand]
            lines.append(f'#define MMA_SHAPE "m16n8k{depth}.row.col.f32.{operand}.{operand}.f32"')
        constants = dict(self.constants)
        if "SCALED" in constants:
            lines.append(f"#define SCALED {constants['SCALED']:d}  // float32 is multiplied as float16")
        if "WGMMA" in constants:
            lines += _matrix_instructions(self.operand, constants)
        return "\n".join(lines) + "\n"


def _matrix_instructions(dtype: str, constants: "Mapping[str, Constant]") -> "list[str]":
    """What common/wgmma.cuh needs of the instruction set: C++ has no way to write an operand list of any length.

    The first operand comes from shared memory, in kernels with COLUMN_TILES from registers, too. In half precision both
    may be transposed, with TRANSPOSED, or the second alone.
    """
    wgmma, cluster = constants["WGMMA"], constants.get("CLUSTER", 1)
    lines = [
        f"#define WGMMA_INSTRUCTION {wgmma:d}",
        f"#define CLUSTER {cluster:d}  // thread blocks",
    ]
    if "BY_THREADS" in constants:
        lines.append(f"#define BY_THREADS {constants['BY_THREADS']:d}")
    if not wgmma:
        return lines
    from_registers = "COLUMN_TILES" in constants
    columns = constants["COLUMN_TILES" if from_registers else "COLUMNS" if "COLUMNS" in constants else "PIXELS"]
    assert isinstance(columns, int)
    columns *= 8 if from_registers else 1
    both = bool(constants.get("TRANSPOSED", False))
    second = both or bool(constants.get("BOXES", False) and not constants["SRC_CHANNELS_LAST"])
    forms = [_matrix_instruction(dtype, columns, form, both, second) for form in sorted({from_registers, False})]
    return [
        *lines,
        "// sums = (add ? sums : 0) + A · B; descriptors are of matrices in shared memory.",
        "#ifndef EMULATOR",
        *itertools.chain(*forms),
        "#endif",
    ]


def _matrix_instruction(dtype: str, columns: int, from_registers: bool, both: bool, second: bool) -> "list[str]":
    """One form of the instruction; whether both operands are transposed, and whether the second is."""
    depth, operand = _OPERANDS[dtype]
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    registers = range(count, count + (4 if from_registers else 1))
    first = ", ".join(f"%{i}" for i in registers)
    b, add = registers[-1] + 1, registers[-1] + 2
    if from_registers:
        declared, first = "const unsigned (&a)[4]", f"{{{first}}}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        declared, inputs = "unsigned long long a", '"l"(a)'
    flags = f"{second:d}" if from_registers else f"{both:d}, {second:d}"
    transposed = f", {flags}" if depth == 16 else ""
    return [
        f"__device__ __forceinline__ void wgmma(float (&sums)[{count}], {declared}, unsigned long long b, bool add) {{",
        "  asm volatile(",
        f'      "{{ .reg .pred add; setp.ne.b32 add, %{add}, 0;\\n"',
        f'      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{operand}.{operand} "',
        f'      "{{{sums}}}, "',
        f'      "{first}, %{b}, add, 1, 1{transposed}; }}"',
        f"      : {outputs}",
        f'      : {inputs}, "l"(b), "r"((int)add));',
        "}",
    ]


def _declare(name: str, value: "Constant") -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    if isinstance(value, Axis):
        return f"Axis {name} = {{{value.kernel}, {value.stride}, {value.padding}, {value.dilation}}}"
    return f"int {name} = {value}"

# =====================================================================================================================
# polyphase/algorithms/base.py
# =====================================================================================================================
#
# What an algorithm tells the planner, and what a plan tells the launcher.

#: Bytes that the widest vector access needs a tensor to be aligned to: four doubles.
ALIGNMENT = 32


#: What memory is read and written in.
SECTOR_BYTES = 32


#: Pixels of an image up to which it is tiny: a kernel may take such images as a whole.
TINY = 64


# Planes of partial sums take at most this many bytes, or as much as the weight itself.
_MAX_PLANES_BYTES = 64 << 20


#: Bytes of a tensor map, which is also aligned to half of that.
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Layouts:
    """How the tensors of a call lie: the input's side and the output's side of the layer, and the weight.

    ``input`` are the strides of the input or its gradient, ``output`` those of the output or its gradient.
    ``weight_channels_last``: the weight's memory order is ``(C_in, *kernel_size, C_out / groups)``, else as its shape.
    ``aligned``: the tensors that are read start at a multiple of `ALIGNMENT` bytes.
    """

    input: "Strides"
    output: "Strides"
    weight_channels_last: bool = False
    aligned: bool = True

    @classmethod
    def dense(cls, problem: "ConvTransposeProblem") -> "Layouts":
        """Tensors without gaps, in the problem's memory format. A weight that has two formats at once is contiguous."""
        return cls(
            dense_strides(problem.input_shape, problem.channels_last),
            dense_strides(problem.output_shape, problem.channels_last),
            problem.channels_last and problem.out_channels_per_group > 1 and problem.taps > 1,
        )

    @classmethod
    def of_call(cls, problem: "ConvTransposeProblem", pass_: "Pass") -> "Layouts":
        """Tensors of a call that reads dense ones in the problem's memory format, and writes what PyTorch would.

        A weight's gradient is planned as if it were contiguous, whatever format it is given in the end.
        """
        read, written = cls.dense(problem), cls.dense(problem.of_pass(pass_))
        if pass_ is Pass.FORWARD:
            return replace(read, output=written.output)
        if pass_ is Pass.INPUT_GRAD:
            return replace(read, input=written.input)
        return replace(read, weight_channels_last=False)


def dense_strides(shape: "tuple[int, ...]", channels_last: bool) -> "Strides":
    """The strides of a tensor ``(N, C, *spatial)`` without gaps."""
    _, channels, *spatial = shape
    depth, height, width = [1] * (3 - len(spatial)) + spatial
    volume = depth * height * width
    if channels_last:
        return volume * channels, 1, height * width * channels, width * channels, channels
    return channels * volume, volume, height * width, width, 1


def extent(shape: "tuple[int, ...]", strides: "Strides") -> int:
    """The largest element offset in a tensor ``(N, C, *spatial)``, plus one."""
    sizes = (shape[0], shape[1], *(1,) * (5 - len(shape)), *shape[2:])
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if all(sizes) else 0


def channels_innermost(channels: int, strides: "Strides") -> bool:
    """Whether neighbouring channels are neighbours in memory, and neighbouring columns are not."""
    return channels > 1 and strides[1] == 1 and strides[4] != 1


@dataclass(frozen=True)
class Boxes:
    """Boxes of a kernel's tensor, as Hopper's copy engine takes them: what a tensor map says but the address.

    Dimensions are listed innermost first, ``strides`` in bytes, without the first dimension's. ``box`` are the elements
    that are brought, of every ``steps``-th of the tensor. Chunks of 16 bytes change places within ``swizzle`` bytes.
    ``tf32``: float32 elements are rounded to TF32 on their way. ``tensor`` counts the kernel's tensors.
    """

    dtype: str
    sizes: "tuple[int, ...]"
    strides: "tuple[int, ...]"
    box: "tuple[int, ...]"
    swizzle: int
    tf32: bool
    tensor: int = 0
    steps: "tuple[int, ...]" = (1, 1, 1, 1, 1)

    @property
    def spans(self) -> "tuple[int, ...]":
        """Elements of the tensor from a box's first to its last, along each dimension."""
        return tuple((count - 1) * step + 1 for count, step in zip(self.box, self.steps))

    @property
    def element(self) -> str:
        """What boxes are made of: ``"tf32"``, or the dtype."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


def engine_strides(dimensions: "Iterable[tuple[int, int]]") -> "tuple[int, ...] | None":
    """The ``strides`` of `Boxes` for dimensions of so many elements, so many bytes apart.

    None where the copy engine does not take them.
    """
    found = tuple(16 if count == 1 else step for count, step in dimensions)
    return found if all(0 < step < 2**40 and step % 16 == 0 for step in found) else None


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the pointers. ``planes`` > 1: partial sums that the caller adds up.

    ``in_parts``: whether an input's gradient comes in planes at some sizes of the layer, which lie as it does.
    ``planes_channels_last``: a weight's gradient comes in the order ``(C_in, *kernel_size, C_out / groups)``;
    ``narrowed``: the one plane comes in the tensors' type, not in the accumulator's.
    ``geometry`` is the kernel's last parameter; there is none where it is empty.
    It begins with `TENSOR_MAP_BYTES` for the tensor map of each of ``boxes``, left to be filled in.
    A ``prologue`` runs before it and writes ``workspace_bytes`` from the weight, which the kernel reads instead. One
    of its own runs before that, and reads the kernel's source, too.
    ``turned``: as many of the kernel's first tensors the caller brings to channels_last before, and its result back
    after, by the kernel ``turn`` (`turning`).
    ``one_way``: the same kernel for tensors that lie as these do alone, which takes less time to compile.
    """

    source: "KernelSource"
    grid: "tuple[int, int, int]"
    block: int
    shared_bytes: int
    geometry: bytes
    planes: int = 1
    in_parts: bool = False
    planes_channels_last: bool = False
    narrowed: bool = False
    prologue: "Launch | None" = None
    workspace_bytes: int = 0
    turned: int = 0
    turn: "KernelSource | None" = None
    boxes: "tuple[Boxes, ...]" = ()
    one_way: "KernelSource | None" = None

    @property
    def prologues(self) -> "tuple[Launch, ...]":
        """All that run before it, in order."""
        return () if self.prologue is None else (*self.prologue.prologues, self.prologue)


def plain_launch(source: "KernelSource", blocks: int, threads: int, geometry: bytes = b"") -> "Launch":
    """The launch of a kernel that has a row of blocks, and no shared memory but its own."""
    return Launch(source=source, grid=(blocks, 1, 1), block=threads, shared_bytes=0, geometry=geometry)


def slower_of(work: float, moving: float) -> "tuple[float, str]":
    """Predicted time from the seconds that instructions and bytes take, and which of them bound it."""
    return max(work, moving), "bytes" if moving > work else "instructions"


class Sharing(NamedTuple):
    """When blocks share their work, so that each takes the next piece that none has instead of every n-th.

    A block would have so many pieces at least, of so many cycles, and these would take at most so many times what the
    layer's bytes take: bytes must be what blocks compete for.
    """

    rounds: int
    cycles: float
    most: float

    def pays(
        self, rounds: float, predict: "Callable[[], tuple[float, str]]", layer_bytes: int, device: "DeviceInfo"
    ) -> bool:
        """Whether it does for ``rounds`` of pieces; ``predict`` gives their seconds, and what bounds them."""
        if rounds < self.rounds:
            return False
        seconds, _ = predict()
        long_enough = seconds * device.clock_hz >= rounds * self.cycles
        return long_enough and seconds <= self.most * layer_bytes / device.copy_bytes_per_second


def counter_bytes(count: int) -> int:
    """What so many counters take in front of a kernel's weights (kernels/common/counters.cuh)."""
    return round_up(4 * count, 128)


def padded(geometry: bytes, multiple: int = 8) -> bytes:
    """A kernel's parameter filled up to what its next member, or itself, is aligned to."""
    return geometry + bytes(-len(geometry) % multiple)


def tiles_of(batch: int, sizes: "Iterable[int]", extent: "Four") -> "Four":
    """Tiles of ``extent`` along n, d, h and w that images of three ``sizes`` come to."""
    n, d, h, w = (math.ceil(size / side) for size, side in zip((batch, *sizes), extent))
    return n, d, h, w


def layer_constants(
    problem: "ConvTransposeProblem", pass_: "Pass", weight_channels_last: bool = False
) -> "tuple[tuple[str, Constant], ...]":
    """What a kernel is specialised by that knows input and output, not source and destination."""
    out, taps = problem.out_channels_per_group, problem.taps
    return (
        ("AXIS_D", problem.axes3[0]),
        ("AXIS_H", problem.axes3[1]),
        ("AXIS_W", problem.axes3[2]),
        ("INPUT_GRAD", pass_ is Pass.INPUT_GRAD),
        ("IN_CHANNELS", problem.in_channels_per_group),
        ("OUT_CHANNELS", out),
        ("WEIGHT_STRIDE_IN", out * taps),
        ("WEIGHT_STRIDE_OUT", 1 if weight_channels_last else taps),
        ("WEIGHT_STRIDE_TAP", out if weight_channels_last else 1),
    )


@lru_cache(maxsize=4096)
def packed_divisor(value: int) -> bytes:
    """The kernel's ``Divisor``: for 0 ≤ n < 2³¹, n · reciprocal / 2^shift rounds down to n // value.

    T. Granlund and P. Montgomery, Division by Invariant Integers using Multiplication, 1994. Nothing divides by zero:
    an empty batch has no tiles, and is not launched.
    """
    value = max(1, value)
    shift = 31 + (value - 1).bit_length()
    return struct.pack("<iIi", value, -(-(1 << shift) // value), shift)


def affordable_planes(problem: "ConvTransposeProblem", pass_: "Pass" = Pass.WEIGHT_GRAD) -> int:
    """Planes of partial sums of a gradient that memory may be spent on."""
    elements = problem.elements[1] if pass_ is Pass.WEIGHT_GRAD else problem.elements[0]
    return max(1, _MAX_PLANES_BYTES // (max(1, elements) * accumulator_bytes(problem.dtype)))


def parted(total: int, parts: int) -> "tuple[int, int]":
    """The length of each of about so many parts of ``total``, and how many of that length there are."""
    length = max(1, math.ceil(total / parts))
    return length, max(1, math.ceil(total / length))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (max(1, value) - 1).bit_length()

# =====================================================================================================================
# polyphase/algorithms/gather.py
# =====================================================================================================================
#
# A forward pass or an input gradient as the gather kernels see it: source, destination, cells (geometry.cuh).
#
# Both passes gather: every destination element sums what it needs of the source, so nothing is written twice and no sum
# depends on timing. `polyphase.algorithms.gather_tiled` unrolls the whole kernel for a tile of cells;
# `polyphase.algorithms.gather_channels` is for few channels in a group, in channels_last;
# `polyphase.algorithms.gather_general` has no limits.

@dataclass(frozen=True)
class Side:
    # One side of a gather pass: shape ``(N, C, D, H, W)`` and strides.

    shape: "tuple[int, int, int, int, int]"
    strides: "Strides"

    @cached_property
    def channels_last(self) -> bool:
        """Whether neighbouring channels are neighbours in memory."""
        return channels_innermost(self.shape[1], self.strides)

    def packed(self) -> bytes:
        """The kernels' ``Tensor5``."""
        return struct.pack("<5q4i", *self.strides, *self.shape[2:], self.shape[1])


class CellAxis:
    """One spatial dimension cut into cells of one input element and ``stride`` output elements.

    ``src`` and ``dst`` are the elements of a cell on either side, ``first_offset`` the first source element that any
    tap reads, counted from its cell's first, and ``owned`` the destination elements of a cell that own taps.
    """

    def __init__(self, axis: "Axis", forward: bool) -> None:
        if forward:
            self.src, self.dst = 1, axis.stride
            self.owned = len({axis.phase(tap) for tap in range(axis.kernel)})
            self._offsets = sorted({-axis.shift(tap) for tap in range(axis.kernel)})
        else:
            self.src, self.dst = axis.stride, 1
            self.owned = 1
            self._offsets = [tap * axis.dilation - axis.padding for tap in range(axis.kernel)]
        self.first_offset = self._offsets[0]
        self._reach = self._offsets[-1] - self._offsets[0]
        self._used: dict[int, int] = {}

    def window(self, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells span."""
        return (cells - 1) * self.src + self._reach + 1


@dataclass(frozen=True)
class Gather:
    # One pass of one problem.

    pass_: "Pass"
    axes: "tuple[Axis, Axis, Axis]"
    src_channels: int  # of a group
    dst_channels: int  # of a group
    groups: int
    dtype: str
    bias: bool
    src: "Side"
    dst: "Side"
    weight_channels_last: bool
    aligned: bool
    rounded: bool = False  # to TF32, by kernels that could do without
    mirrored: bool = False  # the weight is that of the layer whose input's gradient this forward pass is

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a planner asks for thousands of times
        return hash((self.axes, self.src_channels, self.dst_channels, self.dtype, self.src, self.dst))

    @classmethod
    def of(cls, problem: "ConvTransposeProblem", pass_: "Pass", layouts: "Layouts", mirrored: bool = False) -> "Gather":
        # The pass of a problem whose tensors lie as ``layouts`` says.
        input_side = Side(five(problem.input_shape), layouts.input)
        output_side = Side(five(problem.output_shape), layouts.output)
        forward = pass_ is Pass.FORWARD
        per_group = problem.in_channels_per_group, problem.out_channels_per_group
        src_channels, dst_channels = per_group if forward else per_group[::-1]
        return cls(
            pass_=pass_,
            axes=problem.axes3,
            src_channels=src_channels,
            dst_channels=dst_channels,
            groups=problem.groups,
            dtype=problem.dtype,
            bias=problem.bias and forward,
            src=input_side if forward else output_side,
            dst=output_side if forward else input_side,
            weight_channels_last=layouts.weight_channels_last,
            aligned=layouts.aligned,
            rounded=forward and problem.tf32_as_pytorch and problem.uses_tf32,
            mirrored=mirrored,
        )

    @property
    def forward(self) -> bool:
        # Whether this is the forward pass, else the input gradient.
        return self.pass_ is Pass.FORWARD

    @cached_property
    def taps(self) -> int:
        """Taps of the whole kernel."""
        return math.prod(axis.kernel for axis in self.axes)

    @cached_property
    def cell_axes(self) -> "tuple[CellAxis, CellAxis, CellAxis]":
        """Depth, height and width in cells."""
        depth, height, width = (CellAxis(axis, self.forward) for axis in self.axes)
        return depth, height, width

    @cached_property
    def split(self) -> int:
        """Residues by which ``gather_tiled.cu`` splits a row of the source in shared memory."""
        step = self.cell_axes[2].src
        return step if step == 2 or step % 4 == 0 else 1

    @cached_property
    def owned(self) -> int:
        """Destination elements of a cell that own taps."""
        return math.prod(axis.owned for axis in self.cell_axes)

    @cached_property
    def phases(self) -> int:
        """Destination elements of a cell."""
        return math.prod(axis.dst for axis in self.cell_axes)

    @cached_property
    def cells(self) -> "tuple[int, int, int]":
        """Cells along depth, height and width."""
        depth, height, width = (math.ceil(size / axis.dst) for size, axis in zip(self.dst.shape[2:], self.cell_axes))
        return depth, height, width

    def constants(self, **variant: "Constant") -> "tuple[tuple[str, Constant], ...]":
        """What both kernels are specialised by, and the variant's own constants."""
        out_channels = self.dst_channels if self.forward is not self.mirrored else self.src_channels
        last = self.weight_channels_last
        strides = out_channels * self.taps, 1 if last else self.taps
        common: dict[str, Constant] = {
            "AXIS_D": self.axes[0],
            "AXIS_H": self.axes[1],
            "AXIS_W": self.axes[2],
            "INPUT_GRAD": not self.forward,
            "SRC_CHANNELS": self.src_channels,
            "DST_CHANNELS": self.dst_channels,
            "HAS_BIAS": self.bias,
            "DST_CHANNELS_LAST": self.dst.channels_last,
            "WEIGHT_STRIDE_IN": strides[self.mirrored],
            "WEIGHT_STRIDE_OUT": strides[not self.mirrored],
            "WEIGHT_STRIDE_TAP": (-1 if self.mirrored else 1) * (out_channels if last else 1),
        }
        return tuple({**common, **variant}.items())

    def wide_offsets(self, images: int, stage_channels: int) -> bool:
        """Whether byte offsets within a tile of ``images`` batch entries need more than 32 bits."""
        return any(
            extent((images, channels, *side.shape[2:]), side.strides) * DTYPE_BYTES[self.dtype] >= 2**32
            for side, channels in ((self.src, stage_channels), (self.dst, 1))
        )


def five(shape: "tuple[int, ...]") -> "tuple[int, int, int, int, int]":
    """A shape ``(N, C, *spatial)`` as ``(N, C, D, H, W)``."""
    batch, channels, *spatial = shape
    depth, height, width = [1] * (3 - len(spatial)) + spatial
    return batch, channels, depth, height, width

# =====================================================================================================================
# polyphase/algorithms/stages.py
# =====================================================================================================================
#
# What a kernel loads stage by stage, as ``common/stages.cuh`` takes it, and what its copies cost.

#: Of a box: Place in the kernels has 16 bits for each coordinate.
MAX_SIDE = 1 << 15


#: Of shared memory, for each piece of a channel: of boxes that stay where they are, and of those that move.
STILL_BYTES, MOVING_BYTES = 8, 16


# Cycles of each of a multiprocessor's four schedulers for a warp's copy, for one whose elements pass registers, and for
# finding where a row of pieces lies. Fitted with `polyphase.algorithms.gradient_gemm`.
_COPY, _THROUGH_REGISTERS, _FIND = 24.0, 80.0, 22.0


@dataclass(frozen=True)
class Part:
    """What a stage holds of a tensor, as the kernels' ``Part``, and how many pieces a channel has of it."""

    extent: "tuple[int, int, int, int]"
    piece: int
    pitch: int
    places: int

    def packed(self) -> bytes:
        return struct.pack("<6i", *self.extent, self.piece, self.pitch)


def weight_part(problem: "ConvTransposeProblem", layouts: "Layouts", out_chunk: int, pitch: int, length: int) -> "Part":
    """All taps of ``out_chunk`` output channels, in the order in which the weight has them, ``length`` in all."""
    size, out, taps = DTYPE_BYTES[problem.dtype], problem.out_channels_per_group, problem.taps
    extent, run = ((1, 1, taps, out_chunk), 1) if layouts.weight_channels_last else ((1, 1, 1, out_chunk * taps), taps)
    piece = widest_piece(size, out * run, out_chunk * run, 0 if layouts.aligned else 1)
    return Part(extent, piece, pitch, length // piece)


def packed_weight(problem: "ConvTransposeProblem", layouts: "Layouts") -> bytes:
    """The weight as a ``Tensor5`` whose channels are its rows and whose rest lies along h and w."""
    out, taps = problem.out_channels_per_group, problem.taps
    inner = (out, 1, 1, taps, out) if layouts.weight_channels_last else (0, 1, 1, 1, out * taps)
    height, width, *sizes = inner
    return struct.pack("<5q4i", 0, out * taps, 0, height, width, *sizes, problem.in_channels_per_group)


def widest_piece(size: int, *multiples: int) -> int:
    """Elements that can be moved at once: 16 bytes or less, of which all ``multiples`` are multiples."""
    piece = 16 // size
    while any(value % piece for value in multiples):
        piece //= 2
    return piece


def row_piece(side: "Side", size: int, aligned: bool, step: int) -> int:
    """Neighbouring elements of a row moved at once, in rows that begin ``step`` elements after one another."""
    *others, width = side.strides
    if not aligned or width != 1:
        return 1
    return widest_piece(size, side.shape[4], step, *others)


def channel_piece(side: "Side", channels: int, stage_channels: int, size: int, aligned: bool) -> int:
    """Neighbouring channels moved at once: 16 bytes, or one."""
    batch, _, *others = side.strides
    vector = 16 // size
    whole = all(value % vector == 0 for value in (channels, stage_channels, batch, *others))
    return vector if aligned and whole else 1


def copy_cycles(part: "Part", channels: int, warps: int, size: int) -> float:
    """Predicted cycles of a multiprocessor for what its warps do to copy so many channels of a part."""
    lanes = min(32, next_power_of_two(part.places))
    rounds = math.ceil(part.places / lanes)
    copies = rounds * math.ceil(channels / (warps * 32 // lanes))
    each = _COPY + (_THROUGH_REGISTERS if part.piece * size < 4 else 0.0)
    return warps / 4 * (rounds * _FIND + copies * each)


def row_bytes(part: "Part", size: int) -> float:
    """Bytes that memory moves for a channel of a part: whole sectors of its rows."""
    *rows, width = part.extent
    return math.prod(rows) * 32 * (math.ceil(width * size / 32) + 0.5)

# =====================================================================================================================
# polyphase/algorithms/gradient.py
# =====================================================================================================================
#
# What the gradients' algorithms on tensor cores have in common: tiles of positions, windows of the output gradient.

class Gradient:
    """An algorithm for one of the gradients."""

    name: str
    any_size: bool
    adapts = False
    pass_: "Pass"


def blocks_of(problem: "ConvTransposeProblem", pass_: "Pass", in_chunk: int, out_chunk: int) -> int:
    """Blocks of a tile of positions, or of a part of them, of so many channels each."""
    blocks = math.ceil(problem.in_channels_per_group / in_chunk) * problem.groups
    if pass_ is Pass.WEIGHT_GRAD:
        blocks *= math.ceil(problem.out_channels_per_group / out_chunk)
    return blocks


def lanes_of(problem: "ConvTransposeProblem", positions: int) -> "Iterator[Four]":
    """Extents along n, d, h and w of at most so many positions, with as many images as those leave room for.

    Long rows come first.
    """
    depth, height, width = five(problem.input_shape)[2:]
    for w in reversed(_extents(width, positions)):
        for h in _extents(height, positions // w):
            for d in _extents(depth, positions // (w * h)):
                yield max(1, min(problem.batch, positions // (w * h * d))), d, h, w


def _extents(size: int, most: int) -> "list[int]":
    """Extents worth trying along one dimension: powers of two, and equal parts of at most so many."""
    found = {1 << i for i in range(most.bit_length()) if 1 << i < size}
    return sorted(found | ({math.ceil(size / math.ceil(size / most))} if most > 0 else set()))


def extent_of_window(problem: "ConvTransposeProblem", lanes: "Four") -> "Four":
    """What ``lanes`` positions along n, d, h and w meet of a channel of the output gradient."""
    slabs, rows, columns = (
        (count - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1
        for count, axis in zip(lanes[1:], problem.axes3)
    )
    return lanes[0], slabs, rows, columns


def window_of(problem: "ConvTransposeProblem", layouts: "Layouts", out_chunk: int, lanes: "Four") -> "tuple[Part, int]":
    """The window of ``lanes`` positions in ``out_chunk`` channels of the output gradient, in pieces.

    Beside it the elements that its rows begin before the first that is met, so that pieces are aligned.
    """
    size = DTYPE_BYTES[problem.dtype]
    grad = Side(five(problem.output_shape), layouts.output)
    extent = extent_of_window(problem, lanes)
    if grad.channels_last:
        piece = channel_piece(grad, problem.out_channels_per_group, out_chunk, size, layouts.aligned)
        return Part(extent, piece, size * (math.prod(extent) | 1), math.prod(extent)), 0
    axis = problem.axes3[2]
    whole_rows = lanes[3] >= problem.input_size[-1]
    piece = row_piece(grad, size, layouts.aligned, 0 if whole_rows else lanes[3] * axis.stride)
    skew = -axis.padding % piece
    extent = (*extent[:3], round_up(skew + extent[3], piece))
    pitch = 16 * (math.ceil(math.prod(extent) * size / 16) | 1)
    return Part(extent, piece, pitch, math.prod(extent) // piece), skew

# =====================================================================================================================
# polyphase/algorithms/gradient_gemm.py
# =====================================================================================================================
#
# Both gradients on tensor cores, ``kernels/input_grad_gemm.cu`` and ``kernels/weight_grad_gemm.cu``.

_WARPS = 8
_THREADS = 32 * _WARPS
_LEAST_ROW = 8  # positions along the width of a tile, where images are wider and more fit


class GradientVariant(NamedTuple):
    """The compile-time shape of a kernel; ``window_product.cuh`` says what the names mean."""

    row_tiles: int
    column_tiles: int
    row_warps: int
    out_chunk: int
    positions: int
    buffers: int
    min_blocks: int

    @property
    def rows(self) -> int:
        """Input channels of a block."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Positions, or pairs of output channel and tap, of a block."""
        return 8 * self.column_tiles * (_WARPS // self.row_warps)


@dataclass(frozen=True)
class _Tiling:
    """How a variant cuts the input positions into tiles, and what that takes of shared memory."""

    lanes: "tuple[int, int, int, int]"
    tiles: "tuple[int, int, int, int]"
    skew: int
    window: "Part"
    operand: "Part"
    table_bytes: int
    stage_bytes: int

    @property
    def total(self) -> int:
        return math.prod(self.tiles)


class _GradientGemm(Gradient):
    """What the two kernels share."""

    def launch(
        self, problem: "ConvTransposeProblem", pass_: "Pass", device: "DeviceInfo", layouts: "Layouts", variant: "GradientVariant"
    ) -> "Launch":
        tiling = _tiling(problem, pass_, layouts, variant, device)
        assert tiling is not None
        grad = Side(five(problem.output_shape), layouts.output)
        x = Side(five(problem.input_shape), layouts.input)
        blocks = blocks_of(problem, pass_, variant.rows, variant.out_chunk)
        if pass_ is Pass.WEIGHT_GRAD:
            length, planes = parted(tiling.total, _parts(problem, variant, tiling, device))
            geometry = x.packed() + grad.packed() + tiling.operand.packed() + tiling.window.packed()
            geometry += struct.pack("<2i", problem.batch, problem.groups)
            geometry += struct.pack("<11i", *tiling.lanes, *tiling.tiles, *_sizes(tiling))
            geometry = padded(geometry)
            geometry += struct.pack("<3q", length, tiling.total, math.prod(problem.weight_shape))
            grid = blocks * planes
        else:
            geometry = grad.packed() + packed_weight(problem, layouts) + x.packed()
            geometry += tiling.operand.packed() + tiling.window.packed()
            pairs = tiling.lanes[3] % 2 == 0 and row_piece(x, 8, True, 0) == 2
            geometry += struct.pack("<13i", problem.batch, *tiling.lanes, *tiling.tiles, *_sizes(tiling), pairs)
            planes = 1
            grid = blocks * tiling.total
        geometry = padded(geometry)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            *((("X_CHANNELS_LAST", x.channels_last),) if pass_ is Pass.WEIGHT_GRAD else ()),
            ("G_CHANNELS_LAST", grad.channels_last),
            ("WARPS", _WARPS),
            ("LOAD_WARPS", _WARPS),
            ("FIRST_LOAD_WARP", 0),
            ("ROW_TILES", variant.row_tiles),
            ("COLUMN_TILES", variant.column_tiles),
            ("ROW_WARPS", variant.row_warps),
            ("OUT_CHUNK", variant.out_chunk),
            ("POSITIONS", variant.positions),
            ("BUFFERS", variant.buffers),
            ("PARTS", 1),
            ("MIN_BLOCKS", variant.min_blocks),
        )
        return Launch(
            source=KernelSource(self.name, problem.dtype, True, constants),
            grid=(grid, 1, 1),
            block=_THREADS,
            shared_bytes=_shared_bytes(variant, tiling),
            geometry=geometry,
            planes=planes,
        )


class WeightGradGemm(_GradientGemm):
    """The weight gradient: all taps of some channels, in parts of batch × positions that are added in a fixed order."""

    pass_ = Pass.WEIGHT_GRAD
    name = "weight_grad_gemm"
    any_size = True


def _sizes(tiling: "_Tiling") -> "tuple[int, int, int]":
    return tiling.skew, tiling.table_bytes, tiling.stage_bytes


def _parts(problem: "ConvTransposeProblem", variant: "GradientVariant", tiling: "_Tiling", device: "DeviceInfo") -> int:
    """Parts of the positions: the machine is filled once, and no part is mostly its beginning."""
    blocks = blocks_of(problem, Pass.WEIGHT_GRAD, variant.rows, variant.out_chunk)
    full = max(1, device.multiprocessors * variant.min_blocks // blocks)
    return max(1, min(full, affordable_planes(problem), tiling.total // 8))


def _depth(problem: "ConvTransposeProblem", pass_: "Pass", variant: "GradientVariant") -> int:
    """Terms of a sum in one stage."""
    if pass_ is Pass.WEIGHT_GRAD:
        return variant.positions
    return round_up(variant.out_chunk * problem.taps, 32 // DTYPE_BYTES[problem.dtype])


def _shared_bytes(variant: "GradientVariant", tiling: "_Tiling") -> int:
    return max(tiling.table_bytes + variant.buffers * tiling.stage_bytes, tiling.table_bytes + 8 * variant.columns)


@lru_cache(maxsize=8192)
def _tiling(
    problem: "ConvTransposeProblem", pass_: "Pass", layouts: "Layouts", variant: "GradientVariant", device: "DeviceInfo"
) -> "_Tiling | None":
    """The tiles of least work whose stages fit shared memory."""
    best, least = None, math.inf
    for images, depth, height, width in lanes_of(problem, variant.positions):
        if best is not None and width < min(_LEAST_ROW, problem.input_size[-1]):
            break
        tiling = _gradient_gemm_tiles(problem, pass_, layouts, variant, (images, depth, height, width))
        while not _fits(variant, tiling, device) and images > 1:
            images //= 2
            tiling = _gradient_gemm_tiles(problem, pass_, layouts, variant, (images, depth, height, width))
        if not _fits(variant, tiling, device):
            continue
        work = tiling.total * _stage_cycles(problem, pass_, variant, tiling)
        if work < least:
            best, least = tiling, work
    if best is None and layouts.aligned:  # whole pieces make long rows longer
        return _tiling(problem, pass_, replace(layouts, aligned=False), variant, device)
    return best


def _fits(variant: "GradientVariant", tiling: "_Tiling", device: "DeviceInfo") -> bool:
    """Whether stages fit shared memory, and places of the window the bits that they have."""
    return _shared_bytes(variant, tiling) <= device.shared_bytes_per_block and max(tiling.window.extent) <= MAX_SIDE


def _gradient_gemm_tiles(
    problem: "ConvTransposeProblem",
    pass_: "Pass",
    layouts: "Layouts",
    variant: "GradientVariant",
    lanes: "tuple[int, int, int, int]",
) -> "_Tiling":
    size = DTYPE_BYTES[problem.dtype]
    x = Side(five(problem.input_shape), layouts.input)
    window, skew = window_of(problem, layouts, variant.out_chunk, lanes)
    depth = _depth(problem, pass_, variant)
    a_pitch = depth * size + 16
    if pass_ is Pass.WEIGHT_GRAD:
        if x.channels_last:
            piece = channel_piece(x, problem.in_channels_per_group, variant.rows, size, layouts.aligned)
            operand = Part(lanes, piece, a_pitch, depth)
        else:
            piece = row_piece(x, size, layouts.aligned, lanes[3])
            operand = Part(lanes, piece, a_pitch, depth // piece)
        tables = 4 * depth
    else:
        operand = weight_part(problem, layouts, variant.out_chunk, a_pitch, depth)
        tables = 4 * (depth + variant.columns)
    moving = pass_ is Pass.WEIGHT_GRAD
    tables += MOVING_BYTES * operand.places + (MOVING_BYTES if moving else STILL_BYTES) * window.places
    stage = variant.rows * a_pitch + variant.out_chunk * window.pitch
    counts = tiles_of(problem.batch, x.shape[2:], lanes)
    return _Tiling(lanes, counts, skew, window, operand, round_up(tables, 128), round_up(stage, 128))


# Cycles: of a multiprocessor for an instruction of the tensor cores; of each of its four schedulers for an instruction
# beside those; for a stage, also where no other block is resident; for a block, and each result that it stores. Fitted
# to 336 measured variants on an H200 (docs/performance.md, "Gradients on tensor cores").
_OPERATION, _SLOT = 1.45, 2.6


_BYTE, _STAGE, _LONE_STAGE, _BLOCK, _STORED = 0.35 / 24, 130.0, 500.0, 1150.0, 0.25


def _stage_cycles(problem: "ConvTransposeProblem", pass_: "Pass", variant: "GradientVariant", tiling: "_Tiling") -> float:
    """Predicted cycles of a multiprocessor for a stage of a block, by what its warps do and the bytes that come."""
    size = DTYPE_BYTES[problem.dtype]
    depth = _depth(problem, pass_, variant)
    operations = depth * size // 32
    products = variant.row_tiles * variant.column_tiles
    slots = variant.row_tiles + variant.column_tiles * (4 if size == 4 else 10) + products + 8
    cycles = operations * _WARPS * (products * _OPERATION + slots / 4 * _SLOT)
    moved = 0.0
    for part, channels in ((tiling.operand, variant.rows), (tiling.window, variant.out_chunk)):
        cycles += copy_cycles(part, channels, _WARPS, size)
        of_weight = part is tiling.operand and pass_ is Pass.INPUT_GRAD
        moved += channels * (depth * size if of_weight else row_bytes(part, size))
    return cycles + moved * _BYTE + _STAGE + (_LONE_STAGE if variant.min_blocks == 1 else 0.0)

# =====================================================================================================================
# polyphase/algorithms/implicit_gemm_variant.py
# =====================================================================================================================
#
# What `implicit_gemm` can be specialised to: its variants, and what one of them makes of a layer.

ROWS = 64  # of a row block
BOX_PIXELS = 64  # of a box of pixels that is an operand as it lies in memory
CHUNK_BYTES = 16  # neighbouring channels of a pixel or row; an instruction is two chunks deep
CONSUMERS = 2  # warp groups that multiply
SUMS_AT_ONCE = 16  # outputs of a cell's row that a thread adds up, from taps in rows, and then stores
_PART_PHASES = 4  # at most, of the phases along the width, where these are in parts


class GemmVariant(NamedTuple):
    """One specialisation of the kernel.

    ``pixels · pixel_blocks`` cells and ``channel_blocks · lines · (phases along the width) / width_parts`` row blocks
    are a warp group's accumulators. ``split`` says what the warp groups that multiply share out: the ``"cells"`` of a
    tile, its ``"rows"`` (row groups), or whole tiles, in ``"turns"``. ``parts`` is 2 where float32 is split in two TF32
    numbers, ``k_steps`` the depth of a stage in instructions, ``resident`` whether a thread block keeps its weights,
    ``wgmma`` whether Hopper's instruction is used, or ``mma.sync``. ``boxes``: the copy engine brings pixels as the
    cores take them, where channels come last; or in half precision, where no tap reads beside its pixel. With
    ``row_channels`` rows are the taps of so many channels, in as few row blocks as hold them, and ``channel_blocks`` of
    these sets are one item's; with ``whole_images`` columns are the pixels of whole images, without a halo.
    ``raw_slots`` are for copied stages that are not turned around yet, those of all loading groups. A ``cluster`` of
    thread blocks shares the weights it loads. ``piece_bytes`` of a row are stored at once, at most. ``scaled``: it
    multiplies float32 as float16 (kernels/common/scales.cuh).
    """

    pixels: int
    pixel_blocks: int
    channel_blocks: int
    lines: int
    k_steps: int
    stages: int
    parts: int
    split: str
    resident: bool
    loader_groups: int
    wgmma: bool
    row_channels: int = 0
    boxes: bool = False
    whole_images: bool = False
    raw_slots: int = 4
    cluster: int = 1
    piece_bytes: int = 256
    width_parts: int = 1
    scaled: bool = False

    def operand_bytes(self, dtype: str) -> int:
        """Of an element of the product's operands."""
        return 2 if self.scaled else DTYPE_BYTES[dtype]

    def stage_channels(self, dtype: str) -> int:
        """Input channels of a stage."""
        return self.k_steps * 2 * CHUNK_BYTES // self.operand_bytes(dtype)

    @property
    def taps_in_rows(self) -> bool:
        """Whether a row is a tap, not a channel of a phase."""
        return self.row_channels > 0

    @property
    def group_cells(self) -> int:
        """Cells of a warp group."""
        return self.pixels * self.pixel_blocks

    @property
    def cells(self) -> int:
        """Cells of a tile, those in its halo included."""
        return self.group_cells * (CONSUMERS if self.split == "cells" else 1)

    def sets_at_once(self, gather: "Gather") -> int:
        """Sets whose partial products are in shared memory at once, of some images; or a single one, of all images.

        Where channels come last they are as many as fill a sector of memory, or as a thread has sums for.
        """
        sets, channels = 1, self.row_channels
        if not (self.whole_images and gather.dst.channels_last) or channels & (channels - 1):
            return sets
        size, stride = DTYPE_BYTES[gather.dtype], gather.axes[2].stride
        most = min(SECTOR_BYTES // size, SUMS_AT_ONCE // stride) // channels
        while self.channel_blocks % (2 * sets) == 0 and 2 * sets <= most:
            sets *= 2
        return sets

    def round_pixels(self, gather: "Gather") -> int:
        """Columns of those images; with one set at once all of a tile."""
        sets = self.sets_at_once(gather)
        return self.cells if sets == 1 else max(self.cells // sets, TINY)

    def row_columns(self, gather: "Gather") -> int:
        """Elements of a cell that are stored together: a line of it, or a part of one."""
        return gather.axes[2].stride // (1 if self.width_parts == self.row_parts else self.width_parts)

    def piece(self, gather: "Gather") -> int:
        # Cells whose results pass through shared memory at once, on their way to the destination.
        if gather.dst.channels_last:
            return 32
        cell_bytes, cells = self.row_columns(gather) * DTYPE_BYTES[gather.dtype], 128
        while cells > 8 and (cells * cell_bytes > self.piece_bytes or cells >= 2 * self.group_cells):
            cells //= 2
        return cells

    @property
    def row_parts(self) -> int:
        """Row groups of an item."""
        return CONSUMERS if self.split == "rows" else 1

    @property
    def sharers(self) -> int:
        """Warp groups that multiply the same item."""
        return 1 if self.split == "turns" else CONSUMERS

    @property
    def loader_threads(self) -> int:
        """Threads that load; the registers of those who multiply leave no more."""
        return 256 if self.wgmma and self.loader_groups > 1 else 128

    @property
    def turning_groups(self) -> int:
        """Groups of warps that take turns to turn the copy engine's boxes around."""
        return self.loader_threads // 128 if self.stages > 2 else 1


@dataclass(frozen=True)
class Taps:
    """What the layer's phases come to (kernels/common/row_blocks.cuh)."""

    owned_w: int
    lines: "tuple[int, ...]"  # taps of each phase along depth and height that owns any
    along_w: int  # taps of all phases along the width

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(axes: "tuple[Axis, Axis, Axis]") -> "Taps":
        """The taps of a layer."""
        depth, height, width = ([len(taps) for taps in axis.taps_by_phase if taps] for axis in axes)
        return Taps(len(width), tuple(d * h for d in depth for h in height), sum(width))

    def rows(self, channels: int, lines: int) -> int:
        """Taps of ``channels``, of those ``lines`` neighbouring phases that have most."""
        most = max(sum(self.lines[i : i + lines]) for i in range(0, len(self.lines), lines))
        return channels * most * self.along_w

    def row_blocks(self, channels: int, lines: int) -> int:
        """Row blocks that hold a row for each of those."""
        return math.ceil(self.rows(channels, lines) / ROWS)

    @staticmethod
    def width_parts(axes: "tuple[Axis, Axis, Axis]") -> int:
        """Parts of the phases along the width: of four or two phases, or 1 where not all have as many taps."""
        phases = [len(taps) for axis in axes[:2] for taps in axis.taps_by_phase]
        along_w = {len(taps) for taps in axes[2].taps_by_phase}
        if not all(phases) or len(along_w) > 1 or axes[2].stride % _PART_PHASES:
            return 1
        return max(2, axes[2].stride // _PART_PHASES)

    @staticmethod
    def stay_in_cells(axes: "tuple[Axis, Axis, Axis]") -> bool:
        """Whether no tap reads beside its cell."""
        return all(axis.shifts == (0, 0) for axis in axes)


@dataclass(frozen=True)
class Product:
    # The product that a variant makes of a pass, in row groups of ``channel_blocks`` and ``lines``.

    row_blocks: int  # of a row group
    row_groups: int  # of the layer
    line_groups: int
    operations: int  # taps of the row group that has most
    steps: int  # depth in instructions

    @classmethod
    def of(cls, gather: "Gather", variant: "GemmVariant") -> "Product":
        """The product of a variant."""
        shape = variant.channel_blocks, variant.lines, variant.width_parts, variant.row_channels
        return cls._of(gather, *shape, variant.k_steps, variant.operand_bytes(gather.dtype))

    @classmethod
    @lru_cache(maxsize=4096)
    def _of(
        cls,
        gather: "Gather",
        channel_blocks: int,
        lines: int,
        width_parts: int,
        row_channels: int,
        k_steps: int,
        operand_bytes: int,
    ) -> "Product":
        taps = Taps.of(gather.axes)
        groups = [sum(taps.lines[i : i + lines]) for i in range(0, len(taps.lines), lines)]
        if row_channels:
            row_blocks = operations = channel_blocks * taps.row_blocks(row_channels, lines)
            channel_groups = math.ceil(gather.dst_channels / (channel_blocks * row_channels))
        else:
            row_blocks = channel_blocks * lines * taps.owned_w // width_parts
            operations = max(groups) * taps.along_w * channel_blocks // width_parts
            channel_groups = math.ceil(gather.dst_channels / (ROWS * channel_blocks))
        depth = gather.src_channels * operand_bytes / (2 * CHUNK_BYTES)
        return cls(
            row_blocks=row_blocks,
            row_groups=gather.groups * channel_groups * len(groups) * width_parts,
            line_groups=len(groups) * width_parts,
            operations=operations,
            steps=math.ceil(depth / k_steps) * k_steps,
        )

    def step_bytes(self, variant: "GemmVariant") -> int:
        """Packed weights of one step of a row group."""
        return self.operations * variant.parts * 2 * ROWS * CHUNK_BYTES

    def weight_bytes(self, variant: "GemmVariant") -> int:
        """Packed weights of a row group."""
        return self.steps * self.step_bytes(variant)

    def stages(self, variant: "GemmVariant") -> int:
        """Stages of an item."""
        return self.steps // variant.k_steps

    def counter_bytes(self, variant: "GemmVariant") -> int:
        """What lies in front of the packed weights: counters of the items that blocks have taken.

        A cluster has one; the emulator, which runs blocks one by one, has one for each of its blocks.
        """
        return counter_bytes(self.row_groups // variant.row_parts if variant.resident else variant.cluster)


def fills_stages(groups: int, channels: int, stage_channels: int) -> bool:
    """Whether the last stage of a group's ``channels`` does not reach into the next group."""
    return groups == 1 or channels % stage_channels == 0

# =====================================================================================================================
# polyphase/algorithms/implicit_gemm_tile.py
# =====================================================================================================================
#
# The tiles of `implicit_gemm`: which cells a thread block takes at once, and how they lie in shared memory.

_MAX_SIDE = 1023, 63, 63  # of a tile and its halo: pixels of a row, slabs, images (Pixel in the kernel packs them)
_MAX_STATIC_SHARED = 48 << 10
_MAX_BOX_SIDE = 256


class Tile(NamedTuple):
    """The cells of a block and how their halo lies in shared memory, in pixels (see `Geometry` in the kernel)."""

    images: int
    cells: "tuple[int, int, int]"
    pitch: "tuple[int, int, int]"  # from one image, slab and row to the next
    halo: int
    allocated: int
    skew: int
    copy_bytes: int
    tiles: "tuple[int, int, int, int]"
    boxes: int = 0  # that the copy engine brings for a stage; none where threads copy
    box_pixels: int = 0
    run: int = 0  # cells of any rows, and images up to ``images``, one after the other

    @property
    def tile_cells(self) -> int:
        """Cells of a tile; of whole images their pixels."""
        return self.run or self.images * math.prod(self.cells)

    @property
    def total(self) -> int:
        """Tiles of the whole problem."""
        return math.prod(self.tiles)


def raw_pitch(halo: int, size: int) -> int:
    """Pixels of a channel in a copied stage, which is turned around 128 bytes at a time."""
    return math.ceil(halo * size / 128) * 128 // size


def shared_bytes(gather: "Gather", variant: "GemmVariant", tile: "Tile") -> int:
    """Dynamic shared memory of a tile."""
    return _SharedBytes(gather, variant).of(tile, variant.stages, aligned=True)


class _SharedBytes:
    """Dynamic shared memory of the tiles of a variant, whatever its stages."""

    def __init__(self, gather: "Gather", variant: "GemmVariant") -> None:
        self.size = DTYPE_BYTES[gather.dtype]
        self.cells = variant.cells
        self.src_channels_last = gather.src.channels_last
        product = Product.of(gather, variant)
        weights = variant.row_parts * product.step_bytes(variant)
        self.fixed = _store_bytes(gather, variant) + 8 + (weights * product.steps if variant.resident else 0)
        self.weights = 0 if variant.resident else weights * variant.k_steps  # of a stage
        chunks = 2 * variant.k_steps
        self.allocated = variant.parts * chunks * CHUNK_BYTES
        self.in_boxes = variant.boxes
        raw = variant.raw_slots * chunks * CHUNK_BYTES * self.size // variant.operand_bytes(gather.dtype)
        self.raw = 0 if self.src_channels_last or variant.boxes else raw
        self.table = 4 + (8 if needs_wide_offsets(gather) else 4) * variant.loader_groups
        # Beside partial products little is left: a variant that fits must fit with any halo and wide offsets, too.
        self.worst_table = 4 + 8 * variant.loader_groups if variant.taps_in_rows else self.table
        self.worst_halo = variant.cells if variant.taps_in_rows else 0

    def least(self, stages: int) -> int:
        """Of any tile: all have pixels for each cell."""
        return self.fixed + stages * (self.weights + self.allocated * self.cells)

    def of(self, tile: "Tile", stages: int, aligned: bool) -> int:
        """Of one tile; not ``aligned``: of the worst like it, where every pixel is copied by itself."""
        copied = tile.copy_bytes // self.size if aligned and not self.src_channels_last else 1
        halo = tile.halo if aligned else max(tile.halo, self.worst_halo)
        total = self.fixed + stages * (self.weights + self.allocated * (tile.allocated + (0 if aligned else 32)))
        if tile.boxes and (aligned or self.in_boxes):
            return total + self.raw * tile.boxes * tile.box_pixels
        total += self.raw * raw_pitch(halo, self.size) if self.raw else 0
        return total + (self.table if aligned else self.worst_table) * -(-halo // copied)


def items_known(variant: "GemmVariant", product: "Product", stages: int) -> int:
    """The slots in which a block learns of its items (``QUEUE`` in the kernel)."""
    ahead = 2 * (stages + variant.loader_groups) + variant.raw_slots
    return math.ceil(ahead / product.stages(variant)) + 4


def _static_shared_bytes(variant: "GemmVariant", product: "Product", stages: int) -> int:
    """The kernel's ``Shared``: barriers, items that are known, distances of operations; what follows is aligned."""
    barriers = 8 * (2 * (stages + variant.raw_slots) + CONSUMERS + 1)
    barriers += round_up(12 * items_known(variant, product, stages), 8)
    alignment = 1024 if variant.boxes else 128  # of what follows
    numbers = (product.operations + product.row_blocks) * product.line_groups + 1
    return math.ceil((barriers + 4 * numbers) / alignment) * alignment


@lru_cache(maxsize=4096)
def needs_wide_offsets(gather: "Gather") -> bool:
    """Whether offsets within an image need more than 32 bits."""
    return max(extent((1, 1, *side.shape[2:]), side.strides) for side in (gather.src, gather.dst)) >= 2**31


def _store_bytes(gather: "Gather", variant: "GemmVariant") -> int:
    # What results pass on their way to the destination (``STORE_BYTES`` in the kernel).
    size = DTYPE_BYTES[gather.dtype]
    if variant.taps_in_rows:
        sets, columns = variant.sets_at_once(gather), variant.round_pixels(gather)
        pitch = math.ceil((columns + (2 if sets > 1 else 0) - 8) / 32) * 32 + 8
        rows = sets * Taps.of(gather.axes).rows(variant.row_channels, variant.lines)
        return (1 if variant.split == "cells" else CONSUMERS) * rows * pitch * 4 + 4 * variant.cells
    places = CONSUMERS * variant.group_cells * (16 if needs_wide_offsets(gather) else 8)
    cells, columns = variant.piece(gather), variant.row_columns(gather)
    if gather.dst.channels_last:
        return places + CONSUMERS * cells * (ROWS * size + CHUNK_BYTES)
    vector = CHUNK_BYTES // size
    lanes = 32 if cells * columns > 16 * vector else 16
    own = gather.axes[2].stride // variant.width_parts  # a thread's of a cell
    staged = math.gcd(own if columns > own else 2 * own, vector)
    pitch = math.ceil(cells * columns / (lanes * vector)) * lanes * vector + 4 * staged
    return places + CONSUMERS * 4 * 8 * pitch * size


def pixels_join(gather: "Gather") -> bool:
    """Whether the pixels of an image follow each other in memory."""
    sizes, strides = gather.src.shape[2:], gather.src.strides[2:]
    rows_join = sizes[1] == 1 or strides[1] == sizes[2] * strides[2]
    return rows_join and (sizes[0] == 1 or strides[0] == sizes[1] * sizes[2] * strides[2])


def copy_sizes(gather: "Gather", row: int) -> "list[int]":
    """Bytes that one copy from global memory may have, where ``row`` pixels and their whole rows are copied so."""
    size = DTYPE_BYTES[gather.dtype]
    batch, channel, depth, height, width = gather.src.strides
    if gather.src.channels_last:
        chunk = CHUNK_BYTES // size
        whole = gather.src_channels % chunk == 0 and all(s % chunk == 0 for s in (batch, depth, height, width))
        return [CHUNK_BYTES] if whole and gather.aligned else [size]
    sizes = [size]
    if width == 1 and gather.aligned:
        counts = [copied // size for copied in (4, 8, 16) if copied > size]
        sizes += [count * size for count in counts if all(s % count == 0 for s in (row, batch, channel))]
    return sizes


@lru_cache(maxsize=65536)
def best_tile(gather: "Gather", variant: "GemmVariant", batch: int, device: "DeviceInfo", reserve: int = 0) -> "Tile | None":
    """The tile that covers the problem with the least work; None where none fits shared memory less ``reserve``."""
    return best_tiles(gather, variant, (variant.stages,), batch, device, reserve)[0]


def best_tiles(
    gather: "Gather", variant: "GemmVariant", stages: "Sequence[int]", batch: int, device: "DeviceInfo", reserve: int
) -> "list[Tile | None]":
    """The `best_tile` of a variant with each of these ``stages`` in its own one's place; they rise."""
    product, shared = Product.of(gather, variant), _SharedBytes(gather, variant)
    # Chunks of a pixel lie in different banks, where they are copied together.
    banks = 8 // min(8, 2 * variant.k_steps) if gather.src.channels_last and not variant.boxes else 0
    transposed = variant.boxes and not gather.src.channels_last
    if transposed and not may_take_operands(gather):
        return [None] * len(stages)
    engines = (True,) if variant.boxes else (True, False) if may_take_boxes(gather, variant) else (False,)
    limits = []
    for count in stages:
        static = _static_shared_bytes(variant, product, count)
        limit = device.shared_bytes_per_block - static - reserve
        if static > _MAX_STATIC_SHARED or shared.least(count) > limit:
            break  # nor do more stages fit
        limits.append(limit)
    found: list[Tile | None] = [None] * len(stages)
    if limits:
        kind = variant.taps_in_rows, variant.round_pixels(gather) if variant.whole_images else 0
        tiles = iter(_implicit_gemm_tile_tiles(gather, variant.cells, batch, banks, *kind, engines, transposed))
        tile = next(tiles, None)
        for index, limit in enumerate(limits):
            while tile is not None and shared.of(tile, stages[index], not reserve) > limit:
                tile = next(tiles, None)
            found[index] = tile
    return found


@lru_cache(maxsize=512)
def _implicit_gemm_tile_tiles(
    gather: "Gather",
    capacity: int,
    batch: int,
    banks: int,
    all_pixels: bool,
    most_pixels: int,
    engines: "tuple[bool, ...]",
    transposed: bool,
) -> "list[Tile]":
    """Tiles of at most ``capacity`` cells, those in their halo included; least work first, then less memory.

    ``all_pixels``: of at most so many pixels, every one of which is a column of the product. ``engines``: whether the
    copy engine brings them; ``transposed``: as operands, `BOX_PIXELS` of every channel at a time. Where images are
    whole, they have at most ``most_pixels``, which is zero elsewhere.
    """
    if most_pixels:
        if math.prod(gather.src.shape[2:]) > most_pixels:
            return []
        return list(_whole_images(gather, capacity, batch, banks, engines, transposed))
    images = _addressable(gather)
    offered = [*_runs(gather, capacity, batch, banks, images, engines, transposed)]
    if not offered and not transposed:
        offered = [
            tile
            for engine in engines
            if not engine or box_strides(gather) is not None
            for tile in _boxes(gather, capacity, batch, banks, images, all_pixels, engine)
        ]
    found: list[Tile] = []
    for tile in sorted(offered, key=lambda tile: _work(tile, capacity)):
        if not found or tile.allocated < found[-1].allocated or tile.halo < found[-1].halo:
            found.append(tile)
    return found


def _addressable(gather: "Gather") -> int:
    """Images of a tile, of which several are taken only where offsets within it have 32 bits."""
    sides = [(side.strides[0], extent((1, 1, *side.shape[2:]), side.strides)) for side in (gather.src, gather.dst)]
    return min((2**31 - one) // max(1, stride) for stride, one in sides)


def _work(tile: "Tile", capacity: int) -> float:
    # What tiles cost, up to a factor: their cells, and the copies of their halo. Two bytes pass registers.
    per_pixel = 0.1 if tile.boxes else {16: 0.3, 8: 0.4, 4: 0.6, 2: 4.0}[tile.copy_bytes]
    rows = 1 + 8 / tile.cells[2] if tile.tiles[3] > 1 else 1.0  # short rows move parts of memory's lines
    return tile.total * (capacity + per_pixel * tile.halo) * rows


def _runs(
    gather: "Gather",
    capacity: int,
    batch: int,
    banks: int,
    addressable: int,
    engines: "tuple[bool, ...]",
    transposed: bool,
) -> "Iterator[Tile]":
    """Cells in the order of memory, whatever rows they belong to; of several images, too, where that is possible."""
    depth, height, width = gather.cells
    pixels = depth * height * width
    alone = Taps.stay_in_cells(gather.axes) and gather.cells == gather.src.shape[2:]
    if not (alone and pixels_join(gather) and addressable > capacity // max(1, pixels) + 2):
        return
    if (batch + 1) * pixels >= 2**31 - capacity:
        return
    last, pitch = gather.src.channels_last, (pixels, height * width, width)
    for engine in engines:
        size = max(copy_sizes(gather, pixels))
        if engine and not _are_one_row(gather, batch):
            continue
        if last or not engine:
            run, images, tiles = capacity, 2**31 - 1, (1, 1, 1, math.ceil(batch * pixels / capacity))
        elif pixels:
            parts, even = math.ceil(pixels / capacity), CHUNK_BYTES // DTYPE_BYTES[gather.dtype]
            run, images, tiles = math.ceil(pixels / parts / even) * even, 1, (batch, 1, 1, parts)
        else:
            continue
        boxes = _operands(run) if transposed else _pieces_of_row(run, gather) if engine else (0, 0)
        allocated = _allocated(capacity, capacity, banks, *boxes)
        yield Tile(images, gather.cells, pitch, run, allocated, 0, size, tiles, *boxes, run)


def _whole_images(
    gather: "Gather", capacity: int, batch: int, banks: int, engines: "tuple[bool, ...]", transposed: bool
) -> "Iterator[Tile]":
    """The pixels of whole images, one after the other."""
    depth, height, width = gather.src.shape[2:]
    pixels = depth * height * width
    images = min(capacity // max(1, pixels), _MAX_SIDE[2], max(1, batch), _addressable(gather))
    if images < 1 or not pixels_join(gather) or (batch + 1) * pixels >= 2**31 - capacity:
        return
    last, run, pitch = gather.src.channels_last, images * pixels, (pixels, height * width, width)
    for engine in engines:
        if engine and not _are_one_row(gather, batch):
            continue
        if engine and not last and pixels * DTYPE_BYTES[gather.dtype] % CHUNK_BYTES:
            continue
        pieces = _operands(run) if transposed else _pieces_of_row(run, gather) if last else (1, run)
        boxes = pieces if engine else (0, 0)
        allocated = _allocated(run, capacity, banks, *boxes)
        size, tiles = max(copy_sizes(gather, pixels)), (math.ceil(batch / images), 1, 1, 1)
        yield Tile(images, gather.cells, pitch, run, allocated, 0, size, tiles, *boxes, run)


def _are_one_row(gather: "Gather", batch: int) -> bool:
    """Whether boxes can take pixels that join as one row: those of an image, or with channels last of the tensor."""
    pixels, (image, *_, pixel) = math.prod(gather.src.shape[2:]), gather.src.strides
    if gather.src.channels_last:
        return batch == 1 or image == pixels * pixel
    return pixel == 1 or pixels == 1


def _is_box(row: int, rows: int, slabs: int, images: int) -> bool:
    """Whether the copy engine brings so many pixels at once, or a single row in several pieces."""
    return max(rows, slabs, images) <= _MAX_BOX_SIDE and (row <= _MAX_BOX_SIDE or rows * slabs * images == 1)


def _pieces_of_row(row: int, gather: "Gather") -> "tuple[int, int]":
    """Boxes that a row of pixels is brought in, and the pixels of each; one of several is turned around as a whole."""
    count, turned = math.ceil(row / _MAX_BOX_SIDE), 128 // DTYPE_BYTES[gather.dtype]
    return count, row if count == 1 else math.ceil(row / count / turned) * turned


def _operands(pixels: int) -> "tuple[int, int]":
    """Boxes that are operands for so many pixels, and the pixels of each."""
    return math.ceil(pixels / BOX_PIXELS), BOX_PIXELS


@lru_cache(maxsize=4096)
def box_strides(gather: "Gather", one_row: bool = False) -> "tuple[int, ...] | None":
    """Bytes between neighbours in all dimensions but the innermost, as `boxes` lists them; None where the copy engine
    cannot take the source apart. ``one_row``: the pixels of an image, which follow each other, channels first."""
    size = DTYPE_BYTES[gather.dtype]
    batch, channels, *spatial = zip(gather.src.shape, gather.src.strides)
    if one_row:
        spatial = [(1, 0), (1, 0), spatial[2]]
    dimensions = [*spatial[::-1], batch]
    inner = channels if gather.src.channels_last else dimensions.pop(0)
    if not gather.src.channels_last:
        dimensions.append(channels)
    last_joins = not gather.src.channels_last or channels[0] * size % CHUNK_BYTES == 0  # whatever the image's size
    if not gather.aligned or not last_joins or (inner[0] > 1 and inner[1] != 1):
        return None
    return engine_strides((count, step * size) for count, step in dimensions)


def may_take_boxes(gather: "Gather", variant: "GemmVariant") -> bool:
    """Whether the copy engine can bring pixels that are then turned around, channels first."""
    fills = fills_stages(gather.groups, gather.src_channels, variant.stage_channels(gather.dtype))
    return variant.wgmma and fills and not gather.src.channels_last and box_strides(gather, one_row=True) is not None


def may_take_operands(gather: "Gather") -> bool:
    """Whether the copy engine can bring pixels as the cores take them: with channels last, or in half precision rows of
    pixels that no tap reads beside. (Rows of 32 bytes, as of 16 pixels, are not swizzled as rows of 128 bytes are.)"""
    if gather.src.channels_last:
        return box_strides(gather) is not None
    if DTYPE_BYTES[gather.dtype] != 2 or not pixels_join(gather) or box_strides(gather, one_row=True) is None:
        return False
    return Taps.stay_in_cells(gather.axes) or math.prod(gather.src.shape[2:]) == BOX_PIXELS


def boxes(gather: "Gather", variant: "GemmVariant", tile: "Tile") -> "Boxes":
    """What the copy engine brings for a stage of the tile, ``tile.boxes`` times."""
    size, last = DTYPE_BYTES[gather.dtype], gather.src.channels_last
    strides = box_strides(gather, one_row=bool(tile.run) and not last)
    assert strides is not None
    batch, channels, *spatial = gather.src.shape
    sizes, (image, slab, row) = [*spatial[::-1], batch], tile.pitch
    columns = tile.box_pixels if tile.run or tile.boxes > 1 else row
    box = [columns, slab // row, image // slab, tile.images]
    if tile.run:  # pixels are one row: of an image, or of the tensor
        box = [columns, 1, 1, 1] if variant.boxes or not variant.whole_images else [image, 1, 1, tile.images]
        pixel = CHUNK_BYTES if math.prod(sizes) == 1 else gather.src.strides[4] * size
        if last:
            sizes, strides = [math.prod(sizes), 1, 1, 1], (pixel, *(CHUNK_BYTES,) * 3)
        else:
            sizes = [math.prod(spatial), 1, 1, batch]
    stage_bytes, stage_channels = 2 * CHUNK_BYTES * variant.k_steps, variant.stage_channels(gather.dtype)
    rounded = variant.parts == 1 and not variant.scaled
    if last:
        return Boxes(gather.dtype, (channels, *sizes), strides, (stage_channels, *box), stage_bytes, rounded)
    swizzle = BOX_PIXELS * size if variant.boxes else CHUNK_BYTES
    return Boxes(gather.dtype, (*sizes, channels), strides, (*box, stage_channels), swizzle, rounded)


def _allocated(halo: int, read: int, banks: int, boxes: int, box_pixels: int) -> int:
    """Pixels of a run in shared memory, of which taps read some beyond the halo.

    Chunks of 32 are turned around, and chunks of channels lie in other banks. Boxes are swizzled in rows of eight, and
    stages of them are whole kilobytes.
    """
    whole = max(math.ceil(halo / 32) * 32, read)
    if boxes:
        return math.ceil(max(whole, boxes * box_pixels) / 32) * 32
    return whole + (banks - whole) % 8 if banks else whole


def _boxes(
    gather: "Gather", capacity: int, batch: int, banks: int, addressable: int, all_pixels: bool, engine: bool
) -> "Iterator[Tile]":
    """Boxes of cells, which lie in a run of pixels with the halo between them.

    A row of the run is followed by the next row's halo on the left, which is its own on the right where a tile is as
    wide as the image: all of it is padding then. So it is with rows, between images.
    """
    size = DTYPE_BYTES[gather.dtype]
    depth, height, width = gather.cells
    ahead = [max(0, -axis.shifts[0]) for axis in gather.axes]  # pixels that any tap needs behind a cell
    back = [axis.shifts[1] for axis in gather.axes]  # and before it; negative where all are behind
    reach = [axis.shifts[1] - axis.shifts[0] for axis in gather.axes]
    whole_rows = math.gcd(gather.src.shape[4], math.gcd(gather.src.strides[2], gather.src.strides[3]))
    for copy_bytes in [max(copy_sizes(gather, whole_rows))] if engine else copy_sizes(gather, whole_rows):
        even = 1 if gather.src.channels_last else (CHUNK_BYTES if engine else copy_bytes) // size
        skew = -back[2] % even
        lead = back[2] + skew
        widest = min(width, capacity, _MAX_SIDE[0])
        least = math.ceil(width / widest)
        parts = range(least, min(math.ceil(width / 8), least + 128) + 1)
        widths = (math.ceil(math.ceil(width / n) / even) * even if n > 1 else width for n in parts)
        for columns in dict.fromkeys(widths):
            if columns > min(capacity, _MAX_SIDE[0]):
                continue
            shared = columns == width and lead >= ahead[2] and width >= gather.src.shape[4]
            row = math.ceil((lead + columns if shared else skew + columns + reach[2]) / even) * even
            most = min(height, capacity // row - reach[1] if all_pixels else (capacity - columns) // row + 1)
            for rows in {math.ceil(height / math.ceil(height / max(1, most * n // 8))) for n in (8, 6, 4, 3, 2, 1)}:
                whole = rows == height and back[1] >= ahead[1] and height >= gather.src.shape[3] and depth == 1
                slab = (back[1] + rows if whole else rows + reach[1]) * row
                flat = (rows - 1) * row + columns
                fitting = capacity // slab - reach[0] if all_pixels else (capacity - flat) // slab + 1
                most_slabs = min(depth, _MAX_SIDE[1] - reach[0], fitting)
                if row > _MAX_SIDE[0] or rows + reach[1] > _MAX_SIDE[0] or most_slabs < 1:
                    continue
                for slabs in {1, math.ceil(depth / math.ceil(depth / most_slabs))}:
                    used = flat + (slabs - 1) * slab
                    image = (slabs + reach[0]) * slab
                    tail = math.ceil(((ahead[1] * row if whole else 0) + ahead[2]) / even) * even
                    images = 1
                    if (slabs, rows, columns) == (depth, height, width):
                        fitting = (capacity - tail) // image if all_pixels else (capacity - used) // image + 1
                        images = max(1, min(batch, _MAX_SIDE[2], fitting, addressable))
                    span = reach[0] * slab + reach[1] * row + reach[2] + skew
                    halo = images * image + tail
                    if all_pixels and halo > capacity:
                        continue
                    if engine and not _is_box(row, slab // row, image // slab, images):
                        continue
                    boxes = (1, images * image) if engine else (0, 0)
                    if engine and row > _MAX_BOX_SIDE:
                        boxes = _pieces_of_row(row, gather)
                    allocated = _allocated(halo, capacity + (0 if all_pixels else span), banks, *boxes)
                    tiles = (
                        math.ceil(batch / images),
                        math.ceil(depth / slabs),
                        math.ceil(height / rows),
                        math.ceil(width / columns),
                    )
                    pitch = image, slab, row
                    cells = slabs, rows, columns
                    yield Tile(images, cells, pitch, halo, allocated, skew, copy_bytes, tiles, *boxes)


def store_vector(gather: "Gather", variant: "GemmVariant", tile: "Tile") -> int:
    """Elements of a store, the most that every row of the tile allows: each exists as a whole or not at all."""
    size = DTYPE_BYTES[gather.dtype]
    batch, channel, depth, height, width = gather.dst.strides
    if variant.taps_in_rows and not gather.dst.channels_last:
        wide = math.gcd(gather.axes[2].stride, 16 // size)
        return wide if width == 1 and all(s % wide == 0 for s in (batch, channel, depth, height)) else 1
    if gather.dst.channels_last:
        channels = variant.sets_at_once(gather) * variant.row_channels if variant.taps_in_rows else gather.dst_channels
        wide = math.gcd(channels, 16 // size)
        while variant.taps_in_rows and wide > 1 and wide * gather.axes[2].stride > SUMS_AT_ONCE:
            wide //= 2
        return wide if all(s % wide == 0 for s in (gather.dst_channels, batch, depth, height, width)) else 1
    stride = gather.axes[2].stride
    for count in (16 // size, 8 // size, 2):
        if variant.row_columns(gather) < stride and variant.row_columns(gather) % count:
            continue  # the neighbours of a part of a line are not its own
        rows = tile.pitch[2] * stride % count == 0 and (tile.cells[2] * stride % count == 0 or tile.tiles[3] == 1)
        whole = width == 1 and gather.dst.shape[4] % count == 0
        if whole and rows and all(s % count == 0 for s in (batch, channel, depth, height)):
            return count
    return 1

# =====================================================================================================================
# polyphase/algorithms/implicit_gemm_cost.py
# =====================================================================================================================
#
# How long a variant of `implicit_gemm` takes, predicted from what it counts of a layer (docs/performance.md).

@dataclass(frozen=True)
class _Costs:
    """Multiprocessor cycles, fitted to times of variants on an H200 (docs/performance.md)."""

    shared: float = 1.055 / 128  # a byte through shared memory, beside the products
    shared_boxes: float = 0.82 / 128  # where the copy engine brings operands, channels last
    issue: float = 8.62  # each matrix instruction, above what the cores and shared memory take
    wait: float = 14.62  # for a stage, by those who multiply
    stage: float = 750.0  # barriers and latencies of a stage, for the group that loads it
    stage_in_place: float = 727.8
    stage_turned: float = 725.3  # where the copy engine brings boxes that are turned around
    turn: float = 114.6  # and 128 bytes of each channel of a chunk, for each warp
    stage_boxes: float = 314.5  # and where it brings operands
    box_pixel: float = 1.27  # of those, each pixel
    copy_rows: float = 99.0  # a warp's copies, channels first
    copy_pixels: float = 340.0  # and channels last
    convert: float = 178.0  # a chunk of 32 pixels turned around, for each warp
    moved: float = 1 / 46.75  # a byte from the L2 cache
    slot: float = 1128.0  # from a stage that is free to the same stage full, beside the products
    slot_in_place: float = 1695.0
    slot_shared: float = 146.2  # more, where it is to be free in all blocks of a cluster
    slot_use: float = 1.36  # of the products of a stage, what its slot is held for them
    value_rows: float = 16.68  # a thread's value stored, channels first
    value_pixels: float = 20.32  # and channels last
    partial_lines: float = 0.9119  # times that, where an item stores every other line, channels first
    partial_pixels: float = 2.45  # and channels last
    parts_of_sectors: float = 1.9  # times what a copy takes for the output, where row groups share its sectors
    crowding: float = 0.09875  # share of that more for every four warps that load, beyond the first four
    odd_stride: float = 1.56  # times that, 3 or 4 bytes by bytes of a value, where a thread's elements are no vector
    edges: float = 24.89  # bytes by which a row's parts of memory sectors make it longer, where tiles share a row
    partial: float = 0.04658  # with taps in rows: a partial product stored and added up
    output: float = 0.1027  # and a result of whole images stored
    lane_output: float = 0.5  # or one of others, by lanes, whether they have a cell or not
    scattered: float = 3.04  # or one where lanes' results lie apart
    launch: float = 13090.0
    turn_scaled: float = 259.0  # a chunk of pixels that become float16: brought by the copy engine, or by threads
    convert_scaled: float = 629.0
    measure: float = 10.0e-6  # seconds to find what they are multiplied by,
    measured: float = 0.54  # and of a copy's bandwidth, at which all is read for that
    bandwidth: float = 0.85  # of a copy's, which no layer exceeds
    bandwidth_one_tap: float = 0.81  # where the kernel is the stride, channels first
    overlap: float = 2.74  # exponents of the norms that add what goes on at the same time
    turns: float = 3.8
    other_instruction: float = 2.2  # mma.sync: each of four warps reads the pixels for itself


_COSTS = _Costs()


def estimate(
    gather: "Gather", variant: "GemmVariant", tile: "Tile", device: "DeviceInfo", layer_bytes: int
) -> "tuple[float, str]":
    """Predicted seconds of a variant, and whether ``layer_bytes`` or instructions bound it."""
    product = Product.of(gather, variant)
    multiply, load, moved, slots = _main_loop(gather, variant, tile, product)
    main = _norm(_COSTS.overlap, multiply, load, moved, slots)
    store = _store(gather, variant, tile, product)
    item = main + store
    tiles = math.ceil(tile.total / variant.cluster) * variant.cluster
    waves = tiles * product.row_groups / variant.row_parts / device.multiprocessors
    if waves < 8:
        waves = math.ceil(waves)
    if variant.split == "turns" and (waves > 1 or variant.whole_images):
        item, waves = _norm(_COSTS.turns, main, (multiply + store) / 2), max(waves, 2)
    resident = variant.row_parts * product.weight_bytes(variant) * _COSTS.moved if variant.resident else 0
    busy = (waves * item + resident + _COSTS.launch) / device.clock_hz
    if variant.row_columns(gather) < gather.axes[2].stride:
        written = math.prod(gather.dst.shape) * DTYPE_BYTES[gather.dtype]
        busy += _COSTS.parts_of_sectors * written / device.copy_bytes_per_second
    one_tap = all((a.kernel, a.padding, a.dilation) == (a.stride, 0, 1) for a in gather.axes)
    bandwidth = _COSTS.bandwidth_one_tap if one_tap and not gather.src.channels_last else _COSTS.bandwidth
    floor = layer_bytes / (bandwidth * device.copy_bytes_per_second)
    seconds, bound = slower_of(busy, floor)
    return seconds + (_measure(gather, device) if variant.scaled else 0), bound


def _measure(gather: "Gather", device: "DeviceInfo") -> float:
    """Seconds to find what pixels and weights are multiplied by."""
    read = math.prod(gather.src.shape) + gather.groups * gather.src_channels * gather.dst_channels * gather.taps
    return _COSTS.measure + read * DTYPE_BYTES[gather.dtype] / (_COSTS.measured * device.copy_bytes_per_second)


def _norm(exponent: float, *parts: float) -> float:
    return float(sum(part**exponent for part in parts) ** (1 / exponent))


def _main_loop(gather: "Gather", variant: "GemmVariant", tile: "Tile", product: "Product") -> "tuple[float, float, float, float]":
    """Cycles of an item's products, of its loading, of its bytes from the L2 cache, and of waiting for free stages."""
    size = DTYPE_BYTES[gather.dtype]
    raw = size // variant.operand_bytes(gather.dtype)  # bytes for each of an operand
    in_place = gather.src.channels_last or variant.boxes
    stages = product.stages(variant)
    chunks = 2 * variant.k_steps
    weight_bytes = 0 if variant.resident else variant.row_parts * product.weight_bytes(variant)
    pixel_bytes = stages * tile.halo * chunks * CHUNK_BYTES

    instructions = product.steps * product.operations * variant.pixel_blocks * variant.sharers
    instructions *= 3 if variant.parts == 2 else 1
    operand_bytes = instructions * 2 * CHUNK_BYTES * (ROWS + variant.pixels)
    passes = (1 if variant.boxes or (size == 2 and in_place) else 1 + 2 * raw) * (1 if variant.parts == 1 else 4 / 3)
    shared = operand_bytes + passes * pixel_bytes + weight_bytes
    shared *= _COSTS.shared_boxes if variant.boxes and gather.src.channels_last else _COSTS.shared
    products = max(instructions * variant.pixels / 2, shared) * (1 if variant.wgmma else _COSTS.other_instruction)
    multiply = products + _COSTS.issue * instructions + _COSTS.wait * stages * variant.sharers

    load = stages * _load(gather, variant, tile)
    free = variant.stages - (variant.loader_groups if in_place and not variant.boxes else 0)
    slot = _COSTS.slot_in_place if in_place else _COSTS.slot
    slot += _COSTS.slot_shared if variant.cluster > 1 else 0
    slots = (stages * slot + _COSTS.slot_use * multiply) / free
    return multiply, load, (raw * pixel_bytes + weight_bytes / variant.cluster) * _COSTS.moved, slots


def _load(gather: "Gather", variant: "GemmVariant", tile: "Tile") -> float:
    """Cycles until a stage is loaded, of as many as are loaded at a time."""
    size = DTYPE_BYTES[gather.dtype]
    in_place, chunks = gather.src.channels_last, 2 * variant.k_steps
    if variant.boxes:
        return _COSTS.stage_boxes + _COSTS.box_pixel * max(tile.halo, tile.boxes * tile.box_pixels)
    warps = variant.loader_threads // 32
    if tile.boxes:
        pieces = math.ceil(tile.halo * size / 128) * chunks * variant.parts
        turners = (warps - 1) // variant.turning_groups
        turn = _COSTS.turn_scaled if variant.scaled else _COSTS.turn
        return (_COSTS.stage_turned + turn * math.ceil(pieces / turners)) / variant.turning_groups
    warps //= variant.loader_groups
    vectors = tile.halo / (tile.copy_bytes // size)
    if in_place:
        pieces = CHUNK_BYTES // tile.copy_bytes
        copies = _COSTS.copy_pixels * math.ceil(tile.halo * chunks / 32) * pieces / warps
    else:
        copies = _COSTS.copy_rows * math.ceil(vectors / 32) * variant.stage_channels(gather.dtype) / warps
    turned = 0 if size == 2 and in_place else math.ceil(math.ceil(tile.halo / 32) * chunks / warps) * variant.parts
    latency = _COSTS.stage_in_place if in_place else _COSTS.stage
    convert = _COSTS.convert_scaled if variant.scaled else _COSTS.convert
    return (latency + copies + convert * turned) / variant.loader_groups


def _store(gather: "Gather", variant: "GemmVariant", tile: "Tile", product: "Product") -> float:
    """Cycles of an item's stores."""
    stride, size = gather.axes[2].stride, DTYPE_BYTES[gather.dtype]
    if variant.taps_in_rows:
        channels = min(gather.dst_channels, variant.channel_blocks * variant.row_channels) * variant.row_parts
        rows = Taps.of(gather.axes).rows(channels, variant.lines)
        outputs = channels * gather.phases / product.line_groups
        if gather.dst.channels_last and gather.dst_channels > 1:
            outputs *= tile.tile_cells * _COSTS.scattered / variant.sets_at_once(gather)
        elif variant.whole_images:
            outputs *= tile.tile_cells * _COSTS.output
        else:  # a lane has one cell of as many as there are lanes
            lanes = 128 * variant.sharers // variant.row_parts
            outputs *= math.ceil(tile.tile_cells / lanes) * lanes * _COSTS.lane_output
        return _COSTS.partial * rows * variant.cells + outputs
    owned = product.row_blocks // variant.channel_blocks * product.line_groups
    values = variant.group_cells / 2 * product.row_blocks * gather.phases / owned
    if gather.dst.channels_last:
        value = _COSTS.value_pixels
    elif stride & (stride - 1):
        value = _COSTS.value_rows * _COSTS.odd_stride * (2 + size / 2)
    else:
        value = _COSTS.value_rows
    if not gather.dst.channels_last and tile.tiles[3] > 1:
        value *= 1 + _COSTS.edges / (tile.cells[2] * stride * size)
    if product.line_groups > 1:
        value *= _COSTS.partial_pixels if gather.dst.channels_last else _COSTS.partial_lines
    return values * value * (1 + _COSTS.crowding * (variant.loader_threads / 128 - 1))

# =====================================================================================================================
# polyphase/algorithms/implicit_gemm_packing.py
# =====================================================================================================================
#
# What runs before `implicit_gemm`: weights are packed, and measured first where float32 is multiplied as float16.

_PIXEL_PARTS = 264  # blocks that measure pixels: two for each multiprocessor of an H200
_MEASURING_THREADS = 256
_MEASURING_LANES = 16  # neighbouring threads, of which each has neighbouring pixels: as many, or more
_MEASURED_CHANNELS = 8  # where each would have fewer channels
_PACKED_ROWS = 512  # that a block packs where taps are rows


def pack_weights(gather: "Gather", variant: "GemmVariant", product: "Product", batch: int) -> "Launch":
    """The kernel that packs the weights, behind the one that measures, if it wants that."""
    launch = _packing_launch(gather, variant, product)
    if not variant.scaled:
        return launch
    return replace(launch, prologue=_measure_scales(gather, variant, product, batch))


def packing_constants(gather: "Gather", variant: "GemmVariant", product: "Product") -> "tuple[tuple[str, Constant], ...]":
    """The constants that decide how weights are packed."""
    return gather.constants(
        SCALED=variant.scaled,
        **(_measured(gather) | {"SUM_ROWS": _sum_rows(product)} if variant.scaled else {}),
        CHANNEL_BLOCKS=variant.channel_blocks,
        LINES=variant.lines,
        WIDTH_PARTS=variant.width_parts,
        K_STEPS=variant.k_steps,
        PARTS=variant.parts,
        TAPS_IN_ROWS=variant.taps_in_rows,
        ROW_CHANNELS=variant.row_channels,
        OPERATIONS=product.operations,
        COUNTER_BYTES=product.counter_bytes(variant),
        MIN_BLOCKS=1,
    )


def scales_bytes(gather: "Gather", variant: "GemmVariant", product: "Product") -> int:
    """What lies between counters and weights: ``SCALES_BYTES`` in kernels/common/bands.cuh."""
    if not variant.scaled:
        return 0
    measured = 2 * _PIXEL_PARTS + _weight_parts(gather) * gather.groups * gather.dst_channels
    return round_up(4 * (32 + measured + _sum_rows(product)), 128)


def _packing_launch(gather: "Gather", variant: "GemmVariant", product: "Product") -> "Launch":
    constants = [each for each in packing_constants(gather, variant, product) if each[0] != "HAS_BIAS"]
    if variant.taps_in_rows:
        rows = Taps.of(gather.axes).rows(variant.row_channels, variant.lines)
        sets = product.row_groups // (gather.groups * product.line_groups) * variant.channel_blocks
        together = max(1, min(sets, _PACKED_ROWS // (2 if variant.scaled else 1) // rows))
        blocks = gather.groups * product.line_groups * product.steps * math.ceil(sets / together)
        threads = min(256, round_up(together * rows, 32))
        constants += [("SLAB_SETS", together), ("SLAB_THREADS", threads)]
        source = KernelSource("pack_taps", gather.dtype, False, tuple(constants))
        return plain_launch(source, blocks, threads)
    places = product.line_groups * product.operations // variant.channel_blocks
    row_blocks = product.row_groups // product.line_groups * variant.channel_blocks
    # What a block packs: up to 16 KB of 16-byte chunks, less where blocks would be few. Runs of what lies innermost in
    # memory, channels or taps, stay long. What is multiplied as float16 is staged as float32, twice as large.
    if gather.weight_channels_last:
        slabs = [(ROWS, taps) for taps in (16, 8, 4, 2, 1)]
    else:
        slabs = [(channels, min(places, 64 if variant.scaled else 128)) for channels in (64, 32, 16)]
    for channels, taps in slabs:
        blocks = 2 * product.steps * row_blocks * ROWS // channels * math.ceil(places / taps)
        if channels * taps <= 1024 and blocks >= 256:
            break
    threads = min(256, max(64, round_up(channels * taps, 32)))
    constants += [("SLAB_CHANNELS", channels), ("SLAB_TAPS", taps), ("SLAB_THREADS", threads)]
    return plain_launch(KernelSource("pack_weights", gather.dtype, False, tuple(constants)), blocks, threads)


def _measure_scales(gather: "Gather", variant: "GemmVariant", product: "Product", batch: int) -> "Launch":
    """The kernel that finds what pixels and weights are multiplied by as float16."""
    shape, strides = gather.src.shape[2:], gather.src.strides
    one_row = pixels_join(gather)
    sizes = (1, 1, math.prod(shape)) if one_row else shape
    row = sizes[2] if one_row else math.gcd(shape[2], math.gcd(strides[2], strides[3]))
    vector = 4 if max(copy_sizes(gather, row)) == CHUNK_BYTES else 1
    pixels = math.prod(shape)
    lanes = 1
    most = max(_MEASURING_LANES, _MEASURING_THREADS * _MEASURED_CHANNELS // gather.src_channels)
    while 2 * lanes <= min(most, _MEASURING_THREADS) and lanes * vector < pixels:
        lanes *= 2
    geometry = gather.src.packed()
    runs = math.ceil(pixels / (lanes * vector))
    geometry += b"".join(map(packed_divisor, (1, *sizes, runs)))
    geometry += struct.pack("<4i", batch * gather.groups * runs, pixels, lanes, vector)
    blocks = _PIXEL_PARTS + _weight_tiles(gather) * _weight_parts(gather)
    constants = gather.constants(
        SCALED=True,
        **_measured(gather),
        COUNTER_BYTES=product.counter_bytes(variant),
        MIN_BLOCKS=1,
    )
    known = tuple(each for each in constants if each[0] not in ("HAS_BIAS", "DST_CHANNELS_LAST"))
    source = KernelSource("measure_scales", gather.dtype, False, known)
    return plain_launch(source, blocks, _MEASURING_THREADS, padded(geometry))


def _measured(gather: "Gather") -> "dict[str, Constant]":
    """The constants that decide where lies what is measured of pixels and weights."""
    return {"GROUPS": gather.groups, "PIXEL_PARTS": _PIXEL_PARTS, "WEIGHT_PARTS": _weight_parts(gather)}


def _weight_tiles(gather: "Gather") -> int:
    """Blocks that measure the output channels of all groups, in one part of the input channels."""
    return gather.groups * math.ceil(gather.dst_channels / max(1, _MEASURING_THREADS // gather.taps))


def _weight_parts(gather: "Gather") -> int:
    """Parts of the input channels in which weights are measured, so that there are blocks enough."""
    return max(1, min(256 // _weight_tiles(gather), gather.src_channels // 16))


def _sum_rows(product: "Product") -> int:
    return product.row_groups * product.row_blocks * ROWS

# =====================================================================================================================
# polyphase/algorithms/implicit_gemm.py
# =====================================================================================================================
#
# The forward pass on tensor cores, ``kernels/implicit_gemm.cu``: choice and launch of a variant.

# By whether channels come last in the destination.
_SHARING = {False: Sharing(rounds=32, cycles=1800.0, most=3.0), True: Sharing(rounds=32, cycles=1800.0, most=1.2)}


_ALL = 2**31 - 1


class ImplicitGemm:
    """Taps as products of matrices on tensor cores, all phases of a tile in one block."""

    name = "implicit_gemm"
    any_size = True
    adapts = False

    def launch(
        self, problem: "ConvTransposeProblem", pass_: "Pass", device: "DeviceInfo", layouts: "Layouts", variant: "GemmVariant"
    ) -> "Launch":
        problem, gather = _as_forward(problem, pass_, layouts)
        product = Product.of(gather, variant)
        tile = best_tile(gather, variant, problem.batch, device)
        assert tile is not None
        tile_items = product.row_groups // variant.row_parts
        items = math.ceil(tile.total / variant.cluster) * tile_items
        vector = store_vector(gather, variant, tile)
        clusters = _clusters(items, tile_items, device, variant)
        geometry = bytes(TENSOR_MAP_BYTES) + gather.src.packed() + gather.dst.packed()
        geometry += struct.pack("<2i", problem.batch, tile.images)
        geometry += b"".join(map(packed_divisor, (*tile.cells, *tile.tiles, tile_items, *tile.pitch)))
        geometry += struct.pack(
            "<11i",
            items,
            tile.halo,
            tile.box_pixels if tile.boxes else raw_pitch(tile.halo, DTYPE_BYTES[problem.dtype]),
            tile.allocated * CHUNK_BYTES,
            tile.skew,
            tile.copy_bytes,
            vector,
            tile.boxes,
            tile.box_pixels,
            tile.run,
            _own_items(gather, variant, tile, device, problem, math.ceil(items / max(1, clusters))),
        )
        geometry = padded(geometry, TENSOR_MAP_BYTES // 2)
        source = KernelSource(
            self.name, problem.dtype, needs_wide_offsets(gather), self._constants(gather, variant, product)
        )
        return Launch(
            source=source,
            grid=(variant.cluster * clusters, 1, 1),
            block=variant.loader_threads + 128 * CONSUMERS,
            shared_bytes=shared_bytes(gather, variant, tile),
            geometry=geometry,
            prologue=pack_weights(gather, variant, product, problem.batch),
            workspace_bytes=product.counter_bytes(variant)
            + scales_bytes(gather, variant, product)
            + product.row_groups * product.weight_bytes(variant),
            boxes=(boxes(gather, variant, tile),) if tile.boxes else (),
            one_way=None
            if variant.whole_images and variant.parts == 2  # a register spills
            else source.with_constants(STORE_VECTOR=vector, COPY_BYTES=0 if tile.boxes else tile.copy_bytes),
        )

    @staticmethod
    def _constants(gather: "Gather", variant: "GemmVariant", product: "Product") -> "tuple[tuple[str, Constant], ...]":
        return (
            *packing_constants(gather, variant, product),
            ("SRC_CHANNELS_LAST", gather.src.channels_last),
            ("WHOLE_IMAGES", variant.whole_images),
            ("BOXES", variant.boxes),
            ("PIXELS", variant.pixels),
            ("PIXEL_BLOCKS", variant.pixel_blocks),
            ("CONSUMERS", CONSUMERS),
            ("SPLIT_ROWS", variant.split == "rows"),
            ("TAKE_TURNS", variant.split == "turns"),
            ("RESIDENT", variant.resident),
            ("LOADER_GROUPS", variant.loader_groups),
            ("LOADER_THREADS", variant.loader_threads),
            ("GIVEN_REGISTERS", 0),
            ("TURNING_GROUPS", variant.turning_groups),
            ("STAGES", variant.stages),
            ("CLUSTER", variant.cluster),
            ("STORE_VECTOR", 0),
            ("COPY_BYTES", 0),
            ("RAW_STAGES", variant.raw_slots // variant.loader_groups),
            *(
                [("SETS", variant.sets_at_once(gather)), ("ROUND_PIXELS", variant.round_pixels(gather))]
                if variant.taps_in_rows
                else [("PIECE", variant.piece(gather))]
            ),
            ("WGMMA", variant.wgmma),
        )


def _as_forward(problem: "ConvTransposeProblem", pass_: "Pass", layouts: "Layouts") -> "tuple[ConvTransposeProblem, Gather]":
    # The layer whose forward pass this is, and that pass.
    if pass_ is Pass.FORWARD:
        return problem, Gather.of(problem, pass_, layouts)
    mirrored = problem.mirrored()
    assert mirrored is not None
    layouts = replace(layouts, input=layouts.output, output=layouts.input)
    return mirrored, Gather.of(mirrored, Pass.FORWARD, layouts, mirrored=True)


def _clusters(items: int, tile_items: int, device: "DeviceInfo", variant: "GemmVariant") -> int:
    """Clusters of blocks; those with resident weights stay with their row groups, however few multiprocessors."""
    clusters = max(1, device.multiprocessors // variant.cluster)
    if variant.resident:
        clusters = max(1, clusters // tile_items) * tile_items
    return min(items, clusters)


def _own_items(
    gather: "Gather", variant: "GemmVariant", tile: "Tile", device: "DeviceInfo", problem: "ConvTransposeProblem", rounds: int
) -> int:
    """Of the ``rounds`` of items for each block, those that it does not share with the others (item_queue.cuh)."""
    sharing = _SHARING[gather.dst.channels_last]
    if not sharing.pays(rounds, lambda: estimate(gather, variant, tile, device, 0), problem.bytes, device):
        return _ALL
    stages = Product.of(gather, variant).stages(variant)
    told_ahead = math.ceil((variant.loader_groups - 1) / stages)
    loaded_ahead = variant.stages if gather.src.channels_last or variant.boxes else variant.raw_slots
    return 1 + told_ahead + math.ceil(loaded_ahead / stages)

# =====================================================================================================================
# What this file does when it runs
# =====================================================================================================================

@dataclass(frozen=True)
class Choice:
    # What computes a pass: an algorithm and its variant.

    algorithm: "Algorithm"
    variant: Any


@dataclass(frozen=True)
class Layer:
    # A layer as it was emitted: at the size of the model's inputs, with a choice by architecture and pass.

    problem: "ConvTransposeProblem"
    choices: "dict[str, dict[Pass, Choice]]"


def cuda_source(arch: str) -> str:
    """The kernels for one architecture as one CUDA file, each in a namespace of its own."""
    parts = ["namespace polyphase {", *(FILES[name] for name in SHARED_FILES)]
    entries = []
    for number, (name, specialisation, files) in enumerate(KERNELS[arch]):
        text = "\n".join([specialisation, *(FILES[file] for file in files)])
        text = text.replace('extern "C" __global__', "__global__")  # a C name has no namespace
        macros = dict.fromkeys(re.findall(r"^#define (\w+)", text, re.MULTILINE))
        parts += [f"namespace kernel_{number} {{", text, "}", *(f"#undef {macro}" for macro in macros)]
        entries.append(f"entry(polyphase::kernel_{number}::{name})")
    return "\n".join([*parts, "}", "#define POLYPHASE_KERNELS " + ", ".join(entries), LAUNCHER])


@lru_cache(maxsize=8)
def build(arch: str) -> Any:
    """The extension module for one architecture. Takes a minute the first time; PyTorch keeps what it has built."""
    source = cuda_source(arch)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    standard = ["-std=c++17"] if version < (2, 1) else []  # the default later on
    # Only by this variable will every PyTorch build for one architecture and no other, which could not have its
    # instructions.
    before = os.environ.get("TORCH_CUDA_ARCH_LIST")
    major, minor = re.fullmatch(r"sm_(\d+)(\d[af]?)", arch).groups()  # type: ignore[union-attr]
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    extension = load_inline(
        name="polyphase_" + hashlib.sha256((arch + BINDING + source).encode()).hexdigest()[:16],
        cpp_sources=[BINDING],
        cuda_sources=[source.encode("ascii", "replace").decode()],  # written in the locale's encoding, whatever it is
        functions=["launch"],
        extra_cflags=[*standard],
        extra_cuda_cflags=[*standard],
    )
    del os.environ["TORCH_CUDA_ARCH_LIST"]
    os.environ.update({} if before is None else {"TORCH_CUDA_ARCH_LIST": before})
    return extension


def arch_of(device: torch.device) -> str:
    """The architecture of a GPU. Raises `UnsupportedError` where this file has no kernels for it."""
    major, minor = torch.cuda.get_device_capability(device)
    for arch in KERNELS:
        if arch.rstrip("af") == f"sm_{major}{minor}":
            return arch
    raise UnsupportedError(
        f"this file has kernels for {', '.join(KERNELS)}, and {device} is sm_{major}{minor}: emit it again with --arch"
    )


def kernel_number(arch: str, source: "KernelSource") -> int:
    """Which kernel of the file ``source`` is, but for constants that the compiler settled."""

    def significant(text: str) -> "list[str]":
        return [line for line in text.splitlines() if line and not any(name in line for name in SETTLED)]

    wanted = significant(source.specialisation)
    for number, (name, specialisation, _) in enumerate(KERNELS[arch]):
        if name == source.kernel and significant(specialisation) == wanted:
            return number
    raise UnsupportedError(
        f"this file has no {source.kernel} for tensors of this size"
        + (", whose offsets take more than 32 bits" if source.wide_offsets else "")
        + ": emit it again for inputs as large"
    )


@dataclass(frozen=True)
class Call:
    """A prepared call. Launches are what the extension's ``launch`` takes before the tensors.

    ``copies``: the first tensor is copied, so that it is aligned.
    """

    extension: Any
    copies: bool
    launch: "tuple[Any, ...]"
    prologues: "list[tuple[Any, ...]]"
    workspace_bytes: int
    planes: int
    planes_channels_last: bool
    narrowed: bool
    shape: "tuple[int, ...]"
    memory_format: torch.memory_format


_calls: "dict[tuple[Any, ...], Call]" = {}
_MOST_CALLS = 4096


def prepare(
    pass_: "Pass",
    layer: "Layer",
    input_shape: "tuple[int, ...]",
    output_padding: "tuple[int, ...]",
    device: torch.device,
    aligned: bool,
) -> "Call":
    """What a call of these sizes launches, as the package itself decides it."""
    problem = replace(
        layer.problem, batch=input_shape[0], input_size=tuple(input_shape[2:]), output_padding=output_padding
    ).of_pass(pass_)
    arch = arch_of(device)
    choice = layer.choices[arch][pass_]

    def launch_on(aligned: bool) -> "Launch":
        layouts = replace(Layouts.of_call(problem, pass_), aligned=aligned)
        return choice.algorithm.launch(problem, pass_, DeviceInfo.of(device), layouts, choice.variant)

    launch = launch_on(aligned=True)
    copies = not aligned and bool(launch.boxes)  # whose tensors must be aligned
    if not aligned and not copies:
        other = launch_on(aligned=False)
        copies = other.source != launch.source  # the kernel for others is not in this file
        launch = launch if copies else other
    shapes = {
        Pass.FORWARD: problem.output_shape,
        Pass.INPUT_GRAD: problem.input_shape,
        Pass.WEIGHT_GRAD: problem.weight_shape,
    }
    return Call(
        extension=build(arch),
        copies=copies,
        launch=arguments(arch, launch),
        prologues=[arguments(arch, each) for each in launch.prologues],
        workspace_bytes=launch.workspace_bytes,
        planes=launch.planes,
        planes_channels_last=launch.planes_channels_last,
        narrowed=launch.narrowed,
        shape=shapes[pass_],
        memory_format=memory_format(problem),
    )


def arguments(arch: str, launch: "Launch") -> "tuple[Any, ...]":
    """What the extension's ``launch`` takes before the tensors."""
    number, boxes = kernel_number(arch, launch.source), b"".join(map(packed_boxes, launch.boxes))
    return (number, launch.geometry, boxes, *launch.grid, launch.block, launch.shared_bytes)


# How the driver numbers what it makes tensor maps of, and the bytes within which chunks change places.
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "tf32": 11}


_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}


def packed_boxes(boxes: "Boxes") -> bytes:
    """``Boxes`` of binding.cpp."""
    kind = _DATA_TYPES[boxes.element], _SWIZZLES[boxes.swizzle]
    return struct.pack("<9Q14I", *boxes.sizes, *boxes.strides, *boxes.spans, *boxes.steps, *kind, boxes.tensor, 0)


def memory_format(problem: "ConvTransposeProblem") -> torch.memory_format:
    """The format of the tensors that the layer's kernels take and give."""
    if not problem.of_pass(Pass.FORWARD).channels_last:
        return torch.contiguous_format
    return torch.channels_last if problem.dims == 2 else torch.channels_last_3d


def run(
    pass_: "Pass",
    number: int,
    input_shape: "tuple[int, ...]",
    output_padding: "tuple[int, ...]",
    first: torch.Tensor,
    second: torch.Tensor,
    bias: "torch.Tensor | None" = None,
) -> torch.Tensor:
    """One computation of layer ``number`` from two of input, weight and gradient of the output.

    Gradients may come as partial sums, of the weight of parts of the input, which are added in a fixed order.
    """
    read = first.data_ptr() if pass_ is Pass.FORWARD else first.data_ptr() | second.data_ptr()  # as it is
    aligned = read % ALIGNMENT == 0
    key = (pass_, number, input_shape, output_padding, first.device, aligned)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        call = _calls[key] = prepare(pass_, LAYERS[number], input_shape, output_padding, first.device, aligned)
    launch = call.extension.launch
    if call.copies:
        first, second = first.clone(), second.clone()
    if pass_ is Pass.WEIGHT_GRAD:
        inputs, outputs, *kernel = call.shape
        shape = (inputs, *kernel, outputs) if call.planes_channels_last else call.shape
        dtype = first.dtype if call.narrowed else accumulator_of(first.dtype)
        partial = torch.empty((call.planes, *shape), dtype=dtype, device=first.device)
        launch(*call.launch, [first, second, partial])
        found = (partial.sum(0) if call.planes > 1 else partial[0]).to(first.dtype)
        return found.movedim(-1, 1) if call.planes_channels_last else found
    output = torch.empty(call.shape, dtype=first.dtype, device=first.device, memory_format=call.memory_format)
    if 0 in call.launch[3:6]:
        return output
    if call.prologues:
        workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=first.device)
        for prologue in call.prologues[:-1]:
            launch(*prologue, [second, workspace, first])
        launch(*call.prologues[-1], [second, workspace])
        second = workspace
    if call.planes == 1:
        launch(*call.launch, [first, second, bias, output])
        return output
    batch, *others = call.shape
    shape, dtype = (call.planes * batch, *others), accumulator_of(first.dtype)
    partial = torch.empty(shape, dtype=dtype, device=first.device, memory_format=call.memory_format)
    launch(*call.launch, [first, second, bias, partial])
    return output.copy_(partial.unflatten(0, (call.planes, batch)).sum(0))


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """What partial sums come in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class KernelFunction(torch.autograd.Function):
    """The layer and its first derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: "torch.Tensor | None",
        number: int,
        output_padding: "tuple[int, ...]",
    ) -> torch.Tensor:
        """The output, ``(N, C_out, *spatial)``."""
        dense = memory_format(LAYERS[number].problem)
        input, weight = input.contiguous(memory_format=dense), weight.contiguous(memory_format=dense)
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(input, weight)
        ctx.number, ctx.output_padding = number, output_padding
        return run(Pass.FORWARD, number, tuple(input.shape), output_padding, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> "tuple[Any, ...]":
        """The gradients of input, weight and bias, those that are needed."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the kernels of this file give first derivatives alone, and create_graph=True asks for more"
            )
        input, weight = ctx.saved_tensors
        constants = (ctx.number, tuple(input.shape), ctx.output_padding)
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous(memory_format=memory_format(LAYERS[ctx.number].problem))
        return (
            run(Pass.INPUT_GRAD, *constants, grad, weight) if for_input else None,
            run(Pass.WEIGHT_GRAD, *constants, input, grad) if for_weight else None,
            grad.sum([0, *range(2, grad.dim())]) if for_bias else None,
            None,
            None,
        )


def check(module: Any, input: torch.Tensor, problem: "ConvTransposeProblem") -> None:
    """Raises `UnsupportedError` for a device or dtype that has no kernels here, RuntimeError for shapes."""
    wanted = getattr(torch, problem.dtype)
    for role, tensor in (("input", input), ("weight", module.weight), ("bias", module.bias)):
        if tensor is None:
            continue
        if tensor.device.type != "cuda":
            raise UnsupportedError(
                f"the {role} is on {tensor.device}: the kernels of this file run on CUDA devices alone; "
                "move model and inputs to one, as with .cuda()"
            )
        if tensor.device != input.device:
            raise RuntimeError(f"input and {role} must be on one device, got {input.device} and {tensor.device}")
        if tensor.dtype != wanted:
            raise UnsupportedError(
                f"the {role} is {tensor.dtype}: the kernels of this file take {wanted}; convert model and inputs, as "
                f"with .to({wanted}), or emit the file again with --dtype"
            )
    shape = tuple(input.shape)
    if input.dim() != problem.dims + 2 or shape[1] != problem.in_channels or 0 in shape[2:]:
        raise RuntimeError(
            f"expected an input (N, {problem.in_channels}, *spatial) with {problem.dims} spatial sizes of at least 1, "
            f"or one without N; got shape {shape}"
        )


def forward_of(module: Any, input: torch.Tensor, output_size: Any) -> torch.Tensor:
    """The forward method of the modules below."""
    problem = LAYERS[module.emitted_layer].problem
    batch = input if input.dim() != problem.dims + 1 else input.unsqueeze(0)
    check(module, batch, problem)
    extra = module.output_padding
    if output_size is not None:
        extra = module._output_padding(
            input, list(output_size), module.stride, module.padding, module.kernel_size, problem.dims, module.dilation
        )
    size = [axis.output_size(n, more) for axis, n, more in zip(problem.axes, batch.shape[2:], extra)]
    if min(size) < 1:
        raise RuntimeError(f"the output would have size {tuple(size)}, and every size must be at least 1")
    apply: Any = KernelFunction.apply
    output: torch.Tensor = apply(batch, module.weight, module.bias, module.emitted_layer, tuple(extra))
    return output if batch is input else output.squeeze(0)


class ConvTranspose2d(nn.ConvTranspose2d):
    """PyTorch's module on the kernels of this file."""

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        """``(N, C_in, H, W)`` or ``(C_in, H, W)`` to ``(N, C_out, H_out, W_out)`` or without ``N``."""
        return forward_of(self, input, output_size)


def constants(layer: Any) -> "tuple[Any, ...]":
    """What a layer's kernels are made for; of a module, or of a problem."""
    return (
        *(layer.in_channels, layer.out_channels, tuple(layer.kernel_size), tuple(layer.stride), tuple(layer.padding)),
        *(tuple(layer.dilation), layer.groups, layer.bias is not None and layer.bias is not False),
    )


def use_kernels(model: nn.Module) -> None:
    """Changes the class of the model's transposed convolutions, in place: parameters and all else stay what they are.

    Raises `UnsupportedError` for a layer that this file was not emitted for.
    """
    emitted = {constants(layer.problem): number for number, layer in enumerate(LAYERS)}
    for name, module in model.named_modules():
        if type(module) not in CLASSES:
            continue
        number = emitted.get(constants(module))
        if number is None:
            raise UnsupportedError(
                f"this file has no kernels for {name or 'the model itself'}, {module}: it has them for "
                + "; ".join(str(layer.problem) for layer in LAYERS)
            )
        module.emitted_layer = number
        module.__class__ = CLASSES[type(module)]

# =====================================================================================================================
# What was emitted: layers, and what computes their passes
# =====================================================================================================================

LAYERS = [
    Layer(
        problem=ConvTransposeProblem(
            batch=8,
            in_channels=64,
            out_channels=64,
            input_size=(1024, 1024),
            kernel_size=(3, 3),
            stride=(1, 1),
            padding=(0, 0),
            output_padding=(0, 0),
            dilation=(1, 1),
            groups=1,
            bias=False,
            dtype="float32",
            channels_last=False,
            tf32=True,
            tf32_as_pytorch=True,
        ),
        choices={
            "sm_90a": {
                Pass.FORWARD: Choice(
                    algorithm=ImplicitGemm(),
                    variant=GemmVariant(
                        pixels=144,
                        pixel_blocks=2,
                        channel_blocks=1,
                        lines=1,
                        k_steps=1,
                        stages=4,
                        parts=1,
                        split="turns",
                        resident=False,
                        loader_groups=2,
                        wgmma=True,
                        row_channels=0,
                        boxes=False,
                        whole_images=False,
                        raw_slots=4,
                        cluster=2,
                        piece_bytes=256,
                        width_parts=1,
                        scaled=False,
                    ),
                ),
                Pass.INPUT_GRAD: Choice(
                    algorithm=ImplicitGemm(),
                    variant=GemmVariant(
                        pixels=160,
                        pixel_blocks=2,
                        channel_blocks=1,
                        lines=1,
                        k_steps=1,
                        stages=4,
                        parts=1,
                        split="turns",
                        resident=False,
                        loader_groups=2,
                        wgmma=True,
                        row_channels=0,
                        boxes=False,
                        whole_images=False,
                        raw_slots=4,
                        cluster=2,
                        piece_bytes=256,
                        width_parts=1,
                        scaled=False,
                    ),
                ),
                Pass.WEIGHT_GRAD: Choice(
                    algorithm=WeightGradGemm(),
                    variant=GradientVariant(
                        row_tiles=4,
                        column_tiles=4,
                        row_warps=1,
                        out_chunk=22,
                        positions=64,
                        buffers=4,
                        min_blocks=2,
                    ),
                ),
            },
        },
    ),
]

CLASSES = {nn.ConvTranspose2d: ConvTranspose2d}

if UNLISTED:
    del sys.modules[__name__]

# =====================================================================================================================
# The model
# =====================================================================================================================

# A square kernel at stride 1 on large images (KernelBench, level 1, problem 57).

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution, its parameters single numbers: ``(N, 64, 1024, 1024)`` to ``(N, 64, 1026, 1026)``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size=(kernel_size, kernel_size),
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose2d(x)


def get_inputs() -> "list[torch.Tensor]":
    return [torch.rand(8, 64, 1024, 1024)]


def get_init_inputs() -> "list[object]":
    return [64, 64, 3]


class ModelNew(Model):
    """`Model` with its transposed convolutions computed by the kernels above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # the same parameters, made of the same random numbers
        use_kernels(self)
