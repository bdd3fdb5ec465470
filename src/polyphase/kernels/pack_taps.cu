// The weights as the tensor cores take them where a row is one tap of one channel (row_blocks.cuh): for every group,
// group of channels and group of lines
//
//     [step][row block][part][chunk of two][row of 64][16 bytes]
//
// Rows and channels that do not exist are zero. A thread block makes one operation: a row and a chunk for each thread.

static_assert(OPERATIONS == ROW_BLOCKS && TAPS > 0, "an operation is a row block");

extern "C" __global__ void __launch_bounds__(2 * ROWS, MIN_BLOCKS)
    pack_taps(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  let_dependents_start();
  const int chunk = blockIdx.x / ROW_BLOCKS % STEPS * 2 + threadIdx.x / ROWS;
  const int row_group = blockIdx.x / (ROW_BLOCKS * STEPS), block = blockIdx.x % ROW_BLOCKS;
  const int line_group = row_group % LINE_GROUPS, group = row_group / (LINE_GROUPS * CHANNEL_GROUPS);
  const int first_out = row_group / LINE_GROUPS % CHANNEL_GROUPS * GROUP_CHANNELS + block / SET_BLOCKS * ROW_CHANNELS;
  int row = block % SET_BLOCKS * ROWS + threadIdx.x % ROWS, line = line_group * LINES;
  const int behind = line + LINES;
  for (; line < behind && row >= rows_of_lines(line, line + 1); ++line) row -= rows_of_lines(line, line + 1);

  scalar_t values[CHUNK];
#pragma unroll
  for (int in = 0; in < CHUNK; ++in) values[in] = zero<scalar_t>();
  if (line < behind && line < OWNED_LINES) {
    const int depth = owned_phase(AXIS_D, line / OWNED_H), height = owned_phase(AXIS_H, line % OWNED_H);
    const int along_h = tap_count(AXIS_H, height), width_tap = row % AXIS_W.kernel;
    row /= AXIS_W.kernel;
    const int height_tap = first_tap(AXIS_H, height) + row % along_h * tap_step(AXIS_H);
    row /= along_h;
    const int along_d = tap_count(AXIS_D, depth);
    const int depth_tap = first_tap(AXIS_D, depth) + row % along_d * tap_step(AXIS_D);
    const int out = first_out + row / along_d;
    const int tap = (depth_tap * AXIS_H.kernel + height_tap) * AXIS_W.kernel + width_tap, first_in = chunk * CHUNK;
    const scalar_t* const from =
        weight + group_offset(group) + (long long)first_in * WEIGHT_STRIDE_IN + weight_offset(0, out, tap);
#pragma unroll
    for (int in = 0; in < CHUNK; ++in)
      if (out < DST_CHANNELS && first_in + in < SRC_CHANNELS)
        values[in] = read(from + (long long)in * WEIGHT_STRIDE_IN);
  }
  alignas(16) scalar_t parts[PARTS][CHUNK];
#pragma unroll
  for (int in = 0; in < CHUNK; ++in) prepare(values[in], parts, in);
  unsigned char* const to = packed + (long long)blockIdx.x * OPERATION_BYTES + threadIdx.x * 16;
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    *(Vector<scalar_t, CHUNK>*)(to + part * (2 * ROWS * 16)) = *(const Vector<scalar_t, CHUNK>*)parts[part];
}
