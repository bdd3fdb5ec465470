// An output computed by scalar products, if tensor cores may be wrong: infinities, NaN, and overflow of parts.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"

// The source position that the output at `at` reads at a tap, along one dimension; negative for none.
__device__ __forceinline__ int read_at(Axis axis, int at, int tap) {
  const int moved = tap * axis.dilation - axis.padding, far = at - moved;
  if (INPUT_GRAD) return at * axis.stride + moved;
  return far % axis.stride == 0 ? far / axis.stride : -1;
}

// The sum of the output at `at` along n, d, h and w, over `channels` source channels. `src` is the group's first
// channel, `weight` the first weight of the output's channel.
__device__ __forceinline__ float plain_sum(const Tensor5& src_lies, const scalar_t* src, const scalar_t* weight,
                                           int channels, const int (&at)[4]) {
  constexpr int APART = INPUT_GRAD ? WEIGHT_STRIDE_OUT : WEIGHT_STRIDE_IN;
  float sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < TAPS; ++tap) {
    const int from[4] = {at[0], read_at(AXIS_D, at[1], tap / (AXIS_H.kernel * AXIS_W.kernel)),
                         read_at(AXIS_H, at[2], tap / AXIS_W.kernel % AXIS_H.kernel),
                         read_at(AXIS_W, at[3], tap % AXIS_W.kernel)};
    if ((unsigned)from[1] >= (unsigned)src_lies.size[0] || (unsigned)from[2] >= (unsigned)src_lies.size[1] ||
        (unsigned)from[3] >= (unsigned)src_lies.size[2])
      continue;
    const scalar_t* const pixel = src + offset_of(src_lies, from);
#pragma unroll 1
    for (int i = 0; i < channels; ++i)
      sum += widen(pixel[i * src_lies.stride[1]]) * widen(weight[i * APART + tap * WEIGHT_STRIDE_TAP]);
  }
  return sum;
}
