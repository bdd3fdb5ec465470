// The weight with output channels innermost, (C_in, taps, C_out / groups), from one of any order, and those of a group
// padded with zeros to PADDED_CHANNELS. A thread makes 16 bytes: neighbouring threads read neighbouring taps.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int CHUNK = 16 / (int)sizeof(scalar_t);  // channels
static_assert(PADDED_CHANNELS % CHUNK == 0, "channels of a tap are whole chunks");
static_assert(ALL_IN_CHANNELS % IN_CHANNELS == 0, "groups are alike");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_channels(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  griddepcontrol_launch_dependents();
  const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
  const int tap = (int)(at % TAPS);
  const long long chunk = at / TAPS, in = chunk / (PADDED_CHANNELS / CHUNK);
  const int out = (int)(chunk % (PADDED_CHANNELS / CHUNK)) * CHUNK;
  if (in >= ALL_IN_CHANNELS) return;
  const scalar_t* const from = weight + in * WEIGHT_STRIDE_IN + weight_offset(0, out, tap);
  Vector<scalar_t, CHUNK> values;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i)
    values.value[i] = out + i < OUT_CHANNELS ? read(from + i * WEIGHT_STRIDE_OUT) : zero<scalar_t>();
  *(Vector<scalar_t, CHUNK>*)(packed + ((in * TAPS + tap) * PADDED_CHANNELS + out) * sizeof(scalar_t)) = values;
}
