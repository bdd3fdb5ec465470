// The second step of a forward pass as GEMM + col2im (overlap-add): every output sums the products that meet it.
//
//   product[n, (co, tap), i]  =  Σ over ci of   x[n, ci, i] · w[ci, co, tap]            (a layer of one tap)
//   y[n, co, o]               =  finish(Σ over the taps that meet o of   product[n, (co, tap), i of the tap])
//
// Products are accum_t, in `splits` partial planes. They are added in the order of planes, then of taps, and the sum is
// narrowed once. Columns (co, tap) are in the weight's order, which the GEMM reads in place.
//
// Index mapping. A thread has LINES outputs along h, a stride apart: the taps of one phase serve all of them, so that
// their loads are in flight together. If columns are innermost, each may be RUN neighbours along w of one cell, which
// read neighbouring columns. Neighbouring threads have neighbours along w (channels first) or neighbouring channels
// (channels last). Every product is read once; products of one sector are read by neighbouring threads, or by one
// thread in turn. No shared memory, no barrier.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"

struct Params {
  Tensor5 dst;
  Divisor sizes[3];  // threads along d, h and w
  Divisor channels;
  int threads;     // threads that have outputs, for all images
  int product[5];  // strides of the product, whose channels are columns
  int product_size[3];
  int splits, plane;  // partial planes of the product, and elements from one to the next
};

// The taps that meet an output along one dimension (core/taps.cuh).
template <class T, int KERNEL>
struct MetTaps {
  static constexpr int STEP = -T::SRC_STEP;
  int count, tap, src;  // number of taps; the first tap and its element

  __device__ __forceinline__ explicit MetTaps(int dst) {
    const Progression from = T::at(dst);
    count = from.tap < KERNEL ? (KERNEL - from.tap + T::TAP_STEP - 1) / T::TAP_STEP : 0;
    tap = from.tap, src = from.src;
  }
  // Only the taps that meet an existing element, of `size`.
  __device__ __forceinline__ MetTaps(int dst, int size) : MetTaps(dst) {
    const int first = src < size ? 0 : (src - size) / STEP + 1, last = src < 0 ? -1 : src / STEP;
    count = min(last + 1, count) - first;
    tap += first * T::TAP_STEP, src -= first * STEP;
  }
  // Elements of the product from that of a tap to the next one's.
  static __device__ __forceinline__ int step(int column, int position) {
    return T::TAP_STEP * column - STEP * position;
  }
};

// Most taps that meet an output along the width; MOST: products that are in flight together.
constexpr int WIDTH_TAPS = ceil_div(AXIS_W.kernel, TapsW::TAP_STEP), MOST = LINES > 1 ? 4 : 8;
constexpr int TOGETHER = WIDTH_TAPS < MOST ? WIDTH_TAPS : MOST;

typedef Vector<accum_t, RUN> Run;
__device__ __forceinline__ Run read_run(const accum_t* from) {
  if constexpr (RUN == 1) return {read(from)};
  return *(const Run*)from;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    col2im(const accum_t* __restrict__ product, const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS,
           scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]);
  int rest = (int)(blockIdx.x * THREADS + threadIdx.x);
  if (rest >= params.threads) return;
  const auto next = [&rest](const Divisor& size) {  // index along the fastest remaining dimension
    const int outer = rest / size, place = rest - outer * size.value;
    rest = outer;
    return place;
  };
  int channel = DST_CHANNELS_LAST ? next(params.channels) : 0;
  const int w = next(params.sizes[2]) * RUN, line = next(params.sizes[1]), d = next(params.sizes[0]);
  const int h = line / AXIS_H.stride * (AXIS_H.stride * LINES) + line % AXIS_H.stride;
  if (!DST_CHANNELS_LAST) channel = next(params.channels);
  const ChannelTerms terms = channel_terms(operands, channel);

  const int column = params.product[1] * WEIGHT_STRIDE_TAP;  // elements from one tap's product to the next one's
  const MetTaps<TapsD, AXIS_D.kernel> at_d(d, params.product_size[0]);
  const MetTaps<TapsH, AXIS_H.kernel> at_h(h);  // of the first line; the others' elements follow that one's
  const MetTaps<TapsW, AXIS_W.kernel> at_w(w, params.product_size[2]);
  const int step_d = at_d.step(AXIS_H.kernel * AXIS_W.kernel * column, params.product[2]);
  const int step_h = at_h.step(AXIS_W.kernel * column, params.product[3]);
  const int step_w = at_w.step(column, params.product[4]), next_line = params.product[3];
  const int of_channel = channel / DST_CHANNELS * (DST_CHANNELS * TAPS) + weight_offset(0, channel % DST_CHANNELS, 0);
  const int first_tap = (at_d.tap * AXIS_H.kernel + at_h.tap) * AXIS_W.kernel + at_w.tap;
  product += rest * params.product[0] + of_channel * params.product[1] + first_tap * column +
             at_d.src * params.product[2] + at_h.src * params.product[3] + at_w.src * params.product[4];

  Run sum[LINES] = {};
#pragma unroll 1
  for (int split = 0; split < params.splits; ++split, product += params.plane) {
    const accum_t* slab = product;
#pragma unroll 1
    for (int i = 0; i < at_d.count; ++i, slab += step_d) {
      const accum_t* row = slab;
#pragma unroll 1
      for (int j = 0; j < at_h.count; ++j, row += step_h) {
#pragma unroll 1
        for (int first = 0; first < WIDTH_TAPS; first += TOGETHER) {
          Run values[LINES][TOGETHER];
#pragma unroll
          for (int k = 0; k < LINES; ++k) {
            const bool met = (unsigned)(at_h.src + k - j * at_h.STEP) < (unsigned)params.product_size[1];
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t)
              values[k][t] =
                  met && first + t < at_w.count ? read_run(row + k * next_line + (first + t) * step_w) : Run{};
          }
#pragma unroll
          for (int k = 0; k < LINES; ++k)
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
              for (int i = 0; i < RUN; ++i) sum[k].value[i] += values[k][t].value[i];
        }
      }
    }
  }

  const int at[4] = {rest, d, h, w};
  dst += channel * params.dst.stride[1] + offset_of(params.dst, at);
#pragma unroll
  for (int k = 0; k < LINES; ++k, dst += AXIS_H.stride * params.dst.stride[3]) {
    if (h + k * AXIS_H.stride >= params.dst.size[1]) break;
    Vector<scalar_t, RUN> results;
#pragma unroll
    for (int i = 0; i < RUN; ++i) narrow(finish(sum[k].value[i], terms, dst + i), results.value[i]);
    *(Vector<scalar_t, RUN>*)dst = results;
  }
}
