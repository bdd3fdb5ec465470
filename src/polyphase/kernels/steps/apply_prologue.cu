// Applies a prologue to the input, for kernels that read it in place: writes a tensor of the same strides.
//
// A thread has AT_ONCE times VECTOR neighbouring elements, counted in memory order: `run` of a channel, then as many of
// the next; with ONE_CHANNEL a vector is in one channel. Without gaps an element's number is its offset; else the
// offset is computed from it.
//
// It may start while weights are being packed, and ends after that, so that the next step waits for both.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "operand/input_value.cuh"

struct Params {
  long long elements;
  Divisor run, channels;
  long long stride[5];  // strides of the dimensions, innermost first; below: their sizes
  int size[5];
};

constexpr bool WIDE = sizeof(offset_t) == 8;  // element numbers need more than 32 bits
constexpr bool PAIRS = sizeof(scalar_t) == 2 && ONE_CHANNEL && VECTOR > 1;
constexpr int ROUND = THREADS * VECTOR, TILE = AT_ONCE * ROUND;

__device__ __forceinline__ long long place_of(const Params& params, long long element) {
  if (DENSE) return element;
  long long place = 0;
#pragma unroll
  for (int i = 0; i < 5; ++i) place += element % params.size[i] * params.stride[i], element /= params.size[i];
  return place;
}

// The channel of an element, which is relative to the block's first.
__device__ __forceinline__ int channel_of(const Params& params, int element) {
  if (!WIDE) return ((int)blockIdx.x * TILE + element) / params.run % params.channels;
  return (int)(((long long)blockIdx.x * TILE + element) / params.run.value % params.channels.value);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    apply_prologue(const scalar_t* __restrict__ src PROLOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                   const __grid_constant__ Params params) {
  const int own = (int)threadIdx.x * VECTOR;
  const long long first = (long long)blockIdx.x * TILE + own;
  const InputChannels all{PROLOGUE_OPERANDS, 0, params.channels};
  Vector<scalar_t, VECTOR> values[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i)
    if (first + i * ROUND < params.elements)
      values[i] = *(const Vector<scalar_t, VECTOR>*)(src + place_of(params, first + i * ROUND));
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    if (first + i * ROUND >= params.elements) break;
    const int in_block = own + i * ROUND, channel = channel_of(params, in_block);
    if (PAIRS) {
#pragma unroll
      for (int j = 0; j < VECTOR / 2; ++j) ((unsigned*)&values[i])[j] = all.pair(((unsigned*)&values[i])[j], channel);
    } else {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j)
        values[i].value[j] = all.value(values[i].value[j], ONE_CHANNEL ? channel : channel_of(params, in_block + j));
    }
    *(Vector<scalar_t, VECTOR>*)(dst + place_of(params, first + i * ROUND)) = values[i];
  }
  griddepcontrol_wait();
}
