// Packs the weights of phase_gemm_pixels.cu in the order that tensor cores read: for every group and chunk of columns
//
//     [step][half of an operation][column][16 bytes]
//
// then, if SCALED, for every column of all chunks the factor that undoes its scale. Columns and channels that do not
// exist are zero. A block has eight columns, and LANES threads for each, each of which writes 16 bytes at a time.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "operand/scaled_half.cuh"

constexpr int CHUNK = 8;  // channels
constexpr int HALVES = 2 * ceil_div(IN_CHANNELS, 2 * CHUNK);
constexpr int ALL_COLUMNS = OUT_CHANNELS * TAPS;
constexpr int COLUMNS = 8 * COLUMN_TILES, CHUNKS = ceil_div(ALL_COLUMNS, COLUMNS);
constexpr int LANES = THREADS / 8;

__device__ __forceinline__ scalar_t weight_of(const scalar_t* from, bool exists, int in) {
  return exists && in < IN_CHANNELS ? read(from + (long long)in * WEIGHT_STRIDE_IN) : zero<scalar_t>();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_columns(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  griddepcontrol_launch_dependents();
  const int index = (int)blockIdx.x * 8 + (int)threadIdx.x % 8, lane = threadIdx.x / 8;  // index: column of all chunks
  const int group = index / (CHUNKS * COLUMNS), column = index % (CHUNKS * COLUMNS);
  const bool exists = column < ALL_COLUMNS;
  const scalar_t* const from =
      weight + (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN + weight_offset(0, column / TAPS, column % TAPS);
  float scale = 1;
  if constexpr (SCALED) {
    __shared__ float of_warps[THREADS / 32][8];
    float largest = 0;
#pragma unroll
    for (int half = lane; half < HALVES; half += LANES)
#pragma unroll
      for (int i = 0; i < CHUNK; ++i)
        largest = larger_magnitude(largest, widen(weight_of(from, exists, half * CHUNK + i)));
#pragma unroll
    for (int by = 8; by < 32; by *= 2) largest = larger_magnitude(largest, __shfl_xor_sync(~0u, largest, by));
    of_warps[threadIdx.x / 32][threadIdx.x % 8] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) largest = larger_magnitude(largest, of_warps[i][threadIdx.x % 8]);
    scale = scale_of_column(largest);
    float* const factors = (float*)(packed + (long long)GROUPS * CHUNKS * COLUMNS * HALVES * 16);
    if (lane == 0) factors[index] = unscale_column(largest);
  }
  unsigned char* const to = packed + ((long long)(index / COLUMNS) * HALVES * COLUMNS + index % COLUMNS) * 16;
#pragma unroll
  for (int half = lane; half < HALVES; half += LANES) {
    Vector<operand_t, CHUNK> values;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) scaled(weight_of(from, exists, half * CHUNK + i), scale, values.value[i]);
    *(Vector<operand_t, CHUNK>*)(to + (long long)half * COLUMNS * 16) = values;
  }
}
