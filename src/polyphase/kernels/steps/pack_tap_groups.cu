// The weights as tap_gemm reads them: for every group, phase and block of ROWS destination channels
//
//     [stage][part][row][k]
//
// SWIZZLED, pieces of a row change places as wgmma looks for them (core/swizzle.cuh).
//
// k runs over the tap groups of the phase (core/phase.cuh). What does not exist is zero.
//
// Index mapping. A thread makes 16 bytes of each part; neighbours make neighbouring ones.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"
#include "core/swizzle.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int PER_PIECE = 16 / (int)sizeof(scalar_t), PIECES = DEPTH / PER_PIECE;
constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);

struct Params {
  long long pieces;  // of one part
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_tap_groups(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed, const Params params) {
  griddepcontrol_launch_dependents();
  const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (index >= params.pieces) return;
  const int in_stage = (int)(index % (ROWS * PIECES)), row = in_stage / PIECES;
  const int piece = (SWIZZLED ? (int)swizzled(in_stage * 16, PIECES * 16) / 16 : in_stage) % PIECES;
  const long long stage_of_all = index / (ROWS * PIECES);
  const int stage = (int)(stage_of_all % PACKED_STAGES);
  const int block = (int)(stage_of_all / PACKED_STAGES), row_block = block % ROW_BLOCKS;
  const int group = block / (ROW_BLOCKS * PHASES), dst = row_block * ROWS + row;
  const Phase phase(block / ROW_BLOCKS % PHASES);
  const int count = CHUNKS * phase.taps;
  const scalar_t* const from =
      weight + (long long)group * (INPUT_GRAD ? DST_CHANNELS : SRC_CHANNELS) * WEIGHT_STRIDE_IN;
  if (stage * (DEPTH / CHUNK) >= count) return;

  alignas(16) scalar_t parts[PARTS][PER_PIECE];
#pragma unroll
  for (int i = 0; i < PER_PIECE; ++i) {
    const int k = stage * DEPTH + piece * PER_PIECE + i;
    scalar_t value = zero<scalar_t>();
    if (k / CHUNK < count && dst < DST_CHANNELS) {
      const TapGroup tap_group(phase, k / CHUNK);
      const int src = tap_group.channel + k % CHUNK, tap = tap_group.tap.tap;
      if (src < SRC_CHANNELS)
        value = read(from + (INPUT_GRAD ? weight_offset(dst, src, tap) : weight_offset(src, dst, tap)));
    }
    prepare(value, parts, i);
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    *(Vector<scalar_t, PER_PIECE>*)(packed + ((stage_of_all * PARTS + part) * (ROWS * PIECES) + in_stage) * 16) =
        *(const Vector<scalar_t, PER_PIECE>*)parts[part];
}
