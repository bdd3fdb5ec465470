// Packs the weights for tensor cores if a row is one tap of one channel (core/row_blocks.cuh): for every group, group
// of channels and line group
//
//     [step][row block][part][chunk of two][row of 64][16 bytes]
//
// Rows and channels that do not exist are zero.
//
// A block takes a slab through shared memory: a step's input channels, and the rows of SLAB_SETS sets. It reads
// the slab in the weight's memory order, each thread all input channels of a row, and writes runs of rows, a chunk for
// each thread.

#include "specialisation.cuh"
#include "core/counters.cuh"
#include "core/geometry.cuh"
#include "core/row_blocks.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "operand/scaled_half.cuh"
#include "operand/tf32.cuh"
#if SCALED
#include "operand/measured_bands.cuh"
#include "operand/scales.cuh"
#endif

constexpr int THREADS = SLAB_THREADS;
constexpr int SETS = CHANNEL_GROUPS * CHANNEL_BLOCKS, SLABS = ceil_div(SETS, SLAB_SETS);
constexpr int SET_ROWS = most_rows(), PITCH = SET_ROWS + 2;  // padded to avoid bank conflicts between sets
constexpr bool TAPS_INNERMOST = WEIGHT_STRIDE_TAP <= WEIGHT_STRIDE_OUT;
static_assert(OPERATIONS == ROW_BLOCKS && TAPS > 0, "an operation is a row block");

// A row of a slab.
struct Row {
  int set, in_set;  // in_set is SET_ROWS or more for a row that does not exist
  int out, tap;     // out: output channel in the set

  // Row `index` of a line group, in the weight's memory order except for lines.
  __device__ __forceinline__ Row(int line_group, int index) : in_set(0) {
    int line = line_group * LINES;
    const int behind = min(line + LINES, OWNED_LINES);
    for (; line < behind; ++line) {
      const int rows = rows_of_lines(line, line + 1);
      if (index < SLAB_SETS * rows) break;
      index -= SLAB_SETS * rows, in_set += rows;
    }
    if (line == behind) {
      set = 0, in_set = SET_ROWS, out = 0, tap = 0;
      return;
    }
    const int depth = owned_phase(AXIS_D, line / OWNED_H), height = owned_phase(AXIS_H, line % OWNED_H);
    const int along_h = tap_count(AXIS_H, height), taps = taps_of_line(line) * AXIS_W.kernel;
    const int channel = TAPS_INNERMOST ? index / taps : index % (SLAB_SETS * ROW_CHANNELS);
    const int number = TAPS_INNERMOST ? index % taps : index / (SLAB_SETS * ROW_CHANNELS);
    const int depth_tap = first_tap(AXIS_D, depth) + number / (along_h * AXIS_W.kernel) * tap_step(AXIS_D);
    const int height_tap = first_tap(AXIS_H, height) + number / AXIS_W.kernel % along_h * tap_step(AXIS_H);
    set = channel / ROW_CHANNELS, out = channel % ROW_CHANNELS;
    in_set += out * taps + number;
    tap = (depth_tap * AXIS_H.kernel + height_tap) * AXIS_W.kernel + number % AXIS_W.kernel;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_taps(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  __shared__ scalar_t slab[STEP_CHANNELS][SLAB_SETS * PITCH];
  griddepcontrol_launch_dependents();
  packed = clear_counters(packed);
#if SCALED
  griddepcontrol_wait();
  const Scales scales(packed);
  packed += SCALES_BYTES;
  write_first_band(scales);
#endif
  const int first_set = blockIdx.x % SLABS * SLAB_SETS, step = blockIdx.x / SLABS % STEPS;
  const int line_group = blockIdx.x / (SLABS * STEPS) % LINE_GROUPS, group = blockIdx.x / (SLABS * STEPS) / LINE_GROUPS;
  const int first_in = step * STEP_CHANNELS, first_out = first_set * ROW_CHANNELS;

  const scalar_t* const origin =
      weight + group_offset(group) + (long long)first_in * WEIGHT_STRIDE_IN + weight_offset(0, first_out, 0);
  for (int i = threadIdx.x; i < SLAB_SETS * SET_ROWS; i += THREADS) {
    const Row row(line_group, i);
    if (row.in_set == SET_ROWS) break;
    const int out = row.set * ROW_CHANNELS + row.out;
    const scalar_t* const from = origin + weight_offset(0, out, row.tap);
#if SCALED
    const bool inside = first_out + out < DST_CHANNELS;
    const float largest = inside ? scales.largest_weight(group * DST_CHANNELS + first_out + out) : 0;
    const float scale = scale_of_column(largest);
    if (step == 0) {
      const int set = first_set + row.set;
      const int row_group = (group * CHANNEL_GROUPS + set / CHANNEL_BLOCKS) * LINE_GROUPS + line_group;
      const int block = row_group * ROW_BLOCKS + set % CHANNEL_BLOCKS * SET_BLOCKS;
      if (set < SETS) scales.rows()[block * ROWS + row.in_set] = unscale_column(largest);
    }
#endif
    scalar_t values[STEP_CHANNELS];  // in flight together
#pragma unroll
    for (int in = 0; in < STEP_CHANNELS; ++in) {
      const bool exists = first_out + out < DST_CHANNELS && first_in + in < SRC_CHANNELS;
      values[in] = exists ? read(from + (long long)in * WEIGHT_STRIDE_IN) : zero<scalar_t>();
    }
#pragma unroll
    for (int in = 0; in < STEP_CHANNELS; ++in) {
#if SCALED
      values[in] *= scale;
#endif
      slab[in][row.set * PITCH + row.in_set] = values[in];
    }
  }
  __syncthreads();

  const int rows = rows_of_lines(line_group * LINES, line_group * LINES + LINES);
#pragma unroll 2
  for (int i = threadIdx.x; i < SLAB_SETS * SET_BLOCKS * 2 * ROWS; i += THREADS) {
    const int chunk = i / ROWS % 2, block = i / (2 * ROWS) % SET_BLOCKS, in_slab = i / (2 * ROWS * SET_BLOCKS);
    const int set = first_set + in_slab, row = block * ROWS + i % ROWS;
    if (set >= SETS) break;
    scalar_t values[CHUNK];
#pragma unroll
    for (int in = 0; in < CHUNK; ++in)
      values[in] = row < rows ? slab[chunk * CHUNK + in][in_slab * PITCH + row] : zero<scalar_t>();
    alignas(16) operand_t parts[PARTS][CHUNK];
#pragma unroll
    for (int in = 0; in < CHUNK; ++in) prepare(values[in], parts, in);
    const int row_group = (group * CHANNEL_GROUPS + set / CHANNEL_BLOCKS) * LINE_GROUPS + line_group;
    const int operation = set % CHANNEL_BLOCKS * SET_BLOCKS + block;
#if SCALED
    if (step == 0 && chunk == 0 && row >= rows)
      scales.rows()[(row_group * ROW_BLOCKS + operation) * ROWS + i % ROWS] = 0;  // an empty row
#endif
    unsigned char* const to =
        packed + (((long long)row_group * STEPS + step) * OPERATIONS + operation) * OPERATION_BYTES;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      *(Vector<operand_t, CHUNK>*)(to + ((part * 2 + chunk) * ROWS + i % ROWS) * 16) =
          *(const Vector<operand_t, CHUNK>*)parts[part];
  }
}
