// How the forward pass becomes products of matrices: rows of weights, blocks of rows, and the taps of each block.
//
// A phase of the output that owns taps is a product of its own: 64 output channels (rows) by input channels, summed
// over the taps of the phase. A row block is 64 channels of one phase. A block computes CHANNEL_BLOCKS · LINES ·
// LINE_PHASES of them: all phases along the width, so that lines of the output are written whole, or one of WIDTH_PARTS
// of these, as if its elements were a line of their own; LINES of the phases along depth and height that own taps.
//
// An operation is one tap of one row block. `find_operation` numbers those of a block.
//
// With few output channels most of a row block would be empty. So STACKED neighbouring lines may share a row block,
// LINE_ROWS rows each: an operation is then a pixel that any of the lines reads along depth and height, and the rows of
// a line that does not read it are zero. The lines of a row block are neighbours along the height, or all lines of
// neighbouring depths.
//
// With still fewer channels, or images so small that most cells are halo, TAPS_IN_ROWS is used: a row is one tap of one
// channel, for all taps of LINES of these phases. A row block is one operation, and the products that meet in an output
// are added afterwards (epilogue/store_overlap.cuh). The fewest row blocks that hold the taps of ROW_CHANNELS form a
// set, and a block computes CHANNEL_BLOCKS sets. The rows of a set are ordered by line, channel, tap along depth,
// height and width.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "operand/scaled_half.cuh"

constexpr int ROWS = 64;
constexpr int LINE_ROWS = ROWS / 4 * (4 / STACKED);  // rows of a line in a row block: those of whole warps

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

// The phases along depth and height of a line, and the phase along the width of one of its row blocks.
__host__ __device__ constexpr int depth_of_line(int line) { return owned_phase(AXIS_D, line / WIDTH_PARTS / OWNED_H); }
__host__ __device__ constexpr int height_of_line(int line) { return owned_phase(AXIS_H, line / WIDTH_PARTS % OWNED_H); }
__host__ __device__ constexpr int width_of_block(int line, int block) {
  return owned_phase(AXIS_W, line % WIDTH_PARTS * LINE_PHASES + block % LINE_PHASES);
}

// Whether all parts of the width have as many taps, without elements that own none.
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

// The source offsets that `together` neighbouring phases of an axis read, each once.
template <int KERNEL, int STRIDE>
struct Reads {
  int count[STRIDE] = {};           // number of source offsets that a set of neighbours reads
  int offset[STRIDE][KERNEL] = {};  // these offsets
  int tap[STRIDE][KERNEL] = {};     // the tap of a phase that reads each offset of its set; -1 for none

  __host__ __device__ constexpr Reads(Axis axis, int together) {
    int number[STRIDE] = {}, owned = 0;  // a phase's number among those that own taps
    for (int i = 0; i < KERNEL; ++i) number[phase_of(axis, i)] = 1;
    for (int i = 0; i < STRIDE; ++i) owned += number[i], number[i] = owned - 1;
    for (int i = 0; i < STRIDE * KERNEL; ++i) tap[i / KERNEL][i % KERNEL] = -1;
    for (int i = 0; i < KERNEL; ++i) {
      const int phase = number[phase_of(axis, i)], at = phase / together;
      int found = 0;
      while (found < count[at] && offset[at][found] != src_offset(axis, i)) ++found;
      if (found == count[at]) offset[at][count[at]++] = src_offset(axis, i);
      tap[phase][found] = i;
    }
  }
};
constexpr Axis STACKED_AXIS_D = STACKED > 1 ? AXIS_D : Axis{1, 1, 0, 1};
constexpr Axis STACKED_AXIS_H = STACKED > 1 ? AXIS_H : Axis{1, 1, 0, 1};
constexpr int STACKED_H = STACKED < OWNED_H ? STACKED : OWNED_H, STACKED_D = ceil_div(STACKED, OWNED_H);
__device__ constexpr Reads<STACKED_AXIS_D.kernel, STACKED_AXIS_D.stride> READS_D(STACKED_AXIS_D, STACKED_D);
__device__ constexpr Reads<STACKED_AXIS_H.kernel, STACKED_AXIS_H.stride> READS_H(STACKED_AXIS_H, STACKED_H);
static_assert(STACKED == 1 || (WIDTH_PARTS == 1 && CHANNEL_BLOCKS == 1 && !TAPS_IN_ROWS), "lines of few channels");
static_assert(STACKED == 1 || DST_CHANNELS <= LINE_ROWS, "a line's channels are in one row block");
static_assert(STACKED == 1 || (LINES % STACKED == 0 && STACKED == STACKED_D * STACKED_H && OWNED_H % STACKED_H == 0 &&
                               owned_phases(AXIS_D) % STACKED_D == 0),
              "row blocks are whole");

// Pixels along depth and height that the lines of a row block read, from its first line on.
__device__ __forceinline__ int pixels_of_lines(int line) {
  if (STACKED == 1) return taps_of_line(line);
  return READS_D.count[line / OWNED_H / STACKED_D] * READS_H.count[line % OWNED_H / STACKED_H];
}

// With TAPS_IN_ROWS: rows of lines `first` to `last` - 1; most_rows(): of the line group that has most.
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

constexpr int LINE_BLOCKS = LINES / STACKED;  // row blocks of a group of lines, of one phase along the width
constexpr int SET_BLOCKS = TAPS_IN_ROWS ? ceil_div(most_rows(), ROWS) : LINE_BLOCKS * LINE_PHASES;
constexpr int ROW_BLOCKS = CHANNEL_BLOCKS * SET_BLOCKS;
constexpr int GROUP_CHANNELS = CHANNEL_BLOCKS * (TAPS_IN_ROWS ? ROW_CHANNELS : LINE_ROWS);
constexpr int CHANNEL_GROUPS = ceil_div(DST_CHANNELS, GROUP_CHANNELS);

// A tap of a row block's line. With STACKED lines from `line` on: a pixel that any of them reads along depth and height
// (`depth` and `height` index the offsets of READS_D and READS_H), and a tap along the width.
struct Operation {
  int line, depth, height, width_tap;

  __device__ __forceinline__ int depth_offset() const {
    if (STACKED > 1) return READS_D.offset[line / OWNED_H / STACKED_D][depth];
    return src_offset(AXIS_D, depth);
  }
  __device__ __forceinline__ int height_offset() const {
    if (STACKED > 1) return READS_H.offset[line % OWNED_H / STACKED_H][height];
    return src_offset(AXIS_H, height);
  }
};

// The first of the lines of row block `block` of a block whose first line is `first_line`.
__host__ __device__ constexpr int line_of_block(int block, int first_line) {
  return first_line + block / LINE_PHASES % LINE_BLOCKS * STACKED;
}

// Operations of row block `block` of a block whose first line is `first_line`.
__device__ __forceinline__ int operations_of(int block, int first_line) {
  if (TAPS_IN_ROWS) return 1;
  const int line = line_of_block(block, first_line);
  return pixels_of_lines(line) * tap_count(AXIS_W, width_of_block(line, block));
}

// `pixels_of_lines` of all lines in one table, as compilers limit constant evaluation. With STACKED lines an entry is
// that of the line's row block.
struct LineTaps {
  int of[OWNED_LINES];
};
__host__ __device__ constexpr LineTaps taps_of_lines() {
  LineTaps taps{};
  if (STACKED > 1) {
    const Reads<STACKED_AXIS_D.kernel, STACKED_AXIS_D.stride> depth(STACKED_AXIS_D, STACKED_D);
    const Reads<STACKED_AXIS_H.kernel, STACKED_AXIS_H.stride> height(STACKED_AXIS_H, STACKED_H);
    for (int line = 0; line < OWNED_LINES; ++line)
      taps.of[line] = depth.count[line / OWNED_H / STACKED_D] * height.count[line % OWNED_H / STACKED_H];
    return taps;
  }
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
    const int line = line_of_block(block, group * LINES), width = width_of_block(line, block);
    counts.of[block] = TAPS_IN_ROWS ? 1 : line < OWNED_LINES ? taps.of[line] * tap_count(AXIS_W, width) : 0;
  }
  return counts;
}

static_assert(OWNED_LINES % LINES == 0, "groups of lines are whole");

// Line groups are of one kind if their row blocks have the same numbers of operations. A kind is its first line group.
struct Kinds {
  int next[LINE_GROUPS];  // the next kind; LINE_GROUPS after the last
  int operations;         // operations of one group of each kind, in all
  int most;               // operations of the row block that has most
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

// Finds operation `index` of a block; false after the last.
__device__ __forceinline__ bool find_operation(int index, int first_line, Operation& operation) {
  for (int block = 0; block < ROW_BLOCKS; ++block) {
    const int count = operations_of(block, first_line);
    if (index >= count) {
      index -= count;
      continue;
    }
    const int line = line_of_block(block, first_line);
    const int depth = depth_of_line(line), height = height_of_line(line), width = width_of_block(line, block);
    const int along_w = tap_count(AXIS_W, width);
    const int along_h = STACKED > 1 ? READS_H.count[line % OWNED_H / STACKED_H] : tap_count(AXIS_H, height);
    operation.line = line;
    operation.width_tap = first_tap(AXIS_W, width) + index % along_w * tap_step(AXIS_W);
    const int first_h = STACKED > 1 ? 0 : first_tap(AXIS_H, height), step_h = STACKED > 1 ? 1 : tap_step(AXIS_H);
    const int first_d = STACKED > 1 ? 0 : first_tap(AXIS_D, depth), step_d = STACKED > 1 ? 1 : tap_step(AXIS_D);
    operation.height = first_h + index / along_w % along_h * step_h;
    operation.depth = first_d + index / (along_w * along_h) * step_d;
    return true;
  }
  return false;
}

// Operands are stored in shared memory as chunks of 16 bytes: CHUNK neighbouring channels of one row or pixel. Two
// chunks are the depth of one instruction.
constexpr int CHUNK = 16 / (int)sizeof(operand_t);
constexpr int STEP_CHANNELS = 2 * CHUNK;
constexpr int STEPS = round_up(ceil_div(SRC_CHANNELS, STEP_CHANNELS), K_STEPS);
constexpr int OPERATION_BYTES = PARTS * 2 * ROWS * 16;  // the weights of one operation and step

// The line of its row block that a row belongs to; STACKED for none (three lines have 48 rows).
__host__ __device__ constexpr int line_of_row(int row) { return STACKED > 1 ? row / LINE_ROWS : 0; }

// The channel, of 64, that a row of a row block holds. A thread's accumulators are rows r and r + 8: with channels last
// in the destination these are neighbouring channels.
__device__ __forceinline__ int channel_of_row(int row) {
  return DST_CHANNELS_LAST ? row / 16 * 16 + row % 8 * 2 + row / 8 % 2 : row;
}

// Element offset of a group's first weight. In a mirrored layer (gather.py) taps come in falling order.
__device__ __forceinline__ long long group_offset(int group) {
  return (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS +
         (WEIGHT_STRIDE_TAP < 0 ? weight_offset(0, 0, 1 - TAPS) : 0);
}
