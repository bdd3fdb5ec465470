// Types and constants that specialise a kernel for one layer. `KernelSource.specialisation` (jit/source.py) generates
// such a text for each kernel, which replaces an include of this file. The text below is an example, for editors and
// readers: every kernel gets the constants that its schedule gives (schedules/), and no others.

#pragma once

#include "core/axis.cuh"
#include "core/types.cuh"

// Types.
typedef float scalar_t;         // elements of tensors
typedef float accum_t;          // sums: double for double, else float
typedef unsigned int offset_t;  // offsets in bytes; 64 bits if tensors need them

// The layer, along depth, height and width: kernel, stride, padding, dilation. A missing dimension is a kernel of 1.
constexpr Axis AXIS_D = {1, 1, 0, 1};
constexpr Axis AXIS_H = {4, 2, 1, 1};
constexpr Axis AXIS_W = {4, 2, 1, 1};
constexpr bool INPUT_GRAD = false;  // a kernel's source is the output gradient, its destination the input's

// Channels of a group: of the pass's source and destination, and of the layer's input and output.
constexpr int SRC_CHANNELS = 64, DST_CHANNELS = 64;
constexpr int IN_CHANNELS = 64, OUT_CHANNELS = 64;
constexpr bool HAS_BIAS = true, DST_CHANNELS_LAST = false;

// Elements from one weight to that of the next input channel, output channel and tap.
constexpr int WEIGHT_STRIDE_IN = 1024, WEIGHT_STRIDE_OUT = 16, WEIGHT_STRIDE_TAP = 1;

constexpr int MIN_BLOCKS = 1;  // resident blocks of a multiprocessor, for which the compiler limits registers

// Macros (`MACROS` in jit/source.py), by which headers and code are chosen.
#define WGMMA 1         // wgmma, not mma.sync
#define CLUSTER 1       // blocks
#define BY_THREADS 0    // MN-major operands of 32 bits go through registers
#define SCALED 0        // float32 is multiplied as float16
#define COPIED 0        // the source is also there as a checked copy in float16 (operand/half_copies.cuh)
#define GUARDED 0       // returns at once if copies in float16 are exact (operand/half_copies.cuh)
#define SRC_WRITTEN 0   // by a step before, for which all warps wait
#define TENSORS 1       // that are sampled
#define SPLIT 0         // 1: writes partial moments; 2: reads them
#define TAPS_IN_ROWS 0  // rows of the product are taps (col2im follows), not channels of one phase

// implicit_gemm: the tile, the warps, the pipeline.
constexpr int CHANNEL_BLOCKS = 1, LINES = 1, STACKED = 1, WIDTH_PARTS = 1, K_STEPS = 2, PARTS = 1;
constexpr int ROW_CHANNELS = 64;
constexpr int OPERATIONS = 8, COUNTER_BYTES = 128;
constexpr bool SRC_CHANNELS_LAST = false, WHOLE_IMAGES = false, TMA_OPERANDS = false;
constexpr bool REPLACED = false;  // COPIED: another kernel computes the result if the copy is inexact
constexpr int PIXELS = 64, PIXEL_BLOCKS = 1, CONSUMERS = 2;
constexpr bool COOPERATIVE = false, PING_PONG = false, RESIDENT = false;
constexpr int LOADER_GROUPS = 2, LOADER_THREADS = 256, GIVEN_REGISTERS = 0, TRANSPOSE_GROUPS = 1, STAGES = 4;
constexpr int STORE_VECTOR = 0, COPY_BYTES = 0, RAW_STAGES = 2, PIECE = 16;
constexpr bool IN_SUMS = false;  // the destination is accum_t
