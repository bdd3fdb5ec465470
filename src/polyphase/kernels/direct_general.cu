// Direct kernel of the forward pass and the input gradient for every layer that direct_tiled does not unroll: kernels
// of thousands of taps, large strides. No limits, no shared memory, no barrier.
//
//   destination[n, cd, o] = bias[cd] + Σ source[n, cs, (position of o) + …] · w[cs, cd, tap]
//
// Index mapping. A thread owns DST_PER_THREAD destination channels of one group at one destination element.
// Neighbouring threads own neighbouring elements along w (channels first) or neighbouring channels (channels last).
// core/taps.cuh has the taps that meet an element.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "operand/rounding.cuh"

struct Params {
  Tensor5 src, dst;
  int batch, groups;
};

constexpr int THREADS = 256;
constexpr int DST_BLOCKS = ceil_div(DST_CHANNELS, DST_PER_THREAD);

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_general(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                   const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                   const Params params) {
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
  int block = 0, group = 0;
  const int blocks = DST_BLOCKS * params.groups;
  if (DST_CHANNELS_LAST) {
    block = (int)(index % blocks);
    index /= blocks;
  }
  const int w = (int)(index % params.dst.size[2]);
  index /= params.dst.size[2];
  const int h = (int)(index % params.dst.size[1]);
  index /= params.dst.size[1];
  const int d = (int)(index % params.dst.size[0]);
  index /= params.dst.size[0];
  if (!DST_CHANNELS_LAST) {
    block = (int)(index % blocks);
    index /= blocks;
  }
  const long long n = index;
  if (n >= params.batch) return;
  group = block / DST_BLOCKS;
  const int first_dst = block % DST_BLOCKS * DST_PER_THREAD;

  const Progression at_d = TapsD::at(d), at_h = TapsH::at(h), at_w = TapsW::at(w);
  src += n * params.src.stride[0] + (long long)group * SRC_CHANNELS * params.src.stride[1];
  weight += (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS;
  accum_t sum[DST_PER_THREAD] = {};
#pragma unroll 1
  for (int channel = 0; channel < SRC_CHANNELS; ++channel, src += params.src.stride[1]) {
    int src_d = at_d.src;
#pragma unroll 1
    for (int kd = at_d.tap; kd < AXIS_D.kernel; kd += TapsD::TAP_STEP, src_d += TapsD::SRC_STEP) {
      if ((unsigned)src_d >= (unsigned)params.src.size[0]) continue;
      int src_h = at_h.src;
#pragma unroll 1
      for (int kh = at_h.tap; kh < AXIS_H.kernel; kh += TapsH::TAP_STEP, src_h += TapsH::SRC_STEP) {
        if ((unsigned)src_h >= (unsigned)params.src.size[1]) continue;
        const scalar_t* const row = src + src_d * params.src.stride[2] + src_h * params.src.stride[3];
        int src_w = at_w.src;
#pragma unroll 4
        for (int kw = at_w.tap; kw < AXIS_W.kernel; kw += TapsW::TAP_STEP, src_w += TapsW::SRC_STEP) {
          if ((unsigned)src_w >= (unsigned)params.src.size[2]) continue;
          const accum_t value = operand(widen(read(row + src_w * params.src.stride[4])));
          const int tap = (kd * AXIS_H.kernel + kh) * AXIS_W.kernel + kw;
#pragma unroll
          for (int i = 0; i < DST_PER_THREAD; ++i) {
            const int dst_channel =
                DST_CHANNELS % DST_PER_THREAD == 0 ? first_dst + i : min(first_dst + i, DST_CHANNELS - 1);
            sum[i] += value * operand(widen(read(weight + (INPUT_GRAD ? weight_offset(dst_channel, channel, tap)
                                                                      : weight_offset(channel, dst_channel, tap)))));
          }
        }
      }
    }
  }

  const long long first_channel = (long long)group * DST_CHANNELS + first_dst;
  dst += n * params.dst.stride[0] + first_channel * params.dst.stride[1] + d * params.dst.stride[2] +
         h * params.dst.stride[3] + w * params.dst.stride[4];
#pragma unroll
  for (int i = 0; i < DST_PER_THREAD; ++i)
    if (first_dst + i < DST_CHANNELS) {
      scalar_t* const to = dst + i * params.dst.stride[1];
      narrow(finish(sum[i], channel_terms(operands, first_channel + i), to), *to);
    }
}
