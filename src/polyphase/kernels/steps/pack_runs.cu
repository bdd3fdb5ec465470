// Packs the weights for tap_gemm_tma if taps along the width and channels are joined in k (core/run_groups.cuh): for
// every group, phase and block of ROWS destination channels
//
//     [stage][part][row][k]
//
// A stage is a tap group, and the pieces of a row are swizzled as wgmma reads them (core/swizzle.cuh). A row may be a
// channel's output in a cell (core/merged_phases.cuh). Weights that do not exist are zero. There are few source
// channels.
//
// Index mapping. A thread writes 16 bytes of each part; neighbouring threads write neighbouring pieces.

#include "specialisation.cuh"
#include "core/counters.cuh"
#include "core/geometry.cuh"
#include "core/merged_phases.cuh"
#include "core/phase.cuh"
#include "core/run_groups.cuh"
#include "core/swizzle.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int PIECES = CHUNK / PIECE;  // of a row
constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_runs(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  griddepcontrol_launch_dependents();
  packed = clear_counters(packed);
  const int piece_of_block = (int)(blockIdx.x % BLOCKS_EACH * THREADS + threadIdx.x);
  const int block = blockIdx.x / BLOCKS_EACH, row_block = block % ROW_BLOCKS, group = block / (ROW_BLOCKS * PHASES);
  const int stage = piece_of_block / (ROWS * PIECES), in_stage = piece_of_block % (ROWS * PIECES);
  const int dst = row_block * ROWS + in_stage / PIECES, piece = (int)swizzled(in_stage * 16, PIECES * 16) / 16 % PIECES;
  const Phase phase(block / ROW_BLOCKS % PHASES);
  if (stage >= RunGroup::count(phase)) return;
  const RunGroup tap_group(phase, stage);
  const scalar_t* const from = weight + (long long)group * (INPUT_GRAD ? CHANNELS : SRC_CHANNELS) * WEIGHT_STRIDE_IN;
  const Column of(dst);

  alignas(16) scalar_t parts[PARTS][PIECE];
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    const RunWeight at = tap_group.weight(phase, piece * PIECE + i);
    const int tap = of.layer_tap(at.tap);
    scalar_t value = zero<scalar_t>();
    if (at.src < SRC_CHANNELS && dst < DST_CHANNELS && tap >= 0)
      value =
          read(from + (INPUT_GRAD ? weight_offset(of.channel, at.src, tap) : weight_offset(at.src, of.channel, tap)));
    prepare(value, parts, i);
  }
  unsigned char* const to = packed + ((long long)block * PACKED_STAGES + stage) * (PARTS * ROWS * PIECES * 16);
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    *(Vector<scalar_t, PIECE>*)(to + (part * (ROWS * PIECES) + in_stage) * 16) =
        *(const Vector<scalar_t, PIECE>*)parts[part];
  griddepcontrol_wait();  // so that a kernel that waits for this step has waited for the previous one, too
}
