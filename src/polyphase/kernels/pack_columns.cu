// The weights of pixel_gemm.cu as the tensor cores take them: for every group and chunk of columns
//
//     [step][half of an operation][column][16 bytes]
//
// Columns and channels that do not exist are zero. A thread makes 16 bytes.

constexpr int CHUNK = 16 / (int)sizeof(scalar_t);  // channels
constexpr int HALVES = 2 * ceil_div(IN_CHANNELS, 2 * CHUNK);
constexpr int ALL_COLUMNS = OUT_CHANNELS * TAPS;
constexpr int COLUMNS = 8 * COLUMN_TILES, CHUNKS = ceil_div(ALL_COLUMNS, COLUMNS);

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_columns(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  let_dependents_start();
  const int at = blockIdx.x * THREADS + threadIdx.x, half = at / COLUMNS % HALVES;
  const int chunk = at / (COLUMNS * HALVES), column = chunk % CHUNKS * COLUMNS + at % COLUMNS;
  const long long group = chunk / CHUNKS;
  if (group >= GROUPS) return;
  const scalar_t* const from =
      weight + group * IN_CHANNELS * WEIGHT_STRIDE_IN + weight_offset(0, column / TAPS, column % TAPS);
  Vector<scalar_t, CHUNK> values;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    const int in = half * CHUNK + i;
    const bool exists = column < ALL_COLUMNS && in < IN_CHANNELS;
    values.value[i] = rounded(exists ? read(from + (long long)in * WEIGHT_STRIDE_IN) : zero<scalar_t>());
  }
  *(Vector<scalar_t, CHUNK>*)(packed + (long long)at * 16) = values;
}
