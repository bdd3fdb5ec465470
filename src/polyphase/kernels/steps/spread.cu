// The second step of a forward pass as GEMM + col2im where kernels do not overlap and leave gaps: an output is finished
// from the one product that meets it, or from none.
//
//   product[n, (co, tap), i]  =  Σ over ci of   x[n, ci, i] · w[ci, co, tap]            (a layer of one tap)
//   y[n, co, o]               =  finish(product[n, (co, tap), i] if tap and i meet o, otherwise 0)
//
// Products are accum_t, in `splits` partial planes, which are added in order. The output is contiguous, channels first.
//
// Index mapping. A thread owns VECTOR neighbours in memory, whatever the length of rows: 16 aligned bytes, from one row
// or from the end of one and the begin of the next. Neighbouring threads store neighbouring vectors, a thread VECTORS
// of them. What a block needs to know of its rows is found once for each row and kept in shared memory.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "epilogue/read_if.cuh"

struct Params {
  long long sample_stride;                 // of the output
  Divisor channels, slabs, rows, columns;  // sizes of the output
  int outputs;                             // of all images
  int product[5];                          // strides of the product, whose channels are columns (co, tap)
  int product_size[3];
  int splits, plane;  // partial planes of the product, and elements from one to the next
};

constexpr int VECTOR = 16 / (int)sizeof(scalar_t);
constexpr int OF_BLOCK = THREADS * VECTORS * VECTOR;  // outputs

// A row of the output: the place of its first product, NONE if it meets none, and the operands of its channel.
struct Row {
  int first;
  ChannelTerms terms;
};
constexpr int NONE = -1;

// The first tap of the progression if it and its source element exist, or no place.
struct Met {
  bool exists;
  int tap, src;

  __device__ __forceinline__ Met(const Progression& at, int kernel, int size)
      : exists(at.tap < kernel && (unsigned)at.src < (unsigned)size), tap(at.tap), src(at.src) {}
};

__device__ __forceinline__ Row find_row(const Params& params, const EpilogueOperands& operands, int index) {
  int rest = index / params.rows;
  const int h = index - rest * params.rows.value;
  const int line = rest / params.slabs, d = rest - line * params.slabs.value;
  const int n = line / params.channels, channel = line - n * params.channels.value;
  const Met at_d(TapsD::at(d), AXIS_D.kernel, params.product_size[0]);
  const Met at_h(TapsH::at(h), AXIS_H.kernel, params.product_size[1]);
  Row row = {NONE, channel_terms(operands, channel)};
  if (at_d.exists && at_h.exists) {
    const int column = channel / DST_CHANNELS * (DST_CHANNELS * TAPS) + weight_offset(0, channel % DST_CHANNELS, 0) +
                       (at_d.tap * AXIS_H.kernel + at_h.tap) * AXIS_W.kernel * WEIGHT_STRIDE_TAP;
    row.first = n * params.product[0] + column * params.product[1] + at_d.src * params.product[2] +
                at_h.src * params.product[3];
  }
  return row;
}

// Writes the first `count` of VECTOR outputs, from column `w` of the row `here` on; others are in the row behind it.
__device__ __forceinline__ void write(const Params& params, const Row& here, const Row& behind, int w, int count,
                                      const accum_t* product, scalar_t* dst) {
  accum_t value[VECTOR] = {};
  if (here.first != NONE || behind.first != NONE) {
    int place[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const bool next = w + i >= params.columns.value;
      const Met at(TapsW::at(next ? w + i - params.columns.value : w + i), AXIS_W.kernel, params.product_size[2]);
      place[i] = next ? behind.first : here.first;
      if (!at.exists || i >= count) place[i] = NONE;
      if (place[i] != NONE) place[i] += at.tap * (params.product[1] * WEIGHT_STRIDE_TAP) + at.src * params.product[4];
    }
#pragma unroll 1
    for (int split = 0; split < params.splits; ++split, product += params.plane)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) value[i] += read_if(place[i] != NONE, product + place[i]);
  }

  Vector<scalar_t, VECTOR> results;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const bool next = w + i >= params.columns.value;
    narrow(finish(value[i], next ? behind.terms : here.terms, i < count ? dst + i : nullptr), results.value[i]);
  }
  if (count == VECTOR) {
    *(Vector<scalar_t, VECTOR>*)dst = results;
    return;
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    if (i < count) dst[i] = results.value[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    spread(const accum_t* __restrict__ product, const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS,
           scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  __shared__ Row rows[MOST_ROWS];
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.sample_stride);
  const int begin = blockIdx.x * OF_BLOCK, end = min(begin + OF_BLOCK, params.outputs);
  const int first_row = begin / params.columns, last_row = (end - 1) / params.columns;
  for (int row = first_row + threadIdx.x; row <= last_row; row += THREADS)
    rows[row - first_row] = find_row(params, operands, row);
  __syncthreads();
#pragma unroll 1
  for (int first = begin + threadIdx.x * VECTOR; first < end; first += THREADS * VECTOR) {
    const int row = first / params.columns, w = first - row * params.columns.value;
    const int count = min(VECTOR, end - first);
    const Row here = rows[row - first_row], behind = rows[min(row + 1, last_row) - first_row];
    write(params, here, behind, w, count, product, dst + first);
  }
}
