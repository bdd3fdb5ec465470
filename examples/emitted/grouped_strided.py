# examples/grouped_strided.py, emitted by polyphase 0.1.0: a model whose transposed convolutions are computed by CUDA
# kernels of their own, in one file that needs PyTorch and what that builds extensions with: nvcc, a C++ compiler and
# ninja.
#
# ModelNew, at the end, has the constructor, parameters, state_dict and random numbers of Model. It takes inputs of any
# batch and image size and of any strides, in the dtype below, on GPUs of the architectures below, and gives first
# derivatives. The kernels are built when they are first needed, which takes about a minute; PyTorch keeps what it has
# built. Made for PyTorch 1.13 and newer on Python 3.8 and newer, and for nvcc 11.7 and newer; sm_90a takes nvcc 12 and
# PyTorch 2.2, newer architectures take versions that know them.
#
# Layer conv_transpose2d: 16×32×128×256 → 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1), g=4, float32
#     sm_80, forward: gather_tiled(lanes=64, dst_per_thread=4, cells_h=4, cells_w=1, dst_slices=4, src_slices=1,
#         stage_channels=8, loads=4, buffers=3, min_blocks=2, dst_vector=1)
#     sm_80, input_grad: gather_tiled(lanes=64, dst_per_thread=2, cells_h=4, cells_w=2, dst_slices=4, src_slices=1,
#         stage_channels=1, loads=5, buffers=3, min_blocks=2, dst_vector=1)
#     sm_80, weight_grad: weight_grad(rows=8, columns=128, thread_rows=8, thread_columns=8, k_slices=16, depth=32,
#         min_blocks=1)
#     sm_90a, forward: gather_gemm(warps=4, pixel_tiles=2, out_chunk=16, stage_steps=1, buffers=3, load_warps=1,
#         store_warps=3, min_blocks=2)
#     sm_90a, input_grad: gather_tiled(lanes=64, dst_per_thread=4, cells_h=4, cells_w=1, dst_slices=2, src_slices=1,
#         stage_channels=1, loads=5, buffers=3, min_blocks=5, dst_vector=1)
#     sm_90a, weight_grad: weight_grad(rows=8, columns=128, thread_rows=8, thread_columns=8, k_slices=16, depth=32,
#         min_blocks=1)
#     float32 is not rounded to TF32
#
# It was made, and is made again, by
#
#     python -m polyphase emit examples/grouped_strided.py --arch sm_80,sm_90a -o examples/emitted/grouped_strided.py
#
# Apache License 2.0, as polyphase, but for the model's own source. Not to be edited: the package is the place.

import hashlib
import itertools
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
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
FILES["common/operand.cuh"] = r"""
// Operands of the direct kernels, as they are multiplied: float32 is rounded to TF32 where the specialisation says
// ROUNDED. These kernels need not, but results are then nearer to those of PyTorch, which does.
template <class T>
__device__ __forceinline__ T operand(T value) {
  if constexpr (ROUNDED) return round_tf32(value);
  return value;
}
"""
FILES["gather_tiled.cu"] = r"""
// Direct kernel of the forward pass and the input gradient: all phases of a tile in one block, without tensor cores.
//
//   destination[n, cd, cell·DST + dst_offset(tap)]  =
//       bias[cd]  +  Σ source[n, cs, cell·SRC + src_offset(tap)] · w[cs, cd, tap]
//
// summed over the source channels cs of the group and over all taps (common/geometry.cuh has the offsets). For layers
// whose taps unroll: weights × cells of a thread are straight-line code.
//
// Index mapping. A block owns a tile of cells in (n, d, h, w) and one or more items, one after the other: an item is a
// group and BLOCK_DST of its destination channels. The threads are SRC_SLICES × DST_SLICES × LANES: a lane is CELLS_H ×
// CELLS_W cells of the tile, lanes running along w, then h, d, n in extents chosen at launch; a destination slice is
// DST_PER_THREAD channels; a source slice is its share of every stage's source channels, summed at the end of an item.
// A thread keeps every phase of its cells in registers: CELLS_H × CELLS_W × (DST per cell) × DST_PER_THREAD
// accumulators, of which those without taps cost nothing.
//
// Sums have two levels, so that rounding does not grow with the number of source channels: after CHAIN stages a thread
// adds its accumulators to its lane's sums in shared memory, and starts anew. Source slices share these sums, and take
// turns: each adds after another stage.
//
// Shared memory: BUFFERS buffers of weights as [channel][slice][tap][DST_PER_THREAD], padded to 16 bytes a slice; as
// many of STAGE_CHANNELS planes of the source tile with its halo as [n][d][h][w % SPLIT][w / SPLIT], rows starting at a
// multiple of four source elements and split by residues so that lanes read neighbouring words at even strides too,
// planes as long as the longest tile; then where each element of a lane's row goes; then for each warp the row that it
// turns into a whole output line; then the sums of the lanes.
//
// Synchronisation: steps (a stage of an item) are loaded BUFFERS - 1 ahead. With two buffers the next step waits in
// registers while one is computed, and is then stored to the other buffer; with more, copies go to their buffer
// asynchronously. One barrier a step suffices, since a buffer is written again only after the barrier that follows its
// last reads. A warp's row is its own.

struct Geometry {
  Tensor5 src, dst;
  int batch;
  int lanes[4];  // extents of the lanes along n, d, h, w; their product is at most LANES
  int tiles[4];  // tiles along n, d, h, w
  int items;     // of the layer: groups × DST_BLOCKS
  int items_per_block;
  int aligned_src;   // whether quads of the source start at a multiple of their size, and none is cut by an edge
  int aligned_rows;  // whether every RUN elements of the destination start at a multiple of their size
};

constexpr int SLICE_THREADS = LANES * DST_SLICES;
constexpr int THREADS = SLICE_THREADS * SRC_SLICES;
constexpr int BLOCK_DST = DST_PER_THREAD * DST_SLICES;
constexpr int DST_BLOCKS = ceil_div(DST_CHANNELS, BLOCK_DST);
constexpr int STAGES = ceil_div(SRC_CHANNELS, STAGE_CHANNELS);
constexpr int WEIGHT_SLICE = round_up(TAPS * DST_PER_THREAD, 4);
constexpr int WEIGHT_CHANNEL = DST_SLICES * WEIGHT_SLICE;
constexpr int WEIGHT_STAGE = STAGE_CHANNELS * WEIGHT_CHANNEL;
constexpr int WEIGHT_ITEMS = ceil_div(STAGE_CHANNELS * BLOCK_DST * TAPS, THREADS);
constexpr int SLICE_CHANNELS = STAGE_CHANNELS / SRC_SLICES;
constexpr int CHANNELS_AT_ONCE = STRAIGHT ? SLICE_CHANNELS : 1;  // in one piece of straight-line code
constexpr bool CHAINED = CHAIN < STAGES;
constexpr bool ASYNC = BUFFERS > 2;

constexpr int DST_D = dst_cell(AXIS_D), DST_H = dst_cell(AXIS_H), DST_W = dst_cell(AXIS_W);
constexpr int SRC_D = src_cell(AXIS_D), SRC_H = src_cell(AXIS_H), SRC_W = src_cell(AXIS_W);
constexpr int SPLIT = SRC_W == 2 || SRC_W % 4 == 0 ? SRC_W : 1;  // odd strides meet no bank twice as they are
constexpr int SKEW = first_offset(AXIS_W) - floor_div(first_offset(AXIS_W), 4) * 4;  // of a tile's first column
// Where lanes lie an even number of elements apart, they read pairs.
constexpr int PAIR = SPLIT == 1 && CELLS_W * SRC_W % 2 == 0 ? 2 : 1;
constexpr int WINDOW_H = window(AXIS_H, CELLS_H), WINDOW_W = SKEW % PAIR + window(AXIS_W, CELLS_W);
constexpr int RUN = CELLS_W * DST_W;  // neighbouring destination elements along w that a thread owns
constexpr int ACCUMULATORS = CELLS_H * DST_D * DST_H * RUN * DST_PER_THREAD;
// Quads of a source plane, four columns or four channels each, and elements from one plane to the next; planes of
// channels that are stored at once lie half the banks apart.
constexpr int PLANE_QUADS = LOADS * THREADS / STAGE_CHANNELS;  // whole: threads are a multiple of 64
constexpr int PLANE = PLANE_QUADS * 4 + (SRC_CHANNELS_LAST ? 4 : 0);

static_assert(STAGE_CHANNELS % SRC_SLICES == 0, "every source slice takes the same share of a stage");
static_assert(LANES % 32 == 0, "a warp lies in one slice");
static_assert(CHAIN >= SRC_SLICES, "every source slice adds its sums after another stage");
static_assert(!SRC_CHANNELS_LAST || STAGE_CHANNELS % 4 == 0, "a thread loads four channels at once");
static_assert(!ASYNC || (sizeof(scalar_t) == sizeof(accum_t) && SPLIT == 1 && !SRC_CHANNELS_LAST && !ROUNDED),
              "what is copied asynchronously stays as it is");

// The tile of the source, as every thread sees it.
struct Tile {
  int n, d, h, w;              // first batch entry and first cells
  int size_d, size_h, size_w;  // source elements along each dimension, halo included, whole quads along w
  int pitch;                   // elements of one residue of w in a row
  int slab, image;             // pitches of d and n; that of h is size_w
};

__device__ __forceinline__ Tile make_tile(const Geometry& g, int tile) {
  Tile t;
  t.w = tile % g.tiles[3] * g.lanes[3] * CELLS_W;
  tile /= g.tiles[3];
  t.h = tile % g.tiles[2] * g.lanes[2] * CELLS_H;
  tile /= g.tiles[2];
  t.d = tile % g.tiles[1] * g.lanes[1];
  t.n = tile / g.tiles[1] * g.lanes[0];
  t.size_d = window(AXIS_D, g.lanes[1]);
  t.size_h = window(AXIS_H, g.lanes[2] * CELLS_H);
  t.size_w = round_up(SKEW + window(AXIS_W, g.lanes[3] * CELLS_W), SPLIT > 4 ? SPLIT : 4);
  t.pitch = t.size_w / SPLIT;
  t.slab = t.size_w * t.size_h;
  t.image = t.slab * t.size_d;
  return t;
}

// Loads a stage of the source, LOADS quads a thread: four neighbouring columns of a channel, or four neighbouring
// channels of a position. Where a quad lies never changes. Asynchronous copies fill the padding with zeros at every
// stage; else it is zeroed once, and quads in the padding read the first elements and store nothing.
struct SourceLoader {
  offset_t offsets[LOADS];  // bytes from the stage's first channel at the tile's first batch entry
  int slots[LOADS];         // in a stage's planes
  int channels[LOADS];      // of the stage
  unsigned inside;          // four bits a quad: the elements that are not padding
  Quad<scalar_t> values[ASYNC ? 1 : LOADS];

  __device__ __forceinline__ void init(const Geometry& g, const Tile& t, int thread, accum_t* planes) {
    inside = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int index = thread + i * THREADS;
      channels[i] = SRC_CHANNELS_LAST ? index % (STAGE_CHANNELS / 4) * 4 : index / PLANE_QUADS;
      int position = SRC_CHANNELS_LAST ? index / (STAGE_CHANNELS / 4) : index % PLANE_QUADS * 4;
      offsets[i] = 0;
      slots[i] = SRC_CHANNELS_LAST ? channels[i] * PLANE + position : index * 4;
      if (position >= t.image * g.lanes[0]) continue;
      const int w = position % t.size_w;
      if (SPLIT > 1) slots[i] += w % SPLIT * t.pitch + w / SPLIT - w;
      position /= t.size_w;
      const int h = position % t.size_h;
      position /= t.size_h;
      const int d = position % t.size_d;
      const int n = position / t.size_d;

      const int src_d = t.d * SRC_D + first_offset(AXIS_D) + d;
      const int src_h = t.h * SRC_H + first_offset(AXIS_H) + h;
      const int src_w = t.w * SRC_W + first_offset(AXIS_W) - SKEW + w;
      const bool row_inside =
          t.n + n < g.batch && (unsigned)src_d < (unsigned)g.src.size[0] && (unsigned)src_h < (unsigned)g.src.size[1];
      unsigned mask = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (row_inside && (unsigned)(src_w + (SRC_CHANNELS_LAST ? 0 : j)) < (unsigned)g.src.size[2]) mask |= 1u << j;
      inside |= mask << (4 * i);
      if (mask) {
        offsets[i] = byte_offset<scalar_t>(g.src, n, src_d, src_h, src_w) +
                     (offset_t)channels[i] * (offset_t)(g.src.stride[1] * sizeof(scalar_t));
      } else if (!ASYNC) {
        put(planes + slots[i], t, Vector<accum_t, 4>{});
        put(planes + slots[i] + STAGE_CHANNELS * PLANE, t, Vector<accum_t, 4>{});
      }
    }
  }

  // Whether element j of quad i, of a channel of the stage of which so many remain, is in `mask` and exists.
  static __device__ __forceinline__ bool exists(unsigned mask, int i, int j, int channel, int remaining) {
    return (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel < remaining) && mask >> (4 * i + j) & 1u;
  }

  // The stage that begins at `src` with so many channels remaining, asynchronously to `planes`.
  __device__ __forceinline__ void copy(const Geometry& g, const scalar_t* src, int remaining, accum_t* planes) const {
    const unsigned mask = opaque(inside);
    const unsigned to = shared_address(planes);
    constexpr int SIZE = sizeof(scalar_t), AT_ONCE = 16 / SIZE;
    if (g.aligned_src) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int j = 0; j < 4; j += AT_ONCE)
          copy_async<16>(to + (slots[i] + j) * SIZE, at(src, offsets[i]) + j,
                         exists(mask, i, j, channels[i], remaining));
    } else {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          copy_async<SIZE>(to + (slots[i] + j) * SIZE, at(src, offsets[i]) + j * g.src.stride[4],
                           exists(mask, i, j, channels[i], remaining));
    }
  }

  // The same to registers, from where `store` takes it.
  __device__ __forceinline__ void load(const Geometry& g, const scalar_t* src, int remaining) {
    const unsigned mask = opaque(inside);
    if (g.aligned_src) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (SRC_CHANNELS % STAGE_CHANNELS == 0 || channels[i] < remaining)
          values[i].load(at(src, offsets[i]));
        else
          values[i].clear();
      }
    } else {
      const long long step = SRC_CHANNELS_LAST ? g.src.stride[1] : g.src.stride[4];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        values[i].clear();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (exists(mask, i, j, channels[i] + (SRC_CHANNELS_LAST ? j : 0), remaining))
            values[i].load(j, at(src, offsets[i]) + j * step);
      }
    }
  }

  __device__ __forceinline__ void store(const Geometry& g, const Tile& t, accum_t* planes) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (inside >> (4 * i) & 0xfu) {
        Vector<accum_t, 4> wide;
#pragma unroll
        for (int j = 0; j < 4; ++j) wide.value[j] = operand(widen(values[i].get(j, g.aligned_src)));
        put(planes + slots[i], t, wide);
      }
  }

  static __device__ __forceinline__ void put(accum_t* slot, const Tile& t, const Vector<accum_t, 4>& quad) {
    if (!SRC_CHANNELS_LAST && SPLIT == 1) {
      *(Vector<accum_t, 4>*)slot = quad;
    } else if (!SRC_CHANNELS_LAST && SPLIT == 2) {
      *(Vector<accum_t, 2>*)slot = Vector<accum_t, 2>{quad.value[0], quad.value[2]};
      *(Vector<accum_t, 2>*)(slot + t.pitch) = Vector<accum_t, 2>{quad.value[1], quad.value[3]};
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) slot[j * (SRC_CHANNELS_LAST ? PLANE : t.pitch)] = quad.value[j];
    }
  }
};

// Loads a stage of the weights, in the order in which they lie in memory.
struct WeightLoader {
  static constexpr int COUNT = STAGE_CHANNELS * BLOCK_DST * TAPS;
  static constexpr int CHANNEL_STRIDE = INPUT_GRAD ? WEIGHT_STRIDE_OUT : WEIGHT_STRIDE_IN;
  static constexpr int DST_STRIDE = INPUT_GRAD ? WEIGHT_STRIDE_IN : WEIGHT_STRIDE_OUT;

  unsigned offsets[WEIGHT_ITEMS];  // bytes from the stage's first weight
  int slots[WEIGHT_ITEMS];         // in a stage's weights; -1 for nothing to store
  scalar_t values[ASYNC ? 1 : WEIGHT_ITEMS];

  static __device__ __forceinline__ void locate(int item, int& channel, int& dst, int& tap) {
    if (INPUT_GRAD) {
      tap = item % TAPS, channel = item / TAPS % STAGE_CHANNELS, dst = item / (TAPS * STAGE_CHANNELS);
    } else if (WEIGHT_STRIDE_OUT == 1) {
      dst = item % BLOCK_DST, tap = item / BLOCK_DST % TAPS, channel = item / (BLOCK_DST * TAPS);
    } else {
      tap = item % TAPS, dst = item / TAPS % BLOCK_DST, channel = item / (TAPS * BLOCK_DST);
    }
  }

  __device__ __forceinline__ void init(int thread) {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i) {
      int channel, dst, tap;
      locate(thread + i * THREADS, channel, dst, tap);
      const bool exists = thread + i * THREADS < COUNT;
      offsets[i] =
          exists ? (channel * CHANNEL_STRIDE + dst * DST_STRIDE + tap * WEIGHT_STRIDE_TAP) * sizeof(scalar_t) : 0;
      slots[i] = exists ? channel * WEIGHT_CHANNEL + dst / DST_PER_THREAD * WEIGHT_SLICE + tap * DST_PER_THREAD +
                              dst % DST_PER_THREAD
                        : -1;
    }
  }

  static __device__ __forceinline__ bool exists(int item, int dst_block, int remaining) {
    if (SRC_CHANNELS % STAGE_CHANNELS == 0 && DST_CHANNELS % BLOCK_DST == 0) return true;
    int channel, dst, tap;
    locate(item, channel, dst, tap);
    return channel < remaining && dst + dst_block * BLOCK_DST < DST_CHANNELS;
  }

  // The stage that begins at `weight` with so many source channels remaining: asynchronously to `weights`, or to
  // registers, from where `store` takes it.
  __device__ __forceinline__ void load(const scalar_t* weight, int dst_block, int remaining, int thread,
                                       accum_t* weights) {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i) {
      const bool exist = exists(thread + i * THREADS, dst_block, remaining);
      if constexpr (ASYNC) {
        if (slots[i] >= 0)
          copy_async<sizeof(scalar_t)>(shared_address(weights) + slots[i] * sizeof(scalar_t), at(weight, offsets[i]),
                                       exist);
      } else {
        values[i] = exist ? read(at(weight, offsets[i])) : zero<scalar_t>();
      }
    }
  }

  __device__ __forceinline__ void store(accum_t* weights) const {
#pragma unroll
    for (int i = 0; i < WEIGHT_ITEMS; ++i)
      if (slots[i] >= 0) weights[slots[i]] = operand(widen(values[i]));
  }
};

// Whether any tap adds to accumulator `i` of a thread.
__device__ __forceinline__ constexpr bool has_taps(int i) {
  const int row = i / (DST_PER_THREAD * RUN);
  return has_taps(AXIS_D, row / DST_H % DST_D) && has_taps(AXIS_H, row % DST_H) &&
         has_taps(AXIS_W, i / DST_PER_THREAD % DST_W);
}

// A thread's cells: accumulators as [cell h][phase d][phase h][run along w][destination channel].
struct Accumulators {
  accum_t sum[CELLS_H][DST_D][DST_H][RUN][DST_PER_THREAD];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) (&sum[0][0][0][0][0])[i] = 0;
  }

  // One source channel. `corner` is the thread's first source element, `weights` its slice's taps.
  __device__ __forceinline__ void accumulate(const accum_t* corner, const accum_t* weights, const Tile& t) {
    accum_t tap_weights[WEIGHT_SLICE];
#pragma unroll
    for (int i = 0; i < WEIGHT_SLICE; i += 4) {
      const Vector<accum_t, 4> four = *(const Vector<accum_t, 4>*)(weights + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) tap_weights[i + j] = four.value[j];
    }
#pragma unroll
    for (int kd = 0; kd < AXIS_D.kernel; ++kd) {
      const accum_t* slab = corner + (src_offset(AXIS_D, kd) - first_offset(AXIS_D)) * t.slab;
      accum_t patch[WINDOW_H][round_up(WINDOW_W, PAIR)];
#pragma unroll
      for (int h = 0; h < WINDOW_H; ++h)
#pragma unroll
        for (int w = 0; w < WINDOW_W; w += PAIR) {
          const int column = SKEW / PAIR * PAIR + w;
          *(Vector<accum_t, PAIR>*)&patch[h][w] =
              *(const Vector<accum_t, PAIR>*)(slab + h * t.size_w + column % SPLIT * t.pitch + column / SPLIT);
        }
#pragma unroll
      for (int kh = 0; kh < AXIS_H.kernel; ++kh)
#pragma unroll
        for (int kw = 0; kw < AXIS_W.kernel; ++kw)
#pragma unroll
          for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
            for (int cell_w = 0; cell_w < CELLS_W; ++cell_w)
#pragma unroll
              for (int dst = 0; dst < DST_PER_THREAD; ++dst)
                sum[cell_h][dst_offset(AXIS_D, kd)][dst_offset(AXIS_H, kh)][cell_w * DST_W + dst_offset(AXIS_W, kw)]
                   [dst] += patch[cell_h * SRC_H + src_offset(AXIS_H, kh) - first_offset(AXIS_H)]
                                 [SKEW % PAIR + cell_w * SRC_W + src_offset(AXIS_W, kw) - first_offset(AXIS_W)] *
                            tap_weights[((kd * AXIS_H.kernel + kh) * AXIS_W.kernel + kw) * DST_PER_THREAD + dst];
    }
  }

  // Adds the lane's sums in shared memory.
  __device__ __forceinline__ void add(const accum_t* sums) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i += 4) {
      const Vector<accum_t, 4> four = *(const Vector<accum_t, 4>*)(sums + i * SLICE_THREADS);
#pragma unroll
      for (int j = 0; j < 4 && i + j < ACCUMULATORS; ++j)
        if (has_taps(i + j)) (&sum[0][0][0][0][0])[i + j] += four.value[j];
    }
  }

  // Leaves all in the lane's sums, which hold nothing yet if it is the `first`, and starts anew.
  __device__ __forceinline__ void flush(accum_t* sums, bool first) {
    if (!first) add(sums);
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i += 4) {
      Vector<accum_t, 4> four = {};
#pragma unroll
      for (int j = 0; j < 4 && i + j < ACCUMULATORS; ++j) four.value[j] = (&sum[0][0][0][0][0])[i + j];
      *(Vector<accum_t, 4>*)(sums + i * SLICE_THREADS) = four;
    }
    clear();
  }

  // The lane's sums and those of all source slices, left in slice 0. Every thread of the block comes here.
  __device__ __forceinline__ void reduce(accum_t* sums, int slice) {
#pragma unroll 1
    for (int other = 1; other < SRC_SLICES; ++other) {
      if (slice == other) flush(sums, !CHAINED && other == 1);
      __syncthreads();
    }
    if (slice == 0) add(sums);
  }
};

// Where a lane's first cell lies in the destination.
struct Place {
  offset_t offset;           // bytes from the tile's first batch entry
  int slabs, rows, columns;  // of the destination from there on; none for lanes beyond the tile or the batch

  __device__ __forceinline__ void init(const Geometry& g, const Tile& t, int lane) {
    const int w = (t.w + lane % g.lanes[3] * CELLS_W) * DST_W;
    lane /= g.lanes[3];
    const int h = (t.h + lane % g.lanes[2] * CELLS_H) * DST_H;
    lane /= g.lanes[2];
    const int d = (t.d + lane % g.lanes[1]) * DST_D;
    const int n = lane / g.lanes[1];
    offset = byte_offset<scalar_t>(g.dst, n, d, h, w);
    slabs = n < g.lanes[0] && t.n + n < g.batch ? g.dst.size[0] - d : 0;
    rows = g.dst.size[1] - h;
    columns = g.dst.size[2] - w;
  }
};

// One element of a destination row: where it lies, and in how many of the lane's rows (low half) and slabs it exists.
struct Element {
  offset_t offset;
  unsigned limits;
};

// Channels first. Every lane owns RUN neighbouring elements of a row. Where rows start aligned it stores them as one
// vector; else a warp turns the rows of its lanes around in shared memory, so that neighbouring lanes store
// neighbouring elements: either way whole lines are written. For the turned rows `elements` says where each element
// goes.
constexpr bool VECTORS = (RUN == 2 || RUN == 4 || RUN == 8) && RUN * sizeof(scalar_t) <= 16;

__device__ __forceinline__ void describe_row(const Geometry& g, const Place& place, Element* elements) {
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    const unsigned rows = i < place.columns ? max(0, min(place.rows, CELLS_H * DST_H)) : 0;
    const unsigned slabs = max(0, min(place.slabs, DST_D));
    elements[i] = Element{place.offset + i * (offset_t)(g.dst.stride[4] * sizeof(scalar_t)), rows | slabs << 16};
  }
}

// With WHOLE all that the warp's lanes own exists, and it need not be asked for each element.
template <bool WHOLE>
__device__ __forceinline__ void store_rows(const Geometry& g, const Place& place, const Accumulators& acc,
                                           scalar_t* dst, const accum_t (&bias)[DST_PER_THREAD], int channels,
                                           accum_t* staging, const Element* elements, int in_warp) {
  const bool vectors = VECTORS && g.aligned_rows;
  constexpr bool KEPT = WHOLE && RUN <= 8;  // few enough for registers
  offset_t offsets[KEPT ? RUN : 1];
#pragma unroll
  for (int i = 0; KEPT && RUN > 1 && i < RUN; ++i) offsets[i] = elements[i * 32 + in_warp].offset;
#pragma unroll
  for (int channel = 0; channel < DST_PER_THREAD; ++channel) {
    if (channel >= channels) break;
    scalar_t* const plane = dst + channel * g.dst.stride[1];
#pragma unroll
    for (int d = 0; d < DST_D; ++d)
#pragma unroll
      for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
        for (int h = 0; h < DST_H; ++h) {
          const int row = cell_h * DST_H + h;
          scalar_t* const line = plane + d * g.dst.stride[2] + row * g.dst.stride[3];
          accum_t value[RUN];
#pragma unroll
          for (int i = 0; i < RUN; ++i)
            value[i] = HAS_BIAS ? acc.sum[cell_h][d][h][i][channel] + bias[channel] : acc.sum[cell_h][d][h][i][channel];
          if (RUN == 1 || vectors) {
            typedef Vector<scalar_t, RUN == 1 || VECTORS ? RUN : 1> Run;
            Run run;
#pragma unroll
            for (int i = 0; i < (int)(sizeof(Run) / sizeof(scalar_t)); ++i) narrow(value[i], run.value[i]);
            if (d < place.slabs && row < place.rows && place.columns > 0) *(Run*)at(line, place.offset) = run;
            continue;
          }
          if (has_taps(AXIS_D, d) && has_taps(AXIS_H, h)) {  // else all elements of the row are alike
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RUN; ++i) staging[in_warp * RUN + i] = value[i];
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RUN; ++i) value[i] = staging[i * 32 + in_warp];
          }
#pragma unroll
          for (int i = 0; i < RUN; ++i) {
            if constexpr (WHOLE) {
              narrow(value[i], *at(line, KEPT ? offsets[i] : elements[i * 32 + in_warp].offset));
            } else {
              const Element element = elements[i * 32 + in_warp];
              if (row < (int)(element.limits & 0xffffu) && d < (int)(element.limits >> 16))
                narrow(value[i], *at(line, element.offset));
            }
          }
        }
  }
}

// Channels last: a thread's channels are neighbours already.
__device__ __forceinline__ void store_channels(const Geometry& g, const Place& place, const Accumulators& acc,
                                               scalar_t* dst, const accum_t (&bias)[DST_PER_THREAD], int channels) {
#pragma unroll
  for (int cell_h = 0; cell_h < CELLS_H; ++cell_h)
#pragma unroll
    for (int d = 0; d < DST_D; ++d)
#pragma unroll
      for (int h = 0; h < DST_H; ++h)
#pragma unroll
        for (int w = 0; w < RUN; ++w) {
          const int row = cell_h * DST_H + h;
          if (d >= place.slabs || row >= place.rows || w >= place.columns) continue;
          scalar_t* const pixel =
              at(dst + d * g.dst.stride[2] + row * g.dst.stride[3] + w * g.dst.stride[4], place.offset);
#pragma unroll
          for (int first = 0; first < DST_PER_THREAD; first += DST_VECTOR) {
            if (first >= channels) break;
            Vector<scalar_t, DST_VECTOR> vector;
#pragma unroll
            for (int i = 0; i < DST_VECTOR; ++i)
              narrow(acc.sum[cell_h][d][h][w][first + i] + bias[first + i], vector.value[i]);
            *(Vector<scalar_t, DST_VECTOR>*)(pixel + first) = vector;
          }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gather_tiled(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                 const scalar_t* __restrict__ bias, scalar_t* __restrict__ dst, const Geometry g) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int thread = threadIdx.x;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler knows now that a warp shares it
  const int lane = thread % LANES;
  const int dst_slice = warp / (LANES / 32) % DST_SLICES;
  const int src_slice = warp / (SLICE_THREADS / 32);

  const int tile_index = blockIdx.z * gridDim.y + blockIdx.y;
  if (tile_index >= g.tiles[0] * g.tiles[1] * g.tiles[2] * g.tiles[3]) return;
  const int first_item = blockIdx.x * g.items_per_block;
  const int items = min(g.items_per_block, g.items - first_item);
  const Tile tile = make_tile(g, tile_index);
  src += tile.n * g.src.stride[0];
  dst += tile.n * g.dst.stride[0];

  accum_t* const weights = (accum_t*)shared_memory;
  accum_t* const planes = weights + BUFFERS * WEIGHT_STAGE;
  Element* const elements = (Element*)(planes + BUFFERS * STAGE_CHANNELS * PLANE);
  accum_t* const rows = (accum_t*)(elements + (RUN > 1 ? LANES * RUN : 0));
  accum_t* const sums = rows + SLICE_THREADS * RUN + thread % SLICE_THREADS * 4;

  // The lane's first source element in a plane.
  const int lane_w = lane % g.lanes[3], lane_h = lane / g.lanes[3] % g.lanes[2];
  const int lane_d = lane / (g.lanes[3] * g.lanes[2]) % g.lanes[1];
  const int lane_n = min(lane / (g.lanes[3] * g.lanes[2] * g.lanes[1]), g.lanes[0] - 1);  // lanes beyond the tile idle
  const int corner = lane_n * tile.image + lane_d * SRC_D * tile.slab + lane_h * CELLS_H * SRC_H * tile.size_w +
                     lane_w * CELLS_W * (SRC_W / SPLIT);

  SourceLoader source;
  WeightLoader taps;
  Place place;
  Accumulators acc;
  source.init(g, tile, thread, planes);
  taps.init(thread);
  place.init(g, tile, lane);
  if (!DST_CHANNELS_LAST && RUN > 1 && warp < LANES / 32) describe_row(g, place, elements + lane * RUN);
  const bool whole =
      __all_sync(0xffffffffu, place.slabs >= DST_D && place.rows >= CELLS_H * DST_H && place.columns >= RUN);

  int group = first_item / DST_BLOCKS, dst_block = first_item % DST_BLOCKS;
  // The step to be loaded next, and how many are left.
  int ahead_group = group, ahead_block = dst_block, ahead_stage = 0, ahead = items * STAGES;
  const scalar_t *ahead_src = src, *ahead_weight = weight;
  auto load = [&](int buffer) {
    if (ahead-- > 0) {
      if (ahead_stage == 0) {
        ahead_src = src + (long long)ahead_group * SRC_CHANNELS * g.src.stride[1];
        ahead_weight = weight + (long long)ahead_group * SRC_CHANNELS * DST_CHANNELS * TAPS +
                       ahead_block * BLOCK_DST * WeightLoader::DST_STRIDE;
      }
      const int remaining = SRC_CHANNELS - ahead_stage * STAGE_CHANNELS;
      if constexpr (ASYNC)
        source.copy(g, ahead_src, remaining, planes + buffer * STAGE_CHANNELS * PLANE);
      else
        source.load(g, ahead_src, remaining);
      taps.load(ahead_weight, ahead_block, remaining, thread, weights + buffer * WEIGHT_STAGE);
      ahead_src += STAGE_CHANNELS * g.src.stride[1];
      ahead_weight += STAGE_CHANNELS * WeightLoader::CHANNEL_STRIDE;
      if (++ahead_stage == STAGES) {
        ahead_stage = 0;
        if (++ahead_block == DST_BLOCKS) ahead_block = 0, ++ahead_group;
      }
    }
    if constexpr (ASYNC) copies_commit();
  };

#pragma unroll 1
  for (int step = 0; step < BUFFERS - 1; ++step) load(step);
  int buffer = 0;
#pragma unroll 1
  for (int item = 0; item < items; ++item) {
    acc.clear();
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
      accum_t* const stage_planes = planes + buffer * STAGE_CHANNELS * PLANE;
      accum_t* const stage_weights = weights + buffer * WEIGHT_STAGE;
      if constexpr (ASYNC) {
        copies_wait<BUFFERS - 2>();
      } else {
        source.store(g, tile, stage_planes);
        taps.store(stage_weights);
      }
      __syncthreads();
      load(buffer == 0 ? BUFFERS - 1 : buffer - 1);
#pragma unroll(CHANNELS_AT_ONCE)
      for (int i = 0; i < SLICE_CHANNELS; ++i) {
        const int channel = src_slice * SLICE_CHANNELS + i;
        acc.accumulate(stage_planes + channel * PLANE + corner,
                       stage_weights + channel * WEIGHT_CHANNEL + dst_slice * WEIGHT_SLICE, tile);
      }
      const int first_flush = CHAIN - SRC_SLICES;
      if (CHAINED && stage % CHAIN == first_flush + src_slice && stage + 1 < STAGES)
        acc.flush(sums, stage == first_flush);
      buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
    }

    const int first_dst = dst_block * BLOCK_DST + dst_slice * DST_PER_THREAD;
    const int channels = DST_CHANNELS - first_dst;  // that exist, from this slice's first on
    const long long first_channel = (long long)group * DST_CHANNELS + first_dst;
    if (CHAINED || SRC_SLICES > 1) acc.reduce(sums, src_slice);
    if (src_slice == 0 && channels > 0) {
      accum_t biases[DST_PER_THREAD];
#pragma unroll
      for (int i = 0; i < DST_PER_THREAD; ++i)
        biases[i] = HAS_BIAS && i < channels ? widen(read(bias + first_channel + i)) : (accum_t)0;
      scalar_t* const item_dst = dst + first_channel * g.dst.stride[1];
      if (STAGES > 4) place.init(g, tile, lane);  // again, so that its registers serve the stages
      accum_t* const staging = rows + warp * (32 * RUN);
      const Element* const of_warp = elements + lane / 32 * (32 * RUN);
      if (DST_CHANNELS_LAST)
        store_channels(g, place, acc, item_dst, biases, channels);
      else if (RUN > 1 && !VECTORS && whole)
        store_rows<true>(g, place, acc, item_dst, biases, channels, staging, of_warp, lane % 32);
      else
        store_rows<false>(g, place, acc, item_dst, biases, channels, staging, of_warp, lane % 32);
    }
    if (++dst_block == DST_BLOCKS) dst_block = 0, ++group;
  }
}
"""
FILES["weight_grad.cu"] = r"""
// Direct kernel of the weight gradient, in exact arithmetic.
//
//   gw[ci, co, tap] = Σ over batch and input positions i of   x[n, ci, i] · g[n, co, i·stride + tap·dilation - padding]
//
// A matrix product of each group: rows are the input channels, columns the pairs (co, tap), and the sum runs over the
// K = batch × input positions. The second operand is gathered from the output gradient on its way to shared memory, one
// element a (column, position), zero where it falls into the padding.
//
// Index mapping. A block owns ROWS × COLUMNS of one group and one contiguous part of K. Its threads are K_SLICES ×
// (ROWS / THREAD_ROWS) × (COLUMNS / THREAD_COLUMNS); a K slice takes every K_SLICES-th position of a stage, summed at
// the end in slice order. Blocks on different parts of K write to different planes of `partial`, which the caller sums
// in order: the result does not depend on timing.
//
// Shared memory: two buffers of DEPTH × ROW_PITCH of x and DEPTH × COLUMN_PITCH of g, both [position][row or column],
// padded so that stores along K do not meet in one bank; then every thread's sums as [K slice][sum][thread].
//
// Synchronisation: stage i+1 is loaded to registers while stage i is computed, and stored to the other buffer; one
// barrier a stage suffices, since a buffer is written again only after the barrier that follows its last reads.

struct Geometry {
  Tensor5 x, g;
  int batch, groups;
  int parts;              // blocks along K
  long long part_length;  // positions of a part
  long long positions;    // K
  long long plane;        // elements of one plane of `partial`: all weights
};

constexpr int COLUMNS_TOTAL = OUT_CHANNELS * TAPS;
constexpr int ROW_BLOCKS = ceil_div(IN_CHANNELS, ROWS);
constexpr int COLUMN_BLOCKS = ceil_div(COLUMNS_TOTAL, COLUMNS);
constexpr int ROW_THREADS = ROWS / THREAD_ROWS, COLUMN_THREADS = COLUMNS / THREAD_COLUMNS;
constexpr int SLICE_THREADS = ROW_THREADS * COLUMN_THREADS;
constexpr int THREADS = SLICE_THREADS * K_SLICES;
constexpr int ROW_PITCH = round_up(ROWS, 4) + 4, COLUMN_PITCH = round_up(COLUMNS, 4) + 4;
constexpr int X_ITEMS = ceil_div(ROWS * DEPTH, THREADS), G_ITEMS = ceil_div(COLUMNS * DEPTH, THREADS);
constexpr int ROW_STEP = THREADS / DEPTH;  // rows or columns that the block loads at once

constexpr int SUMS = THREAD_ROWS * THREAD_COLUMNS, RESULTS = ROWS * COLUMNS;  // of a thread; of a block
constexpr int FLUSH = 2048 / DEPTH > 0 ? 2048 / DEPTH : 1;  // stages whose positions are summed in one chain
constexpr int STAGE = DEPTH * (ROW_PITCH + COLUMN_PITCH);   // shared values of one stage

static_assert(SUMS * SLICE_THREADS == RESULTS, "a slice has a sum for each result");
static_assert(THREADS % DEPTH == 0, "a thread loads the same position of every stage");
static_assert(DEPTH % K_SLICES == 0, "every K slice takes the same share of a stage");

// How far the last tap of a dimension lies from the first.
__host__ __device__ constexpr int reach(Axis axis) { return (axis.kernel - 1) * axis.dilation; }

// A column: its channel of the output, and where its tap lies from tap 0.
struct Column {
  int channel, d, h, w;
};

__device__ __forceinline__ Column column_at(int column) {
  const int tap = column % TAPS;
  return {column / TAPS, tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation,
          tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation, tap % AXIS_W.kernel * AXIS_W.dilation};
}

// THREAD_ROWS or THREAD_COLUMNS neighbouring values from shared memory, 16 bytes at a time where they are that many.
template <int COUNT>
struct Values {
  accum_t value[COUNT];

  __device__ __forceinline__ void load(const accum_t* from) {
    struct alignas((COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1) * sizeof(accum_t)) Chunk {
      accum_t value[COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1];
    };
    constexpr int CHUNK = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < COUNT; i += CHUNK) {
      const Chunk chunk = *(const Chunk*)(from + i);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) value[i + j] = chunk.value[j];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    weight_grad(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, accum_t* __restrict__ partial,
                const Geometry g) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  const int row_block = block % ROW_BLOCKS;
  block /= ROW_BLOCKS;
  const int column_block = block % COLUMN_BLOCKS;
  block /= COLUMN_BLOCKS;
  const int group = block % g.groups;
  const int part = block / g.groups;
  const long long first = part * g.part_length;
  const long long end = first + g.part_length < g.positions ? first + g.part_length : g.positions;

  const int thread = threadIdx.x;
  const int k_slice = thread / SLICE_THREADS;
  const int row = thread % SLICE_THREADS / COLUMN_THREADS * THREAD_ROWS;
  const int column = thread % COLUMN_THREADS * THREAD_COLUMNS;
  const int load_k = thread % DEPTH, load_row = thread / DEPTH;

  const int in_channel = row_block * ROWS, first_column = column_block * COLUMNS;
  x += (long long)(group * IN_CHANNELS + in_channel) * g.x.stride[1];
  grad += (long long)group * OUT_CHANNELS * g.g.stride[1];

  // The columns that this thread loads: how far each lies from tap 0 of channel 0. Columns beyond the last repeat it.
  long long column_offset[G_ITEMS];
#pragma unroll
  for (int i = 0; i < G_ITEMS; ++i) {
    const Column c = column_at(first_column + load_row + i * ROW_STEP);
    column_offset[i] = c.channel * g.g.stride[1] + c.d * g.g.stride[2] + c.h * g.g.stride[3] + c.w * g.g.stride[4];
    if (first_column + load_row + i * ROW_STEP >= COLUMNS_TOTAL) column_offset[i] = 0;
  }

  // The position that this thread loads, which goes on by DEPTH every stage.
  long long k = first + load_k;
  long long rest = k;
  int w = (int)(rest % g.x.size[2]);
  rest /= g.x.size[2];
  int h = (int)(rest % g.x.size[1]);
  rest /= g.x.size[1];
  int d = (int)(rest % g.x.size[0]);
  long long n = rest / g.x.size[0];

  scalar_t x_values[X_ITEMS], g_values[G_ITEMS];
  auto load = [&]() {
    const bool exists = k < end;
    const scalar_t* x_at =
        x + n * g.x.stride[0] + d * g.x.stride[2] + h * g.x.stride[3] + w * g.x.stride[4] + load_row * g.x.stride[1];
#pragma unroll
    for (int i = 0; i < X_ITEMS; ++i, x_at += ROW_STEP * g.x.stride[1]) {
      const int r = load_row + i * ROW_STEP;
      x_values[i] = exists && r < ROWS && in_channel + r < IN_CHANNELS ? read(x_at) : zero<scalar_t>();
    }
    const int base_d = d * AXIS_D.stride - AXIS_D.padding;
    const int base_h = h * AXIS_H.stride - AXIS_H.padding;
    const int base_w = w * AXIS_W.stride - AXIS_W.padding;
    const scalar_t* const g_at =
        grad + n * g.g.stride[0] + base_d * g.g.stride[2] + base_h * g.g.stride[3] + base_w * g.g.stride[4];
    const bool interior = base_d >= 0 && base_d + reach(AXIS_D) < g.g.size[0] && base_h >= 0 &&
                          base_h + reach(AXIS_H) < g.g.size[1] && base_w >= 0 && base_w + reach(AXIS_W) < g.g.size[2];
    if (exists && interior) {
#pragma unroll
      for (int i = 0; i < G_ITEMS; ++i) g_values[i] = read(g_at + column_offset[i]);
    } else {
#pragma unroll
      for (int i = 0; i < G_ITEMS; ++i) {
        const Column c = column_at(first_column + load_row + i * ROW_STEP);
        const bool inside = exists && first_column + load_row + i * ROW_STEP < COLUMNS_TOTAL &&
                            (unsigned)(base_d + c.d) < (unsigned)g.g.size[0] &&
                            (unsigned)(base_h + c.h) < (unsigned)g.g.size[1] &&
                            (unsigned)(base_w + c.w) < (unsigned)g.g.size[2];
        g_values[i] = inside ? read(g_at + column_offset[i]) : zero<scalar_t>();
      }
    }
    k += DEPTH;
    w += DEPTH;
    while (w >= g.x.size[2]) {
      w -= g.x.size[2];
      if (++h < g.x.size[1]) continue;
      h = 0;
      if (++d < g.x.size[0]) continue;
      d = 0;
      ++n;
    }
  };

  // Sums of FLUSH stages in registers, sums of those in shared memory: rounding grows with the root of the terms, and
  // millions of positions in one chain would lose three digits.
  accum_t sum[THREAD_ROWS][THREAD_COLUMNS] = {};
  accum_t* const totals = (accum_t*)shared_memory + 2 * STAGE;
  accum_t* const own = totals + k_slice * RESULTS + thread % SLICE_THREADS;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) own[i * SLICE_THREADS] = 0;
  auto flush = [&]() {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      own[i * SLICE_THREADS] += (&sum[0][0])[i];
      (&sum[0][0])[i] = 0;
    }
  };

  load();
  int until_flush = FLUSH;
  int buffer = 0;
#pragma unroll 1
  for (long long stage = first; stage < end; stage += DEPTH, buffer ^= 1) {
    accum_t* const x_tile = (accum_t*)shared_memory + buffer * STAGE;
    accum_t* const g_tile = x_tile + DEPTH * ROW_PITCH;
#pragma unroll
    for (int i = 0; i < X_ITEMS; ++i)
      if (load_row + i * ROW_STEP < ROWS) x_tile[load_k * ROW_PITCH + load_row + i * ROW_STEP] = widen(x_values[i]);
#pragma unroll
    for (int i = 0; i < G_ITEMS; ++i)
      if (load_row + i * ROW_STEP < COLUMNS)
        g_tile[load_k * COLUMN_PITCH + load_row + i * ROW_STEP] = widen(g_values[i]);
    __syncthreads();
    if (stage + DEPTH < end) load();
#pragma unroll 4
    for (int step = k_slice; step < DEPTH; step += K_SLICES) {
      Values<THREAD_ROWS> a;
      Values<THREAD_COLUMNS> b;
      a.load(x_tile + step * ROW_PITCH + row);
      b.load(g_tile + step * COLUMN_PITCH + column);
#pragma unroll
      for (int r = 0; r < THREAD_ROWS; ++r)
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; ++c) sum[r][c] += a.value[r] * b.value[c];
    }
    if (--until_flush == 0) {
      flush();
      until_flush = FLUSH;
    }
  }
  flush();

  // Sum the K slices in order, each of the block's results by one thread.
  __syncthreads();
  partial += part * g.plane + (long long)group * IN_CHANNELS * COLUMNS_TOTAL;
  for (int result = thread; result < RESULTS; result += THREADS) {
    accum_t total = totals[result];
#pragma unroll 8
    for (int slice = 1; slice < K_SLICES; ++slice) total += totals[slice * RESULTS + result];
    const int i = result / SLICE_THREADS, of = result % SLICE_THREADS;  // a thread's sum, and the thread in its slice
    const int in = in_channel + of / COLUMN_THREADS * THREAD_ROWS + i / THREAD_COLUMNS;
    const int global = first_column + of % COLUMN_THREADS * THREAD_COLUMNS + i % THREAD_COLUMNS;
    if (in < IN_CHANNELS && global < COLUMNS_TOTAL) partial[(long long)in * COLUMNS_TOTAL + global] = total;
  }
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
FILES["common/split.cuh"] = r"""
// float32 in two parts of TF32 or three of bfloat16, where there are more of them than products to hide them behind;
// PARTS says how many.

// What the cores multiply.
template <int COUNT>
struct PartOf {
  typedef scalar_t type;
};
template <>
struct PartOf<3> {
  typedef bfloat16 type;
};
typedef PartOf<PARTS>::type part_t;
static_assert(PARTS == 1 || sizeof(scalar_t) == 4, "float32 alone comes in parts");

// What a float loses as TF32 is its low part. The cores truncate that: they take off half of its last bit on average,
// which is put on before. (Rounding it, or both by common/tensor_float.cuh, would take more instructions than the
// products.) NaN stays NaN in the low part whatever becomes of the high one.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  if constexpr (PARTS == 2) {
    high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint((value - __uint_as_float(high)) * (1 + 0.72f / 2048));
  } else {
    high = __float_as_uint(round_tf32(value));
  }
}

// Two floats as three pairs of bfloat16, the first in the lower half, that sum to them exactly from 2^-110 on (below
// that the last is too small for bfloat16): each is what rounding to the one before has left, and 24 significant bits
// are three times eight. What is not finite, or rounded to what is not, leaves NaN.
__device__ __forceinline__ void split_pair(float first, float second, unsigned (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#ifndef EMULATOR
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(parts[i]) : "f"(second), "f"(first));
#else
    bfloat16 narrowed[2];
    narrow(first, narrowed[0]), narrow(second, narrowed[1]);
    parts[i] = narrowed[0].bits | (unsigned)narrowed[1].bits << 16;
#endif
    first -= __uint_as_float(parts[i] << 16), second -= __uint_as_float(parts[i] & 0xffff0000u);
  }
}
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
FILES["common/staged_rows.cuh"] = r"""
// Rows of the destination that lie in shared memory as they are to lie in memory, and are written from there, on Hopper
// by the copy engine. A sector of 32 bytes that two stores share costs the L2 cache far more than its bytes
// (docs/performance.md), so rows are as long as they come, and written from a sector's first byte on. To that end they
// begin as far behind a sector's first byte in shared memory as they will.

constexpr int SECTOR = 32 / (int)sizeof(scalar_t);  // elements

// Elements from the first of the address's sector.
__device__ __forceinline__ int misalignment(const scalar_t* address) {
  return (unsigned)(unsigned long long)address / (unsigned)sizeof(scalar_t) % SECTOR;
}

// The copy engine's; the specialisation says BULK_STORES where there is one.
#ifndef EMULATOR
// `bytes`, a multiple of 16, from shared to global memory, while the thread goes on.
__device__ __forceinline__ void bulk_store(scalar_t* to, const scalar_t* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
// What the thread has written to shared memory is there for the copy engine.
__device__ __forceinline__ void publish_rows() {
  if (BULK_STORES) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void bulk_stores_commit() {
  if (BULK_STORES) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the copy engine has read all that the thread has committed.
__device__ __forceinline__ void bulk_stores_wait() {
  if (BULK_STORES) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#else
__device__ __forceinline__ void bulk_store(scalar_t* to, const scalar_t* from, unsigned bytes) {
  emulator::bulk_store(to, from, bytes);
}
__device__ __forceinline__ void publish_rows() {}
__device__ __forceinline__ void bulk_stores_commit() { emulator::commit(emulator::Async::stores); }
__device__ __forceinline__ void bulk_stores_wait() { emulator::wait(emulator::Async::stores, 0); }
#endif

// What of a row lies in sectors of its own.
struct Body {
  int head, length;  // elements before it, and its own

  __device__ __forceinline__ Body(const scalar_t* to, int row)
      : head(min(row, (SECTOR - misalignment(to)) % SECTOR)), length((row - head) / SECTOR * SECTOR) {}
};

// That of a row of `length` elements, by the copy engine, or by a warp.
__device__ __forceinline__ void bulk_store_body(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  if (body.length > 0) bulk_store(to + body.head, from + body.head, body.length * (unsigned)sizeof(scalar_t));
}
__device__ __forceinline__ void write_body(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  typedef Vector<scalar_t, SECTOR / 2> Wide;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < body.length / (SECTOR / 2); i += 32)
    ((Wide*)(to + body.head))[i] = ((const Wide*)(from + body.head))[i];
}

// The rest of it, by as many lanes as may be needed. Neighbouring rows that share a sector, written by one instruction,
// write it whole.
constexpr int END_LANES = 2 * SECTOR, ENDS_AT_ONCE = 32 / END_LANES;
__device__ __forceinline__ void write_ends(scalar_t* to, const scalar_t* from, int length) {
  const Body body(to, length);
  const int lane = threadIdx.x % END_LANES, tail = body.head + body.length;
  const int end = lane < SECTOR ? body.head : length, edge = lane < SECTOR ? lane : tail + lane - SECTOR;
  if (edge < end) to[edge] = from[edge];
}

// A row whose elements are `stride` apart in memory.
__device__ __forceinline__ void write_apart(scalar_t* to, const scalar_t* from, int length, long long stride) {
  for (int i = threadIdx.x % 32; i < length; i += 32) to[i * stride] = from[i];
}

// Calls write(to, from, length) with the row of each of a warp's first `count` lanes, of AT_ONCE in parts of the warp.
template <int AT_ONCE, class Write>
__device__ __forceinline__ void for_rows(scalar_t* to, const scalar_t* from, int length, int count,
                                         const Write& write) {
#pragma unroll 2
  for (int i = 0; i < count; i += AT_ONCE) {
    const int lane = i + threadIdx.x % 32 / (32 / AT_ONCE);
    const int of_lane = __shfl_sync(~0u, length, lane);
    scalar_t* const row = (scalar_t*)__shfl_sync(~0u, (long long)to, lane);
    write(row, (const scalar_t*)__cvta_shared_to_generic(__shfl_sync(~0u, shared_address(from), lane)), of_lane);
  }
}

// A row of each of a warp's first `count` lanes, of 0 elements for the others.
__device__ __forceinline__ void write_rows(scalar_t* to, const scalar_t* from, int length, int count,
                                           long long stride) {
  if (stride != 1) {
    for_rows<1>(to, from, length, count,
                [=](scalar_t* to, const scalar_t* from, int length) { write_apart(to, from, length, stride); });
    return;
  }
  if (BULK_STORES)
    bulk_store_body(to, from, length), bulk_stores_commit();
  else
    for_rows<1>(to, from, length, count, write_body);
  if (!__all_sync(~0u, Body(to, length).length == length)) for_rows<ENDS_AT_ONCE>(to, from, length, count, write_ends);
}
"""
FILES["common/phase_taps.cuh"] = r"""
// All phases of a cell as one product: its rows are pairs of a phase that has taps and one of OUT_CHUNK output
// channels, its depth the pixels that these read, and some pairs of phase and pixel have no tap.

// One dimension: outputs of a cell that have taps, pixels that these read, and the tap of a pair, -1 where it has none.
template <int KERNEL, int STRIDE>
struct Dimension {
  int phases = 0, pixels = 0;
  int phase[STRIDE] = {}, pixel[KERNEL] = {}, tap[STRIDE][KERNEL] = {};
  int number[STRIDE] = {};  // of a phase among those, -1 for one without taps

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

// The tap of phase `phase` and pixel `pixel`, of those that have or are read by any; -1 where there is none.
__host__ __device__ constexpr int tap_of(int phase, int pixel) {
  const int d = ALONG_D.tap[phase / (ALONG_H.phases * ALONG_W.phases)][pixel / (ALONG_H.pixels * ALONG_W.pixels)];
  const int h = ALONG_H.tap[phase / ALONG_W.phases % ALONG_H.phases][pixel / ALONG_W.pixels % ALONG_H.pixels];
  const int w = ALONG_W.tap[phase % ALONG_W.phases][pixel % ALONG_W.pixels];
  return d < 0 || h < 0 || w < 0 ? -1 : (d * AXIS_H.kernel + h) * AXIS_W.kernel + w;
}

// Which blocks of rows have a tap at a pixel.
struct Entries {
  int count = 0;
  int pixel[PIXELS_READ * ROW_BLOCKS] = {}, block[PIXELS_READ * ROW_BLOCKS] = {};
  int of[PIXELS_READ][ROW_BLOCKS] = {};  // -1 for none
  int first[ROW_BLOCKS] = {};            // a block's first pixel

  __host__ __device__ constexpr Entries() {
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
"""
FILES["gather_gemm.cu"] = r"""
// Forward pass of layers with few channels in a group on tensor cores: all phases of a tile as one product of few rows,
// put together in shared memory as they are to lie, and written as whole rows.
//
//   y[co, i·stride + phase]  =  bias[co]  +  Σ_ci Σ_pixel   w[ci, co, tap(phase, pixel)] · x[ci, i + pixel]
//
// where pixels are those that a cell i reads, counted from its own, and some pairs of phase and pixel have no tap.
//
// Rows of outputs without any tap are bias alone, and are written from rows that stay.
//
// Who does what. LOAD_WARPS bring stage after stage, WARPS multiply and put a tile's outputs together, STORE_WARPS
// write those. Barriers of shared memory pass on each stage (full, and empty again), and the outputs (whole, and gone).
//
// Index mapping. A block owns OUT_CHUNK output channels of one group, and takes tile after tile of cells
// (common/geometry.cuh). Rows of the product are pairs of a phase that has taps and a channel, in blocks of 16; its
// columns are cells, of which a warp owns PIXEL_TILES tiles of 8. A stage is STAGE_STEPS operations' channels of the
// window that the tile reads. For each pixel, a warp takes the operands of its columns once, for all blocks of rows of
// which any has a tap there: an entry.
//
// Without TF32 a float32 comes in PARTS (common/split.cuh): three of bfloat16, whose instruction is twice as deep and
// multiplies with one part of the weights in its first half and with another in its second; or two of TF32, less
// accurate, where the weights would take too much room. Each operation's sum leaves the cores at once, since they round
// towards zero. The parts of what is not finite sum to NaN, and so does what is not finite with the zeros of pairs
// without a tap; the product of two parts that were rounded up may overflow where that of the whole does not. Where an
// output may be wrong for that it is therefore computed again, plainly.
//
// Shared memory: the barriers; where pairs of cells lie; the weights in the order in which lanes take them; outputs of
// one tile or two (common/staged_rows.cuh); rows of bias; where the pieces of a window lie; BUFFERS stages.

struct Geometry {
  Tensor5 x, y;
  Part window;
  int batch, groups;
  int lanes[4];      // cells of a tile along n, d, h, w; two neighbours along w are of one row
  Divisor tiles[4];  // tiles along n, d, h, w
  int apart[4];      // tiles along n, d, h, w from one of a block's to its next
  int first[4];      // the window's first pixel, counted from the tile's first cell
  int skew;          // pixels from there to the first that any tap reads
  int pitch[4];      // of staged outputs: elements from one channel, image, slab and row that has taps to the next
  int shift[4];  // what outputs in memory are then off a whole number of sectors; a row that follows on is off by none
  int joined;    // rows that follow one another in memory: all of a tile's slab, or 1
  int outputs;   // tiles whose outputs there is room for, 1 or 2
  int at_once;   // blocks that walk through the same tiles, each beginning with one of its own
  int counters;  // bytes in front of the weights, a counter for each group and block of output channels; 0: no tiles
                 // are shared, and there is no kernel ahead
  int staged_bytes, bare_bytes, table_bytes, stage_bytes;
};

constexpr int CHANNELS = OPERATION / 8;  // neighbours in four bytes
constexpr int STEPS = ceil_div(IN_CHANNELS, OPERATION), STAGES = ceil_div(STEPS, STAGE_STEPS);
constexpr int OUT_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr bool EXACT = PARTS > 1;
constexpr int ALL_WARPS = WARPS + LOAD_WARPS + STORE_WARPS, BLOCK = 32 * ALL_WARPS;
constexpr int LOAD_SPAN = LOAD_WARPS == 4 ? 7 : LOAD_WARPS == 2 ? 6 : 5;
static_assert(LOADERS == 1 << LOAD_SPAN && FIRST_LOAD_WARP == WARPS, "the last warps are those that store");

constexpr int MATRICES = EXACT ? 2 : 1;  // of an entry
constexpr int ENTRY_BYTES = MATRICES * 512, WEIGHT_BYTES = STEPS * ENTRIES.count * ENTRY_BYTES;
constexpr bool HAS_BARE = ALONG_D.phases < AXIS_D.stride || ALONG_H.phases < AXIS_H.stride;  // rows without taps

// What the cores take of one channel's weight or pixel, or of two neighbouring ones'.
__device__ __forceinline__ unsigned word_of(float value, float) { return __float_as_uint(round_tf32(value)); }
template <class T>
__device__ __forceinline__ unsigned word_of(T value, T next) {
  return value.bits | (unsigned)next.bits << 16;
}

// All operations' weights of a block's channels; `weight` is of the first. What has no tap or no channel is zero. A
// word is two neighbouring channels' weights, one channel's, or one of PARTS == 3 of two that are half an operation
// apart. Of two parts there is a matrix for each, the high and the low one; of three those of parts (in the first and
// in the second half of the depth) 3 and 1, and 2 and 1.
__device__ __forceinline__ void load_weights(const scalar_t* weight, int channels, char* to) {
  constexpr int WORDS = PARTS == 3 ? 2 : 4;  // of a lane: of each row, and of each half of the channels
#pragma unroll 4
  for (int i = threadIdx.x; i < STEPS * ENTRIES.count * 32 * WORDS; i += BLOCK) {
    const int at = i / (32 * WORDS), entry = at % ENTRIES.count, lane = i / WORDS % 32;
    const int row = 16 * ENTRIES.block[entry] + lane / 4 + i % 2 * 8, out = row % OUT_CHUNK;
    const int in = at / ENTRIES.count * OPERATION + i % WORDS / 2 * (OPERATION / 2) + lane % 4 * CHANNELS;
    const int tap = row < ROWS ? tap_of(row / OUT_CHUNK, ENTRIES.pixel[entry]) : -1;
    const scalar_t* const from = weight + weight_offset(in, out, tap);
    constexpr int APART = PARTS == 3 ? OPERATION / 2 : CHANNELS - 1;
    scalar_t values[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool exists = tap >= 0 && out < channels && in + j * APART < IN_CHANNELS;
      values[j] = exists ? from[j * APART * WEIGHT_STRIDE_IN] : zero<scalar_t>();
    }
    unsigned* const slot = (unsigned*)(to + at * ENTRY_BYTES);
    if (PARTS == 3) {
      unsigned parts[3];
      split_pair(widen(values[0]), widen(values[1]), parts);
      unsigned* const word = slot + lane * 4 + i % 2;
      word[0] = parts[2], word[2] = parts[0];
      word[128] = parts[1], word[130] = parts[0];
    } else if (PARTS == 2) {
      split(widen(values[0]), slot[i % 128], slot[128 + i % 128]);
    } else {
      slot[i % 128] = word_of(values[0], values[1]);
    }
  }
}

// Where an output is staged: elements, and what it is off the first of a sector, which is added once it is whole.
// Places add up; a tile's origin has one, so have its cells, and rows of the product.
constexpr int NOWHERE = -(1 << 30);
__device__ __forceinline__ int staged_place(int elements, int off) { return elements * 64 + off % SECTOR; }
__device__ __forceinline__ int find_place(int sum) { return sum / 64 + sum % SECTOR; }

// Where a row of outputs begins, counted from the tile's first: of slab and line `d` and `h` of those with taps, which
// are `slab` and `line` in the tile.
__device__ __forceinline__ int place_of_row(const Geometry& g, int channel, int image, int d, int h, int slab,
                                            int line) {
  return staged_place(channel * g.pitch[0] + image * g.pitch[1] + d * g.pitch[2] + h * g.pitch[3],
                      channel * g.shift[0] + image * g.shift[1] + slab * g.shift[2] + line * g.shift[3]);
}

// A cell of a tile, by its number along n, d, h and w: where the outputs begin that it owns; NOWHERE beyond the tile.
__device__ __forceinline__ int place_of_cell(const Geometry& g, const int (&at)[4]) {
  if (at[0] >= g.lanes[0]) return NOWHERE;
  return place_of_row(g, 0, at[0], at[1] * ALONG_D.phases, at[2] * ALONG_H.phases, at[1] * AXIS_D.stride,
                      at[2] * AXIS_H.stride) +
         staged_place(at[3] * AXIS_W.stride, 0);
}

// Two neighbouring cells of a tile: where the outputs of the first begin, NOWHERE beyond the tile, and how many of
// either lie in a row; what they read. Columns beside the image are in the way only where the next row follows.
struct Pair {
  int place;
  short width[2];
  int pixel[2];  // the first that either reads, in bytes from the window's first

  __device__ __forceinline__ Pair(const Geometry& g, const int (&at)[4]) : place(place_of_cell(g, at)) {
    const int row = (at[0] * g.window.extent[1] + at[1]) * g.window.extent[2] + at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int rest = g.joined > 1 ? max(0, g.y.size[2] - (at[3] + i) * AXIS_W.stride) : AXIS_W.stride;
      width[i] = place >= 0 ? (short)min(AXIS_W.stride, rest) : 0;
      pixel[i] = place >= 0 ? (row * g.window.extent[3] + at[3] + i + g.skew) * ELEMENT : 0;
    }
  }
};
constexpr int PAIRS = 4 * PIXEL_TILES * WARPS, PAIR_BYTES = round_up(PAIRS * (int)sizeof(Pair), 128);

// A warp's part of the product: of row block i and column tile j.
struct Sums {
  float of[ROW_BLOCKS][PIXEL_TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS * PIXEL_TILES * 4; ++i) (&of[0][0][0])[i] = 0;
  }

  // One operation, of the warp's `pairs` of cells.
  __device__ __forceinline__ void add(const Geometry& g, const char* window, const Pair* pairs, const char* weights) {
    weights += threadIdx.x % 32 * 16;
    window += threadIdx.x % 4 * CHANNELS * g.window.pitch;
    int columns[PIXEL_TILES];  // bytes
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j) columns[j] = pairs[4 * j + threadIdx.x % 32 / 8].pixel[threadIdx.x / 4 % 2];
    Elements elements[PIXEL_TILES];
    Words words[PIXEL_TILES];
    if (AHEAD) load(g, window, columns, 0, elements);
#pragma unroll
    for (int pixel = 0; pixel < PIXELS_READ; ++pixel) {
      if (AHEAD) {
        to_words(elements, words);
        if (pixel + 1 < PIXELS_READ) load(g, window, columns, pixel + 1, elements);
      }
      // A loop that ends after its first round, which the compiler does not know: else it mingles pixels, for which
      // there are no registers.
#pragma unroll 1
      for (unsigned rounds = opaque(1); rounds > 0; --rounds) {
        if (!AHEAD) {
          load(g, window, columns, pixel, elements);
          to_words(elements, words);
        }
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; ++i)
          if (ENTRIES.of[pixel][i] >= 0)
            multiply(of[i], weights + ENTRIES.of[pixel][i] * ENTRY_BYTES, words,
                     STEPS == 1 && ENTRIES.first[i] == pixel);
      }
    }
  }

 private:
  // What a lane holds of eight pixels: the elements of two channels, half an operation apart, or of two pairs of
  // neighbours. And as the cores take them: a word of each of the two, and of two parts the low ones behind; or the
  // three parts of both together.
  typedef scalar_t Elements[2 * CHANNELS];
  typedef unsigned Words[PARTS == 1 ? 2 : PARTS == 2 ? 4 : 3];

  // Whether a pixel is on its way while the one before is multiplied; else there are no registers.
  static constexpr bool AHEAD = PIXEL_TILES <= 4 && PARTS != 2;

  static __device__ __forceinline__ void load(const Geometry& g, const char* window, const int (&columns)[PIXEL_TILES],
                                              int pixel, Elements (&to)[PIXEL_TILES]) {
    const int d = ALONG_D.pixel[pixel / (ALONG_H.pixels * ALONG_W.pixels)] - ALONG_D.pixel[0];
    const int h = ALONG_H.pixel[pixel / ALONG_W.pixels % ALONG_H.pixels] - ALONG_H.pixel[0];
    const int w = ALONG_W.pixel[pixel % ALONG_W.pixels] - ALONG_W.pixel[0];
    const char* const from = window + ((d * g.window.extent[2] + h) * g.window.extent[3] + w) * ELEMENT;
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j)
#pragma unroll
      for (int k = 0; k < 2 * CHANNELS; ++k) {
        const int channel = k / CHANNELS * (OPERATION / 2) + k % CHANNELS;
        to[j][k] = *(const scalar_t*)(from + columns[j] + channel * g.window.pitch);
      }
  }
  static __device__ __forceinline__ void to_words(const Elements (&elements)[PIXEL_TILES],
                                                  Words (&words)[PIXEL_TILES]) {
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j) to_words(elements[j], words[j]);
  }
  template <class T>
  static __device__ __forceinline__ void to_words(const T (&elements)[2 * CHANNELS], unsigned (&words)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = word_of(elements[i * CHANNELS], elements[i * CHANNELS + CHANNELS - 1]);
  }
  static __device__ __forceinline__ void to_words(const float (&elements)[2], unsigned (&words)[3]) {
    split_pair(elements[0], elements[1], words);
  }
  static __device__ __forceinline__ void to_words(const float (&elements)[2], unsigned (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split(elements[i], words[i], words[2 + i]);
  }

  // Adds to the sums of a row block, or begins them. `weights` is the lane's.
  static __device__ __forceinline__ void multiply(float (&to)[PIXEL_TILES][4], const char* weights,
                                                  const Words (&words)[PIXEL_TILES], bool first) {
    typedef Vector<unsigned, 4> Rows;
    if constexpr (EXACT) {
      float sums[PIXEL_TILES][4] = {};
#pragma unroll
      for (int i = 0; i < 3; ++i) {  // the smallest products first
        const Rows rows = *(const Rows*)(weights + (PARTS == 3 ? i > 0 : i == 0) * 512);
        const int one = PARTS == 3 ? i == 2 : 2 * (i == 1), other = PARTS == 3 ? 2 - i : one + 1;
#pragma unroll
        for (int j = 0; j < PIXEL_TILES; ++j) mma<part_t>(sums[j], rows.value, words[j][one], words[j][other]);
      }
#pragma unroll
      for (int j = 0; j < 4 * PIXEL_TILES; ++j)
        to[j / 4][j % 4] = first ? sums[j / 4][j % 4] : to[j / 4][j % 4] + sums[j / 4][j % 4];
    } else {
#pragma unroll
      for (int j = 0; j < 4 * PIXEL_TILES; ++j) to[j / 4][j % 4] = first ? 0 : to[j / 4][j % 4];
      const Rows rows = *(const Rows*)weights;
#pragma unroll
      for (int j = 0; j < PIXEL_TILES; ++j) mma(to[j], rows.value, words[j][0], words[j][1]);
    }
  }
};

// A row of the product, of the lane's in a block: its phase and channel. Where OUT_CHUNK is a multiple of 8, the phase
// is the same in all lanes, and known when the kernel is compiled.
struct Row {
  int d, h, w, channel;
  bool exists;

  __device__ __forceinline__ Row(int block, int i) {
    constexpr bool KNOWN = OUT_CHUNK % 8 == 0;
    const int first = 16 * block + 8 * i, lane = threadIdx.x % 32 / 4;
    const int phase = KNOWN ? first / OUT_CHUNK : (first + lane) / OUT_CHUNK, owned = min(phase, PHASES - 1);
    channel = KNOWN ? first % OUT_CHUNK + lane : (first + lane) % OUT_CHUNK;
    exists = phase < PHASES;
    d = ALONG_D.phase[owned / (ALONG_H.phases * ALONG_W.phases)];
    h = ALONG_H.phase[owned / ALONG_W.phases % ALONG_H.phases];
    w = exists ? ALONG_W.phase[owned % ALONG_W.phases] : AXIS_W.stride;
  }
  __device__ __forceinline__ int place(const Geometry& g) const {
    return place_of_row(g, channel, 0, ALONG_D.number[d], ALONG_H.number[h], d, h);
  }
};

// One output, without the cores. `x` is the group's first channel and `weight` is of the output's.
__device__ __forceinline__ float plain(const Tensor5& x_lies, const scalar_t* x, const scalar_t* weight, float bias,
                                       const int (&cell)[4], int phase_d, int phase_h, int phase_w) {
  float value = bias;
#pragma unroll 1
  for (int tap = 0; tap < TAPS; ++tap) {
    const int kd = tap / (AXIS_H.kernel * AXIS_W.kernel), kh = tap / AXIS_W.kernel % AXIS_H.kernel;
    const int kw = tap % AXIS_W.kernel;
    if (phase_of(AXIS_D, kd) != phase_d || phase_of(AXIS_H, kh) != phase_h || phase_of(AXIS_W, kw) != phase_w) continue;
    const int at[4] = {cell[0], cell[1] + src_offset(AXIS_D, kd), cell[2] + src_offset(AXIS_H, kh),
                       cell[3] + src_offset(AXIS_W, kw)};
    if ((unsigned)at[1] >= (unsigned)x_lies.size[0] || (unsigned)at[2] >= (unsigned)x_lies.size[1] ||
        (unsigned)at[3] >= (unsigned)x_lies.size[2])
      continue;
    const scalar_t* const pixel = x + offset_of(x_lies, at);
#pragma unroll 1
    for (int in = 0; in < IN_CHANNELS; ++in)
      value += widen(pixel[in * x_lies.stride[1]]) * widen(weight[weight_offset(in, 0, tap)]);
  }
  return value;
}

// Whether the cores may be right about an output.
__device__ __forceinline__ bool is_trusted(float value) {
  return EXACT ? fabsf(value) <= 3.402823466e+38f : value == value;
}

// The outputs of a tile on their way from sums to shared memory.
struct Outputs {
  const Geometry& g;
  const Pair* const pairs;     // of the warp's cells
  const scalar_t* const bias;  // of the block's first channel
  const int channels;          // that exist from there on
  bool whole;                  // whether all outputs of those cells exist, in rows that begin as the tile's first does

  __device__ __forceinline__ Outputs(const Geometry& g, const Pair* pairs, const scalar_t* bias, int channels)
      : g(g), pairs(pairs), bias(bias), channels(channels), whole(true) {
    for (int i = 0; i < 4 * PIXEL_TILES; ++i) whole = whole && pairs[i].width[1] == AXIS_W.stride;
    for (int i = 0; i < 4; ++i) whole = whole && g.shift[i] % 2 == 0 && g.pitch[i] % 2 == 0;
  }

  __device__ __forceinline__ float start(int channel) const {
    return HAS_BIAS ? widen(read(bias + min(channel, channels - 1))) : 0.f;
  }

  // Whether all of them can be trusted.
  __device__ __forceinline__ bool stage(scalar_t* staged, int origin, const Sums& sums) const {
    float doubt = 0;  // NaN where any may be wrong
    if constexpr (CELLS_AT_ONCE) {
      if (whole && origin % 2 == 0)
        stage_cells<true>(staged, origin, sums, doubt);
      else
        stage_cells<false>(staged, origin, sums, doubt);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * ROW_BLOCKS; ++i) stage_row(staged, origin, sums, i, doubt);
    }
    return doubt == 0;
  }

  // What the thread has staged that cannot be trusted is computed again; `x` is the group's and `weight` the block's
  // first channel.
  __device__ __forceinline__ void mend(scalar_t* staged, int origin, const int (&first)[4], const scalar_t* x,
                                       const scalar_t* weight) const {
#pragma unroll 1
    for (int i = 0; i < 4 * ROW_BLOCKS * PIXEL_TILES; ++i) {
      const Row row(i / (4 * PIXEL_TILES), i / (2 * PIXEL_TILES) % 2);
      const int j = i / 2 % PIXEL_TILES, k = i % 2;
      const Pair& pair = pairs[4 * j + threadIdx.x % 4];
      if (row.w >= pair.width[k] || row.channel >= channels) continue;
      scalar_t* const to = staged + find_place(origin + row.place(g) + pair.place) + row.w + k * AXIS_W.stride;
      const float value = widen(*to);
      if (is_trusted(value)) continue;
      int cell[4];
      decode(g.lanes, (threadIdx.x / 32 * PIXEL_TILES + j) * 8 + threadIdx.x % 4 * 2 + k, cell);
#pragma unroll
      for (int d = 0; d < 4; ++d) cell[d] += first[d];
      if (cell[0] >= g.batch) continue;
      narrow(plain(g.x, x, weight + row.channel * WEIGHT_STRIDE_OUT, start(row.channel), cell, row.d, row.h, row.w),
             *to);
    }
  }

 private:
  // Whether a thread holds all elements of two cells' rows, which are put there two at a time.
  static constexpr bool CELLS_AT_ONCE = OUT_CHUNK % 8 == 0 && ALONG_W.phases == AXIS_W.stride;

  __device__ __forceinline__ float finish(float sum, float bias, float& doubt) const {
    const float value = HAS_BIAS ? sum + bias : sum;
    doubt = fmaf(value, 0.f, doubt);
    return value;
  }

  // Those of all phases along the width, of which a lane has one channel.
  template <bool WHOLE>
  __device__ __forceinline__ void stage_cells(scalar_t* staged, int origin, const Sums& sums, float& doubt) const {
    constexpr int STRIDE = AXIS_W.stride;
#pragma unroll
    for (int index = 0; index < PIXEL_TILES * PHASES / STRIDE * OUT_CHUNK; index += 8) {
      const int j = index / (PHASES / STRIDE * OUT_CHUNK), i = index % (PHASES / STRIDE * OUT_CHUNK);
      const int first = i / OUT_CHUNK * (STRIDE * OUT_CHUNK) + i % OUT_CHUNK;  // row of the first phase and lane
      const Pair& pair = pairs[4 * j + threadIdx.x % 4];
      const Row row(first / 16, first / 8 % 2);
      const float bias = start(row.channel);
      scalar_t* const to = staged + find_place(origin + pair.place + row.place(g));
      alignas(2 * ELEMENT) scalar_t values[2 * STRIDE];
#pragma unroll
      for (int k = 0; k < 2 * STRIDE; ++k) {
        const int at = first + k % STRIDE * OUT_CHUNK;
        narrow(finish(sums.of[at / 16][j][at / 8 % 2 * 2 + k / STRIDE], bias, doubt), values[k]);
      }
      if (WHOLE || (pair.width[1] == STRIDE && shared_address(to) % (2 * ELEMENT) == 0)) {
#pragma unroll
        for (int k = 0; k < STRIDE; ++k) ((Vector<scalar_t, 2>*)to)[k] = ((const Vector<scalar_t, 2>*)values)[k];
      } else {
#pragma unroll
        for (int k = 0; k < 2 * STRIDE; ++k)
          if (k % STRIDE < pair.width[k / STRIDE]) to[k] = values[k];
      }
    }
  }

  // Half `i` of the rows of all blocks.
  __device__ __forceinline__ void stage_row(scalar_t* staged, int origin, const Sums& sums, int i, float& doubt) const {
    const Row row(i / 2, i % 2);
    const float bias = start(row.channel);
    const bool first = ALONG_W.phases < AXIS_W.stride && row.w == ALONG_W.phase[0];
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j) {
      const Pair pair = pairs[4 * j + threadIdx.x % 4];
      scalar_t* const to = staged + find_place(origin + row.place(g) + pair.place) + row.w;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float value = finish(sums.of[i / 2][j][i % 2 * 2 + k], bias, doubt);
        if (row.w < pair.width[k]) narrow(value, to[k * AXIS_W.stride]);
#pragma unroll
        for (int w = 0; w < AXIS_W.stride; ++w)  // outputs without taps beside it
          if (ALONG_W.number[w] < 0 && first && w < pair.width[k]) narrow(bias, to[k * AXIS_W.stride + w - row.w]);
      }
    }
  }
};

// Rows of `length` of bias, which lie bare_pitch(length) apart where channels have different ones.
__device__ __forceinline__ int bare_pitch(int length) { return HAS_BIAS ? round_up(length + SECTOR, SECTOR) : 0; }
__device__ __forceinline__ void fill_bare_rows(const Geometry& g, const scalar_t* bias, int channels, scalar_t* bare) {
  const int pitch = bare_pitch(g.lanes[3] * AXIS_W.stride);
  for (int i = threadIdx.x; i < g.bare_bytes / ELEMENT; i += BLOCK) {
    scalar_t value = zero<scalar_t>();
    if (HAS_BIAS) value = read(bias + min(i / pitch, channels - 1));
    bare[i] = value;
  }
}

// The outputs of a tile on their way to memory, by the warps that store.
struct Writer {
  const Geometry& g;
  const scalar_t* const staged;
  const scalar_t* const bare;
  scalar_t* const y;   // the block's first channel of the tile's first output
  const int channels;  // that exist from there on
  const int (&size)[4];

  __device__ __forceinline__ void write() const {
    const int images = min(g.lanes[0], size[0]), slabs = min(g.lanes[1] * AXIS_D.stride, size[1]);
#pragma unroll 1
    for (int image = 0; image < images; ++image)
#pragma unroll 1
      for (int slab = 0; slab < slabs; ++slab) write_slab(image, slab);
  }

 private:
  // Each warp has neighbouring rows. Each lane tells the copy engine of one, and then the warp sees to their ends.
  __device__ __forceinline__ void write_slab(int image, int slab) const {
    const int warp = threadIdx.x / 32 - (WARPS + LOAD_WARPS), lane = threadIdx.x % 32;
    const int lines = min(g.lanes[2] * AXIS_H.stride, size[2]), row = min(g.lanes[3] * AXIS_W.stride, size[3]);
    const int length = g.joined > 1 ? lines * g.y.size[2] : row, of_channel = g.joined > 1 ? 1 : lines;
    const int each = round_up(ceil_div(OUT_CHUNK * of_channel, STORE_WARPS), ENDS_AT_ONCE);
    const int behind = min((warp + 1) * each, OUT_CHUNK * of_channel), d = ALONG_D.number[slab % AXIS_D.stride];
#pragma unroll 1
    for (int first = warp * each; first < behind; first += 32) {
      const int i = first + lane, channel = i / of_channel, line = i % of_channel;
      const int h = ALONG_H.number[line % AXIS_H.stride];
      const int place = place_of_row(g, channel, image, slab / AXIS_D.stride * ALONG_D.phases + d,
                                     line / AXIS_H.stride * ALONG_H.phases + h, slab, line);
      scalar_t* to = y + channel * g.y.stride[1] + image * g.y.stride[0] + slab * g.y.stride[2] + line * g.y.stride[3];
      const scalar_t* from = staged + find_place(staged_place(0, misalignment(y)) + place);
      if (HAS_BARE && (d < 0 || h < 0))
        from = bare + channel * bare_pitch(g.lanes[3] * AXIS_W.stride) + misalignment(to);
      const int mine = i < behind && channel < channels ? length : 0;
      write_rows(to, from, mine, min(32, behind - first), g.y.stride[4]);
    }
  }
};

// Stage `number` of all those of a block's tiles, one tile after the other. One number, for want of registers.
struct Stage {
  int number = 0;

  __device__ __forceinline__ int tile() const { return number / STAGES; }
  __device__ __forceinline__ int of_tile() const { return number % STAGES; }
  __device__ __forceinline__ bool is_last() const { return of_tile() == STAGES - 1; }
  // Its buffer, and the parity of that one's barriers.
  __device__ __forceinline__ int slot() const { return number % BUFFERS; }
  __device__ __forceinline__ int parity() const { return number / BUFFERS % 2; }
  // The tile's outputs, and the parity of their barriers.
  __device__ __forceinline__ int output(const Geometry& g) const { return tile() & (g.outputs - 1); }
  __device__ __forceinline__ int output_parity(const Geometry& g) const { return tile() >> (g.outputs - 1) & 1; }
};

// What those who load say to the others: a tile's first cell, and the place of its outputs, NOWHERE behind the last.
struct Note {
  int cell[4], place;
};
struct Notes {
  // Those who load are at most BUFFERS stages ahead of those who multiply, and these two tiles ahead of those who
  // store: with one stage a tile that many notes are read.
  static constexpr int COUNT = 8;
  static_assert(BUFFERS + 2 <= COUNT, "a short ring");
  Note of[COUNT];
  int taken[2];  // numbers of tiles

  __device__ __forceinline__ Note& of_tile(const Stage& stage) { return of[stage.tile() % COUNT]; }
};

// What a block owns: output channels from `first_out` on of a group, and its first tile's number.
struct Share {
  int first_out, group, tile;

  __device__ __forceinline__ Share(const Geometry& g) {
    first_out = blockIdx.x % OUT_BLOCKS * OUT_CHUNK;
    group = blockIdx.x / OUT_BLOCKS % g.groups;
    tile = blockIdx.x / OUT_BLOCKS / g.groups;
  }
  // Input channels, and weights, from the block's first on.
  __device__ __forceinline__ const scalar_t* input(const Geometry& g, const scalar_t* x) const {
    return x + (long long)group * IN_CHANNELS * g.x.stride[1];
  }
  __device__ __forceinline__ const scalar_t* weights(const scalar_t* weight) const {
    return weight + (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN + first_out * WEIGHT_STRIDE_OUT;
  }
};

// The tiles of a block, one after the other, as those who load walk through them: every n-th, or the next that no block
// has taken. In the latter case what is computed at a time is neighbours, however fast each block is.
struct Tiles {
  const Geometry& g;
  unsigned* const counter;  // or none
  int* const taken;
  int at[4];      // the tile, by its number along n, d, h and w
  int ahead = 0;  // of the thread that takes them: what the counter said, a tile ahead; behind the blocks' first ones
  int parity = 0;

  __device__ __forceinline__ Tiles(const Geometry& g, unsigned* counter, Notes& notes, int first)
      : g(g), counter(counter), taken(notes.taken) {
    decode(g.tiles, first, at);
    if (counter && threadIdx.x == THREADS) ahead = (int)atomicAdd(counter, 1u);
  }
  __device__ __forceinline__ bool exists() const { return at[0] < g.tiles[0]; }
  __device__ __forceinline__ void advance() {
    if (counter) {
      // What the counter says is used at the next tile, and has come by then.
      if (threadIdx.x == THREADS) taken[parity] = g.at_once + ahead, ahead = (int)atomicAdd(counter, 1u);
      threads_sync(1, LOADERS);
      decode(g.tiles, *(volatile int*)(taken + parity), at);
      parity ^= 1;
      return;
    }
    int carry = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      at[i] += g.apart[i] + carry;
      carry = i > 0 && at[i] >= g.tiles[i];
      if (carry) at[i] -= g.tiles[i];
    }
  }
  __device__ __forceinline__ void first_cell(int (&cell)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) cell[i] = at[i] * g.lanes[i];
  }
};

// The first output of a tile.
__device__ __forceinline__ void first_output(const int (&cell)[4], int (&output)[4]) {
  output[0] = cell[0], output[1] = cell[1] * AXIS_D.stride;
  output[2] = cell[2] * AXIS_H.stride, output[3] = cell[3] * AXIS_W.stride;
}

// Barriers, 8 bytes each: of every stage full and empty, of every tile's outputs whole and gone.
struct Barriers {
  unsigned first;

  __device__ __forceinline__ unsigned full(int slot) const { return first + 8 * slot; }
  __device__ __forceinline__ unsigned empty(int slot) const { return first + 8 * (BUFFERS + slot); }
  __device__ __forceinline__ unsigned whole(int output) const { return first + 16 * BUFFERS + 8 * output; }
  __device__ __forceinline__ unsigned gone(int output) const { return first + 16 * BUFFERS + 16 + 8 * output; }

  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < BUFFERS; ++i) barrier_init(full(i), LOADERS), barrier_init(empty(i), WARPS);
      for (int i = 0; i < 2; ++i) barrier_init(whole(i), THREADS), barrier_init(gone(i), 32 * STORE_WARPS);
    }
  }
};
constexpr int NOTES_AT = 128, BARRIER_BYTES = 384;  // with the notes
static_assert(16 * BUFFERS + 32 <= NOTES_AT && (int)sizeof(Notes) <= BARRIER_BYTES - NOTES_AT, "BUFFERS");

// A warp's arrival, after all of its lanes.
__device__ __forceinline__ void arrive(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// What the three kinds of warps do.

__device__ __forceinline__ void load_stages(const Geometry& g, Tiles tiles, const Barriers& barriers, Notes& notes,
                                            Place* places, char* buffers, const scalar_t* x, const scalar_t* y) {
  PartLoader<Channels::first, STAGE_STEPS * OPERATION, Moving, LOAD_SPAN> loader(g.x, g.window);
  loader.init(places, elements(g.window));
  threads_sync(1, LOADERS);
  // What is on its way is waited for once BUFFERS - 2 stages follow it. Behind the last tile comes a note of its own.
  constexpr int BEHIND = BUFFERS - 2;
  int count = 1 << 30;  // of stages, with that note's, as soon as it is known
  for (Stage stage; stage.number < count + BEHIND; ++stage.number) {
    const int slot = stage.slot();
    if (stage.number < count) {
      barrier_wait(barriers.empty(slot), stage.parity() ^ 1);
      int at[4];
      tiles.first_cell(at);
      if (threadIdx.x == THREADS && stage.of_tile() == 0) {
        Note& note = notes.of_tile(stage);
        int output[4];
        first_output(at, output);
        note.place = tiles.exists() ? staged_place(0, misalignment(y + offset_of(g.y, output))) : NOWHERE;
#pragma unroll
        for (int i = 0; i < 4; ++i) note.cell[i] = at[i];
      }
      if (tiles.exists()) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at[i] += g.first[i];
        const int channel = stage.of_tile() * (STAGE_STEPS * OPERATION);
        loader.load(x + channel * g.x.stride[1], IN_CHANNELS - channel, buffers + slot * g.stage_bytes, g.batch, at);
        if (stage.is_last()) tiles.advance();
      } else {
        count = stage.number + 1;
      }
    }
    copies_commit();
    if (stage.number < BEHIND) continue;
    copies_wait<BEHIND>();
    barrier_arrive(barriers.full((stage.number - BEHIND) % BUFFERS));
  }
}

__device__ __forceinline__ void multiply_stages(const Geometry& g, const Barriers& barriers, Notes& notes,
                                                const char* weights, const char* buffers, scalar_t* staged,
                                                const Outputs& outputs, const scalar_t* x, const scalar_t* weight) {
  Sums sums;
  sums.clear();
#pragma unroll 1
  for (Stage stage;; ++stage.number) {
    barrier_wait(barriers.full(stage.slot()), stage.parity());
    const Note& note = notes.of_tile(stage);
    const bool exists = *(volatile const int*)&note.place != NOWHERE;
    if (exists) {
      const char* const window = buffers + stage.slot() * g.stage_bytes;
      const char* const from = weights + stage.of_tile() * (STAGE_STEPS * ENTRIES.count * ENTRY_BYTES);
#pragma unroll 1
      for (int i = 0; i < min(STAGE_STEPS, STEPS - stage.of_tile() * STAGE_STEPS); ++i)
        sums.add(g, window + i * OPERATION * g.window.pitch, outputs.pairs, from + i * (ENTRIES.count * ENTRY_BYTES));
    }
    if (!exists || stage.is_last()) {
      const int output = stage.output(g);
      barrier_wait(barriers.gone(output), stage.output_parity(g) ^ 1);
      if (exists) {
        scalar_t* const to = (scalar_t*)((char*)staged + output * g.staged_bytes);
        if (!outputs.stage(to, note.place, sums)) {
          const Share share(g);
          outputs.mend(to, note.place, note.cell, share.input(g, x), share.weights(weight));
        }
        publish_rows();
      }
      barrier_arrive(barriers.whole(output));
      if (!exists) break;
      sums.clear();
    }
    arrive(barriers.empty(stage.slot()));
  }
}

__device__ __forceinline__ void store_tiles(const Geometry& g, const Barriers& barriers, Notes& notes,
                                            const scalar_t* staged, const scalar_t* bare, scalar_t* y, int channels) {
  for (Stage stage;; stage.number += STAGES) {
    barrier_wait(barriers.whole(stage.output(g)), stage.output_parity(g));
    const Note note = notes.of_tile(stage);
    if (note.place == NOWHERE) break;
    int at[4], size[4];
    first_output(note.cell, at);
    size[0] = g.batch - at[0];
#pragma unroll
    for (int i = 0; i < 3; ++i) size[1 + i] = g.y.size[i] - at[1 + i];
    const scalar_t* const outputs = (const scalar_t*)((const char*)staged + stage.output(g) * g.staged_bytes);
    Writer{g, outputs, bare, y + offset_of(g.y, at), channels, size}.write();
    bulk_stores_wait();
    barrier_arrive(barriers.gone(stage.output(g)));
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    gather_gemm(const scalar_t* __restrict__ x, const scalar_t* weight,  // which may be written while this begins
                const scalar_t* __restrict__ bias, scalar_t* __restrict__ y, const Geometry g) {
  extern __shared__ __align__(128) char shared_memory[];
  const Share share(g);
  const int channels = OUT_CHANNELS - share.first_out, first_bias = share.group * OUT_CHANNELS + share.first_out;
  y += first_bias * g.y.stride[1];

  const Barriers barriers = {shared_address(shared_memory)};
  Notes& notes = *(Notes*)(shared_memory + NOTES_AT);
  Pair* const pairs = (Pair*)(shared_memory + BARRIER_BYTES);
  char* const weights = (char*)pairs + PAIR_BYTES;
  scalar_t* const staged = (scalar_t*)(weights + WEIGHT_BYTES);
  scalar_t* const bare = (scalar_t*)((char*)staged + g.outputs * g.staged_bytes);
  Place* const places = (Place*)((char*)bare + g.bare_bytes);
  char* const buffers = (char*)places + g.table_bytes;

  barriers.init();
  for (int i = threadIdx.x; i < PAIRS; i += BLOCK) {
    int at[4];
    decode(g.lanes, 2 * i, at);
    pairs[i] = Pair(g, at);
  }
  unsigned* counter = nullptr;
  if (g.counters) {
    counter = (unsigned*)weight + (share.group * OUT_BLOCKS + share.first_out / OUT_CHUNK);
    weight = (const scalar_t*)((const char*)weight + g.counters);
    wait_for_prologue();
  }
  load_weights(share.weights(weight), channels, weights);
  if (HAS_BARE) {
    fill_bare_rows(g, bias + first_bias, channels, bare);
    publish_rows();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS + LOADERS) {
    store_tiles(g, barriers, notes, staged, bare, y, channels);
  } else if (threadIdx.x >= THREADS) {
    load_stages(g, Tiles(g, counter, notes, share.tile), barriers, notes, places, buffers, share.input(g, x), y);
  } else {
    const Outputs outputs(g, pairs + threadIdx.x / 32 * (4 * PIXEL_TILES), bias + first_bias, channels);
    multiply_stages(g, barriers, notes, weights, buffers, staged, outputs, x, weight);
  }
}
"""

# =====================================================================================================================
# What each of them is made from: its name, its constants, its files
# =====================================================================================================================

KERNELS = {}
KERNELS["sm_80"] = [
    ("gather_tiled", r"""
// gather_tiled, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 2, 1, 2};
constexpr Axis AXIS_W = {5, 3, 2, 1};
constexpr bool INPUT_GRAD = false;
constexpr int SRC_CHANNELS = 8;
constexpr int DST_CHANNELS = 16;
constexpr bool HAS_BIAS = false;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 240;
constexpr int WEIGHT_STRIDE_OUT = 15;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr bool ROUNDED = false;
constexpr bool SRC_CHANNELS_LAST = false;
constexpr int LANES = 64;
constexpr int DST_PER_THREAD = 4;
constexpr int CELLS_H = 4;
constexpr int CELLS_W = 1;
constexpr int DST_SLICES = 4;
constexpr int SRC_SLICES = 1;
constexpr int STAGE_CHANNELS = 8;
constexpr int LOADS = 4;
constexpr int BUFFERS = 3;
constexpr int CHAIN = 1;
constexpr bool STRAIGHT = false;
constexpr int DST_VECTOR = 1;
constexpr int MIN_BLOCKS = 2;
""", ("common/geometry.cuh", "common/copy_async.cuh", "common/operand.cuh", "gather_tiled.cu")),
    ("gather_tiled", r"""
// gather_tiled, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 2, 1, 2};
constexpr Axis AXIS_W = {5, 3, 2, 1};
constexpr bool INPUT_GRAD = true;
constexpr int SRC_CHANNELS = 16;
constexpr int DST_CHANNELS = 8;
constexpr bool HAS_BIAS = false;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 240;
constexpr int WEIGHT_STRIDE_OUT = 15;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr bool ROUNDED = false;
constexpr bool SRC_CHANNELS_LAST = false;
constexpr int LANES = 64;
constexpr int DST_PER_THREAD = 2;
constexpr int CELLS_H = 4;
constexpr int CELLS_W = 2;
constexpr int DST_SLICES = 4;
constexpr int SRC_SLICES = 1;
constexpr int STAGE_CHANNELS = 1;
constexpr int LOADS = 5;
constexpr int BUFFERS = 3;
constexpr int CHAIN = 4;
constexpr bool STRAIGHT = true;
constexpr int DST_VECTOR = 1;
constexpr int MIN_BLOCKS = 2;
""", ("common/geometry.cuh", "common/copy_async.cuh", "common/operand.cuh", "gather_tiled.cu")),
    ("weight_grad", r"""
// weight_grad, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned long long offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 2, 1, 2};
constexpr Axis AXIS_W = {5, 3, 2, 1};
constexpr bool INPUT_GRAD = false;
constexpr int IN_CHANNELS = 8;
constexpr int OUT_CHANNELS = 16;
constexpr int WEIGHT_STRIDE_IN = 240;
constexpr int WEIGHT_STRIDE_OUT = 15;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr int ROWS = 8;
constexpr int COLUMNS = 128;
constexpr int THREAD_ROWS = 8;
constexpr int THREAD_COLUMNS = 8;
constexpr int K_SLICES = 16;
constexpr int DEPTH = 32;
constexpr int MIN_BLOCKS = 1;
""", ("common/geometry.cuh", "weight_grad.cu")),
]
KERNELS["sm_90a"] = [
    ("gather_gemm", r"""
// gather_gemm, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned long long offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 2, 1, 2};
constexpr Axis AXIS_W = {5, 3, 2, 1};
constexpr bool INPUT_GRAD = false;
constexpr int IN_CHANNELS = 8;
constexpr int OUT_CHANNELS = 16;
constexpr int WEIGHT_STRIDE_IN = 240;
constexpr int WEIGHT_STRIDE_OUT = 15;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr bool HAS_BIAS = false;
constexpr int WARPS = 4;
constexpr int LOAD_WARPS = 1;
constexpr int FIRST_LOAD_WARP = 4;
constexpr int STORE_WARPS = 3;
constexpr int PIXEL_TILES = 2;
constexpr int OUT_CHUNK = 16;
constexpr int STAGE_STEPS = 1;
constexpr int BUFFERS = 3;
constexpr int PARTS = 3;
constexpr bool BULK_STORES = true;
constexpr int MIN_BLOCKS = 2;
#define MMA_SHAPE "m16n8k8.row.col.f32.tf32.tf32.f32"
#define WGMMA_INSTRUCTION 0
#define CLUSTER 1  // thread blocks
""", ("common/geometry.cuh", "common/tensor_float.cuh", "common/dependent.cuh", "common/divisor.cuh", "common/split.cuh", "common/copy_async.cuh", "common/async.cuh", "common/mma.cuh", "common/stages.cuh", "common/staged_rows.cuh", "common/phase_taps.cuh", "gather_gemm.cu")),
    ("gather_tiled", r"""
// gather_tiled, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned int offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 2, 1, 2};
constexpr Axis AXIS_W = {5, 3, 2, 1};
constexpr bool INPUT_GRAD = true;
constexpr int SRC_CHANNELS = 16;
constexpr int DST_CHANNELS = 8;
constexpr bool HAS_BIAS = false;
constexpr bool DST_CHANNELS_LAST = false;
constexpr int WEIGHT_STRIDE_IN = 240;
constexpr int WEIGHT_STRIDE_OUT = 15;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr bool ROUNDED = false;
constexpr bool SRC_CHANNELS_LAST = false;
constexpr int LANES = 64;
constexpr int DST_PER_THREAD = 4;
constexpr int CELLS_H = 4;
constexpr int CELLS_W = 1;
constexpr int DST_SLICES = 2;
constexpr int SRC_SLICES = 1;
constexpr int STAGE_CHANNELS = 1;
constexpr int LOADS = 5;
constexpr int BUFFERS = 3;
constexpr int CHAIN = 4;
constexpr bool STRAIGHT = true;
constexpr int DST_VECTOR = 1;
constexpr int MIN_BLOCKS = 5;
""", ("common/geometry.cuh", "common/copy_async.cuh", "common/operand.cuh", "gather_tiled.cu")),
    ("weight_grad", r"""
// weight_grad, specialised by:
typedef float scalar_t;       // of the tensors
typedef float accum_t;  // of every sum
typedef unsigned long long offset_t;  // of offsets in bytes
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {3, 2, 1, 2};
constexpr Axis AXIS_W = {5, 3, 2, 1};
constexpr bool INPUT_GRAD = false;
constexpr int IN_CHANNELS = 8;
constexpr int OUT_CHANNELS = 16;
constexpr int WEIGHT_STRIDE_IN = 240;
constexpr int WEIGHT_STRIDE_OUT = 15;
constexpr int WEIGHT_STRIDE_TAP = 1;
constexpr int ROWS = 8;
constexpr int COLUMNS = 128;
constexpr int THREAD_ROWS = 8;
constexpr int THREAD_COLUMNS = 8;
constexpr int K_SLICES = 16;
constexpr int DEPTH = 32;
constexpr int MIN_BLOCKS = 1;
""", ("common/geometry.cuh", "weight_grad.cu")),
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

    @property
    def has_copy_engine(self) -> bool:
        """Whether it has the copy engine that came with Hopper."""
        return self.capability >= 90

    @staticmethod
    def of(device: torch.device) -> "DeviceInfo":
        """The device a tensor lives on. Raises `UnsupportedError` for a GPU older than compute capability 7.5."""
        import torch

        if device.type != "cuda" or torch.version.cuda is None:
            return PORTABLE
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)

    def shared_bytes_of(self, resident: int) -> int:
        """Shared memory of a block, in bytes, where so many are to be resident on a multiprocessor together."""
        return min(self.shared_bytes_per_block, self.shared_bytes_per_multiprocessor // resident - 1024)


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


# Planes of partial sums take at most this many bytes, or as much as the weight itself.
_MAX_PLANES_BYTES = 64 << 20


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


def two_dimensions(blocks: int) -> "tuple[int, int]":
    """``blocks`` as a grid's y and z, which take 65535 each; the last row may be longer than needed."""
    rows = max(1, math.ceil(blocks / 65535))
    return math.ceil(blocks / rows), rows if blocks else 0


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


def out_blocks(problem: "ConvTransposeProblem", out_chunk: int) -> int:
    """Blocks that so many output channels each come to, of all groups."""
    return problem.groups * math.ceil(problem.out_channels_per_group / out_chunk)


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


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple

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

    def window_used(self, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells read."""
        if cells not in self._used:
            self._used[cells] = len({cell * self.src + offset for cell in range(cells) for offset in self._offsets})
        return self._used[cells]


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

    @property
    def aligned_src(self) -> bool:
        """Whether four neighbouring source elements (channels, where those come last) can be read at once anywhere."""
        batch, channel, depth, height, width = self.src.strides
        if self.src.channels_last:
            whole, others = self.src_channels % 4 == 0, (batch, depth, height, width)
        else:
            whole, others = self.src.shape[4] % 4 == 0 and width == 1, (batch, channel, depth, height)
        return self.aligned and whole and all(stride % 4 == 0 for stride in others)

    def wide_offsets(self, images: int, stage_channels: int) -> bool:
        """Whether byte offsets within a tile of ``images`` batch entries need more than 32 bits."""
        return any(
            extent((images, channels, *side.shape[2:]), side.strides) * DTYPE_BYTES[self.dtype] >= 2**32
            for side, channels in ((self.src, stage_channels), (self.dst, 1))
        )


@lru_cache(maxsize=2048)
def forward_gather(problem: "ConvTransposeProblem", layouts: "Layouts") -> "Gather":
    # The forward pass of a problem; planners ask for the same one again and again.
    return Gather.of(problem, Pass.FORWARD, layouts)


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


@dataclass(frozen=True)
class Part:
    """What a stage holds of a tensor, as the kernels' ``Part``, and how many pieces a channel has of it."""

    extent: "tuple[int, int, int, int]"
    piece: int
    pitch: int
    places: int

    def packed(self) -> bytes:
        return struct.pack("<6i", *self.extent, self.piece, self.pitch)


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


def row_bytes(part: "Part", size: int) -> float:
    """Bytes that memory moves for a channel of a part: whole sectors of its rows."""
    *rows, width = part.extent
    return math.prod(rows) * 32 * (math.ceil(width * size / 32) + 0.5)

# =====================================================================================================================
# polyphase/algorithms/tensor_cores.py
# =====================================================================================================================
#
# What all algorithms on tensor cores go by.

#: Bytes of a row of an operand that one operation of the cores takes, of ``mma.sync`` and of Hopper's instruction.
OPERATION_BYTES = 32


def parts_of(problem: "ConvTransposeProblem") -> int:
    """Parts in which the tensor cores take an element: two keep the accuracy of float32."""
    return 2 if problem.dtype == "float32" and not problem.uses_tf32 else 1


def steps_of(problem: "ConvTransposeProblem") -> int:
    """Operations of ``mma.sync``, or of Hopper's instruction, that a group's input channels take."""
    return math.ceil(problem.in_channels_per_group * DTYPE_BYTES[problem.dtype] / OPERATION_BYTES)

# =====================================================================================================================
# polyphase/algorithms/gather_gemm.py
# =====================================================================================================================
#
# Layers with few channels in a group on tensor cores, ``kernels/gather_gemm.cu``.

_MAX_THREE_PARTS = 32 << 10  # bytes of weights up to which float32 has three parts; beyond, two, less accurate ones
_BARRIER_BYTES = 384  # and the notes of tiles
_SHARING = Sharing(rounds=16, cycles=5000.0, most=1.5)
_COPY_THREADS = 256


class GatherGemmVariant(NamedTuple):
    """The compile-time shape of a kernel; ``gather_gemm.cu`` says what the names mean."""

    warps: int
    pixel_tiles: int
    out_chunk: int
    stage_steps: int
    buffers: int
    load_warps: int
    store_warps: int
    min_blocks: int

    @property
    def all_warps(self) -> int:
        """Warps of a block."""
        return self.warps + self.load_warps + self.store_warps

    @property
    def columns(self) -> int:
        """Cells of a tile, at most."""
        return 8 * self.pixel_tiles * self.warps


@dataclass(frozen=True)
class _Tiling:
    """How a variant cuts the cells into tiles, and what that takes of shared memory.

    ``first`` is the window's first pixel, counted from the tile's first cell, and ``skew`` the pixels from there to the
    first that is read. ``pitch`` and ``shift`` are those of the kernel's ``Geometry``.
    """

    lanes: "tuple[int, int, int, int]"
    tiles: "tuple[int, int, int, int]"
    first: "tuple[int, int, int, int]"
    skew: int
    window: "Part"
    pitch: "tuple[int, int, int, int]"
    shift: "tuple[int, int, int, int]"
    joined: int
    staged_bytes: int
    bare_bytes: int
    table_bytes: int
    step_bytes: int

    @cached_property
    def total(self) -> int:
        return math.prod(self.tiles)

    @cached_property
    def cells(self) -> int:
        """Of a tile."""
        return math.prod(self.lanes)

    @property
    def whole_sectors(self) -> bool:
        """Whether rows begin and end with a sector of memory."""
        return not any(self.shift)


class _Product(NamedTuple):
    """What the kernel's ``Entries`` and weights come to for so many output channels of a block."""

    row_blocks: int
    pixels: int
    entries: int
    parts: int
    steps: int
    weight_bytes: int


class GatherGemm:
    """All phases of a tile as one product of few rows, written as whole rows."""

    name = "gather_gemm"
    any_size = True
    adapts = False

    def launch(
        self,
        problem: "ConvTransposeProblem",
        pass_: "Pass",
        device: "DeviceInfo",
        layouts: "Layouts",
        variant: "GatherGemmVariant",
    ) -> "Launch":
        tiling = _tiling(problem, layouts, variant, device)
        assert tiling is not None
        gather = forward_gather(problem, layouts)
        blocks = out_blocks(problem, variant.out_chunk)
        at_once = _at_once(problem, variant, tiling, device)
        behind = [max(1, math.prod(tiling.tiles[i:])) for i in range(5)]
        apart = [at_once // behind[1], *(at_once % behind[i] // behind[i + 1] for i in (1, 2, 3))]
        outputs = _outputs(problem, variant, tiling, device)
        counters, weight_bytes = 0, math.prod(problem.weight_shape) * DTYPE_BYTES[problem.dtype]
        if _shares(problem, variant, tiling, device):
            counters = counter_bytes(blocks)
        geometry = gather.src.packed() + gather.dst.packed() + tiling.window.packed()
        geometry += struct.pack("<6i", problem.batch, problem.groups, *tiling.lanes)
        geometry += b"".join(map(packed_divisor, tiling.tiles))
        geometry += struct.pack(
            "<25i",
            *apart,
            *tiling.first,
            tiling.skew,
            *tiling.pitch,
            *tiling.shift,
            tiling.joined,
            outputs,
            at_once,
            counters,
            tiling.staged_bytes,
            tiling.bare_bytes,
            tiling.table_bytes,
            variant.stage_steps * tiling.step_bytes,
        )
        geometry = padded(geometry)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            ("HAS_BIAS", problem.bias),
            ("WARPS", variant.warps),
            ("LOAD_WARPS", variant.load_warps),
            ("FIRST_LOAD_WARP", variant.warps),
            ("STORE_WARPS", variant.store_warps),
            ("WGMMA", False),
            ("PIXEL_TILES", variant.pixel_tiles),
            ("OUT_CHUNK", variant.out_chunk),
            ("STAGE_STEPS", variant.stage_steps),
            ("BUFFERS", variant.buffers),
            ("PARTS", _product(problem, variant.out_chunk).parts),
            ("BULK_STORES", device.has_copy_engine),
            ("MIN_BLOCKS", variant.min_blocks),
        )
        return Launch(
            source=KernelSource(self.name, problem.dtype, True, constants),
            grid=(at_once * blocks if tiling.total else 0, 1, 1),
            block=32 * variant.all_warps,
            shared_bytes=_gather_gemm_shared_bytes(problem, variant, tiling, outputs),
            geometry=geometry,
            prologue=_copy_weights(problem, counters) if counters else None,
            workspace_bytes=counters + weight_bytes if counters else 0,
        )


def _copy_weights(problem: "ConvTransposeProblem", counters: int) -> "Launch":
    """What puts so many bytes of counters in front of the weights."""
    elements = math.prod(problem.weight_shape)
    constants: tuple[tuple[str, Constant], ...] = (
        *layer_constants(problem, Pass.FORWARD, False),
        ("COUNTER_BYTES", counters),
        ("GROUPS", problem.groups),
        ("THREADS", _COPY_THREADS),
        ("MIN_BLOCKS", 1),
    )
    source = KernelSource("copy_weights", problem.dtype, False, constants)
    return plain_launch(source, math.ceil(elements / _COPY_THREADS), _COPY_THREADS)


@lru_cache(maxsize=1024)
def _product(problem: "ConvTransposeProblem", out_chunk: int) -> "_Product":
    # Of each dimension: what each phase that has taps reads.
    taps = [
        [{-axis.shift(tap) for tap in of_phase} for of_phase in axis.taps_by_phase if of_phase]
        for axis in problem.axes3
    ]
    reads = [set(itertools.product(*pixels)) for pixels in itertools.product(*taps)]
    row_blocks = math.ceil(len(reads) * out_chunk / 16)
    entries = 0
    for block in range(row_blocks):
        first, last = 16 * block // out_chunk, (16 * block + 15) // out_chunk
        entries += len(set().union(*reads[first : last + 1]))
    pixels = math.prod(len(set().union(*phases)) for phases in taps)
    parts, steps = parts_of(problem), steps_of(problem)
    weight_bytes = 512 * steps * entries * (2 if parts > 1 else 1)
    if parts > 1:
        parts = 3 if weight_bytes <= _MAX_THREE_PARTS else 2
    return _Product(row_blocks, pixels, entries, parts, steps, weight_bytes)


def _gather_gemm_shared_bytes(problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", outputs: int) -> int:
    stages = variant.buffers * variant.stage_steps * tiling.step_bytes
    tables = (
        _BARRIER_BYTES
        + round_up(8 * variant.columns, 128)
        + _product(problem, variant.out_chunk).weight_bytes
        + tiling.bare_bytes
        + tiling.table_bytes
    )
    return tables + outputs * tiling.staged_bytes + stages


def _outputs(problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", device: "DeviceInfo") -> int:
    """Tiles whose outputs there is room for: of two, one is written while the other is put together."""
    return 2 if _gather_gemm_shared_bytes(problem, variant, tiling, 2) <= device.shared_bytes_of(variant.min_blocks) else 1


@lru_cache(maxsize=8192)
def _tiling(
    problem: "ConvTransposeProblem", layouts: "Layouts", variant: "GatherGemmVariant", device: "DeviceInfo"
) -> "_Tiling | None":
    """The tiles of least time."""
    room = device.shared_bytes_of(variant.min_blocks)
    tilings = _tilings(problem, layouts, variant.out_chunk, variant.columns)
    fitting = [each for each in tilings if _gather_gemm_shared_bytes(problem, variant, each, 1) <= room]
    most = max((each.cells for each in fitting), default=0)
    large = (each for each in fitting if 2 * each.cells >= most)
    return min(large, key=lambda each: _estimate(problem, variant, each, device)[0], default=None)


@lru_cache(maxsize=256)
def _tilings(problem: "ConvTransposeProblem", layouts: "Layouts", out_chunk: int, columns: int) -> "list[_Tiling]":
    """Those by tiles of at most so many cells, for all variants alike."""
    tilings = (_gather_gemm_tiles(problem, layouts, out_chunk, lanes) for lanes in _lanes(problem, columns))
    return [each for each in tilings if each is not None]


@lru_cache(maxsize=256)
def _lanes(problem: "ConvTransposeProblem", columns: int) -> "list[tuple[int, int, int, int]]":
    """Extents of tiles along n, d, h and w of at most so many cells. A tile of one cell is among them."""
    depth, height, width = forward_gather(problem, Layouts.dense(problem)).cells
    found = {(1, 1, 1, 2)}
    for w in sorted({round_up(extent, 2) for extent in _gather_gemm_extents(width, columns)}):
        for h in _gather_gemm_extents(height, columns // w):
            for d in _gather_gemm_extents(depth, columns // (w * h)):
                images = columns // (w * h * d) if (d, h) == (depth, height) and w >= width else 1
                found.add((max(1, min(problem.batch, images)), d, h, w))
    return sorted(found)


def _gather_gemm_extents(cells: int, most: int) -> "list[int]":
    """Extents worth trying along one dimension: even shares of it, and multiples of what is moved at once."""
    shares = {math.ceil(cells / parts) for parts in range(1, 9)}
    wanted = shares | {1, 2, 4, 8, 16, 32, 64, 128, 256, 512} | {most}
    return sorted(extent for extent in wanted if 1 <= extent <= min(cells, most))


def _gather_gemm_tiles(
    problem: "ConvTransposeProblem", layouts: "Layouts", out_chunk: int, lanes: "tuple[int, int, int, int]"
) -> "_Tiling | None":
    """The tiling by tiles of so many cells along n, d, h and w, or None where those cannot be."""
    size, gather = DTYPE_BYTES[problem.dtype], forward_gather(problem, layouts)
    if gather.src.channels_last or gather.dst.channels_last:
        return None
    tiles = tiles_of(problem.batch, gather.cells, lanes)
    depth, height, width = gather.cell_axes
    piece = row_piece(gather.src, size, layouts.aligned, 0 if tiles[3] <= 1 else lanes[3])
    skew = width.first_offset % piece
    window = (lanes[0], depth.window(lanes[1]), height.window(lanes[2]), round_up(width.window(lanes[3]) + skew, piece))
    if max(window) >= MAX_SIDE:
        return None
    places = math.prod(window) // piece
    # So that four channels, or pairs of channels, lie in different banks.
    pitch = math.prod(window) * size
    pitch += (32 - pitch) % 128 if size == 4 else (16 - pitch) % 64
    part = Part(window, piece, pitch, places)

    sector = SECTOR_BYTES // size
    columns = gather.dst.shape[4]
    batch_stride, channel_stride, depth_stride, height_stride, _ = gather.dst.strides
    bare = any(along.owned < along.dst for along in (depth, height))
    lines, run = lanes[2] * height.dst, lanes[3] * width.dst
    whole = lanes[3] >= gather.cells[2] and gather.dst.strides[3:] == (columns, 1) and lines > 1 and not bare
    row = columns if whole else round_up(run, sector) + sector
    slab = round_up(lines * row, sector) + sector if whole else lanes[2] * height.owned * row
    image = lanes[1] * depth.owned * slab
    channel = lanes[0] * image
    channel += _padding(channel % (128 // size), channel_stride % sector, width.dst, size)
    bare_rows = (out_chunk if problem.bias else 1) if bare else 0
    strides = channel_stride, batch_stride, depth_stride, 0 if whole else height_stride
    first, second, third, fourth = (stride % sector for stride in strides)
    staged = round_up(out_chunk * channel * size, 16)
    if out_chunk * channel >= 1 << 23:
        return None
    n, d, h, w = tiles
    return _Tiling(
        lanes,
        (n, d, h, w),
        (0, depth.first_offset, height.first_offset, width.first_offset - skew),
        skew,
        part,
        (channel, image, slab, row),
        (first, second, third, fourth),
        lines if whole else 1,
        staged,
        bare_rows * round_up(run + sector, sector) * size,
        places * MOVING_BYTES,
        32 // size * pitch,
    )


@lru_cache(maxsize=1024)
def _padding(pitch: int, shift: int, stride: int, size: int) -> int:
    """Elements, whole vectors, to add to a channel's pitch, so that few lanes of a warp store to the same bank.

    Lanes are 8 channels by 4 pairs of cells; channels begin ``shift`` elements further behind a sector's first.
    """
    sector = SECTOR_BYTES // size

    def rounds(padding: int) -> int:
        words: dict[int, set[tuple[int, int]]] = {}
        for channel, cells in itertools.product(range(8), range(4)):
            element = channel * (pitch + padding) + channel * shift % sector + 2 * cells * stride
            words.setdefault(element * size // 4 % 32, set()).add((channel, element * size // 4))
        return max(map(len, words.values()))

    return min(range(0, 128 // size, 16 // size), key=lambda padding: (rounds(padding), padding))


# Cycles, fitted to 766 measured variants on an H200 (docs/performance.md). Of a multiprocessor: for an instruction, and
# for a byte that the copy engine writes. Of a warp: for what it waits for at a pixel; to find 32 pieces of a stage, to
# copy those of a channel, and for a stage besides; to write a row, by whether its ends are those of sectors, and for a
# tile's outputs besides. Of all: for what is not tiles.
_SLOT, _BYTE, _PIXEL = 0.433, 0.0175, 155.0


_FIND, _COPY, _STAGE = 75.0, 22.0, 720.0
_ROW, _OUTPUTS = {False: 200.0, True: 40.0}, 450.0
_LAUNCH = 41000.0
_TOGETHER = 2.05  # exponent by which those who load, multiply and store overlap
_BANDWIDTH = 0.95  # of a copy's


def _multiply_cycles(
    problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", resident: int
) -> float:
    """Predicted cycles for the products of a tile, in each of so many resident blocks."""
    size, product, tiles = DTYPE_BYTES[problem.dtype], _product(problem, variant.out_chunk), variant.pixel_tiles
    parts, steps = product.parts, product.steps
    warps = min(variant.warps, math.ceil(tiling.cells / (8 * tiles)))
    taken = product.pixels * tiles * ((10 if parts > 1 else 4) if size == 4 else 6)
    multiplied = product.entries * (2 * parts + tiles * (7 if parts > 1 else 1))
    slots = steps * (taken + multiplied) + product.row_blocks * tiles * 20 + 100
    return resident * warps * slots * _SLOT + steps * product.pixels * _PIXEL


def _load_cycles(problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling") -> float:
    """Predicted cycles for a tile's windows."""
    size = DTYPE_BYTES[problem.dtype]
    stages = math.ceil(_product(problem, variant.out_chunk).steps / variant.stage_steps)
    channels = variant.stage_steps * 32 // size * (4 if tiling.window.piece * size < 4 else 1)
    finds = math.ceil(tiling.window.places / (32 * variant.load_warps))
    return stages * (finds * (_FIND + channels * _COPY) + _STAGE)


def _store_cycles(problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", resident: int) -> float:
    """Predicted cycles for a tile's outputs, in each of so many resident blocks."""
    depth, height, width = problem.axes3
    rows = math.prod(tiling.lanes[:3]) * depth.stride * height.stride * variant.out_chunk
    row_bytes = tiling.lanes[3] * width.stride * DTYPE_BYTES[problem.dtype]
    written = rows / (tiling.joined * variant.store_warps)
    whole = tiling.whole_sectors or tiling.joined > 1
    return written * _ROW[whole] + resident * rows * row_bytes * _BYTE + _OUTPUTS


def _estimate(
    problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", device: "DeviceInfo"
) -> "tuple[float, str]":
    """Predicted time, and what bounds it."""
    size, blocks = DTYPE_BYTES[problem.dtype], out_blocks(problem, variant.out_chunk)
    at_once = device.multiprocessors * variant.min_blocks
    resident = max(1, min(variant.min_blocks, math.ceil(tiling.total * blocks / device.multiprocessors)))
    rounds = math.ceil(tiling.total / max(1, at_once // blocks)) * max(1.0, blocks / at_once)
    parts = (
        _multiply_cycles(problem, variant, tiling, resident),
        _load_cycles(problem, variant, tiling),
        _store_cycles(problem, variant, tiling, resident),
    )
    tile = sum(part**_TOGETHER for part in parts) ** (1 / _TOGETHER)
    work = (rounds * tile + _LAUNCH) / device.clock_hz
    channels = _product(problem, variant.out_chunk).steps * 32 // size
    halo = tiling.total * blocks * channels * row_bytes(tiling.window, size)
    moved = problem.bytes + max(0.0, halo - size * math.prod(problem.input_shape)) * 0.5  # halo is in the L2 cache
    floor = moved / (device.copy_bytes_per_second * _BANDWIDTH)
    return slower_of(work, floor)


def _shares(problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", device: "DeviceInfo") -> bool:
    """Whether blocks share tiles. Those that get less of a busy memory fall behind otherwise."""
    rounds = tiling.total / _at_once(problem, variant, tiling, device)
    return _SHARING.pays(rounds, lambda: _estimate(problem, variant, tiling, device), problem.bytes, device)


def _at_once(problem: "ConvTransposeProblem", variant: "GatherGemmVariant", tiling: "_Tiling", device: "DeviceInfo") -> int:
    """Tiles, one of each block with the same output channels."""
    blocks = device.multiprocessors * variant.min_blocks // out_blocks(problem, variant.out_chunk)
    return max(1, min(tiling.total, blocks))

# =====================================================================================================================
# polyphase/algorithms/gather_tiled_cost.py
# =====================================================================================================================
#
# What a variant of ``gather_tiled.cu`` costs: registers and cycles, from counts of what a thread does.
#
# The constants are fitted to measurements; docs/performance.md, "The cost model of gather_tiled", says how well.

class TiledVariant(NamedTuple):
    """The compile-time shape of ``gather_tiled.cu``; its file says what the names mean."""

    lanes: int
    dst_per_thread: int
    cells_h: int
    cells_w: int
    dst_slices: int
    src_slices: int
    stage_channels: int
    loads: int
    buffers: int
    min_blocks: int
    dst_vector: int

    @property
    def cells(self) -> "tuple[int, int]":
        """Cells of a lane, along height and width."""
        return self.cells_h, self.cells_w

    @property
    def asynchronous(self) -> bool:
        """Whether stages are copied to shared memory past the registers."""
        return self.buffers > 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.dst_slices * self.src_slices


# Terms, on average over the phases, after which a chain of float32 ends with its stage: its error grows with their root
# (docs/numerics.md). Other types are exact enough, or rounded much further in the end.
_CHAIN_TERMS = 50


class Counts(NamedTuple):
    """What one thread does: per source channel, per stage, and per item (gather_tiled.cu has the words)."""

    stages: int
    chain: int  # stages whose products are summed in one chain
    channels: float  # of a stage that a thread computes
    products: int
    weight_reads: int
    patch_reads: int
    weight_items: int
    scattered: bool  # whether each has a place of its own, and not all follow from the first's
    loads: int
    accumulators: int  # phases without taps included
    owned: int  # accumulators that have taps
    patch: int  # source elements held at once
    run: int
    words: int  # registers of a value

    @classmethod
    def of(cls, gather: "Gather", variant: "TiledVariant") -> "Counts":
        # What a thread of ``variant`` does for this pass.
        _, height, width = gather.cell_axes
        cells = variant.cells_h * variant.cells_w
        per_stage = variant.stage_channels * variant.dst_per_thread * variant.dst_slices * gather.taps
        rows, columns = height.window_used(variant.cells_h), width.window_used(variant.cells_w)
        reads = columns  # of a row
        if gather.split == 1 and variant.cells_w * width.src % 2 == 0:  # in pairs
            reads = math.ceil((width.first_offset % 2 + width.window(variant.cells_w)) / 2)
        words = accumulator_bytes(gather.dtype) // 4
        stages = math.ceil(gather.src_channels / variant.stage_channels)
        channels = variant.stage_channels / variant.src_slices
        chain = stages
        if gather.dtype == "float32":
            chain = min(stages, math.ceil(_CHAIN_TERMS * gather.owned / (gather.taps * channels)))
        return cls(
            stages=stages,
            chain=max(chain, variant.src_slices),
            channels=channels,
            products=gather.taps * variant.dst_per_thread * cells * words,
            weight_reads=math.ceil(gather.taps * variant.dst_per_thread / 4) * words,
            patch_reads=gather.axes[0].kernel * rows * reads * words,
            weight_items=math.ceil(per_stage / variant.threads),
            scattered=gather.weight_channels_last
            and variant.threads % (variant.dst_per_thread * variant.dst_slices) > 0,
            loads=variant.loads,
            accumulators=cells * gather.phases * variant.dst_per_thread,
            owned=cells * gather.owned * variant.dst_per_thread,
            patch=rows * columns,
            run=variant.cells_w * width.dst,
            words=words,
        )


# Costs in issue slots, stalls included: fitted to 2,899 measured variants of 21 layers and passes on an H200
# (docs/performance.md, "The cost model of gather_tiled").
_COST_CHANNEL, _COST_WEIGHT_READ, _COST_PATCH_READ = 6.0, 1.9, 1.36


_COST_STAGE, _COST_LOAD, _COST_WEIGHT_ITEM = 98.0, 28.0, 16.0
_COST_VECTOR_ELEMENT, _COST_TURNED_ELEMENT, _COST_LONE_ELEMENT, _COST_REDUCTION = 40.0, 33.0, 44.0, 25.0
_STRAIGHT = 1024  # products that one piece of code has at most: more would crowd the instruction cache
_COST_LONG_CODE, _COST_ROLLED_CODE = 0.07, 0.06
_COST_COPY, _COST_FLUSH = 24.0, 3.0  # of a quad that is copied asynchronously, and a sum that ends a chain


def straight(counts: "Counts") -> bool:
    """Whether all channels of a stage are one piece of straight-line code; else the kernel rolls their loop up."""
    return counts.products * counts.channels <= _STRAIGHT


def thread_cycles(counts: "Counts", variant: "TiledVariant") -> float:
    """Issue slots of a thread for one item."""
    long = counts.products * counts.channels / 700 - 1
    code = _COST_LONG_CODE * max(0.0, long) if straight(counts) else _COST_ROLLED_CODE
    reads = counts.weight_reads * _COST_WEIGHT_READ + counts.patch_reads * _COST_PATCH_READ
    compute = counts.channels * (counts.products * (1 + code) + reads + _COST_CHANNEL)
    quad = _COST_COPY if variant.asynchronous else _COST_LOAD
    load = counts.loads * quad + counts.weight_items * _COST_WEIGHT_ITEM + _COST_STAGE
    flush = counts.accumulators * _COST_FLUSH * (math.ceil(counts.stages / counts.chain) - 1)
    if counts.run == 1:
        element = _COST_LONE_ELEMENT
    else:
        element = _COST_VECTOR_ELEMENT if counts.run in (2, 4) else _COST_TURNED_ELEMENT
    epilogue = counts.accumulators * element / variant.src_slices
    reduction = counts.accumulators * _COST_REDUCTION * (variant.src_slices - 1) / variant.src_slices
    return counts.stages * (compute + load) + flush + epilogue + reduction

# =====================================================================================================================
# polyphase/algorithms/gradient.py
# =====================================================================================================================
#
# What the gradients' algorithms on tensor cores have in common: tiles of positions, windows of the output gradient.

def as_one_channel(problem: "ConvTransposeProblem", layouts: "Layouts") -> "tuple[ConvTransposeProblem, Layouts] | None":
    """The layer of one output channel that a gradient in channels_last is, and how its tensors lie.

    A row's pixels are one row of narrower ones, a pixel's channels and then the next one's, and so are taps along the
    width: what was one step is a step of as many as there are channels. None where pixels lie apart, or taps do.
    """
    channels, axis = problem.out_channels, problem.axes3[2]
    if problem.groups > 1 or not problem.channels_last or (axis.dilation > 1 and axis.kernel > 1):
        return None
    batch, _, depth, height, width = layouts.output
    if problem.output_size[-1] * channels >= 2**31:  # kernels count columns in 32 bits
        return None
    if width != channels or (channels > 1 and layouts.output[1] != 1):
        return None

    def widened(values: "tuple[int, ...]") -> "tuple[int, ...]":
        return (*values[:-1], values[-1] * channels)

    narrow = replace(
        problem,
        out_channels=1,
        kernel_size=widened(problem.kernel_size),
        stride=widened(problem.stride),
        padding=widened(problem.padding),
        output_padding=widened(problem.output_padding),
        dilation=(*problem.dilation[:-1], 1),
        channels_last=False,
    )
    return narrow, replace(layouts, output=(batch, 0, depth, height, 1))


def rows_as_one_channel(problem: "ConvTransposeProblem", layouts: "Layouts") -> "tuple[ConvTransposeProblem, Layouts] | None":
    """The same of an input gradient, whose weight's taps have to lie like the pixels; as it is, channels first."""
    if not problem.channels_last:
        return problem, layouts
    alike = layouts.weight_channels_last or problem.out_channels == 1
    return as_one_channel(problem, layouts) if alike else None

# =====================================================================================================================
# polyphase/algorithms/gather_tiled.py
# =====================================================================================================================
#
# The direct gather kernel for layers that unroll, ``kernels/gather_tiled.cu``: variants, tiles and launch.

_ROW_LANES = 32  # of several rows


class GatherTiled:
    """All phases of a tile in one block, the kernel's taps unrolled."""

    name = "gather_tiled"
    any_size = True
    adapts = False

    def launch(
        self, problem: "ConvTransposeProblem", pass_: "Pass", device: "DeviceInfo", layouts: "Layouts", variant: "TiledVariant"
    ) -> "Launch":
        gather = Gather.of(*_as_read(problem, pass_, layouts))
        lanes, counts = _arrange(gather, variant, device), Counts.of(gather, variant)
        per_lane = (1, 1, variant.cells_h, variant.cells_w)
        extents = (problem.batch, *gather.cells)
        tiles = [math.ceil(size / (lane * cells)) for size, lane, cells in zip(extents, lanes, per_lane)]
        dst_blocks = math.ceil(gather.dst_channels / (variant.dst_per_thread * variant.dst_slices))
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=gather.wide_offsets(lanes[0], variant.stage_channels),
            constants=gather.constants(
                ROUNDED=gather.rounded,
                SRC_CHANNELS_LAST=gather.src.channels_last,
                LANES=variant.lanes,
                DST_PER_THREAD=variant.dst_per_thread,
                CELLS_H=variant.cells_h,
                CELLS_W=variant.cells_w,
                DST_SLICES=variant.dst_slices,
                SRC_SLICES=variant.src_slices,
                STAGE_CHANNELS=variant.stage_channels,
                LOADS=variant.loads,
                BUFFERS=variant.buffers,
                CHAIN=counts.chain,
                STRAIGHT=straight(counts),
                DST_VECTOR=variant.dst_vector,
                MIN_BLOCKS=variant.min_blocks,
            ),
        )
        # Blocks go on to further items of their tile as long as the machine stays full: they know their way already.
        items = dst_blocks * gather.groups
        full = 8 * device.multiprocessors * variant.min_blocks
        per_block = max(1, min(items, items * math.prod(tiles) // full))
        geometry = gather.src.packed() + gather.dst.packed()
        geometry += struct.pack(
            "<13i4x",
            problem.batch,
            *lanes,
            *tiles,
            items,
            per_block,
            gather.aligned_src,
            _aligned_rows(gather, variant),
        )
        return Launch(
            source=source,
            grid=(math.ceil(items / per_block), *two_dimensions(math.prod(tiles))),
            block=variant.threads,
            shared_bytes=_gather_tiled_shared_bytes(gather, variant, lanes),
            geometry=geometry,
        )


def _as_read(
    problem: "ConvTransposeProblem", pass_: "Pass", layouts: "Layouts"
) -> "tuple[ConvTransposeProblem, Pass, Layouts]":
    # The pass as the kernel reads it: two or three output channels do not fill quads, and are columns then.
    if pass_ is Pass.INPUT_GRAD and 1 < problem.out_channels < 4:
        problem, layouts = rows_as_one_channel(problem, layouts) or (problem, layouts)
    return problem, pass_, layouts


class _TileSize(NamedTuple):
    """The source of one channel of a tile, halo included: elements along each dimension, whole quads along w."""

    images: int
    depth: int
    height: int
    width: int

    @classmethod
    def of(cls, gather: "Gather", cells: "tuple[int, int]", lanes: "tuple[int, ...]") -> "_TileSize":
        depth, height, width = gather.cell_axes
        skew = width.first_offset % 4
        return cls(
            lanes[0],
            depth.window(lanes[1]),
            height.window(lanes[2] * cells[0]),
            round_up(skew + width.window(lanes[3] * cells[1]), max(4, gather.split)),
        )

    @property
    def elements(self) -> int:
        """Elements of one channel."""
        return self.images * self.depth * self.height * self.width

    def loads(self, variant: "TiledVariant") -> int:
        """Quads that a thread loads for a stage."""
        return math.ceil(self.elements * variant.stage_channels / 4 / variant.threads)


def _gather_tiled_shared_bytes(gather: "Gather", variant: "TiledVariant", lanes: "tuple[int, ...]", typical: bool = False) -> int:
    """Of tiles of these lanes; ``typical``: whatever the size of images, with offsets of 32 bits."""
    accumulator = accumulator_bytes(gather.dtype)
    weights = variant.stage_channels * variant.dst_slices * round_up(gather.taps * variant.dst_per_thread, 4)
    plane = variant.loads * variant.threads // variant.stage_channels * 4 + (4 if gather.src.channels_last else 0)
    buffers = variant.buffers * (weights + variant.stage_channels * plane)
    slice_threads = variant.lanes * variant.dst_slices
    counts = Counts.of(gather, variant)
    rows = slice_threads * counts.run
    summed = variant.src_slices > 1 or counts.chain < counts.stages
    sums = slice_threads * round_up(counts.accumulators, 4) if summed else 0
    wide = not typical and gather.wide_offsets(lanes[0], variant.stage_channels)
    elements = variant.lanes * counts.run * (16 if wide else 8) if counts.run > 1 else 0
    return (buffers + rows + sums) * accumulator + elements


def _fits(gather: "Gather", variant: "TiledVariant", lanes: "tuple[int, ...]", device: "DeviceInfo") -> bool:
    """Whether the compiled variant can take tiles of these lanes: loads, shared memory, tiles that start at quads."""
    width = lanes[3] * variant.cells_w
    return (
        _TileSize.of(gather, variant.cells, lanes).loads(variant) <= variant.loads
        and _gather_tiled_shared_bytes(gather, variant, lanes) <= device.shared_bytes_per_block
        and (width >= gather.cells[2] or width * gather.cell_axes[2].src % 4 == 0)
    )


def _some_lanes(gather: "Gather", variant: "TiledVariant") -> "tuple[int, int, int, int]":
    """Extents of lanes along n, d, h and w that fit its loads: all in a row, or a few where its halo is wide."""
    row = 1, 1, 1, variant.lanes
    long = _TileSize.of(gather, variant.cells, row).loads(variant) > variant.loads
    return (1, 1, 1, _ROW_LANES) if long else row


def _arrange(gather: "Gather", variant: "TiledVariant", device: "DeviceInfo") -> "tuple[int, int, int, int]":
    """How a tile's lanes extend along n, d, h and w: the least work over all tiles that fits the compiled variant."""
    batch, depths = max(1, gather.src.shape[0]), gather.cells[0]
    heights, widths = (
        math.ceil(cells / lane) for cells, lane in zip(gather.cells[1:], (variant.cells_h, variant.cells_w))
    )
    compute = thread_cycles(Counts.of(gather, variant), variant) * variant.threads / 32
    most_elements = variant.loads * variant.threads * 4 // variant.stage_channels
    best, best_cost = _some_lanes(gather, variant), math.inf
    for width in _gather_tiled_extents(widths, variant.lanes):
        for height in _gather_tiled_extents(heights, variant.lanes // width):
            for depth in _gather_tiled_extents(depths, variant.lanes // (width * height)):
                one = _TileSize.of(gather, variant.cells, (1, depth, height, width)).elements
                images = min(batch, variant.lanes // (width * height * depth), max(1, most_elements // one))
                images = math.ceil(batch / math.ceil(batch / images))
                lanes = (images, depth, height, width)
                if not _fits(gather, variant, lanes, device):
                    continue
                tiles = math.prod(tiles_of(batch, (depths, heights, widths), lanes))
                shared = _gather_tiled_shared_bytes(gather, variant, lanes) + 1024
                crowding = max(1.0, min(variant.min_blocks, 4) * shared / device.shared_bytes_per_multiprocessor)
                # Short rows leave memory transactions half empty, on their way in and out.
                row = width * variant.cells_w
                load = one * images * gather.src_channels * 5 / 32 * (1 + 4 / row)
                cost = tiles * (compute * crowding * (1 + 3 / (row * gather.cell_axes[2].dst)) + load)
                if cost < best_cost:
                    best, best_cost = lanes, cost
    return best


def _gather_tiled_extents(cells: int, most: int) -> "list[int]":
    """Extents worth trying along one dimension: powers of two, and shares of the whole, rounded to whole quads too."""
    least = min(most, max(cells, 1))
    shares = {math.ceil(cells / parts) for parts in range(1, 7)}
    powers = {1 << i for i in range(least.bit_length())}
    quads = {round_up(share, multiple) for share in shares for multiple in (2, 4)}
    return sorted(extent for extent in shares | powers | quads | {least} if 1 <= extent <= least)


def _aligned_rows(gather: "Gather", variant: "TiledVariant") -> bool:
    """Whether a lane's elements along w start at a multiple of their number, in every row of a new tensor."""
    run = variant.cells_w * gather.cell_axes[2].dst
    batch, channel, depth, height, width = gather.dst.strides
    whole_rows = gather.dst.shape[4] % run == 0
    return whole_rows and width == 1 and all(stride % run == 0 for stride in (batch, channel, depth, height))

# =====================================================================================================================
# polyphase/algorithms/weight_grad.py
# =====================================================================================================================
#
# Direct kernel of the weight gradient: ``kernels/weight_grad.cu``, a matrix product along batch × input positions.

_THREADS = 256


class WeightGradVariant(NamedTuple):
    """The compile-time shape of ``weight_grad.cu``; its file says what the names mean."""

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int
    k_slices: int
    depth: int
    min_blocks: int


class WeightGrad:
    """Split along batch × positions over blocks, whose partial sums are added in a fixed order."""

    name = "weight_grad"
    any_size = True
    adapts = False

    def launch(
        self,
        problem: "ConvTransposeProblem",
        pass_: "Pass",
        device: "DeviceInfo",
        layouts: "Layouts",
        variant: "WeightGradVariant",
    ) -> "Launch":
        tiles, parts = _weight_grad_tiles(problem, variant), _parts(problem, variant, device)
        positions = problem.batch * math.prod(problem.input_size)
        weights = math.prod(problem.weight_shape)
        accumulator = accumulator_bytes(problem.dtype)
        part_length = max(1, math.ceil(positions / parts / variant.depth)) * variant.depth
        parts = max(1, math.ceil(positions / part_length))
        source = KernelSource(
            kernel=self.name,
            dtype=problem.dtype,
            wide_offsets=True,
            constants=(
                *layer_constants(problem, pass_),
                ("ROWS", variant.rows),
                ("COLUMNS", variant.columns),
                ("THREAD_ROWS", variant.thread_rows),
                ("THREAD_COLUMNS", variant.thread_columns),
                ("K_SLICES", variant.k_slices),
                ("DEPTH", variant.depth),
                ("MIN_BLOCKS", variant.min_blocks),
            ),
        )
        x = Side(five(problem.input_shape), layouts.input)
        grad = Side(five(problem.output_shape), layouts.output)
        geometry = x.packed() + grad.packed()
        geometry += struct.pack("<3i4x3q", problem.batch, problem.groups, parts, part_length, positions, weights)
        return Launch(
            source=source,
            grid=(tiles * parts, 1, 1),
            block=_THREADS,
            shared_bytes=_shared_floats(variant) * accumulator,
            geometry=geometry,
            planes=parts,
        )


def _weight_grad_tiles(problem: "ConvTransposeProblem", variant: "WeightGradVariant") -> int:
    """Blocks of a part."""
    columns = problem.out_channels_per_group * problem.taps
    rows = math.ceil(problem.in_channels_per_group / variant.rows)
    return problem.groups * rows * math.ceil(columns / variant.columns)


def _parts(problem: "ConvTransposeProblem", variant: "WeightGradVariant", device: "DeviceInfo") -> int:
    """Four waves of blocks even out their ends; a part of less than 16 stages would be mostly prologue."""
    waves = math.ceil(4 * device.multiprocessors * variant.min_blocks / max(1, _weight_grad_tiles(problem, variant)))
    positions = problem.batch * math.prod(problem.input_size)
    return max(1, min(waves, affordable_planes(problem), positions // (16 * variant.depth)))


def _shared_floats(variant: "WeightGradVariant") -> int:
    row_pitch, column_pitch = (-(-size // 4) * 4 + 4 for size in (variant.rows, variant.columns))
    return 2 * variant.depth * (row_pitch + column_pitch) + _THREADS * variant.thread_rows * variant.thread_columns

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
            batch=16,
            in_channels=32,
            out_channels=64,
            input_size=(128, 256),
            kernel_size=(3, 5),
            stride=(2, 3),
            padding=(1, 2),
            output_padding=(0, 0),
            dilation=(2, 1),
            groups=4,
            bias=False,
            dtype="float32",
            channels_last=False,
            tf32=True,
            tf32_as_pytorch=True,
        ),
        choices={
            "sm_80": {
                Pass.FORWARD: Choice(
                    algorithm=GatherTiled(),
                    variant=TiledVariant(
                        lanes=64,
                        dst_per_thread=4,
                        cells_h=4,
                        cells_w=1,
                        dst_slices=4,
                        src_slices=1,
                        stage_channels=8,
                        loads=4,
                        buffers=3,
                        min_blocks=2,
                        dst_vector=1,
                    ),
                ),
                Pass.INPUT_GRAD: Choice(
                    algorithm=GatherTiled(),
                    variant=TiledVariant(
                        lanes=64,
                        dst_per_thread=2,
                        cells_h=4,
                        cells_w=2,
                        dst_slices=4,
                        src_slices=1,
                        stage_channels=1,
                        loads=5,
                        buffers=3,
                        min_blocks=2,
                        dst_vector=1,
                    ),
                ),
                Pass.WEIGHT_GRAD: Choice(
                    algorithm=WeightGrad(),
                    variant=WeightGradVariant(
                        rows=8,
                        columns=128,
                        thread_rows=8,
                        thread_columns=8,
                        k_slices=16,
                        depth=32,
                        min_blocks=1,
                    ),
                ),
            },
            "sm_90a": {
                Pass.FORWARD: Choice(
                    algorithm=GatherGemm(),
                    variant=GatherGemmVariant(
                        warps=4,
                        pixel_tiles=2,
                        out_chunk=16,
                        stage_steps=1,
                        buffers=3,
                        load_warps=1,
                        store_warps=3,
                        min_blocks=2,
                    ),
                ),
                Pass.INPUT_GRAD: Choice(
                    algorithm=GatherTiled(),
                    variant=TiledVariant(
                        lanes=64,
                        dst_per_thread=4,
                        cells_h=4,
                        cells_w=1,
                        dst_slices=2,
                        src_slices=1,
                        stage_channels=1,
                        loads=5,
                        buffers=3,
                        min_blocks=5,
                        dst_vector=1,
                    ),
                ),
                Pass.WEIGHT_GRAD: Choice(
                    algorithm=WeightGrad(),
                    variant=WeightGradVariant(
                        rows=8,
                        columns=128,
                        thread_rows=8,
                        thread_columns=8,
                        k_slices=16,
                        depth=32,
                        min_blocks=1,
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

# Strides, paddings and dilations that differ by dimension, in four groups (KernelBench, level 1, problem 75).

import torch
from torch import nn


class Model(nn.Module):
    """One grouped, strided, padded and dilated transposed convolution: ``(N, 32, H, W)`` to ``(N, 64, H', W')``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: "tuple[int, int]",
        stride: "tuple[int, int]" = (1, 1),
        padding: "tuple[int, int]" = (0, 0),
        dilation: "tuple[int, int]" = (1, 1),
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose2d(x)


def get_inputs() -> "list[torch.Tensor]":
    return [torch.rand(16, 32, 128, 256)]


def get_init_inputs() -> "list[object]":
    in_channels, out_channels, kernel_size = 32, 64, (3, 5)
    stride, padding, dilation, groups = (2, 3), (1, 2), (2, 1), 4
    return [in_channels, out_channels, kernel_size, stride, padding, dilation, groups]


class ModelNew(Model):
    """`Model` with its transposed convolutions computed by the kernels above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # the same parameters, made of the same random numbers
        use_kernels(self)
