// Deterministic split-K reduction: partial planes are added in a fixed order, in the tensors' type.
// If the layer has an epilogue with operations, it is computed here, of complete sums.
//
// Index mapping. Each of `groups` groups of threads adds every groups-th plane, a thread four neighbouring elements of
// it; then the first group adds the others' sums, through shared memory.

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "operand/half_copies.cuh"

#if EPILOGUE
#include "epilogue/finish.cuh"
#endif

#include "epilogue/operations.cuh"

struct Params {
  long long plane;  // elements of a partial plane
  int planes, groups;
  int channels;                             // the layer's, for an epilogue
  long long channel_stride, sample_stride;  // the destination's, which has no gaps
};

constexpr int TOGETHER = 4;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    reduce_splits(const accum_t* partial EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst GUARD_PARAMETER,
                  const __grid_constant__ Params params) {
  griddepcontrol_wait();  // for the planes: the step is launched before the kernel that writes them has ended
  RETURN_IF_EXACT;
  __shared__ Vector<accum_t, TOGETHER> others[THREADS];
  const int lanes = THREADS / params.groups, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const long long first = ((long long)blockIdx.x * lanes + lane) * TOGETHER;
  const bool whole = params.plane % TOGETHER == 0;
  const int count = first >= params.plane             ? 0
                    : params.plane - first < TOGETHER ? (int)(params.plane - first)
                                                      : TOGETHER;
  Vector<accum_t, TOGETHER> sum = {};
#pragma unroll 4
  for (int i = group; i < params.planes; i += params.groups) {
    const accum_t* const from = partial + i * params.plane + first;
    Vector<accum_t, TOGETHER> more = {};
    if (whole && count > 0) {
      more = *(const Vector<accum_t, TOGETHER>*)from;
    } else {
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        if (j < count) more.value[j] = from[j];
    }
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) sum.value[j] += more.value[j];
  }
  if (params.groups > 1) {
    others[threadIdx.x] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll 4
    for (int i = 1; i < params.groups; ++i)
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j) sum.value[j] += others[i * lanes + lane].value[j];
  }
#if EPILOGUE
  const EpilogueOperands operands = EPILOGUE_OPERANDS(nullptr, dst, params.sample_stride);
#pragma unroll
  for (int j = 0; j < TOGETHER; ++j) {
    if (j >= count) break;
    const int channel = (int)((first + j) / params.channel_stride % params.channels);
    sum.value[j] = operate(sum.value[j], channel_terms(operands, channel), dst + first + j);
  }
#endif
  Vector<scalar_t, TOGETHER> result;
#pragma unroll
  for (int j = 0; j < TOGETHER; ++j) narrow(sum.value[j], result.value[j]);
  if (whole && count > 0) {
    *(Vector<scalar_t, TOGETHER>*)(dst + first) = result;
  } else {
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j)
      if (j < count) dst[first + j] = result.value[j];
  }
}
