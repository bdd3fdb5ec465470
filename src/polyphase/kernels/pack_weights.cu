// The weights as the tensor cores take them (row_blocks.cuh): for every group, block of channels and group of lines
//
//     [step][operation][part][chunk of two][row of 64][16 bytes]
//
// One thread makes one chunk of one row in all its parts. Rows and channels that do not exist are zero.

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS)
    pack_weights(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed, const int groups) {
  constexpr int OUTER = CHANNEL_GROUPS * LINE_GROUPS;
  const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
  const int row = index % ROWS, chunk = index / ROWS % 2;
  const int operation_index = index / (ROWS * 2) % OPERATIONS;
  const int rest = index / (ROWS * 2 * OPERATIONS);
  const int step = rest % STEPS, outer = rest / STEPS % OUTER, group = rest / (STEPS * OUTER);
  if (group >= groups) return;

  Operation operation;
  const bool exists = find_operation(operation_index, outer % LINE_GROUPS * LINES, operation);
  const int out = (outer / LINE_GROUPS * CHANNEL_BLOCKS + operation.channel_block) * ROWS + channel_of_row(row);
  const int tap = (operation.depth_tap * AXIS_H.kernel + operation.height_tap) * AXIS_W.kernel + operation.width_tap;
  alignas(16) scalar_t parts[PARTS][CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    const int in = step * STEP_CHANNELS + chunk * CHUNK + i;
    const bool inside = exists && out < DST_CHANNELS && in < SRC_CHANNELS;
    const long long first = (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS;
    prepare(inside ? read(weight + first + weight_offset(in, out, tap)) : zero<scalar_t>(), parts, i);
  }
  unsigned char* const target = packed + (index / (ROWS * 2) * OPERATION_BYTES + (chunk * ROWS + row) * 16);
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    *(Vector<scalar_t, CHUNK>*)(target + part * (2 * ROWS * 16)) = *(const Vector<scalar_t, CHUNK>*)parts[part];
}
