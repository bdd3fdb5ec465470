// Packs the weights for tensor cores (core/row_blocks.cuh): for every group, block of channels and line group
//
//     [step][operation][part][chunk of two][row of 64][16 bytes]
//
// With STACKED lines in a row block rows are [line][channel]. Rows, channels, operations, and pixels that a line does
// not read are zero.
//
// A block takes a slab through shared memory: CHUNK input channels, SLAB_CHANNELS output channels, SLAB_TAPS
// taps. It reads the slab in the order in which weights lie in memory, so that each is read once, and writes a run of
// SLAB_CHANNELS rows for every tap. Both loops give an output channel and a tap to a thread: the first moves the input
// channels of the pair one by one, the second makes them a chunk.

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
constexpr int ROW_SLABS = CHANNEL_GROUPS * CHANNEL_BLOCKS * (LINE_ROWS / SLAB_CHANNELS);
constexpr int CHANNEL_OPERATIONS = OPERATIONS / CHANNEL_BLOCKS;         // operations of a channel block and line group
constexpr int BLOCK_LINES = ROWS / LINE_ROWS;                           // lines that fit a row block
constexpr int PLACES = LINE_GROUPS * CHANNEL_OPERATIONS * BLOCK_LINES;  // places for taps, including empty ones
constexpr int TAP_SLABS = ceil_div(PLACES, SLAB_TAPS);
constexpr int STAGED = STACKED > 1 || SLAB_TAPS < TAPS ? SLAB_TAPS : TAPS;
constexpr int PAIRS = SLAB_CHANNELS * STAGED;
constexpr int BATCH = PAIRS > 3 * THREADS ? 4 : ceil_div(PAIRS, THREADS);  // pairs that a thread reads at once
constexpr bool TAPS_INNERMOST = WEIGHT_STRIDE_TAP <= WEIGHT_STRIDE_OUT;
constexpr int BANK = 4 / (int)sizeof(scalar_t);             // elements of a bank
constexpr int PITCH = (ceil_div(STAGED, BANK) | 1) * BANK;  // odd in banks, to avoid bank conflicts between rows
static_assert(SLAB_CHANNELS % 16 == 0, "channel_of_row keeps 16 rows together");

// The output channel and the tap of a slab's pair, in the weight's memory order.
__device__ __forceinline__ int out_of(int pair) { return TAPS_INNERMOST ? pair / STAGED : pair % SLAB_CHANNELS; }
__device__ __forceinline__ int tap_of(int pair) { return TAPS_INNERMOST ? pair % STAGED : pair / SLAB_CHANNELS; }

constexpr int LINE_TAPS = AXIS_W.kernel / WIDTH_PARTS;  // taps along the width

// The order of a tap of an axis among the phases that own taps.
struct Standing {
  int phase;   // phases before its own
  int before;  // taps of those phases
  int index;   // taps of its own phase before it
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

// Number of existing operations of a channel block and a line group.
__device__ __forceinline__ int existing_operations(int line_group) {
  int taps = 0;
  for (int i = 0; i < LINES; ++i) taps += taps_of_line(line_group * LINES + i);
  return LINE_GROUPS == 1 ? TAPS : taps * LINE_TAPS;
}

// The inverse of `find_operation`: the operation of a tap, counted from the first line group in the order of one step's
// packed weights. Operations that do not exist come after the last tap. With STACKED lines `tap` is a place, counted by
// operation, then line; `tap_of_place` finds its tap.
__device__ __forceinline__ int place_of(int tap, int channel_block) {
  constexpr int LINE_GROUP = STEPS * OPERATIONS;
  if (STACKED > 1) return tap / BLOCK_LINES / OPERATIONS * LINE_GROUP + tap / BLOCK_LINES % OPERATIONS;
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

// With STACKED lines: the tap at a place (counted by operation, then line); -1 for none.
__device__ __forceinline__ int tap_of_place(int place) {
  const int operation = place / BLOCK_LINES, of_block = place % BLOCK_LINES;
  Operation found;
  if (of_block >= STACKED || !find_operation(operation % OPERATIONS, operation / OPERATIONS * LINES, found)) return -1;
  const int line = found.line + of_block;
  const int d = READS_D.tap[line / OWNED_H][found.depth], h = READS_H.tap[line % OWNED_H][found.height];
  return d < 0 || h < 0 ? -1 : (d * AXIS_H.kernel + h) * AXIS_W.kernel + found.width_tap;
}

// The taps of a slab: contiguous in memory from the first place on, or with STACKED lines those at its places.
struct SlabTaps {
  int first_place;
  int* listed;

  __device__ __forceinline__ void list() const {
    if constexpr (STACKED > 1) {
      for (int i = threadIdx.x; i < SLAB_TAPS; i += THREADS)
        listed[i] = first_place + i < PLACES ? tap_of_place(first_place + i) : -1;
      __syncthreads();
    }
  }
  __device__ __forceinline__ int first() const { return STACKED > 1 ? 0 : first_place; }
  __device__ __forceinline__ bool has(int index) const {
    return STACKED > 1 ? listed[index] >= 0 : first_place + index < TAPS;
  }
  // Tap `index` of the slab, relative to the first.
  __device__ __forceinline__ int of(int index) const { return STACKED > 1 ? listed[index] : index; }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_weights(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  __shared__ scalar_t slab[CHUNK][SLAB_CHANNELS * PITCH];
  __shared__ int places[SLAB_TAPS], taps[SLAB_TAPS];
  griddepcontrol_launch_dependents();
  packed = clear_counters(packed);
#if SCALED
  griddepcontrol_wait();
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

  const SlabTaps slab_taps{first_place, taps};
  slab_taps.list();
  const scalar_t* const origin = weight + group_offset(group) + (long long)first_in * WEIGHT_STRIDE_IN +
                                 weight_offset(0, first_out, slab_taps.first());
  for (int first = threadIdx.x; first < PAIRS; first += BATCH * THREADS) {
    scalar_t values[BATCH][CHUNK];  // in flight together
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const int pair = first + k * THREADS, out = out_of(pair), tap = tap_of(pair);
      const bool inside = pair < PAIRS && first_out + out < DST_CHANNELS && slab_taps.has(tap);
      const scalar_t* const from = origin + weight_offset(0, out, inside ? slab_taps.of(tap) : tap);
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
  constexpr int SUMS = SLAB_CHANNELS * LINE_GROUPS * SET_BLOCKS * BLOCK_LINES;  // rows of the slab's channels
  for (int i = threadIdx.x; chunk == 0 && tap_slab == 0 && i < SUMS; i += THREADS) {
    const int row = i % SLAB_CHANNELS, out = first_out + channel_of_row(row), block = i / SLAB_CHANNELS / BLOCK_LINES;
    const int row_block = (outer * LINE_GROUPS + block / SET_BLOCKS) * ROW_BLOCKS + channel_block * SET_BLOCKS;
    const float largest = out < DST_CHANNELS ? scales.largest_weight(group * DST_CHANNELS + out) : 0;
    scales.rows()[(row_block + block % SET_BLOCKS) * ROWS + i / SLAB_CHANNELS % BLOCK_LINES * LINE_ROWS +
                  first_out % ROWS + row] = unscale_column(largest);
  }
#endif
  unsigned char* const target = packed +
                                ((long long)outer * LINE_GROUPS * STEPS + chunk / 2) * OPERATIONS * OPERATION_BYTES +
                                (chunk % 2 * ROWS + first_out % ROWS) * 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < SLAB_CHANNELS * SLAB_TAPS; i += THREADS) {
    const int row = i % SLAB_CHANNELS, tap = i / SLAB_CHANNELS;
    if (first_place + tap >= PLACES) break;
    const bool exists = slab_taps.has(tap);
    scalar_t values[CHUNK];
#pragma unroll
    for (int in = 0; in < CHUNK; ++in)
      values[in] = exists ? slab[in][channel_of_row(row) * PITCH + tap] : zero<scalar_t>();
    alignas(16) operand_t parts[PARTS][CHUNK];
#pragma unroll
    for (int in = 0; in < CHUNK; ++in) prepare(values[in], parts, in);
    unsigned char* const to =
        target + (long long)places[tap] * OPERATION_BYTES + ((first_place + tap) % BLOCK_LINES * LINE_ROWS + row) * 16;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      *(Vector<operand_t, CHUNK>*)(to + part * (2 * ROWS * 16)) = *(const Vector<operand_t, CHUNK>*)parts[part];
  }
}
