// Forward pass of layers with few channels in a group on tensor cores: all phases of a tile as one product of few rows,
// interleaved in shared memory and written as whole rows.
//
//   y[co, i·stride + phase]  =  bias[co]  +  Σ_ci Σ_pixel   w[ci, co, tap(phase, pixel)] · x[ci, i + pixel]
//
// where pixels are those that a cell i reads, relative to its own, and some pairs of phase and pixel have no tap.
//
// Rows of outputs without any tap are bias alone: they are computed once, and stay in shared memory.
//
// Warp roles. LOAD_WARPS fill stages by cp.async (producers), WARPS multiply and stage a tile's outputs in shared
// memory (consumers), STORE_WARPS write these. mbarriers: full and empty for each stage, and for each tile's outputs.
//
// Index mapping. A block owns OUT_CHUNK output channels of one group, and takes tile after tile of cells
// (core/geometry.cuh). Rows of the product are pairs of a phase that has taps and a channel, in blocks of 16; its
// columns are cells, of which a warp owns PIXEL_TILES tiles of 8. A stage is STAGE_STEPS operations' channels of the
// window that the tile reads. A warp reads the operands of its columns at a pixel once, for all row blocks that have a
// tap there. An entry is such a pair of pixel and row block.
//
// Without TF32 a float32 comes in PARTS (operand/split.cuh): three of bfloat16, whose instruction is twice as deep and
// multiplies with one part of the weights in its first half and with another in its second; or two of TF32, less
// accurate, if the weights would take too much shared memory. Each operation's sum is added in float32, since tensor
// cores round towards zero. An output may be wrong: the parts of Inf or NaN sum to NaN; Inf times the zero of a pair
// without a tap is NaN; the product of two parts that were rounded up may overflow though that of the values does not.
// Such outputs are computed again without the tensor cores (operand/plain_sum.cuh).
//
// Shared memory: the barriers; a `Pair` for each two cells; the weights in the order in which lanes read them; the
// outputs of one or two tiles (epilogue/staged_rows.cuh); rows of bias; the table of the window's pieces; BUFFERS
// stages.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "operand/plain_sum.cuh"
#include "operand/split.cuh"
#include "operand/tf32.cuh"
#include "mainloop/accumulators.cuh"
#include "mainloop/multistage.cuh"
#include "epilogue/finish.cuh"
#include "epilogue/staged_rows.cuh"
#include "core/phase_taps.cuh"

struct Params {
  Tensor5 x, y;
  StageBox window;
  int batch, groups;
  int tile_extent[4];  // cells of a tile along n, d, h, w; two neighbours along w are of one row
  Divisor tiles[4];    // tiles along n, d, h, w
  int first[4];        // the window's first pixel, relative to the tile's first cell
  int skew;            // pixels from there to the first that any tap reads
  int pitch[4];        // of staged outputs: elements from one channel, image, slab and row that has taps to the next
  int shift[4];  // misalignment to a sector that one channel, image, slab and row add in memory; 0 for joined rows
  int joined;    // rows that are contiguous in memory: all of a tile's slab, or 1
  int outputs;   // tiles of staged outputs, 1 or 2
  int at_once;   // blocks that share tiles; each begins with a tile of its own
  int counters;  // bytes of counters before the weights, one for each group and block of output channels; 0: tiles are
                 // not shared, and no kernel runs before
  int staged_bytes, bare_bytes, table_bytes, stage_bytes;
};

constexpr int CHANNELS = OPERATION / 8;  // channels in four bytes
constexpr int STEPS = ceil_div(IN_CHANNELS, OPERATION), STAGES = ceil_div(STEPS, STAGE_STEPS);
constexpr int OUT_BLOCKS = ceil_div(OUT_CHANNELS, OUT_CHUNK);
constexpr bool EXACT = PARTS > 1;
constexpr int ALL_WARPS = WARPS + LOAD_WARPS + STORE_WARPS, BLOCK = 32 * ALL_WARPS;
constexpr int LOAD_SPAN = LOAD_WARPS == 4 ? 7 : LOAD_WARPS == 2 ? 6 : 5;
static_assert(LOADERS == 1 << LOAD_SPAN && FIRST_LOAD_WARP == WARPS, "the last warps are those that store");

constexpr int MATRICES = EXACT ? 2 : 1;  // of an entry
constexpr int ENTRY_BYTES = MATRICES * 512, WEIGHT_BYTES = STEPS * ENTRIES.count * ENTRY_BYTES;
constexpr bool HAS_BARE = ALONG_D.phases < AXIS_D.stride || ALONG_H.phases < AXIS_H.stride;  // rows without taps

// Loads the weights of all operations for a block's channels; `weight` is the first channel's. Zero without a tap or
// channel. A word holds the weights of two neighbouring channels, of one channel, or with PARTS == 3 one part of two
// channels that are half an operation apart. With two parts there is a matrix of high and one of low parts; with three
// the matrices hold (first half of the depth, second half) parts 3 and 1, and parts 2 and 1.
__device__ __forceinline__ void load_weights(const scalar_t* weight, int channels, char* to) {
  constexpr int WORDS = PARTS == 3 ? 2 : 4;  // words of a lane: rows × halves of the channels
#pragma unroll 4
  for (int i = threadIdx.x; i < STEPS * ENTRIES.count * 32 * WORDS; i += BLOCK) {
    const int at = i / (32 * WORDS), entry = at % ENTRIES.count, lane = i / WORDS % 32;
    const int row = 16 * ENTRIES.block[entry] + lane / 4 + i % 2 * 8, out = row % OUT_CHUNK;
    const int in = at / ENTRIES.count * OPERATION + i % WORDS / 2 * (OPERATION / 2) + lane % 4 * CHANNELS;
    const int tap = row < ROWS ? tap_of(row / OUT_CHUNK, ENTRIES.pixel[entry]) : -1;
    const scalar_t* const from = weight + weight_offset(in, out, tap);
    constexpr int APART = PARTS == 3 ? OPERATION / 2 : CHANNELS - 1;
    scalar_t values[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool exists = tap >= 0 && out < channels && in + j * APART < IN_CHANNELS;
      values[j] = exists ? from[j * APART * WEIGHT_STRIDE_IN] : zero<scalar_t>();
    }
    unsigned* const slot = (unsigned*)(to + at * ENTRY_BYTES);
    if (PARTS == 3) {
      unsigned parts[3];
      split_pair(widen(values[0]), widen(values[1]), parts);
      unsigned* const word = slot + lane * 4 + i % 2;
      word[0] = parts[2], word[2] = parts[0];
      word[128] = parts[1], word[130] = parts[0];
    } else if (PARTS == 2) {
      split(widen(values[0]), slot[i % 128], slot[128 + i % 128]);
    } else {
      slot[i % 128] = word_of(values[0], values[1]);
    }
  }
}

// Where an output is staged: elements, and the misalignment to a sector. Places add up: those of a tile's origin, of a
// cell, and of a row of the product.
constexpr int NOWHERE = -(1 << 30);
__device__ __forceinline__ int staged_place(int elements, int off) { return elements * 64 + off % SECTOR; }
__device__ __forceinline__ int find_place(int sum) { return sum / 64 + sum % SECTOR; }

// Place of a row of outputs, relative to the tile's first. `d`, `h`: slab and line counted among those with taps;
// `slab`, `line`: counted in the tile.
__device__ __forceinline__ int place_of_row(const Params& params, int channel, int image, int d, int h, int slab,
                                            int line) {
  return staged_place(
      channel * params.pitch[0] + image * params.pitch[1] + d * params.pitch[2] + h * params.pitch[3],
      channel * params.shift[0] + image * params.shift[1] + slab * params.shift[2] + line * params.shift[3]);
}

// Place of the first output of the cell `at` n, d, h and w of the tile; NOWHERE beyond the tile.
__device__ __forceinline__ int place_of_cell(const Params& params, const int (&at)[4]) {
  if (at[0] >= params.tile_extent[0]) return NOWHERE;
  return place_of_row(params, 0, at[0], at[1] * ALONG_D.phases, at[2] * ALONG_H.phases, at[1] * AXIS_D.stride,
                      at[2] * AXIS_H.stride) +
         staged_place(at[3] * AXIS_W.stride, 0);
}

// Two neighbouring cells of a tile: the place of the first one's outputs (NOWHERE beyond the tile), how many outputs of
// each exist along the width, and what they read. Outputs outside the image matter only for joined rows.
struct Pair {
  int place;
  short width[2];
  int pixel[2];  // first pixel of each cell, in bytes from the window's first

  __device__ __forceinline__ Pair(const Params& params, const int (&at)[4]) : place(place_of_cell(params, at)) {
    const int row = (at[0] * params.window.extent[1] + at[1]) * params.window.extent[2] + at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int rest = params.joined > 1 ? max(0, params.y.size[2] - (at[3] + i) * AXIS_W.stride) : AXIS_W.stride;
      width[i] = place >= 0 ? (short)min(AXIS_W.stride, rest) : 0;
      pixel[i] = place >= 0 ? (row * params.window.extent[3] + at[3] + i + params.skew) * ELEMENT : 0;
    }
  }
};
constexpr int PAIRS = 4 * PIXEL_TILES * WARPS, PAIR_BYTES = round_up(PAIRS * (int)sizeof(Pair), 128);

// A warp's accumulators, by row block and column tile.
struct Sums : Accumulators<ROW_BLOCKS, 4 * PIXEL_TILES> {
  // Adds one operation for the warp's `pairs` of cells.
  __device__ __forceinline__ void add(const Params& params, const char* window, const Pair* pairs,
                                      const char* weights) {
    weights += threadIdx.x % 32 * 16;
    window += threadIdx.x % 4 * CHANNELS * params.window.pitch;
    int columns[PIXEL_TILES];  // bytes
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j) columns[j] = pairs[4 * j + threadIdx.x % 32 / 8].pixel[threadIdx.x / 4 % 2];
    Elements elements[PIXEL_TILES];
    Words words[PIXEL_TILES];
    if (PREFETCH) load(params, window, columns, 0, elements);
#pragma unroll
    for (int pixel = 0; pixel < PIXELS_READ; ++pixel) {
      if (PREFETCH) {
        to_words(elements, words);
        if (pixel + 1 < PIXELS_READ) load(params, window, columns, pixel + 1, elements);
      }
      // A loop of one iteration, opaque to the compiler, which would else interleave the products of several pixels and
      // spill.
#pragma unroll 1
      for (unsigned rounds = opaque(1); rounds > 0; --rounds) {
        if (!PREFETCH) {
          load(params, window, columns, pixel, elements);
          to_words(elements, words);
        }
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; ++i)
          if (ENTRIES.of[pixel][i] >= 0)
            multiply(of[i], weights + ENTRIES.of[pixel][i] * ENTRY_BYTES, words,
                     STEPS == 1 && ENTRIES.first[i] == pixel);
      }
    }
  }

 private:
  // A lane's elements of a pixel: two channels half an operation apart, or two pairs of neighbours. As the tensor cores
  // read them: a word of each of the two, then with two parts the low ones; or the three parts of both in one word
  // each.
  typedef scalar_t Elements[2 * CHANNELS];
  typedef unsigned Words[PARTS == 1 ? 2 : PARTS == 2 ? 4 : 3];

  // Whether a pixel is loaded while the previous one is multiplied; else registers do not suffice.
  static constexpr bool PREFETCH = PIXEL_TILES <= 4 && PARTS != 2;

  static __device__ __forceinline__ void load(const Params& params, const char* window,
                                              const int (&columns)[PIXEL_TILES], int pixel,
                                              Elements (&to)[PIXEL_TILES]) {
    const int d = ALONG_D.pixel[pixel / (ALONG_H.pixels * ALONG_W.pixels)] - ALONG_D.pixel[0];
    const int h = ALONG_H.pixel[pixel / ALONG_W.pixels % ALONG_H.pixels] - ALONG_H.pixel[0];
    const int w = ALONG_W.pixel[pixel % ALONG_W.pixels] - ALONG_W.pixel[0];
    const char* const from = window + ((d * params.window.extent[2] + h) * params.window.extent[3] + w) * ELEMENT;
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j)
#pragma unroll
      for (int k = 0; k < 2 * CHANNELS; ++k) {
        const int channel = k / CHANNELS * (OPERATION / 2) + k % CHANNELS;
        to[j][k] = *(const scalar_t*)(from + columns[j] + channel * params.window.pitch);
      }
  }
  static __device__ __forceinline__ void to_words(const Elements (&elements)[PIXEL_TILES],
                                                  Words (&words)[PIXEL_TILES]) {
#pragma unroll
    for (int j = 0; j < PIXEL_TILES; ++j) to_words(elements[j], words[j]);
  }
  template <class T>
  static __device__ __forceinline__ void to_words(const T (&elements)[2 * CHANNELS], unsigned (&words)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = word_of(elements[i * CHANNELS], elements[i * CHANNELS + CHANNELS - 1]);
  }
  static __device__ __forceinline__ void to_words(const float (&elements)[2], unsigned (&words)[3]) {
    split_pair(elements[0], elements[1], words);
  }
  static __device__ __forceinline__ void to_words(const float (&elements)[2], unsigned (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split(elements[i], words[i], words[2 + i]);
  }

  // Adds to the sums of a row block, or overwrites them. `weights` is the lane's.
  static __device__ __forceinline__ void multiply(float (&to)[4 * PIXEL_TILES], const char* weights,
                                                  const Words (&words)[PIXEL_TILES], bool first) {
    typedef Vector<unsigned, 4> Rows;
    if constexpr (EXACT) {
      float sums[4 * PIXEL_TILES] = {};
#pragma unroll
      for (int i = 0; i < 3; ++i) {  // the smallest products first
        const Rows rows = *(const Rows*)(weights + (PARTS == 3 ? i > 0 : i == 0) * 512);
        const int one = PARTS == 3 ? i == 2 : 2 * (i == 1), other = PARTS == 3 ? 2 - i : one + 1;
#pragma unroll
        for (int j = 0; j < PIXEL_TILES; ++j) mma<part_t>(sums + 4 * j, rows.value, words[j][one], words[j][other]);
      }
#pragma unroll
      for (int j = 0; j < 4 * PIXEL_TILES; ++j) to[j] = first ? sums[j] : to[j] + sums[j];
    } else {
#pragma unroll
      for (int j = 0; j < 4 * PIXEL_TILES; ++j) to[j] = first ? 0 : to[j];
      const Rows rows = *(const Rows*)weights;
#pragma unroll
      for (int j = 0; j < PIXEL_TILES; ++j) mma<scalar_t>(to + 4 * j, rows.value, words[j][0], words[j][1]);
    }
  }
};

// A row of the product that the lane has in a row block: its phase and channel. If OUT_CHUNK is a multiple of 8 the
// phase is the same in all lanes, and a constant.
struct Row {
  int d, h, w, channel;
  bool exists;

  __device__ __forceinline__ Row(int block, int i) {
    constexpr bool KNOWN = OUT_CHUNK % 8 == 0;
    const int first = 16 * block + 8 * i, lane = threadIdx.x % 32 / 4;
    const int phase = KNOWN ? first / OUT_CHUNK : (first + lane) / OUT_CHUNK, owned = min(phase, PHASES - 1);
    channel = KNOWN ? first % OUT_CHUNK + lane : (first + lane) % OUT_CHUNK;
    exists = phase < PHASES;
    d = ALONG_D.phase[owned / (ALONG_H.phases * ALONG_W.phases)];
    h = ALONG_H.phase[owned / ALONG_W.phases % ALONG_H.phases];
    w = exists ? ALONG_W.phase[owned % ALONG_W.phases] : AXIS_W.stride;
  }
  __device__ __forceinline__ int place(const Params& params) const {
    return place_of_row(params, channel, 0, ALONG_D.number[d], ALONG_H.number[h], d, h);
  }
};

// Stages the outputs of a tile: from sums to shared memory.
struct Outputs {
  const Params& params;
  const Pair* const pairs;          // the warp's cells
  const EpilogueOperands operands;  // the block's first channel
  const scalar_t* const y;          // the block's first channel
  const int channels;               // channels that exist from there on
  bool whole;  // whether all outputs of the warp's cells exist, in rows as aligned as the tile's first

  __device__ __forceinline__ Outputs(const Params& params, const Pair* pairs, const EpilogueOperands& operands,
                                     const scalar_t* y, int channels)
      : params(params), pairs(pairs), operands(operands), y(y), channels(channels), whole(true) {
    for (int i = 0; i < 4 * PIXEL_TILES; ++i) whole = whole && pairs[i].width[1] == AXIS_W.stride;
    for (int i = 0; i < 4; ++i) whole = whole && params.shift[i] % 2 == 0 && params.pitch[i] % 2 == 0;
  }

  __device__ __forceinline__ ChannelTerms terms(int channel) const {
    return channel_terms(operands, min(channel, channels - 1));
  }

  // Finds a row's first output along the width for cell `k` of pair `j`; `first`: the tile's first cell. Returns
  // whether the cell is in the tile.
  __device__ __forceinline__ bool output_of(const int (&first)[4], const Row& row, int j, int k, int (&at)[4]) const {
    decode(params.tile_extent, (threadIdx.x / 32 * PIXEL_TILES + j) * 8 + fragment_column() + k, at);
    const bool in_tile = at[0] < params.tile_extent[0];
    at[0] += first[0], at[1] = (first[1] + at[1]) * AXIS_D.stride + row.d;
    at[2] = (first[2] + at[2]) * AXIS_H.stride + row.h, at[3] = (first[3] + at[3]) * AXIS_W.stride;
    return in_tile;
  }
  // Address of output `w` of these; null if it does not exist.
  __device__ __forceinline__ const scalar_t* place_of(const int (&first)[4], const Row& row, int j, int k,
                                                      int w) const {
    int at[4];
    const bool in_tile = output_of(first, row, j, k, at) && row.exists && row.channel < channels;
    at[3] += w;
    const bool in_image =
        at[0] < params.batch && at[1] < params.y.size[0] && at[2] < params.y.size[1] && at[3] < params.y.size[2];
    return in_tile && in_image ? y + row.channel * params.y.stride[1] + offset_of(params.y, at) : nullptr;
  }

  // Returns whether none of the thread's outputs may be wrong.
  __device__ __forceinline__ bool stage(scalar_t* staged, int origin, const int (&first)[4], const Sums& sums) const {
    float doubt = 0;  // NaN if any may be wrong
    if (ROWS_AT_ONCE && whole && origin % 2 == 0)
      stage_rows<true>(staged, origin, first, sums, doubt);
    else
      stage_rows<false>(staged, origin, first, sums, doubt);
    return doubt == 0;
  }

  // Computes staged outputs again that may be wrong. `x`: the group's first channel; `weight`: the block's.
  __device__ __forceinline__ void mend(scalar_t* staged, int origin, const int (&first)[4], const scalar_t* x,
                                       const scalar_t* weight) const {
#pragma unroll 1
    for (int i = 0; i < 4 * ROW_BLOCKS * PIXEL_TILES; ++i) {
      const Row row(i / (4 * PIXEL_TILES), i / (2 * PIXEL_TILES) % 2);
      const int j = i / 2 % PIXEL_TILES, k = i % 2;
      const Pair& pair = pairs[4 * j + threadIdx.x % 4];
      if (row.w >= pair.width[k] || row.channel >= channels) continue;
      scalar_t* const to = staged + find_place(origin + row.place(params) + pair.place) + row.w + k * AXIS_W.stride;
      const float value = widen(*to);
      // Elementwise operations may have turned NaN into a number.
      if (!EPILOGUE && (EXACT ? fabsf(value) <= 3.402823466e+38f : value == value)) continue;
      int at[4];
      output_of(first, row, j, k, at), at[3] += row.w;
      if (at[0] >= params.batch) continue;
      const float sum = plain_sum(params.x, x, weight + row.channel * WEIGHT_STRIDE_OUT, IN_CHANNELS, at);
      narrow(finish(sum, terms(row.channel), EPILOGUE_READS_PLACES ? place_of(first, row, j, k, row.w) : nullptr), *to);
    }
  }

 private:
  // Whether a thread holds all elements of two cells' rows, which it stages two at a time.
  static constexpr bool ROWS_AT_ONCE = OUT_CHUNK % 8 == 0 && ALONG_W.phases == AXIS_W.stride;
  static constexpr int RUN = ROWS_AT_ONCE ? AXIS_W.stride : 1;  // neighbouring phases along the width of a thread

  __device__ __forceinline__ float doubted(float sum, ChannelTerms terms, const scalar_t* to, float& doubt) const {
    const float value = add_bias(sum, terms);
    doubt = fmaf(value, 0.f, doubt);
    return operate(value, terms, to);
  }

  template <bool WHOLE>
  __device__ __forceinline__ void stage_rows(scalar_t* staged, int origin, const int (&first_cell)[4], const Sums& sums,
                                             float& doubt) const {
    constexpr int STRIDE = AXIS_W.stride;
#pragma unroll
    for (int i = 0; i < round_up(ROWS / RUN, 8); i += 8) {
      const int first = i / OUT_CHUNK * (RUN * OUT_CHUNK) + i % OUT_CHUNK;  // row of the first phase
      const Row row(first / 16, first / 8 % 2);
      const ChannelTerms of_channel = terms(row.channel);
#pragma unroll
      for (int j = 0; j < PIXEL_TILES; ++j) {
        const Pair pair = pairs[4 * j + threadIdx.x % 4];  // copied, so that it is not read again after each store
        scalar_t* const to = staged + find_place(origin + row.place(params) + pair.place) + row.w;
        const auto place = [&](int cell, int w) {
          return EPILOGUE_READS_PLACES ? place_of(first_cell, row, j, cell, w) : nullptr;
        };
        alignas(2 * ELEMENT) scalar_t values[2 * RUN];
#pragma unroll
        for (int k = 0; k < 2 * RUN; ++k) {
          const int at = first + k % RUN * OUT_CHUNK;
          const float sum = sums.of[at / 16][4 * j + at / 8 % 2 * 2 + k / RUN];
          const float value = doubted(sum, of_channel, place(k / RUN, row.w + k % RUN), doubt);
          if (ROWS_AT_ONCE || row.w < pair.width[k]) narrow(value, ROWS_AT_ONCE ? values[k] : to[k * STRIDE]);
        }
        const bool by_pairs =
            ROWS_AT_ONCE && (WHOLE || (pair.width[1] == STRIDE && shared_address(to) % (2 * ELEMENT) == 0));
#pragma unroll
        for (int k = 0; k < RUN; ++k)
          if (by_pairs) ((Vector<scalar_t, 2>*)to)[k] = ((const Vector<scalar_t, 2>*)values)[k];
#pragma unroll
        for (int k = 0; k < 2 * RUN; ++k)
          if (ROWS_AT_ONCE && !by_pairs && k % RUN < pair.width[k / RUN]) to[k] = values[k];
        const bool first_phase = ALONG_W.phases < STRIDE && row.w == ALONG_W.phase[0];
#pragma unroll
        for (int k = 0; k < 2 * STRIDE; ++k)  // outputs without taps beside it
          if (ALONG_W.number[k % STRIDE] < 0 && first_phase && k % STRIDE < pair.width[k / STRIDE])
            narrow(finish_empty(of_channel, place(k / STRIDE, k % STRIDE)), to[k - row.w]);
      }
    }
  }
};

// Elements from one channel's row of `length` bias values to the next; 0 without bias, as all rows are then alike.
__device__ __forceinline__ int bare_pitch(int length) { return HAS_BIAS ? round_up(length + SECTOR, SECTOR) : 0; }
__device__ __forceinline__ void fill_bare_rows(const Params& params, const EpilogueOperands& operands, int channels,
                                               scalar_t* bare) {
  const int pitch = bare_pitch(params.tile_extent[3] * AXIS_W.stride);
  for (int i = threadIdx.x; i < params.bare_bytes / ELEMENT; i += BLOCK) {
    scalar_t value = zero<scalar_t>();
    if (HAS_BIAS) narrow(finish_empty(channel_terms(operands, min(i / pitch, channels - 1)), nullptr), value);
    bare[i] = value;
  }
}

// Writes the staged outputs of a tile to memory; run by STORE_WARPS.
struct Writer {
  const Params& params;
  const scalar_t* const staged;
  const scalar_t* const bare;
  scalar_t* const y;   // the tile's first output in the block's first channel
  const int channels;  // channels that exist from there on
  const int (&size)[4];

  __device__ __forceinline__ void write() const {
    const int images = min(params.tile_extent[0], size[0]), slabs = min(params.tile_extent[1] * AXIS_D.stride, size[1]);
#pragma unroll 1
    for (int image = 0; image < images; ++image)
#pragma unroll 1
      for (int slab = 0; slab < slabs; ++slab) write_slab(image, slab);
  }

 private:
  // Each warp has neighbouring rows. Each lane issues the TMA store of one, then the warp writes the rows' ends.
  __device__ __forceinline__ void write_slab(int image, int slab) const {
    const int warp = threadIdx.x / 32 - (WARPS + LOAD_WARPS), lane = threadIdx.x % 32;
    const int lines = min(params.tile_extent[2] * AXIS_H.stride, size[2]),
              row = min(params.tile_extent[3] * AXIS_W.stride, size[3]);
    const int length = params.joined > 1 ? lines * params.y.size[2] : row, of_channel = params.joined > 1 ? 1 : lines;
    const int each = round_up(ceil_div(OUT_CHUNK * of_channel, STORE_WARPS), ENDS_AT_ONCE);
    const int behind = min((warp + 1) * each, OUT_CHUNK * of_channel), d = ALONG_D.number[slab % AXIS_D.stride];
#pragma unroll 1
    for (int first = warp * each; first < behind; first += 32) {
      const int i = first + lane, channel = i / of_channel, line = i % of_channel;
      const int h = ALONG_H.number[line % AXIS_H.stride];
      const int place = place_of_row(params, channel, image, slab / AXIS_D.stride * ALONG_D.phases + d,
                                     line / AXIS_H.stride * ALONG_H.phases + h, slab, line);
      scalar_t* to = y + channel * params.y.stride[1] + image * params.y.stride[0] + slab * params.y.stride[2] +
                     line * params.y.stride[3];
      const scalar_t* from = staged + find_place(staged_place(0, misalignment(y)) + place);
      if (HAS_BARE && (d < 0 || h < 0))
        from = bare + channel * bare_pitch(params.tile_extent[3] * AXIS_W.stride) + misalignment(to);
      const int mine = i < behind && channel < channels ? length : 0;
      write_rows(to, from, mine, min(32, behind - first), params.y.stride[4]);
    }
  }
};

// Stage `number` of all stages of a block's tiles, one tile after the other. A single number, to save registers.
struct Stage {
  int number = 0;

  __device__ __forceinline__ int tile() const { return number / STAGES; }
  __device__ __forceinline__ int of_tile() const { return number % STAGES; }
  __device__ __forceinline__ bool is_last() const { return of_tile() == STAGES - 1; }
  // Its buffer, and the parity of the buffer's barriers.
  __device__ __forceinline__ int slot() const { return number % BUFFERS; }
  __device__ __forceinline__ int parity() const { return number / BUFFERS % 2; }
  // The tile's outputs, and the parity of their barriers.
  __device__ __forceinline__ int output(const Params& params) const { return tile() & (params.outputs - 1); }
  __device__ __forceinline__ int output_parity(const Params& params) const {
    return tile() >> (params.outputs - 1) & 1;
  }
};

// What producers tell the other warps: a tile's first cell, and the place of its outputs, NOWHERE after the last tile.
struct Note {
  int cell[4], place;
};

// Barriers: a stage is full or empty; a tile's outputs are staged ("full") or written ("empty").
struct Pipeline {
  // Producers are at most BUFFERS stages ahead of consumers, and these at most two tiles ahead of the storing warps. So
  // with one stage a tile BUFFERS + 2 notes are in use.
  static constexpr int NOTES = 8;
  static_assert(BUFFERS + 2 <= NOTES, "a short ring");

  PipelineBarriers<BUFFERS> stages;
  PipelineBarriers<2> outputs;
  Note notes[NOTES];
  int taken[2];  // numbers of the tiles taken from the counter

  __device__ __forceinline__ Note& note(const Stage& stage) { return notes[stage.tile() % NOTES]; }
};
constexpr int PIPELINE_BYTES = 384;
static_assert(sizeof(Pipeline) <= PIPELINE_BYTES, "what the schedule sets aside");

// A block's share: output channels of a group from `first_out` on, and the number of its first tile.
struct Share {
  int first_out, group, tile;

  __device__ __forceinline__ Share(const Params& params) {
    first_out = blockIdx.x % OUT_BLOCKS * OUT_CHUNK;
    group = blockIdx.x / OUT_BLOCKS % params.groups;
    tile = blockIdx.x / OUT_BLOCKS / params.groups;
  }
  // Input channels, and weights, from the block's first on.
  __device__ __forceinline__ const scalar_t* input(const Params& params, const scalar_t* x) const {
    return x + (long long)group * IN_CHANNELS * params.x.stride[1];
  }
  __device__ __forceinline__ const scalar_t* weights(const scalar_t* weight) const {
    return weight + (long long)group * IN_CHANNELS * WEIGHT_STRIDE_IN + first_out * WEIGHT_STRIDE_OUT;
  }
};

// Tile scheduler of the producers: static, every n-th tile; or dynamic, the next tile that no block has taken, so that
// neighbouring tiles are computed at the same time even if blocks differ in speed.
struct Tiles {
  const Params& params;
  unsigned* const counter;  // null: static
  int* const taken;
  int number, at[4];  // the tile's number, and its index along n, d, h and w
  int ahead = 0;      // the taking thread's next counter value; tiles are counted after the blocks' first ones
  int parity = 0;

  __device__ __forceinline__ Tiles(const Params& params, unsigned* counter, int* taken, int first)
      : params(params), counter(counter), taken(taken), number(first) {
    decode(params.tiles, number, at);
    if (counter && threadIdx.x == THREADS) ahead = (int)atomicAdd(counter, 1u);
  }
  __device__ __forceinline__ bool exists() const { return at[0] < params.tiles[0]; }
  __device__ __forceinline__ void advance() {
    number += params.at_once;
    if (counter) {
      // The counter's value is used at the next tile, so that its latency is hidden.
      if (threadIdx.x == THREADS) taken[parity] = params.at_once + ahead, ahead = (int)atomicAdd(counter, 1u);
      named_barrier_sync(1, LOADERS);
      number = *(volatile int*)(taken + parity);
      parity ^= 1;
    }
    decode(params.tiles, number, at);
  }
  __device__ __forceinline__ void first_cell(int (&cell)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) cell[i] = at[i] * params.tile_extent[i];
  }
};

// The first output of a tile.
__device__ __forceinline__ void first_output(const int (&cell)[4], int (&output)[4]) {
  output[0] = cell[0], output[1] = cell[1] * AXIS_D.stride;
  output[2] = cell[2] * AXIS_H.stride, output[3] = cell[3] * AXIS_W.stride;
}

// The three warp roles.

__device__ __forceinline__ void load_stages(const Params& params, Tiles tiles, Pipeline& pipeline, Place* places,
                                            char* buffers, const scalar_t* x, const scalar_t* y) {
  StageBoxLoader<false, STAGE_STEPS * OPERATION, Moving, LOAD_SPAN> loader(params.x, params.window);
  loader.init(places, volume(params.window.extent));
  named_barrier_sync(1, LOADERS);
  bool exists = true;  // false after the last tile, which a note tells
  for (Stage stage; exists; ++stage.number) {
    const unsigned full = shared_address(pipeline.stages.full + stage.slot());
    mbarrier_wait(shared_address(pipeline.stages.empty + stage.slot()), stage.parity() ^ 1);
    exists = tiles.exists();
    int at[4];
    tiles.first_cell(at);
    if (threadIdx.x == THREADS && stage.of_tile() == 0) {
      Note& note = pipeline.note(stage);
      int output[4];
      first_output(at, output);
      note.place = exists ? staged_place(0, misalignment(y + offset_of(params.y, output))) : NOWHERE;
#pragma unroll
      for (int i = 0; i < 4; ++i) note.cell[i] = at[i];
    }
    if (exists) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at[i] += params.first[i];
      const int channel = stage.of_tile() * (STAGE_STEPS * OPERATION);
      loader.load(x + channel * params.x.stride[1], IN_CHANNELS - channel, buffers + stage.slot() * params.stage_bytes,
                  params.batch, at);
      mbarrier_expect_cp_async(full);
      if (stage.is_last()) tiles.advance();
    }
    mbarrier_arrive(full);
  }
}

__device__ __forceinline__ void multiply_stages(const Params& params, Pipeline& pipeline, const char* weights,
                                                const char* buffers, scalar_t* staged, const Outputs& outputs,
                                                const scalar_t* x, const scalar_t* weight) {
  Sums sums;
  sums.clear();
#pragma unroll 1
  for (Stage stage;; ++stage.number) {
    mbarrier_wait(shared_address(pipeline.stages.full + stage.slot()), stage.parity());
    const Note& note = pipeline.note(stage);
    const bool exists = *(volatile const int*)&note.place != NOWHERE;
    if (exists) {
      const char* const window = buffers + stage.slot() * params.stage_bytes;
      const char* const from = weights + stage.of_tile() * (STAGE_STEPS * ENTRIES.count * ENTRY_BYTES);
#pragma unroll 1
      for (int i = 0; i < min(STAGE_STEPS, STEPS - stage.of_tile() * STAGE_STEPS); ++i)
        sums.add(params, window + i * OPERATION * params.window.pitch, outputs.pairs,
                 from + i * (ENTRIES.count * ENTRY_BYTES));
    }
    if (!exists || stage.is_last()) {
      const int output = stage.output(params);
      mbarrier_wait(shared_address(pipeline.outputs.empty + output), stage.output_parity(params) ^ 1);
      if (exists) {
        scalar_t* const to = (scalar_t*)((char*)staged + output * params.staged_bytes);
        if (!outputs.stage(to, note.place, note.cell, sums)) {
          const Share share(params);
          outputs.mend(to, note.place, note.cell, share.input(params, x), share.weights(weight));
        }
        publish_rows();
      }
      mbarrier_arrive(shared_address(pipeline.outputs.full + output));
      if (!exists) break;
      sums.clear();
    }
    pipeline.stages.release(stage.slot());
  }
}

__device__ __forceinline__ void store_tiles(const Params& params, Pipeline& pipeline, const scalar_t* staged,
                                            const scalar_t* bare, scalar_t* y, int channels) {
  for (Stage stage;; stage.number += STAGES) {
    const int output = stage.output(params);
    mbarrier_wait(shared_address(pipeline.outputs.full + output), stage.output_parity(params));
    const Note note = pipeline.note(stage);
    if (note.place == NOWHERE) break;
    int at[4], size[4];
    first_output(note.cell, at);
    size[0] = params.batch - at[0];
#pragma unroll
    for (int i = 0; i < 3; ++i) size[1 + i] = params.y.size[i] - at[1 + i];
    const scalar_t* const outputs = (const scalar_t*)((const char*)staged + output * params.staged_bytes);
    Writer{params, outputs, bare, y + offset_of(params.y, at), channels, size}.write();
    bulk_stores_wait();
    mbarrier_arrive(shared_address(pipeline.outputs.empty + output));
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    grouped_gemm(const scalar_t* __restrict__ x, const scalar_t* weight,  // weight: the step before may still write it
                 const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ y, const Params params) {
  extern __shared__ __align__(128) char shared_memory[];
  const Share share(params);
  const int channels = OUT_CHANNELS - share.first_out, first_bias = share.group * OUT_CHANNELS + share.first_out;
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, y, params.y.stride[0]) + first_bias;
  y += first_bias * params.y.stride[1];

  Pipeline& pipeline = *(Pipeline*)shared_memory;
  Pair* const pairs = (Pair*)(shared_memory + PIPELINE_BYTES);
  char* const weights = (char*)pairs + PAIR_BYTES;
  scalar_t* const staged = (scalar_t*)(weights + WEIGHT_BYTES);
  scalar_t* const bare = (scalar_t*)((char*)staged + params.outputs * params.staged_bytes);
  Place* const places = (Place*)((char*)bare + params.bare_bytes);
  char* const buffers = (char*)places + params.table_bytes;

  if (threadIdx.x == 0) {
    pipeline.stages.init(LOADERS, WARPS);
    pipeline.outputs.init(THREADS, 32 * STORE_WARPS);
  }
  for (int i = threadIdx.x; i < PAIRS; i += BLOCK) {
    int at[4];
    decode(params.tile_extent, 2 * i, at);
    pairs[i] = Pair(params, at);
  }
  unsigned* counter = nullptr;
  if (params.counters) {
    counter = (unsigned*)weight + (share.group * OUT_BLOCKS + share.first_out / OUT_CHUNK);
    weight = (const scalar_t*)((const char*)weight + params.counters);
    griddepcontrol_wait();
  }
  load_weights(share.weights(weight), channels, weights);
  if (HAS_BARE) {
    fill_bare_rows(params, operands, channels, bare);
    publish_rows();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS + LOADERS) {
    store_tiles(params, pipeline, staged, bare, y, channels);
  } else if (threadIdx.x >= THREADS) {
    load_stages(params, Tiles(params, counter, pipeline.taken, share.tile), pipeline, places, buffers,
                share.input(params, x), y);
  } else {
    const Outputs outputs(params, pairs + threadIdx.x / 32 * (4 * PIXEL_TILES), operands, y, channels);
    multiply_stages(params, pipeline, weights, buffers, staged, outputs, x, weight);
  }
}
