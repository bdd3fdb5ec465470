// An output computed one product after the other, where the tensor cores cannot be right: infinities, NaN, and what
// splitting into parts loses.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"

// The sum of one output, without the tensor cores. `x` is the group's first channel and `weight` is of the output's.
__device__ __forceinline__ float plain(const Tensor5& x_lies, const scalar_t* x, const scalar_t* weight,
                                       const int (&cell)[4], int phase_d, int phase_h, int phase_w) {
  float value = 0;
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
