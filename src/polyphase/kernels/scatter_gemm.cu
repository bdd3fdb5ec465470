// Forward pass of layers with few output channels on tensor cores: what every pixel adds to all that it reaches, as one
// product of matrices, and then the sum of what every output gets:
//
//   product[pixel, column]  =  Σ_ci x[pixel, ci] · w[ci, column],   a column being an output channel co and a tap
//   y[co, o]                =  bias[co]  +  Σ over the taps that meet o of   product[pixel that the tap reads, column]
//
// No product is computed for nothing, whatever the stride, and of few channels only the columns are few. The first sum
// reads each operand as it lies in the tensor: neither is unfolded, packed or turned around.
//
// Index mapping. A block owns a tile of cells (common/geometry.cuh) and OUT_CHUNK output channels of one group. Rows of
// the product are the pixels of the window that the tile reads, halo included, cut at the edges of images that a tile
// covers from edge to edge; row tiles of 16 go to the warps in turn. Columns are pairs of output channel and tap, in
// the order in which the weight has them; a warp computes all of them.
//
// float32 comes in two parts of TF32, and each operation's sum leaves the cores at once, since they round towards zero.
// The parts of what is not finite, or would not be as TF32, sum to NaN. Where an output is NaN it is therefore computed
// again, plainly.
//
// Shared memory: where the pieces of both operands lie, then BUFFERS stages of weights as [channel][column] and pixels
// as [channel][n][d][h][w], or as [n][d][h][w][channel] where channels come last; at the end, in their place, the
// product as [column][pixel]. Neighbouring lanes find their elements in different banks each time.

struct Geometry {
  Tensor5 x, weight, y;  // the weight's rows are channels, the rest of it lies along h and w
  Part weight_part, window;
  int batch;
  int lanes[4];                  // cells of a tile along n, d, h, w
  int tiles[4];                  // tiles along n, d, h, w
  int first[4];                  // the window's first pixel, counted from the tile's first cell
  int table_bytes, stage_bytes;  // of shared memory
  int vectors;                   // whether the outputs of a cell's row are stored together
};

constexpr int COLUMNS = OUT_CHUNK * TAPS;
constexpr int COLUMN_TILES = ceil_div(COLUMNS, 8);
constexpr int ROWS = 16 * ROW_TILES * WARPS;
constexpr int OUT_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK), STAGES = ceil_div(IN_CHANNELS, STAGE_CHANNELS);
constexpr int WEIGHT_BYTES = STAGE_CHANNELS * WEIGHT_PITCH;
constexpr int PRODUCT_PITCH = ROWS + 4;  // 8 rows by 4 pairs of columns lie in different banks
constexpr bool EXACT = PARTS == 2;
// From one channel of an output to the next among the columns, and from one tap to the next.
constexpr int COLUMN_CHANNEL = WEIGHT_STRIDE_OUT == 1 ? 1 : TAPS, COLUMN_TAP = WEIGHT_STRIDE_OUT == 1 ? OUT_CHUNK : 1;
constexpr int RUN = AXIS_W.stride;  // neighbouring outputs of a cell
constexpr bool VECTORS = (RUN == 2 || RUN == 4 || RUN == 8) && RUN * ELEMENT <= 16;

static_assert(STAGE_CHANNELS % OPERATION == 0, "a stage is whole operations");

// The product's elements of a warp.
struct Sums {
  float of[ROW_TILES][COLUMN_TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROW_TILES * COLUMN_TILES * 4; ++i) (&of[0][0][0])[i] = 0;
  }

  // The first pixel of row tile `i`.
  static __device__ __forceinline__ int first_pixel(int i) { return 16 * (threadIdx.x / 32 + i * WARPS); }

  // One stage, of a window of so many pixels.
  __device__ __forceinline__ void add(const char* stage, int pixels, int window_pitch) {
    __syncwarp();  // lanes may have loaded different numbers of pieces
    const int pixel_bytes = X_CHANNELS_LAST ? STAGE_CHANNELS * ELEMENT + 16 : ELEMENT;
    const int channel_bytes = X_CHANNELS_LAST ? ELEMENT : window_pitch;
#pragma unroll 1
    for (int channel = 0; channel < STAGE_CHANNELS; channel += OPERATION)
      if constexpr (ELEMENT == 4)
        add_floats(stage + channel * WEIGHT_PITCH, stage + WEIGHT_BYTES + channel * channel_bytes, pixels, pixel_bytes,
                   channel_bytes);
      else
        add_halves(stage + channel * WEIGHT_PITCH, stage + WEIGHT_BYTES + channel * channel_bytes, pixels, pixel_bytes,
                   channel_bytes);
  }

 private:
  __device__ __forceinline__ void add_floats(const char* weights, const char* window, int pixels, int pixel_bytes,
                                             int channel_bytes) {
    const int major = threadIdx.x % 32 / 4, minor = threadIdx.x % 4;
    unsigned columns[COLUMN_TILES][2], low_columns[COLUMN_TILES][2];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        split(*(const float*)(weights + (minor + 4 * half) * WEIGHT_PITCH + (8 * j + major) * 4), columns[j][half],
              low_columns[j][half]);
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      if (first_pixel(i) >= pixels) break;  // also so that the compiler does not mingle the products of many row tiles
      unsigned rows[4], low_rows[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        split(*(const float*)(window + (first_pixel(i) + major + k % 2 * 8) * pixel_bytes +
                              (minor + k / 2 * 4) * channel_bytes),
              rows[k], low_rows[k]);
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j) {
        if constexpr (EXACT) {
          float sum[4] = {};
          mma(sum, low_rows, columns[j][0], columns[j][1]);
          mma(sum, rows, low_columns[j][0], low_columns[j][1]);
          mma(sum, rows, columns[j][0], columns[j][1]);
#pragma unroll
          for (int k = 0; k < 4; ++k) of[i][j][k] += sum[k];
        } else {
          mma(of[i][j], rows, columns[j][0], columns[j][1]);
        }
      }
    }
  }

  // What a float loses as TF32 is its low part. The cores truncate that: they take off half of its last bit on average,
  // which is put on before. (Rounding it, or both by common/tensor_float.cuh, would take more instructions than the
  // products.) NaN stays NaN in the low part whatever becomes of the high one.
  static __device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
    if constexpr (EXACT) {
      high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
      low = __float_as_uint((value - __uint_as_float(high)) * (1 + 0.72f / 2048));
    } else {
      high = __float_as_uint(round_tf32(value));
    }
  }

  __device__ __forceinline__ void add_halves(const char* weights, const char* window, int pixels, int pixel_bytes,
                                             int channel_bytes) {
    const int row = threadIdx.x % 8, matrix = threadIdx.x % 32 / 8;
    const unsigned columns_at = shared_address(weights) + (matrix % 2 * 8 + row) * WEIGHT_PITCH + matrix / 2 * 16;
    const unsigned rows_at =
        shared_address(window) + (X_CHANNELS_LAST ? (matrix % 2 * 8 + row) * pixel_bytes + matrix / 2 * 16
                                                  : (matrix / 2 * 8 + row) * channel_bytes + matrix % 2 * 16);
    unsigned columns[ceil_div(COLUMN_TILES, 2)][4];
#pragma unroll
    for (int j = 0; j < ceil_div(COLUMN_TILES, 2); ++j) load_matrices<true>(columns[j], columns_at + 32 * j);
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      if (first_pixel(i) >= pixels) break;
      unsigned rows[4];
      load_matrices<!X_CHANNELS_LAST>(rows, rows_at + first_pixel(i) * pixel_bytes);
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
        mma(of[i][j], rows, columns[j / 2][j % 2 * 2], columns[j / 2][j % 2 * 2 + 1]);
    }
  }

 public:
  __device__ __forceinline__ void store(float* product, int pixels) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      if (first_pixel(i) >= pixels) break;
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int column = 8 * j + lane % 4 * 2 + k % 2;
          if (COLUMNS % 8 == 0 || column < COLUMNS)
            product[column * PRODUCT_PITCH + first_pixel(i) + lane / 4 + k / 2 * 8] = of[i][j][k];
        }
    }
  }
};

// What a cell reads along one dimension: for each tap whether its pixel exists, and how far that lies.
template <int KERNEL>
struct Reads {
  bool exists[KERNEL];
  int at[KERNEL];  // pixels of the window

  // `cell` counts from the image's first, `lane` from the tile's; the window begins at `first` and has a `pitch`.
  __device__ __forceinline__ void init(Axis axis, int cell, int lane, int first, int size, int pitch) {
#pragma unroll
    for (int tap = 0; tap < KERNEL; ++tap) {
      exists[tap] = (unsigned)(cell + src_offset(axis, tap)) < (unsigned)size;
      at[tap] = (lane + src_offset(axis, tap) - first) * pitch;
    }
  }
};

// The outputs of one cell and channel, of which `columns` and so on lie in the image from the first on. Whether none of
// them is NaN.
__device__ __forceinline__ bool store_cell(const Geometry& g, const float* product, const Reads<AXIS_D.kernel>& d,
                                           const Reads<AXIS_H.kernel>& h, const Reads<AXIS_W.kernel>& w, float bias,
                                           scalar_t* to, int slabs, int rows, int columns) {
  bool numbers = true;
#pragma unroll
  for (int phase_d = 0; phase_d < AXIS_D.stride; ++phase_d)
#pragma unroll
    for (int phase_h = 0; phase_h < AXIS_H.stride; ++phase_h) {
      if (phase_d >= slabs || phase_h >= rows) continue;
      float value[RUN];
#pragma unroll
      for (int i = 0; i < RUN; ++i) value[i] = bias;
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        const int kd = tap / (AXIS_H.kernel * AXIS_W.kernel), kh = tap / AXIS_W.kernel % AXIS_H.kernel;
        const int kw = tap % AXIS_W.kernel;
        if (phase_of(AXIS_D, kd) != phase_d || phase_of(AXIS_H, kh) != phase_h) continue;
        if (d.exists[kd] && h.exists[kh] && w.exists[kw])
          value[phase_of(AXIS_W, kw)] += product[tap * COLUMN_TAP * PRODUCT_PITCH + d.at[kd] + h.at[kh] + w.at[kw]];
      }
#pragma unroll
      for (int i = 0; i < RUN; ++i) numbers = numbers && value[i] == value[i];
      scalar_t* const row = to + phase_d * g.y.stride[2] + phase_h * g.y.stride[3];
      if (VECTORS && g.vectors) {
        Vector<scalar_t, VECTORS ? RUN : 1> run;
#pragma unroll
        for (int i = 0; i < (VECTORS ? RUN : 1); ++i) narrow(value[i], run.value[i]);
        *(Vector < scalar_t, VECTORS ? RUN : 1 > *)row = run;
      } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
          if (i < columns) narrow(value[i], row[i * g.y.stride[4]]);
      }
    }
  return numbers;
}

// The same one by one, without the cores. `x` is the group's first channel of the cell's pixel, and `weight` its first
// weight of the channel.
__device__ __forceinline__ void store_cell_plainly(const Geometry& g, const scalar_t* x, const scalar_t* weight,
                                                   const Reads<AXIS_D.kernel>& d, const Reads<AXIS_H.kernel>& h,
                                                   const Reads<AXIS_W.kernel>& w, float bias, scalar_t* to, int slabs,
                                                   int rows, int columns) {
  constexpr int OUTPUTS = AXIS_D.stride * AXIS_H.stride * AXIS_W.stride;
#pragma unroll 1
  for (int output = 0; output < OUTPUTS; ++output) {
    const int phase_d = output / (AXIS_H.stride * AXIS_W.stride), phase_h = output / AXIS_W.stride % AXIS_H.stride;
    const int phase_w = output % AXIS_W.stride;
    if (phase_d >= slabs || phase_h >= rows || phase_w >= columns) continue;
    float value = bias;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
      const int kd = tap / (AXIS_H.kernel * AXIS_W.kernel), kh = tap / AXIS_W.kernel % AXIS_H.kernel;
      const int kw = tap % AXIS_W.kernel;
      const bool meets =
          phase_of(AXIS_D, kd) == phase_d && phase_of(AXIS_H, kh) == phase_h && phase_of(AXIS_W, kw) == phase_w;
      if (!meets || !d.exists[kd] || !h.exists[kh] || !w.exists[kw]) continue;
      const scalar_t* const pixel = x + src_offset(AXIS_D, kd) * g.x.stride[2] +
                                    src_offset(AXIS_H, kh) * g.x.stride[3] + src_offset(AXIS_W, kw) * g.x.stride[4];
#pragma unroll 1
      for (int in = 0; in < IN_CHANNELS; ++in)
        value += widen(pixel[in * g.x.stride[1]]) * widen(weight[in * WEIGHT_STRIDE_IN + tap * WEIGHT_STRIDE_TAP]);
    }
    narrow(value, to[phase_d * g.y.stride[2] + phase_h * g.y.stride[3] + phase_w * g.y.stride[4]]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    scatter_gemm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight, const scalar_t* __restrict__ bias,
                 scalar_t* __restrict__ y, const Geometry g) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int block = blockIdx.x;
  const int out_block = block % OUT_BLOCKS;
  block /= OUT_BLOCKS;
  const int tiles = g.tiles[0] * g.tiles[1] * g.tiles[2] * g.tiles[3];
  const int group = block / tiles;
  int first[4];  // cell of the tile
  decode(g.tiles, block % tiles, first);
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] *= g.lanes[i];
  const int first_out = out_block * OUT_CHUNK;
  const int pixels = elements(g.window);

  long long* const places = (long long*)shared_memory;
  char* const buffers = (char*)shared_memory + g.table_bytes;
  PartLoader<Channels::first, STAGE_CHANNELS, Still> weight_loader(g.weight, g.weight_part);
  PartLoader<X_CHANNELS_LAST ? Channels::kept : Channels::first, STAGE_CHANNELS, Still> x_loader(g.x, g.window);
  const int chunk[4] = {0, 0, 0, first_out * COLUMN_CHANNEL};
  int window[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) window[i] = first[i] + g.first[i];
  weight_loader.init(places, elements(g.weight_part), 1, chunk);
  x_loader.init(places + weight_loader.box.pieces, pixels, g.batch, window);
  x += (long long)group * IN_CHANNELS * g.x.stride[1];
  weight += (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN;
  __syncthreads();

  Sums sums;
  sums.clear();
  auto load = [&](int stage, char* to) {
    const int channel = stage * STAGE_CHANNELS;
    weight_loader.load(weight + channel * WEIGHT_STRIDE_IN, IN_CHANNELS - channel, to);
    x_loader.load(x + channel * g.x.stride[1], IN_CHANNELS - channel, to + WEIGHT_BYTES);
  };
  run_stages(STAGES, buffers, g.stage_bytes, load, [&](const char* stage) { sums.add(stage, pixels, g.window.pitch); });

  float* const product = (float*)buffers;
  copies_wait<0>();
  __syncthreads();
  sums.store(product, pixels);
  __syncthreads();

  const int cells = g.lanes[0] * g.lanes[1] * g.lanes[2] * g.lanes[3];
  const int channels = min(OUT_CHUNK, OUT_CHANNELS - first_out);
  for (int i = threadIdx.x; i < cells; i += THREADS) {
    int lane[4], cell[4];
    decode(g.lanes, i, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) cell[j] = first[j] + lane[j];
    const int slabs = g.y.size[0] - cell[1] * AXIS_D.stride, rows = g.y.size[1] - cell[2] * AXIS_H.stride;
    const int columns = g.y.size[2] - cell[3] * AXIS_W.stride;
    if (cell[0] >= g.batch || slabs <= 0 || rows <= 0 || columns <= 0) continue;
    Reads<AXIS_D.kernel> d;
    Reads<AXIS_H.kernel> h;
    Reads<AXIS_W.kernel> w;
    d.init(AXIS_D, cell[1], lane[1], g.first[1], g.x.size[0], g.window.extent[2] * g.window.extent[3]);
    h.init(AXIS_H, cell[2], lane[2], g.first[2], g.x.size[1], g.window.extent[3]);
    w.init(AXIS_W, cell[3], lane[3], g.first[3], g.x.size[2], 1);
    const float* const of_image = product + lane[0] * (g.window.extent[1] * g.window.extent[2] * g.window.extent[3]);
    const scalar_t* const pixel = x + offset_of(g.x, cell);
    cell[1] *= AXIS_D.stride, cell[2] *= AXIS_H.stride, cell[3] *= AXIS_W.stride;
    scalar_t* to = y + offset_of(g.y, cell) + (long long)(group * OUT_CHANNELS + first_out) * g.y.stride[1];
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel, to += g.y.stride[1]) {
      const float start = HAS_BIAS ? widen(read(bias + group * OUT_CHANNELS + first_out + channel)) : 0.f;
      const bool numbers =
          store_cell(g, of_image + channel * COLUMN_CHANNEL * PRODUCT_PITCH, d, h, w, start, to, slabs, rows, columns);
      if (EXACT && !numbers)
        store_cell_plainly(g, pixel, weight + (first_out + channel) * WEIGHT_STRIDE_OUT, d, h, w, start, to, slabs,
                           rows, columns);
    }
  }
}
