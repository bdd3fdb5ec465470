// Forward pass of layers with few output channels: one GEMM of all pixels by all pairs of output channel and tap, then
// col2im in shared memory, which adds up the products that meet in an output:
//
//   product[pixel, column]  =  Σ_ci x[pixel, ci] · w[ci, column],   a column being an output channel co and a tap
//   y[co, o]                =  bias[co]  +  Σ over the taps that meet o of   product[pixel that the tap reads, column]
//
// No product is wasted, whatever the stride. Pixels go from global memory straight to the registers of MMA fragments:
// no two warps read the same pixel.
//
// Index mapping. A block owns a tile of cells (core/geometry.cuh) and OUT_CHUNK output channels of one group. The tile
// reads a window of pixels, which is clipped to the image where the tile spans the image. The window is multiplied in
// bands of image rows, one after the other. The products of a band stay in shared memory until no output of a later
// band needs them. Rows of a band's product are its pixels. A warp owns ROW_TILES tiles of 16 of them, and all columns.
// A lane loads CHANNELS neighbouring channels of an operation, from `lane % 4` · CHANNELS on, and units of UNIT
// neighbouring pixels, the first unit at pixel `lane / 4` · UNIT of the warp: pixel i of a unit is row `lane / 4 + i %
// 2 · 8` of row tile i / 2. A GEMM may permute k and rows in this way, as long as both operands and the store agree.
//
// float32 is split into two parts of TF32. Tensor cores truncate, so each operation's sum is added to the accumulators
// in float32. The parts of a value that is not finite, or overflows TF32, sum to NaN. So outputs that are NaN are
// computed again without tensor cores.
//
// Shared memory: the weights of STEPS_HELD operations, in the order in which lanes read them, and the product as
// [column][n][d][h][w], where h is a ring buffer.

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "ptx/fence.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "operand/plain_sum.cuh"
#include "operand/split.cuh"
#include "operand/tf32.cuh"
#include "mainloop/accumulators.cuh"

struct Params {
  Tensor5 x, y;
  int batch;
  int tile_extent[4];  // cells of a tile along n, d, h, w
  int tiles[4];        // tiles along n, d, h, w
  int extent[4];       // of the window along n, d, h and, in units, w
  int first[4];        // the window's first pixel, counted from the tile's first cell
  int band;            // rows of a band
  int ring;            // rows of the product in shared memory
  int whole;           // whether one load reads a whole unit of pixels (channels last: the lane's channels)
  int vectors;         // whether the outputs of a cell's row are stored together
};

constexpr int THREADS = 32 * WARPS;
constexpr int TOGETHER = WGMMA ? 128 : 32;  // threads of one instruction
constexpr int ELEMENT = sizeof(scalar_t), OPERATION = 32 / ELEMENT, CHANNELS = OPERATION / 4;
constexpr int UNIT = ROW_TILES % 2 == 0 ? 4 : 2, UNITS = 2 * ROW_TILES / UNIT;
constexpr int COLUMNS = OUT_CHUNK * TAPS;
constexpr int OUT_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK), STEPS = ceil_div(IN_CHANNELS, OPERATION);
constexpr bool EXACT = PARTS == 2;
constexpr int RUN = AXIS_W.stride;  // neighbouring outputs of a cell
constexpr bool VECTORS = (RUN == 2 || RUN == 4 || RUN == 8) && RUN * ELEMENT <= 16;
constexpr int STORED = VECTORS ? RUN : 1;  // outputs of a store

static_assert(STEPS_HELD % PREFETCH == 0, "the prefetched operations are used round robin");
static_assert(PITCH % 32 == 4, "8 pixels by 4 pairs of columns lie in different banks");

// Whether the thread's channel `i` of operation `step` exists. Past the last operation none does.
__device__ __forceinline__ bool is_channel(int step, int i) {
  return IN_CHANNELS % (PREFETCH * OPERATION) == 0 ||
         step * OPERATION + (int)threadIdx.x % 4 * CHANNELS + i < IN_CHANNELS;
}

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }
template <class T>
__device__ __forceinline__ unsigned bits_of(T value) {
  return value.bits;
}

// One operation's weights: two chunks of 16 bytes for each column and part, in the layout of ptx/wgmma.cuh.
constexpr int CHUNK_BYTES = COLUMN_TILES * 8 * 16, PART_BYTES = 2 * CHUNK_BYTES, STEP_BYTES = PARTS * PART_BYTES;

// Loads the weights of the operations from `step` on; channels and columns that do not exist are zero.
__device__ __forceinline__ void load_weights(const scalar_t* weight, int step, int first_out, char* to) {
  const int steps = min(STEPS_HELD, STEPS - step);
#pragma unroll 4
  for (int i = threadIdx.x; i < steps * COLUMN_TILES * 32; i += THREADS) {
    const int column = i / 4 % (COLUMN_TILES * 8), out = first_out + column / TAPS;
    const bool exists = column < COLUMNS && out < OUT_CHANNELS;
    const int channel = (step + i / (COLUMN_TILES * 32)) * OPERATION + i % 4 * CHANNELS;
    const scalar_t* const from =
        weight + channel * WEIGHT_STRIDE_IN + out * WEIGHT_STRIDE_OUT + column % TAPS * WEIGHT_STRIDE_TAP;
    unsigned values[CHANNELS];
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j)
      values[j] = exists && channel + j < IN_CHANNELS ? bits_of(read(from + j * WEIGHT_STRIDE_IN)) : 0;
    char* const slot = to + i / (COLUMN_TILES * 32) * STEP_BYTES + column * 16 + i % 4 * 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unsigned word, low = 0;
      if constexpr (ELEMENT == 4)
        split(__uint_as_float(values[j]), word, low);
      else
        word = values[2 * j] | values[2 * j + 1] << 16;
      *(unsigned*)(slot + j * CHUNK_BYTES) = word;
      if (EXACT) *(unsigned*)(slot + PART_BYTES + j * CHUNK_BYTES) = low;
    }
  }
  fence_proxy_async();
}

// One operation's pixels of a lane, as loaded: [unit][channel][pixel], or [pixel][channel] with channels last.
struct Pixels {
  unsigned words[4 * ROW_TILES];

  // The lane's four bytes `half` of an operation's row, for its pixel `i`.
  __device__ __forceinline__ unsigned get(int i, int half) const {
    if (X_CHANNELS_LAST) return words[2 * i + half];
    const unsigned* const unit = words + i / UNIT * (2 * UNIT);
    if constexpr (ELEMENT == 4) return unit[half * UNIT + i % UNIT];
    const unsigned even = unit[half * UNIT + i % UNIT / 2], odd = unit[half * UNIT + UNIT / 2 + i % UNIT / 2];
    return i % 2 ? even >> 16 | (odd & 0xffff0000u) : (even & 0xffffu) | odd << 16;
  }
};

// Addresses of a lane's pixels, and of their products. Outside the image the nearest pixel is read: no output uses that
// product. WHOLE: as `Params::whole`.
template <bool WHOLE>
struct PixelLoader {
  static constexpr bool IN_ROWS = WHOLE && !X_CHANNELS_LAST;

  const Params& params;
  const scalar_t* rows[UNITS];  // the unit's first pixel in the current band's row, at the lane's next channel
  int columns[UNITS][UNIT];     // elements from there to each pixel; not used by loads with IN_ROWS
  int heights[UNITS];           // image row of the unit in the first band
  int places[UNITS];            // element of the product for the unit's first pixel, in ring row 0; -1 for none

  // `x`: the group's first channel. `first`: the window's first pixel. Starts at the first band.
  __device__ __forceinline__ PixelLoader(const Params& params, const scalar_t* x, const int (&first)[4])
      : params(params) {
    const int lane = threadIdx.x % 32, extent[4] = {params.extent[0], params.extent[1], params.band, params.extent[3]};
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      int at[4];
      decode(extent, threadIdx.x / 32 * (16 * ROW_TILES) + (8 * u + lane / 4) * UNIT, at);
      const int place = (at[0] * params.extent[1] + at[1]) * params.ring * params.extent[3] + at[3];
      places[u] = at[0] < params.extent[0] ? place : -1;
      heights[u] = at[2] + first[2];
#pragma unroll
      for (int i = 0; i < UNIT; ++i)
        columns[u][i] =
            min(max(at[3] + first[3] + i, 0), params.x.size[2] - (IN_ROWS ? UNIT : 1)) * (int)params.x.stride[4];
      at[0] = min(at[0] + first[0], params.batch - 1);
      at[1] = min(max(at[1] + first[1], 0), params.x.size[0] - 1);
      at[2] = row(u, 0), at[3] = 0;
      rows[u] = x + offset_of(params.x, at) + lane % 4 * CHANNELS * params.x.stride[1] + columns[u][0];
#pragma unroll
      for (int i = UNIT - 1; i >= 0; --i) columns[u][i] -= columns[u][0];
    }
  }

  __device__ __forceinline__ int row(int u, int band) const {
    return min(max(heights[u] + band * params.band, 0), params.x.size[1] - 1);
  }

  // Called after the previous band. Advances from that band's row: keeping the first row's address would cost two
  // registers per unit.
  __device__ __forceinline__ void begin_band(int band) {
    constexpr int LOADED = round_up(STEPS, PREFETCH) * OPERATION;  // channels
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      rows[u] += (row(u, band) - row(u, band - 1)) * params.x.stride[3] - LOADED * params.x.stride[1];
  }

  // Loads the pixels of the next operation, `step`.
  __device__ __forceinline__ void load(Pixels& to, int step) {
    constexpr int COUNT = X_CHANNELS_LAST ? CHANNELS : UNIT;  // contiguous elements
    constexpr int RUNS = X_CHANNELS_LAST ? UNIT : CHANNELS;   // runs of contiguous elements in a unit
    typedef Vector<unsigned, COUNT * ELEMENT / 4> Words;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const scalar_t* from = rows[u];
#pragma unroll
      for (int i = 0; i < RUNS; ++i) {
        Words loaded = {};
        if (WHOLE) {
          const scalar_t* const address = X_CHANNELS_LAST ? from + columns[u][i] : from;
          if (is_channel(step, X_CHANNELS_LAST ? 0 : i)) loaded = *(const Words*)address;
        } else {
#pragma unroll
          for (int j = 0; j < COUNT; ++j) {
            const scalar_t* const address =
                X_CHANNELS_LAST ? from + columns[u][i] + j * params.x.stride[1] : from + columns[u][j];
            const unsigned element = is_channel(step, X_CHANNELS_LAST ? j : i) ? bits_of(read(address)) : 0;
            loaded.value[j * ELEMENT / 4] |= element << (j * ELEMENT % 4 * 8);
          }
        }
        unsigned* const words = to.words + (u * RUNS + i) * (COUNT * ELEMENT / 4);
#pragma unroll
        for (int j = 0; j < COUNT * ELEMENT / 4; ++j) words[j] = loaded.value[j];
        if (!X_CHANNELS_LAST) from += params.x.stride[1];
      }
      rows[u] += OPERATION * params.x.stride[1];
    }
  }
};

// One operation's pixels as the tensor cores read them.
struct Rows {
  unsigned high[ROW_TILES][4], low[ROW_TILES][4];

  __device__ __forceinline__ Rows(const Pixels& pixels) {
    __syncwarp();  // keeps the compiler from interleaving operations, which would spill
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const unsigned word = pixels.get(2 * i + k % 2, k / 2);
        if constexpr (ELEMENT == 4)
          split(__uint_as_float(word), high[i][k], low[i][k]);
        else
          high[i][k] = word;
      }
  }
};

// A warp's accumulators: of[i][4 * j + k] is element k of row tile i and column tile j.
struct Sums : Accumulators<ROW_TILES, 4 * COLUMN_TILES> {
  // Adds one operation's products.
  __device__ __forceinline__ void add(Rows& rows, const char* weights) {
    if constexpr (EXACT) {
      float sums[ROW_TILES][4 * COLUMN_TILES];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) pin(sums[i]), pin(rows.low[i]), pin(rows.high[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        multiply(sums[i], rows.low[i], weights, false);
        multiply(sums[i], rows.high[i], weights + PART_BYTES, true);
        multiply(sums[i], rows.high[i], weights, true);
        wgmma_commit();
      }
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        wait(ROW_TILES - 1 - i);
        pin(sums[i]);
#pragma unroll
        for (int k = 0; k < 4 * COLUMN_TILES; ++k) of[i][k] += sums[i][k];
        pin(of[i]);  // now: the next operation's sums take the same registers
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) pin(of[i]), pin(rows.high[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) multiply(of[i], rows.high[i], weights, true);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) pin(of[i]);
    }
  }

 private:
  static __device__ __forceinline__ void multiply(float (&sums)[4 * COLUMN_TILES], const unsigned (&rows)[4],
                                                  const char* columns, bool add) {
#if WGMMA
    wgmma(sums, rows, matrix_descriptor<16>(shared_address(columns), CHUNK_BYTES), add);
#else
    columns += threadIdx.x % 32 * 4;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j, columns += 128) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[4 * j + k] = add ? sums[4 * j + k] : 0;
      mma<scalar_t>(sums + 4 * j, rows, *(const unsigned*)columns, *(const unsigned*)(columns + CHUNK_BYTES));
    }
#endif
  }

  static __device__ __forceinline__ void wait(int pending) {
    if (pending == 0) wgmma_wait<0>();
    if (pending == 1) wgmma_wait<1>();
    if (pending == 2) wgmma_wait<2>();
    if (pending == 3) wgmma_wait<3>();
  }

 public:
  // Writes a band to the product in shared memory. `slot`: ring row of the band's first row; `first_row`: image row of
  // the first band's first row.
  template <class Loader>
  __device__ __forceinline__ void store(float* product, const Loader& pixels, int first_row, int slot) const {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (pixels.places[u] < 0) continue;
      const int row = slot + pixels.heights[u] - first_row, ring = pixels.params.ring;
      float* const to = product + pixels.places[u] + (row < ring ? row : row - ring) * pixels.params.extent[3];
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int column = 8 * j + fragment_column() + k;
          if (COLUMNS % 8 != 0 && column >= COLUMNS) continue;
          Vector<float, UNIT> unit;
#pragma unroll
          for (int i = 0; i < UNIT; ++i) unit.value[i] = of[(u * UNIT + i) / 2][4 * j + k + i % 2 * 2];
          *(Vector<float, UNIT>*)(to + column * PITCH) = unit;
        }
    }
  }
};

// What a cell reads along one dimension: for each tap whether its pixel exists, and the pixel's offset in the product.
template <int KERNEL>
struct Reads {
  bool exists[KERNEL];
  int at[KERNEL];

  // `cell` is relative to the image, `in_tile` and `first` (the window's first pixel) to the tile. Pixels are `pitch`
  // apart and wrap after `ring`.
  __device__ __forceinline__ void init(Axis axis, int cell, int in_tile, int first, int size, int pitch,
                                       int ring = 0x7fffffff) {
#pragma unroll
    for (int tap = 0; tap < KERNEL; ++tap) {
      exists[tap] = (unsigned)(cell + src_offset(axis, tap)) < (unsigned)size;
      const int pixel = in_tile + src_offset(axis, tap) - first;
      at[tap] = (pixel < ring ? pixel : pixel - ring) * pitch;
    }
  }
};

// Stores the outputs of one cell and channel: the first `slabs`, `rows` and `columns` exist. Returns whether none is
// NaN.
__device__ __forceinline__ bool store_cell(const Params& params, const float* product, const Reads<AXIS_D.kernel>& d,
                                           const Reads<AXIS_H.kernel>& h, const Reads<AXIS_W.kernel>& w,
                                           ChannelTerms terms, scalar_t* to, int slabs, int rows, int columns) {
  bool numbers = true;
#pragma unroll
  for (int phase_d = 0; phase_d < AXIS_D.stride; ++phase_d)
#pragma unroll
    for (int phase_h = 0; phase_h < AXIS_H.stride; ++phase_h) {
      if (phase_d >= slabs || phase_h >= rows) continue;
      float value[RUN] = {};
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        const int kd = tap / (AXIS_H.kernel * AXIS_W.kernel), kh = tap / AXIS_W.kernel % AXIS_H.kernel;
        const int kw = tap % AXIS_W.kernel;
        if (phase_of(AXIS_D, kd) != phase_d || phase_of(AXIS_H, kh) != phase_h) continue;
        if (d.exists[kd] && h.exists[kh] && w.exists[kw])
          value[phase_of(AXIS_W, kw)] += product[tap * PITCH + d.at[kd] + h.at[kh] + w.at[kw]];
      }
#pragma unroll
      for (int i = 0; i < RUN; ++i) value[i] = add_bias(value[i], terms), numbers = numbers && value[i] == value[i];
      scalar_t* const row = to + phase_d * params.y.stride[2] + phase_h * params.y.stride[3];
      if (VECTORS && params.vectors) {
        Vector<scalar_t, STORED> run;
#pragma unroll
        for (int i = 0; i < STORED; ++i) narrow(operate(value[i], terms, row + i), run.value[i]);
        *(Vector<scalar_t, STORED>*)row = run;
      } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
          if (i < columns) {
            scalar_t* const element = row + i * params.y.stride[4];
            narrow(operate(value[i], terms, element), *element);
          }
      }
    }
  return numbers;
}

// Stores a cell's outputs one by one, computed without tensor cores. `x`: the group's first channel; `weight`: the
// channel's first weight; `first`: the cell's first output.
__device__ __forceinline__ void store_cell_plainly(const Params& params, const scalar_t* x, const scalar_t* weight,
                                                   const int (&first)[4], ChannelTerms terms, scalar_t* to) {
#pragma unroll 1
  for (int output = 0; output < AXIS_D.stride * AXIS_H.stride * AXIS_W.stride; ++output) {
    const int phase[4] = {0, output / (AXIS_H.stride * AXIS_W.stride), output / AXIS_W.stride % AXIS_H.stride,
                          output % AXIS_W.stride};
    const int at[4] = {first[0], first[1] + phase[1], first[2] + phase[2], first[3] + phase[3]};
    if (at[1] >= params.y.size[0] || at[2] >= params.y.size[1] || at[3] >= params.y.size[2]) continue;
    scalar_t* const element = to + offset_of(params.y, phase);
    narrow(finish(plain_sum(params.x, x, weight, IN_CHANNELS, at), terms, element), *element);
  }
}

// Stores rows `done` to `ready` of a tile's cells. Row i of the window is in ring row i + `turn`, modulo `ring`. A
// thread stores all channels of a cell, or with ALONG_CHANNELS one channel, and its neighbours the next ones.
__device__ __forceinline__ void store_rows(const Params& params, const float* product, const scalar_t* x,
                                           const scalar_t* weight, const EpilogueOperands& operands, scalar_t* y,
                                           const int (&first)[4], int first_out, int done, int ready, int turn) {
  const int extent[4] = {params.tile_extent[0], params.tile_extent[1], ready - done, params.tile_extent[3]};
  const int cells = volume(extent), channels = min(OUT_CHUNK, OUT_CHANNELS - first_out);
  const int along = ALONG_CHANNELS ? channels : 1;
  for (int i = threadIdx.x; i < cells * along; i += THREADS) {
    int in_tile[4], cell[4];
    decode(extent, i / along, in_tile);
    in_tile[2] += done;
#pragma unroll
    for (int j = 0; j < 4; ++j) cell[j] = first[j] + in_tile[j];
    const int slabs = params.y.size[0] - cell[1] * AXIS_D.stride, rows = params.y.size[1] - cell[2] * AXIS_H.stride;
    const int columns = params.y.size[2] - cell[3] * AXIS_W.stride;
    if (cell[0] >= params.batch || slabs <= 0 || rows <= 0 || columns <= 0) continue;
    Reads<AXIS_D.kernel> d;
    Reads<AXIS_H.kernel> h;
    Reads<AXIS_W.kernel> w;
    d.init(AXIS_D, cell[1], in_tile[1], params.first[1], params.x.size[0], params.ring * params.extent[3]);
    h.init(AXIS_H, cell[2], in_tile[2] + turn, params.first[2], params.x.size[1], params.extent[3], params.ring);
    w.init(AXIS_W, cell[3], in_tile[3], params.first[3], params.x.size[2], 1);
    const float* const of_image = product + in_tile[0] * (params.extent[1] * params.ring * params.extent[3]);
    cell[1] *= AXIS_D.stride, cell[2] *= AXIS_H.stride, cell[3] *= AXIS_W.stride;
    const int first_channel = i % along, behind = ALONG_CHANNELS ? first_channel + 1 : channels;
    scalar_t* to = y + offset_of(params.y, cell) + (first_out + first_channel) * params.y.stride[1];
#pragma unroll 1
    for (int channel = first_channel; channel < behind; ++channel, to += params.y.stride[1]) {
      const ChannelTerms terms = channel_terms(operands, first_out + channel);
      const bool numbers =
          store_cell(params, of_image + channel * (TAPS * PITCH), d, h, w, terms, to, slabs, rows, columns);
      if (EXACT && !numbers)
        store_cell_plainly(params, x, weight + (first_out + channel) * WEIGHT_STRIDE_OUT, cell, terms, to);
    }
  }
}

// Computes the tile whose first cell is `first`, from output channel `first_out` on; `x` and `weight` are the group's.
template <bool WHOLE>
__device__ __forceinline__ void compute_tile(const Params& params, const scalar_t* __restrict__ x,
                                             const scalar_t* __restrict__ weight, const EpilogueOperands& operands,
                                             scalar_t* __restrict__ y, const int (&first)[4], int first_out,
                                             char* shared_memory) {
  int window[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) window[i] = first[i] + params.first[i];
  PixelLoader<WHOLE> loader(params, x, window);
  Pixels ahead[PREFETCH];
  if (WHOLE) {
#pragma unroll
    for (int i = 0; i < PREFETCH; ++i) loader.load(ahead[i], i);
  }

  const int bands = ceil_div(params.extent[2], params.band),
            pixels = params.extent[0] * params.extent[1] * params.band * params.extent[3];
  const bool owns_pixels = threadIdx.x / TOGETHER * (TOGETHER / 2 * ROW_TILES) < pixels;
  char* const weights = shared_memory;
  float* const product = (float*)(shared_memory + min(STEPS_HELD, STEPS) * STEP_BYTES);
  int done = 0;  // rows of the tile's cells
#pragma unroll 1
  for (int band = 0; band < bands; ++band) {
    Sums sums;
    sums.clear();
#pragma unroll 1
    for (int begin = 0; begin < STEPS; begin += STEPS_HELD) {
      if (STEPS_HELD < STEPS || band == 0) {
        if (STEPS_HELD < STEPS) __syncthreads();
        load_weights(weight, begin, first_out, weights);
        __syncthreads();
      }
      const int end = owns_pixels ? min(STEPS, begin + STEPS_HELD) : 0;
#pragma unroll 1
      for (int step = begin; step < end; step += PREFETCH) {
        // Prefetch the next band; past the last one this reads the image's last row, which nothing uses.
        const int next = step + PREFETCH < STEPS ? step + PREFETCH : 0;
        if (WHOLE && next == 0) loader.begin_band(band + 1);
#pragma unroll
        for (int i = 0; i < PREFETCH; ++i) {
          if (!WHOLE) loader.load(ahead[i], step + i);
          Rows rows(ahead[i]);
          if (WHOLE) loader.load(ahead[i], next + i);
          if (STEPS % PREFETCH == 0 || step + i < STEPS) sums.add(rows, weights + (step - begin + i) * STEP_BYTES);
        }
      }
    }
    __syncthreads();  // the outputs of the previous band have been computed
    sums.store(product, loader, window[2], band * params.band % params.ring);
    __syncthreads();

    // `ready`: rows of cells to which no later band adds. `oldest`: the first window row that they read; `turn`: from
    // window rows to ring rows.
    const int end = (band + 1) * params.band + params.first[2] - last_offset(AXIS_H);
    const int ready = band + 1 < bands ? min(max(end, done), params.tile_extent[2]) : params.tile_extent[2];
    const int oldest = max(0, done + first_offset(AXIS_H) - params.first[2]), turn = oldest % params.ring - oldest;
    store_rows(params, product, x, weight, operands, y, first, first_out, done, ready, turn);
    done = ready;
    if (!WHOLE) loader.begin_band(band + 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    overlap_gemm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                 const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ y, const Params params) {
  extern __shared__ __align__(16) char shared_memory[];
  int block = blockIdx.x;
  const int first_out = block % OUT_BLOCKS * OUT_CHUNK;
  block /= OUT_BLOCKS;
  const int tiles = volume(params.tiles);
  const int group = block / tiles;
  int first[4];  // first cell of the tile
  tile_origin(params.tiles, params.tile_extent, block % tiles, first);
  x += (long long)group * IN_CHANNELS * params.x.stride[1];
  weight += (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN;
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, y, params.y.stride[0]) + group * OUT_CHANNELS;
  y += (long long)group * OUT_CHANNELS * params.y.stride[1];
  if (params.whole)
    compute_tile<true>(params, x, weight, operands, y, first, first_out, shared_memory);
  else
    compute_tile<false>(params, x, weight, operands, y, first, first_out, shared_memory);
}
