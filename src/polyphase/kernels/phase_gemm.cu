// Forward pass of long kernels with large strides, whose cells have many outputs, on tensor cores.
//
// Counted from the first element that any tap reaches, padding included, output o is element o % stride of cell
// o / stride, and all elements of a cell read the same pixels: those 0, 1, … REACH - 1 before it. So they are columns
// of one GEMM, whose rows are cells:
//
//   y[co, cell·stride + phase]  =  bias[co]  +  Σ_reach Σ_ci x[cell - reach, ci] · w[ci, co, phase + reach·stride]
//
// (with dilation, the tap whose distance from the first is that sum, where there is one). Neighbouring columns are
// neighbours in the output, and in a weight of the same memory format. Nothing is unrolled over phases or taps.
//
// Index mapping. A block owns ROWS cells, of all images one after the other, and COLUMNS columns of one group, in the
// order (output channel, phase along d, h, w), or with CHANNELS_INNERMOST (d, h, w, channel). A stage is one reach and
// the channels of STAGE_STEPS instructions. Words of four bytes, one channel or two, pass through registers into two
// shared buffers: the next stage is in flight while one is multiplied. Of a warp's columns a lane has the 8 neighbours
// from `lane % 4` · 8 on: column i of instruction j is column i / 2 · 8 + 2·j + i % 2 of the warp.
//
// float32 is split into two parts of TF32. Tensor cores truncate, so each step's sum is added to the accumulators in
// float32. A column without a tap multiplies the pixel by zero, which gives NaN where the pixel is not finite. So
// outputs that are NaN are computed again without tensor cores.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "operand/split.cuh"
#include "mainloop/accumulators.cuh"

struct Params {
  Tensor5 x, y;
  long long rows;     // cells of all images
  Divisor row_tiles;  // of ROWS
  Divisor cells[3];   // of an image along d, h, w
  int first[3];       // the image's first cell
  int vector;         // neighbouring outputs that are stored together
};

constexpr int THREADS = 32 * WARP_ROWS * WARP_COLUMNS;
constexpr int ROWS = 16 * ROW_TILES * WARP_ROWS, COLUMNS = 32 * WARP_COLUMNS;
constexpr int ELEMENT = sizeof(scalar_t), WORD = 4 / ELEMENT;          // channels
constexpr int DEPTH = 8 * STAGE_STEPS, STAGE_CHANNELS = DEPTH * WORD;  // words and channels of a stage
constexpr int CHUNKS = ceil_div(IN_CHANNELS, STAGE_CHANNELS);
constexpr int PHASES = AXIS_D.stride * AXIS_H.stride * AXIS_W.stride;
constexpr int ALL_COLUMNS = OUT_CHANNELS * PHASES, COLUMN_TILES_OF_GROUP = ceil_div(ALL_COLUMNS, COLUMNS);
constexpr int ROW_PITCH = ROWS + 8, COLUMN_PITCH = COLUMNS + 2;  // 4 words by 8 rows, or columns, in different banks
constexpr int STAGE_WORDS = PARTS * DEPTH * (ROW_PITCH + COLUMN_PITCH);
constexpr int RUN = 8;  // columns of a lane, neighbours in an output row where they are of one channel and line
constexpr bool RUNS = AXIS_W.stride % RUN == 0 && !CHANNELS_INNERMOST;

// Pixels that a cell reads along a dimension.
__host__ __device__ constexpr int reach(Axis axis) {
  return ceil_div((axis.kernel - 1) * axis.dilation + 1, axis.stride);
}
constexpr int REACH_H = reach(AXIS_H), REACH_W = reach(AXIS_W);
constexpr int STAGES = reach(AXIS_D) * REACH_H * REACH_W * CHUNKS;

static_assert(THREADS % ROWS == 0 && THREADS % COLUMNS == 0 && THREADS <= 8 * ROWS && THREADS <= 8 * COLUMNS,
              "a thread loads of one row, and of one column");

// The tap of a dimension that is so far from the first one, the kernel's size where there is none.
__device__ __forceinline__ int tap_at(Axis axis, int distance) {
  const int tap = distance / axis.dilation;
  return distance % axis.dilation == 0 ? min(tap, axis.kernel) : axis.kernel;
}
__device__ __forceinline__ int tap_of(int d, int h, int w) { return (d * AXIS_H.kernel + h) * AXIS_W.kernel + w; }
static_assert(TAPS > 0, "a kernel has taps");

// How far before the cell the pixels of a stage lie, and its first channel.
struct Stage {
  int d, h, w, channel;

  __device__ __forceinline__ explicit Stage(int index) {
    channel = index % CHUNKS * STAGE_CHANNELS, index /= CHUNKS;
    w = index % REACH_W, index /= REACH_W;
    h = index % REACH_H, d = index / REACH_H;
  }
};

// A cell of an image, by where it lies among those of all images.
struct Cell {
  int image, d, h, w;

  __device__ __forceinline__ Cell(const Params& params, long long row) {
    if (row <= 0x7fffffff) {
      const int small = (int)row;
      h = small / params.cells[2], w = small % params.cells[2];
      d = h / params.cells[1], h = h % params.cells[1];
      image = d / params.cells[0], d = d % params.cells[0];
      return;
    }
    w = (int)(row % params.cells[2].value), row /= params.cells[2].value;
    h = (int)(row % params.cells[1].value), row /= params.cells[1].value;
    d = (int)(row % params.cells[0].value), image = (int)(row / params.cells[0].value);
  }
  // The cell that follows `ahead` cells after another.
  __device__ __forceinline__ Cell(const Params& params, const Cell& from, int ahead) {
    w = from.w + ahead, h = from.h + w / params.cells[2], w = w % params.cells[2];
    d = from.d + h / params.cells[1], h = h % params.cells[1];
    image = from.image + d / params.cells[0], d = d % params.cells[0];
    d += params.first[0], h += params.first[1], w += params.first[2];
  }
};

// A column of a group.
struct Column {
  int channel, d, h, w;
  bool exists;

  __device__ __forceinline__ explicit Column(int index) : exists(index < ALL_COLUMNS) {
    if (CHANNELS_INNERMOST) channel = index % OUT_CHANNELS, index /= OUT_CHANNELS;
    w = index % AXIS_W.stride, index /= AXIS_W.stride;
    h = index % AXIS_H.stride, index /= AXIS_H.stride;
    d = index % AXIS_D.stride, index /= AXIS_D.stride;
    if (!CHANNELS_INNERMOST) channel = index;
  }
};

// A row of the first operand: the pixels that a cell reads.
struct Pixels {
  const Params& params;
  const Cell cell;
  const bool exists;
  const scalar_t* const from;

  __device__ __forceinline__ Pixels(const Params& params, const scalar_t* x, const Cell& cell, bool exists)
      : params(params),
        cell(cell),
        exists(exists),
        from(x + cell.image * params.x.stride[0] + cell.d * params.x.stride[2] + cell.h * params.x.stride[3] +
             cell.w * params.x.stride[4]) {}

  // The first of a stage's channels, null where the pixel does not exist.
  __device__ __forceinline__ const scalar_t* at(const Stage& stage) const {
    const bool inside = (unsigned)(cell.d - stage.d) < (unsigned)params.x.size[0] &&
                        (unsigned)(cell.h - stage.h) < (unsigned)params.x.size[1] &&
                        (unsigned)(cell.w - stage.w) < (unsigned)params.x.size[2];
    if (!inside || !exists) return nullptr;
    return from + stage.channel * params.x.stride[1] - stage.d * params.x.stride[2] - stage.h * params.x.stride[3] -
           stage.w * params.x.stride[4];
  }
  __device__ __forceinline__ long long stride() const { return params.x.stride[1]; }
};

// A column of the second operand: the weights of an output channel's phase.
struct Weights {
  const Column column;
  const scalar_t* const from;

  __device__ __forceinline__ Weights(const scalar_t* weight, int index)
      : column(index), from(weight + column.channel * WEIGHT_STRIDE_OUT) {}

  // The first of a stage's channels, null where the phase has no tap so far from its first.
  __device__ __forceinline__ const scalar_t* at(const Stage& stage) const {
    const int d = tap_at(AXIS_D, column.d + stage.d * AXIS_D.stride);
    const int h = tap_at(AXIS_H, column.h + stage.h * AXIS_H.stride);
    const int w = tap_at(AXIS_W, column.w + stage.w * AXIS_W.stride);
    const bool missing = d == AXIS_D.kernel || h == AXIS_H.kernel || w == AXIS_W.kernel;
    if (missing || !column.exists) return nullptr;
    return from + weight_offset(stage.channel, 0, tap_of(d, h, w));
  }
  __device__ __forceinline__ int stride() const { return WEIGHT_STRIDE_IN; }
};

// What a thread moves of an operand for a stage: words of one of its LANES rows or columns.
template <int LANES, int PITCH>
struct Words {
  static constexpr int APART = THREADS / LANES, COUNT = DEPTH / APART;
  scalar_t elements[COUNT][WORD];

  static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
  // The first of the thread's channels in a stage.
  static __device__ __forceinline__ int first_channel() { return (int)threadIdx.x / LANES * WORD; }

  template <class Operand>
  __device__ __forceinline__ void load(const Operand& operand, const Stage& stage) {
    const scalar_t* const from = operand.at(stage);
    const int channels = IN_CHANNELS - stage.channel - first_channel();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        const int channel = i * APART * WORD + j;
        const bool exists = from && (IN_CHANNELS % STAGE_CHANNELS == 0 || channel < channels);
        elements[i][j] = exists ? read(from + channel * operand.stride()) : zero<scalar_t>();
      }
  }

  static __device__ __forceinline__ void pack(const float (&word)[1], unsigned (&parts)[PARTS]) {
    split(word[0], parts[0], parts[PARTS - 1]);
  }
  template <class T>
  static __device__ __forceinline__ void pack(const T (&word)[2], unsigned (&parts)[PARTS]) {
    parts[0] = word[0].bits | (unsigned)word[1].bits << 16;
  }

  // To shared memory, one part behind the other, [word][lane].
  __device__ __forceinline__ void store(unsigned* to) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      unsigned parts[PARTS];
      pack(elements[i], parts);
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        to[(part * DEPTH + (int)threadIdx.x / LANES + i * APART) * PITCH + lane()] = parts[part];
    }
  }
};

// A warp's part of the product.
struct Sums : Accumulators<ROW_TILES, 16> {
  // `rows` and `columns` are the first word of the thread's first.
  __device__ __forceinline__ void add(const unsigned* rows, const unsigned* columns) {
#pragma unroll
    for (int step = 0; step < STAGE_STEPS; ++step) {
      unsigned b[4][PARTS][2];
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 2 * PARTS; ++i)
          b[j][i / 2][i % 2] = columns[(i / 2 * DEPTH + step * 8 + i % 2 * 4) * COLUMN_PITCH + 2 * j];
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        unsigned a[PARTS][4];
#pragma unroll
        for (int i = 0; i < 4 * PARTS; ++i)
          a[i / 4][i % 4] = rows[(i / 4 * DEPTH + step * 8 + i % 4 / 2 * 4) * ROW_PITCH + tile * 16 + i % 2 * 8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (PARTS == 1) {
            mma<scalar_t>(of[tile] + 4 * j, a[0], b[j][0][0], b[j][0][1]);
            continue;
          }
          float sum[4] = {};
          mma<scalar_t>(sum, a[PARTS - 1], b[j][0][0], b[j][0][1]);
          mma<scalar_t>(sum, a[0], b[j][PARTS - 1][0], b[j][PARTS - 1][1]);
          mma<scalar_t>(sum, a[0], b[j][0][0], b[j][0][1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) of[tile][4 * j + i] += sum[i];
        }
      }
    }
  }
};

// The outputs of a cell.
struct Outputs {
  const Params& params;
  const Cell cell;
  scalar_t* const to;  // of the group's first channel

  __device__ __forceinline__ Outputs(const Params& params, scalar_t* y, const Cell& cell)
      : params(params), cell(cell), to(y + cell.image * params.y.stride[0]) {}

  // Where a column lies along a dimension; it is cropped where that is outside the output.
  static __device__ __forceinline__ int place(Axis axis, int cell, int phase) {
    return cell * axis.stride + phase - axis.padding;
  }
  __device__ __forceinline__ scalar_t* at(const Column& column, int (&o)[3]) const {
    o[0] = place(AXIS_D, cell.d, column.d), o[1] = place(AXIS_H, cell.h, column.h);
    o[2] = place(AXIS_W, cell.w, column.w);
    return to + column.channel * params.y.stride[1] + o[0] * params.y.stride[2] + o[1] * params.y.stride[3] +
           o[2] * params.y.stride[4];
  }
  __device__ __forceinline__ bool has(const Column& column, const int (&o)[3]) const {
    return column.exists && (unsigned)o[0] < (unsigned)params.y.size[0] &&
           (unsigned)o[1] < (unsigned)params.y.size[1] && (unsigned)o[2] < (unsigned)params.y.size[2];
  }

  // Where neighbour `i` of column `first` lies; null where it is not stored.
  __device__ __forceinline__ scalar_t* place_of(int first, int i) const {
    const Column column(first + i);
    int o[3];
    scalar_t* const element = at(column, o);
    return has(column, o) ? element : nullptr;
  }

  template <int COUNT>
  static __device__ __forceinline__ void write_vectors(const scalar_t (&values)[RUN], scalar_t* to) {
#pragma unroll
    for (int i = 0; i < RUN; i += COUNT)
      *(Vector<scalar_t, COUNT>*)(to + i) = *(const Vector<scalar_t, COUNT>*)(values + i);
  }

  // RUN neighbouring columns.
  __device__ __forceinline__ void write(int first, const scalar_t (&values)[RUN]) const {
    int o[3];
    if (RUNS) {
      const Column column(first);
      scalar_t* const run = at(column, o);
      const int begin = o[2];
      o[2] = 0;
      if (!has(column, o)) return;
      if (begin >= 0 && begin <= params.y.size[2] - RUN) {
        if (params.vector == 16 / ELEMENT) return write_vectors<16 / ELEMENT>(values, run);
        if (params.vector == 8 / ELEMENT) return write_vectors<8 / ELEMENT>(values, run);
      }
#pragma unroll
      for (int i = 0; i < RUN; ++i)
        if ((unsigned)(begin + i) < (unsigned)params.y.size[2]) run[i * params.y.stride[4]] = values[i];
    } else {
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        const Column column(first + i);
        scalar_t* const element = at(column, o);
        if (has(column, o)) *element = values[i];
      }
    }
  }

  // Computes the outputs again that were written as NaN.
  __device__ __forceinline__ void mend(int first, const scalar_t* x, const scalar_t* weight,
                                       const EpilogueOperands& operands) const {
#pragma unroll 1
    for (int i = 0; i < RUN; ++i) {
      const Column column(first + i);
      int o[3];
      scalar_t* const element = at(column, o);
      if (!has(column, o)) continue;
      const float value = widen(*element);
      if (!EPILOGUE && value == value) continue;  // operations may have made numbers of what is none
      const float sum = plain(x + cell.image * params.x.stride[0], weight + column.channel * WEIGHT_STRIDE_OUT, o);
      narrow(finish(sum, channel_terms(operands, column.channel), element), *element);
    }
  }

 private:
  // An output without the tensor cores and without its bias.
  __device__ __forceinline__ float plain(const scalar_t* x, const scalar_t* weight, const int (&o)[3]) const {
    const Progression d = TapsD::at(o[0]), h = TapsH::at(o[1]), w = TapsW::at(o[2]);
    float sum = 0;
#pragma unroll 1
    for (int kd = d.tap, at_d = d.src; kd < AXIS_D.kernel; kd += TapsD::TAP_STEP, at_d += TapsD::SRC_STEP) {
      if ((unsigned)at_d >= (unsigned)params.x.size[0]) continue;
#pragma unroll 1
      for (int kh = h.tap, at_h = h.src; kh < AXIS_H.kernel; kh += TapsH::TAP_STEP, at_h += TapsH::SRC_STEP) {
        if ((unsigned)at_h >= (unsigned)params.x.size[1]) continue;
#pragma unroll 1
        for (int kw = w.tap, at_w = w.src; kw < AXIS_W.kernel; kw += TapsW::TAP_STEP, at_w += TapsW::SRC_STEP) {
          if ((unsigned)at_w >= (unsigned)params.x.size[2]) continue;
          const scalar_t* pixel = x + at_d * params.x.stride[2] + at_h * params.x.stride[3] + at_w * params.x.stride[4];
          const scalar_t* tap = weight + weight_offset(0, 0, tap_of(kd, kh, kw));
#pragma unroll 1
          for (int channel = 0; channel < IN_CHANNELS; ++channel) {
            const float value = widen(read(pixel)), factor = widen(read(tap));
            sum += PARTS == 2 ? value * factor : round_tf32(value) * round_tf32(factor);
            pixel += params.x.stride[1], tap += WEIGHT_STRIDE_IN;
          }
        }
      }
    }
    return sum;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    phase_gemm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
               const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ y, const Params params) {
  extern __shared__ __align__(16) unsigned shared_memory[];
  const int block = (int)blockIdx.x / params.row_tiles;
  const long long first_row = (long long)((int)blockIdx.x % params.row_tiles) * ROWS;
  const int first_column = block % COLUMN_TILES_OF_GROUP * COLUMNS, group = block / COLUMN_TILES_OF_GROUP;
  const int rows_left = (int)min(params.rows - first_row, (long long)ROWS);
  const Cell first_cell(params, first_row);
  x += (long long)group * IN_CHANNELS * params.x.stride[1];
  weight += (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN;
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, y, params.y.stride[0]) + group * OUT_CHANNELS;
  y += (long long)group * OUT_CHANNELS * params.y.stride[1];

  typedef Words<ROWS, ROW_PITCH> RowWords;
  typedef Words<COLUMNS, COLUMN_PITCH> ColumnWords;
  const Pixels pixels(params, x + RowWords::first_channel() * params.x.stride[1],
                      Cell(params, first_cell, RowWords::lane()), RowWords::lane() < rows_left);
  const Weights weights(weight + ColumnWords::first_channel() * WEIGHT_STRIDE_IN, first_column + ColumnWords::lane());
  RowWords row_words;
  ColumnWords column_words;
  unsigned* const rows = shared_memory;
  unsigned* const columns = shared_memory + PARTS * DEPTH * ROW_PITCH;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int my_row = warp / WARP_COLUMNS * (16 * ROW_TILES) + lane / 4, my_columns = warp % WARP_COLUMNS * 32;
  const int row_word = lane % 4 * ROW_PITCH + my_row;
  const int column_word = lane % 4 * COLUMN_PITCH + my_columns + lane / 8 * 8 + lane / 4 % 2;

  Sums sums;
  sums.clear();
  row_words.load(pixels, Stage(0)), column_words.load(weights, Stage(0));
  row_words.store(rows), column_words.store(columns);
  __syncthreads();
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    const int now = stage % 2 * STAGE_WORDS, next = STAGE_WORDS - now;
    const bool more = stage + 1 < STAGES;
    if (more) row_words.load(pixels, Stage(stage + 1)), column_words.load(weights, Stage(stage + 1));
    sums.add(rows + now + row_word, columns + now + column_word);
    if (more) row_words.store(rows + next), column_words.store(columns + next);
    __syncthreads();
  }

  const int first = first_column + my_columns + lane % 4 * RUN;
  ChannelTerms terms[RUN];
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    const Column column(RUNS ? first : first + i);
    terms[i] = channel_terms(operands, column.channel, column.exists);
  }
  unsigned to_mend = 0;  // rows
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const int row = my_row + 8 * i;
    if (row >= rows_left) break;
    const Outputs outputs(params, y, Cell(params, first_cell, row));
    alignas(16) scalar_t values[RUN];
    bool numbers = true;
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
      const float value = add_bias(sums.of[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2], terms[j]);
      numbers = numbers && value == value;
      narrow(operate(value, terms[j], EPILOGUE_READS_PLACES ? outputs.place_of(first, j) : nullptr), values[j]);
    }
    outputs.write(first, values);
    if (!numbers) to_mend |= 1u << i;
  }
#pragma unroll 1
  for (int i = 0; to_mend >> i != 0; ++i)
    if (to_mend >> i & 1) Outputs(params, y, Cell(params, first_cell, my_row + 8 * i)).mend(first, x, weight, operands);
}
