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
// (epilogue/store_overlap.cuh). As few row blocks as hold the taps of ROW_CHANNELS are a set, and a thread block
// computes CHANNEL_BLOCKS sets. The rows of a set are ordered by line, channel, tap along depth, height and width.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "operand/scaled_half.cuh"

constexpr int ROWS = 64;

// The taps of a phase are `first_tap`, first + `tap_step`, first + 2·step ...
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
