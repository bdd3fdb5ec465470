// Direct kernel of the forward pass and the input gradient for every layer: kernels of thousands of taps, large
// strides. No limits, no shared memory, no barrier.
//
//   destination[n, cd, o] = bias[cd] + Σ source[n, cs, (position of o) + …] · w[cs, cd, tap]
//
// Index mapping. A thread owns DST_PER_THREAD destination channels of one group. For each of them it owns RUN
// neighbours along w that read the same source elements, with neighbouring taps, in CELLS cells that are `apart`
// elements from one another: a weight in a register serves all cells, and a source element all channels and neighbours.
// Neighbouring threads own neighbouring runs along w (channels first) or neighbouring channels (channels last).
// Threads with neighbours or several cells are for few source channels; such passes are bound by their stores.
// core/taps.cuh has the taps that meet an element.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "epilogue/read_if.cuh"
#include "operand/rounding.cuh"

struct Params {
  Tensor5 src, dst;
  Divisor blocks, slabs, rows, columns;  // threads along channels, d, h and w
  int batch;
  int apart;  // elements from one of a thread's cells to the next
};

constexpr int THREADS = 256;
constexpr int DST_BLOCKS = ceil_div(DST_CHANNELS, DST_PER_THREAD);
// Taps of a row that meet an element, at most. If there are few, their loop is unrolled.
constexpr int ROW_TAPS = ceil_div(AXIS_W.kernel, TapsW::TAP_STEP), UNROLLED = ROW_TAPS < 4 ? ROW_TAPS : 4;

// What a thread owns: the first element, and a block of channels.
struct Place {
  int block, w, h, d;
  long long n;

  template <class Index>
  __device__ __forceinline__ void find(const Params& params, Index rest) {
    const auto next = [&rest](const Divisor& size) {  // index along the fastest remaining dimension
      Index outer;
      if constexpr (sizeof(Index) > sizeof(int))
        outer = rest / size.value;
      else
        outer = rest / size;
      const int place = (int)(rest - outer * size.value);
      rest = outer;
      return place;
    };
    if (DST_CHANNELS_LAST) block = next(params.blocks);
    w = next(params.columns) * RUN, h = next(params.rows), d = next(params.slabs);
    if (!DST_CHANNELS_LAST) block = next(params.blocks);
    n = rest;
  }
};

// A thread's sums.
struct Sums {
  accum_t of[CELLS][DST_PER_THREAD][RUN] = {};

  // Adds all products. WHOLE: the weights of neighbours are aligned vectors.
  template <bool WHOLE>
  __device__ __forceinline__ void add(const Params& params, const scalar_t* __restrict__ src,
                                      const scalar_t* __restrict__ weight, int w, int h, int d, int first_dst) {
    const Progression at_d = TapsD::at(d), at_h = TapsH::at(h), at_w = TapsW::at(w);
    const int src_apart = INPUT_GRAD ? params.apart * AXIS_W.stride : params.apart / AXIS_W.stride;
    const long long cell_stride = src_apart * params.src.stride[4];
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
#pragma unroll UNROLLED
          for (int i = 0; i < ROW_TAPS; ++i) {
            const int kw = at_w.tap + i * TapsW::TAP_STEP, src_w = at_w.src + i * TapsW::SRC_STEP;
            if (kw >= AXIS_W.kernel) break;
            const scalar_t* const from = row + src_w * params.src.stride[4];
            accum_t value[CELLS];
            bool exists[CELLS], any = false;
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
              exists[cell] = (unsigned)(src_w + cell * src_apart) < (unsigned)params.src.size[2];
              value[cell] = operand(read_if(exists[cell], from + cell * cell_stride));
              any |= exists[cell];
            }
            if (!any) continue;
            const int tap = (kd * AXIS_H.kernel + kh) * AXIS_W.kernel + kw;
#pragma unroll
            for (int j = 0; j < DST_PER_THREAD; ++j) {
              const int dst_channel =
                  DST_CHANNELS % DST_PER_THREAD == 0 ? first_dst + j : min(first_dst + j, DST_CHANNELS - 1);
              const scalar_t* const taps = weight + (INPUT_GRAD ? weight_offset(dst_channel, channel, tap)
                                                                : weight_offset(channel, dst_channel, tap));
              Vector<scalar_t, RUN> weights;
              if constexpr (WHOLE) {
                weights = *(const Vector<scalar_t, RUN>*)taps;
              } else {
#pragma unroll
                for (int k = 0; k < RUN; ++k) weights.value[k] = read(taps + k);
              }
#pragma unroll
              for (int k = 0; k < RUN; ++k) {
                const accum_t factor = operand(widen(weights.value[k]));
#pragma unroll
                for (int cell = 0; cell < CELLS; ++cell)
                  if (exists[cell]) of[cell][j][k] += value[cell] * factor;  // not zero times infinity
              }
            }
          }
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_general(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                   const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                   const Params params) {
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  Place at;
  if (gridDim.x < (1u << 31) / THREADS)
    at.find<int>(params, (int)(blockIdx.x * THREADS + threadIdx.x));
  else
    at.find<long long>(params, (long long)blockIdx.x * THREADS + threadIdx.x);
  const auto [block, w, h, d, n] = at;
  if (n >= params.batch) return;
  const int group = block / DST_BLOCKS;
  const int first_dst = block % DST_BLOCKS * DST_PER_THREAD;

  src += n * params.src.stride[0] + (long long)group * SRC_CHANNELS * params.src.stride[1];
  weight += (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS;
  Sums sums;
  if (RUN == 1 || (unsigned long long)weight % sizeof(Vector<scalar_t, RUN>) == 0)
    sums.add<true>(params, src, weight, w, h, d, first_dst);
  else
    sums.add<false>(params, src, weight, w, h, d, first_dst);

  const long long first_channel = (long long)group * DST_CHANNELS + first_dst;
  dst += n * params.dst.stride[0] + first_channel * params.dst.stride[1] + d * params.dst.stride[2] +
         h * params.dst.stride[3] + w * params.dst.stride[4];
#pragma unroll
  for (int j = 0; j < DST_PER_THREAD; ++j) {
    if (first_dst + j >= DST_CHANNELS) break;
    const ChannelTerms terms = channel_terms(operands, first_channel + j);
#pragma unroll
    for (int cell = 0; cell < CELLS; ++cell) {
      if (w + cell * params.apart >= params.dst.size[2]) break;
      scalar_t* const to = dst + j * params.dst.stride[1] + cell * params.apart * params.dst.stride[4];
      Vector<scalar_t, RUN> results;
#pragma unroll
      for (int k = 0; k < RUN; ++k) narrow(finish(sums.of[cell][j][k], terms, to + k), results.value[k]);
      *(Vector<scalar_t, RUN>*)to = results;
    }
  }
}
