// The forward pass with wgmma where every output has one tap: kernel = stride, no padding. Persistent,
// warp-specialised, ping-pong. All elements of a cell read the same pixel, so this is one GEMM: M are pixels, K are
// input channels, and N, the columns of a group, are
//
//     column  =  (output channel · phases along d, h  +  phase along d, h) · stride along w  +  phase along w
//
// which is the memory order of the weights, and in which a cell's elements of a row are neighbours.
//
// Warp specialisation. Two consumer warpgroups multiply, one producer warpgroup loads. One consumer runs the epilogue
// of a chunk while the other multiplies (ping-pong, by the barriers `order`).
//
// Index mapping. A tile is TILE pixels, of all images one after the other, ROW_TILES · 64 for each consumer. The
// channels of its pixels stay in registers for all columns: they are loaded from global memory straight into MMA
// fragments, or, with PREFETCH, by cp.async through a ring in shared memory for each consumer. COLUMNS columns are a
// chunk; its weights (steps/pack_columns.cu) are loaded stage by stage into shared memory by TMA, STAGE_STEPS
// operations each, or stay there (RESIDENT). Blocks are persistent and take every gridDim-th tile, so that neighbouring
// tiles are stored at the same time; the chunks of the last wave of tiles are divided among all blocks. A tile's last
// chunk is stored after the loads of the next tile's pixels have been issued.
//
// float32 is multiplied as float16 (SCALED, operand/scaled_half.cuh): four lanes hold all channels of a pixel, so they
// find its largest magnitude, which gives the pixel's scale.
//
// A GEMM may permute M. So a thread has runs of RUN neighbouring pixels, which it loads and stores together. If a cell
// is two elements wide the outputs of a run are contiguous, too, and so are those of neighbouring threads.
//
// Shared memory: STAGES stages of weights; with PREFETCH PIXEL_SLOTS slots of pixels for each consumer; bias and scales
// of TERM_PLACES chunks for each (`Terms`); `Shared`, the barriers.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "operand/scaled_half.cuh"
#include "operand/tf32.cuh"
#include "mainloop/accumulators.cuh"

struct Params {
  Tensor5 x, y;
  int pixels;        // of all images
  Divisor sizes[3];  // of an image along d, h, w
  Divisor groups;    // of channels
  int rounds;        // whole units of each block
  int units, share;  // all units; a block's share of the chunks of the remaining units
  int piece;         // bytes of a cp.async of neighbouring pixels, with PREFETCH
  int vector;        // outputs of one store: of 4, 2 or 1 pixels, or a single output
  int x_stride;      // channel stride
  int y_stride[4];   // strides of channels, d, h and w
};

constexpr int CONSUMER_GROUPS = 2, THREADS = 128 * (CONSUMER_GROUPS + 1), TILE = 64 * ROW_TILES * CONSUMER_GROUPS;
constexpr int PIXELS = 2 * ROW_TILES;  // pixels of a thread
constexpr int RUNS = PIXELS / RUN;
constexpr int ELEMENT = sizeof(scalar_t), DEPTH = 16;  // channels of an operation
constexpr int STEPS = ceil_div(IN_CHANNELS, DEPTH);
constexpr int LINES = AXIS_D.stride * AXIS_H.stride;
constexpr int ALL_COLUMNS = OUT_CHANNELS * TAPS, COLUMNS = 8 * COLUMN_TILES;
constexpr int CHUNKS = ceil_div(ALL_COLUMNS, COLUMNS);
constexpr int CHUNK_STAGES = STEPS / STAGE_STEPS;
constexpr int CHUNK_PITCH = COLUMNS * 16, OPERATION_BYTES = 2 * CHUNK_PITCH;
constexpr int STAGE_BYTES = STAGE_STEPS * OPERATION_BYTES, CHUNK_BYTES = CHUNK_STAGES * STAGE_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int TERMS = SCALED + HAS_BIAS, TERM_PLACES = 3, TERM_BYTES = COLUMNS * 4 * TERMS;  // of a chunk
constexpr int SOME_TERMS = TERMS > 0 ? TERMS : 1;

// The ring of a consumer's pixels; a row holds the pixels of one channel.
constexpr int PIXEL_SLOTS = 4, SLOT_CHANNELS = 32, ROW_BYTES = TILE / CONSUMER_GROUPS * ELEMENT;
constexpr int SLOT_BYTES = SLOT_CHANNELS * ROW_BYTES, RUN_SLOTS = ceil_div(IN_CHANNELS, SLOT_CHANNELS);

static_assert(STEPS % STAGE_STEPS == 0, "stages are whole");
static_assert(registers_suffice(128 * CONSUMER_GROUPS, CONSUMER_REGISTERS, 128, PRODUCER_REGISTERS),
              "too few registers");
static_assert(ROW_TILES * ELEMENT == 4, "a thread's outputs are 16 bytes");
static_assert(!RESIDENT || STAGES == CHUNKS * CHUNK_STAGES, "all stages are there");
static_assert(PIXELS % RUN == 0, "runs are whole");
static_assert(!PREFETCH || RUN > 1, "a thread's pixels are neighbours");
static_assert(TAPS == LINES * AXIS_W.stride, "the kernel is the stride");
static_assert(AXIS_W.stride % 2 == 0, "a thread's two columns are neighbours in a row");

struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  unsigned long long order[CONSUMER_GROUPS];  // the consumer may multiply; the other one's warps arrive
  unsigned long long pixels[CONSUMER_GROUPS][PIXEL_SLOTS], room[CONSUMER_GROUPS][PIXEL_SLOTS];
};

typedef PipelineState<PIXEL_SLOTS> PixelSlot;

// Some chunks of a unit, which is a tile and a group of channels.
struct Run {
  int unit, first, behind;

  __device__ __forceinline__ bool exists() const { return first < behind; }
};

// The runs of a block in order: whole units first, then its share of the remaining chunks.
class Runs {
 public:
  __device__ __forceinline__ explicit Runs(const Params& params) : round(0), index((int)blockIdx.x * params.share) {}
  // Returns a run without chunks after the last.
  __device__ __forceinline__ Run next(const Params& params) {
    if (round < params.rounds) return {round++ * (int)gridDim.x + (int)blockIdx.x, 0, CHUNKS};
    const int behind =
        min(((int)blockIdx.x + 1) * params.share, (params.units - params.rounds * (int)gridDim.x) * CHUNKS);
    if (index >= behind) return {0, 0, 0};
    const int of_unit = index / CHUNKS, first = index % CHUNKS, last = min(CHUNKS, first + behind - index);
    index += last - first;
    return {params.rounds * (int)gridDim.x + of_unit, first, last};
  }

 private:
  int round, index;  // index: among the remaining chunks
};

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// The first pixel of a warp; pixel_of(): a thread's i-th pixel, relative to that.
__device__ __forceinline__ int first_pixel(int tile) { return tile * TILE + threadIdx.x / 32 * (16 * ROW_TILES); }
__device__ __forceinline__ int pixel_of(int i) { return i / RUN * (8 * RUN) + lane() / 4 * RUN + i % RUN; }

// Offsets of a pixel and of its cell from a tensor's first channel.
struct Pixel {
  long long x, y;
  bool exists;

  __device__ __forceinline__ Pixel(const Params& params, int index) : exists(index < params.pixels) {
    if (!exists) index = 0;
    const int row = index / params.sizes[2], slab = row / params.sizes[1], image = slab / params.sizes[0];
    const int w = index % params.sizes[2], h = row % params.sizes[1], d = slab % params.sizes[0];
    x = image * params.x.stride[0] + d * params.x.stride[2] + h * params.x.stride[3] + w * params.x.stride[4];
    y = image * params.y.stride[0] + d * AXIS_D.stride * params.y.stride[2] + h * AXIS_H.stride * params.y.stride[3] +
        w * AXIS_W.stride * params.y.stride[4];
  }
};

// The bits of COUNT elements.
template <int COUNT>
using Words = Vector<unsigned, ceil_div(COUNT* ELEMENT, 4)>;

// Byte offset of a 16-byte piece in a row of pixels, permuted so that neighbouring threads, which read different
// channels, meet no bank twice.
__device__ __forceinline__ int place_in_row(int piece, int channel) { return (piece ^ channel / 2 % 4 * 2) * 16; }

// Run by one warp: loads a warpgroup's pixels, BYTES at a time, run by run. Pixels that do not exist become zero.
template <int BYTES>
__device__ __forceinline__ void load_pixels(const Params& params, const scalar_t* x, unsigned slots,
                                            const Shared& shared, int group) {
  constexpr int LANES = ROW_BYTES / BYTES;  // lanes that load a row
  const int offset = lane() % LANES * BYTES;
  PixelSlot slot;
  Runs runs(params);
  for (Run run = runs.next(params); run.exists(); run = runs.next(params)) {
    const Pixel pixel(params, run.unit / params.groups * TILE + (group * ROW_BYTES + offset) / ELEMENT);
    const scalar_t* from =
        x + pixel.x + (long long)(run.unit % params.groups * IN_CHANNELS + lane() / LANES) * params.x_stride;
    for (int first = 0; first < IN_CHANNELS; first += SLOT_CHANNELS, slot.next()) {
      mbarrier_wait(shared_address(&shared.room[group][slot.index]), slot.parity ^ 1);
#pragma unroll 1
      for (int i = lane() / LANES; i < SLOT_CHANNELS; i += 32 / LANES, from += 32 / LANES * params.x_stride)
        cp_async<BYTES>(slots + slot.index * SLOT_BYTES + i * ROW_BYTES + place_in_row(offset / 16, i) + offset % 16,
                        from, pixel.exists && first + i < IN_CHANNELS);
      mbarrier_arrive_cp_async(shared_address(&shared.pixels[group][slot.index]));
    }
  }
}

// In float32 two channels are converted into one word of an operand: the first is loaded into the word's register, the
// second here. (If both were loaded here, they would need registers besides the operands of the previous chunk.)
struct Seconds {
  float of[SCALED ? STEPS : 1][4];
};

// All channels of a thread's pixels, as the tensor cores read them (ptx/mma.cuh).
struct Rows {
  unsigned of[ROW_TILES][STEPS][4];
  float unscale[PIXELS];  // SCALED: factors of the sums

  // Reads up to COUNT slots of the consumer's ring, from slot FIRST of a run on.
  template <int FIRST, int COUNT>
  __device__ __forceinline__ void take(unsigned slots, const Shared& shared, int group, PixelSlot& slot,
                                       Seconds& seconds) {
    const int channel = lane() % 4 * 2;
    unsigned first[RUNS];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int offset = (threadIdx.x / 32 % 4 * (16 * ROW_TILES) + pixel_of(run * RUN)) * ELEMENT;
      first[run] = slots + channel * ROW_BYTES + place_in_row(offset / 16, channel) + offset % 16;
    }
#pragma unroll
    for (int s = FIRST; s < min(FIRST + COUNT, RUN_SLOTS); ++s, slot.next()) {
      mbarrier_wait(shared_address(&shared.pixels[group][slot.index]), slot.parity);
#pragma unroll
      for (int i = 0; i < 2 * SLOT_CHANNELS / DEPTH; ++i)
        if (s * (SLOT_CHANNELS / DEPTH) + i / 2 < STEPS)
#pragma unroll
          for (int run = 0; run < RUNS; ++run)
            load_half<true>(seconds, s * (2 * SLOT_CHANNELS / DEPTH) + i, run,
                            (const scalar_t*)__cvta_shared_to_generic(first[run] + slot.index * SLOT_BYTES) +
                                i * (DEPTH / 2) * (ROW_BYTES / ELEMENT),
                            ROW_BYTES / ELEMENT, 0);
      __syncwarp();
      if (lane() == 0) mbarrier_arrive(shared_address(&shared.room[group][slot.index]));
    }
  }
  // `x` is the group's first channel. A pixel that does not exist is read from a valid address. No instruction waits
  // for these loads before settle().
  __device__ __forceinline__ void load_runs(const Params& params, const scalar_t* x, int first, Seconds& seconds) {
    const int channel = lane() % 4 * 2;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const scalar_t* from = x + Pixel(params, first + pixel_of(run * RUN)).x + (long long)channel * params.x_stride;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i, from += DEPTH / 2 * params.x_stride)
        load_half<false>(seconds, i, run, from, params.x_stride, channel);
    }
  }
  // The same for runs of a single pixel.
  __device__ __forceinline__ void load_apart(const Params& params, const scalar_t* x, int first, Seconds& seconds) {
    const int channel = lane() % 4 * 2;
    x += (long long)channel * params.x_stride;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      const long long one = Pixel(params, first + pixel_of(i)).x;
      if (SCALED)
        load_apart<1>(seconds, i / 2, i % 2, x + one, 0, params.x_stride, channel);
      else if (i % 2 == 0)
        load_apart<2>(seconds, i / 2, 0, x + one, Pixel(params, first + pixel_of(i + 1)).x - one, params.x_stride,
                      channel);
    }
  }
  // Converts the loaded pixels to MMA operands. `turns` is always true: without a condition the compiler moves code
  // until registers spill.
  __device__ __forceinline__ void settle(const Seconds& seconds, bool turns) {
    if constexpr (SCALED) {
      float scale[2];
#pragma unroll
      for (int pixel = 0; pixel < 2; ++pixel) {
        float largest = 0;
#pragma unroll
        for (int i = pixel; i < 4 * STEPS; i += 2)
          largest = larger_magnitude(larger_magnitude(largest, __uint_as_float(of[0][i / 4][i % 4])),
                                     seconds.of[i / 4][i % 4]);
#pragma unroll
        for (int by = 1; by < 4; by *= 2) largest = larger_magnitude(largest, __shfl_xor_sync(~0u, largest, by));
        scale[pixel] = scale_of_pixel(largest);
      }
#pragma unroll
      for (int i = 0; i < 4 * STEPS; ++i) {
        unsigned& word = of[0][i / 4][i % 4];
        word = f16x2_of_floats(__uint_as_float(word) * scale[i % 2], seconds.of[i / 4][i % 4] * scale[i % 2]);
        pin(word);
      }
#pragma unroll
      for (int pixel = 0; pixel < 2; ++pixel) unscale[pixel] = unscale_pixel(scale[pixel]);
    } else if (RUN > 1) {
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES * STEPS; ++i) {
        unsigned (&words)[4] = of[i / (2 * STEPS)][i / 2 % STEPS];
        const unsigned one = words[i % 2 * 2], other = words[i % 2 * 2 + 1];
        words[i % 2 * 2] = turns ? one & 0xffff | other << 16 : one;
        words[i % 2 * 2 + 1] = turns ? one >> 16 | other & 0xffff0000 : other;
      }
    }
    pin_all();
  }
  __device__ __forceinline__ void pin_all() {
#pragma unroll
    for (int i = 0; i < ROW_TILES * STEPS; ++i) pin(of[i / STEPS][i % STEPS]);
  }

 private:
  // Whether all channels of a half of an operation exist; exists(): whether one does.
  static __device__ __forceinline__ constexpr bool all_exist(int half) {
    return (half + 1) * (DEPTH / 2) <= IN_CHANNELS;
  }
  static __device__ __forceinline__ bool exists(int half, int channel) {
    return half * (DEPTH / 2) + channel < IN_CHANNELS;
  }

  // Loads the thread's channels of half an operation, from `channel` on and `stride` apart, for neighbouring pixels.
  // Words still hold two pixels of a channel; settle() turns them into two channels of a pixel. WHOLE: channels that do
  // not exist may be read, too, and are zero.
  template <bool WHOLE>
  __device__ __forceinline__ void load_half(Seconds& seconds, int i, int run, const scalar_t* from, int stride,
                                            int channel) {
    constexpr int WORDS = ceil_div(RUN * ELEMENT, 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Words<RUN> pixels;
      const scalar_t* const at = from + (long long)j * stride;
      if (WHOLE || all_exist(i))
        pixels = *(const Words<RUN>*)at;
      else
        load_global_if(exists(i, channel + j), at, pixels);
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        if (!SCALED)
          of[(run * WORDS + word) % ROW_TILES][i / 2][i % 2 * 2 + j] = pixels.value[word];
        else if (j == 0)
          of[0][i / 2][i % 2 * 2 + word] = pixels.value[word];
        else
          seconds.of[i / 2][i % 2 * 2 + word] = __uint_as_float(pixels.value[word]);
      }
    }
  }

  // Loads channels of PIXELS separate pixels; the second pixel is `other` elements after the first.
  template <int PIXELS>
  __device__ __forceinline__ void load_apart(Seconds& seconds, int tile, int first, const scalar_t* one,
                                             long long other, int stride, int channel) {
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      scalar_t channels[PIXELS][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const scalar_t* const from = PIXELS == 1 ? one : one + (long long)j * stride;
#pragma unroll
        for (int pixel = 0; pixel < PIXELS; ++pixel)
          if (all_exist(i))
            channels[pixel][j] = load_global(from + pixel * other);
          else
            load_global_if(exists(i, channel + j), from + pixel * other, channels[pixel][j]);
        if (PIXELS == 1) one += (j == 0 ? 1 : DEPTH / 2 - 1) * stride;
      }
      if (PIXELS > 1) one += DEPTH / 2 * stride;
#pragma unroll
      for (int pixel = 0; pixel < PIXELS; ++pixel) keep(seconds, tile, i, first + pixel, channels[pixel]);
      // Keeps the compiler from holding halves of words, and more addresses than registers suffice for.
      if (i % 2 == 1) __syncwarp();
    }
  }
  __device__ __forceinline__ void keep(Seconds& seconds, int, int i, int pixel, const float (&channels)[2]) {
    of[0][i / 2][i % 2 * 2 + pixel] = __float_as_uint(channels[0]);
    seconds.of[i / 2][i % 2 * 2 + pixel] = channels[1];
  }
  template <class T>
  __device__ __forceinline__ void keep(Seconds&, int tile, int i, int pixel, const T (&channels)[2]) {
    of[tile][i / 2][i % 2 * 2 + pixel] = channels[0].bits | (unsigned)channels[1].bits << 16;
  }
};

// Prefetches the warp's pixels of a run to L2, one channel for each lane.
__device__ __forceinline__ void prefetch(const Params& params, const scalar_t* x, const Run& run) {
  const Pixel pixel(params, first_pixel(run.unit / params.groups));
  if (!run.exists() || !pixel.exists) return;
  const scalar_t* const from =
      x + pixel.x + (long long)(run.unit % params.groups * IN_CHANNELS + lane()) * params.x_stride;
#pragma unroll
  for (int first = 0; first < IN_CHANNELS; first += 32)
    if (first + lane() < IN_CHANNELS) prefetch_l2(from + (long long)first * params.x_stride);
}

// Destination offsets of a thread's two columns of each 8, from the first element of a cell.
struct Columns {
  long long offset;  // of the first columns; if ALIKE the next ones are at a constant distance
  int step;

  // Whether each 8 columns are whole channels.
  static constexpr bool ALIKE = 8 % TAPS == 0;

  __device__ __forceinline__ Columns(const Params& params, int chunk)
      : offset(offset_of(params, column(chunk, 0))), step(8 / AXIS_W.stride / LINES * params.y_stride[0]) {}
  static __device__ __forceinline__ int column(int chunk, int tile) {
    return chunk * COLUMNS + 8 * tile + lane() % 4 * 2;
  }
  static __device__ __forceinline__ bool exists(int chunk, int tile) {
    return ALL_COLUMNS % COLUMNS == 0 || column(chunk, tile) < ALL_COLUMNS;
  }
  static __device__ __forceinline__ long long offset_of(const Params& params, int column) {
    const int line = column / AXIS_W.stride;
    return (long long)(line / LINES) * params.y_stride[0] +
           (long long)(line / AXIS_H.stride % AXIS_D.stride) * params.y_stride[1] +
           (long long)(line % AXIS_H.stride) * params.y_stride[2] +
           (long long)(column % AXIS_W.stride) * params.y_stride[3];
  }
  __device__ __forceinline__ long long offset_of(const Params& params, int chunk, int tile) const {
    return ALIKE ? offset + (long long)tile * step : offset_of(params, column(chunk, tile));
  }
};

// The epilogue's operands of a chunk's columns, in shared memory: the factor that undoes the scaling of the weights, if
// SCALED, and the bias. There is room for TERM_PLACES chunks: the next one's terms are loaded while one is stored.
struct Terms {
  float next[SOME_TERMS];

  // Address of a chunk's terms; `first`: the address of the first chunk's.
  static __device__ __forceinline__ unsigned place(unsigned first, int chunk) {
    return first + chunk % TERM_PLACES * TERM_BYTES;
  }
  // Loads a chunk's terms, one column for each thread.
  __device__ __forceinline__ void load(const Params& params, const unsigned char* packed,
                                       const EpilogueOperands& operands, int group, int chunk) {
    const int column = chunk * COLUMNS + (int)threadIdx.x % COLUMNS;
    const float* const factors = (const float*)(packed + (long long)params.groups * CHUNKS * CHUNK_BYTES);
    if (SCALED) next[0] = factors[group * (CHUNKS * COLUMNS) + column];  // not `read`: packing writes them
    const EpilogueOperands of_group = operands + group * OUT_CHANNELS;
    if (HAS_BIAS) next[TERMS - 1] = channel_terms(of_group, min(column / TAPS, OUT_CHANNELS - 1)).bias;
  }
  // Writes what was loaded; visible to the warpgroup after its next barrier.
  __device__ __forceinline__ void publish(unsigned first, int chunk) const {
    if (TERMS == 0) return;
    if (threadIdx.x % 128 >= COLUMNS) return;
    Vector<float, SOME_TERMS>& column =
        *(Vector<float, SOME_TERMS>*)__cvta_shared_to_generic(place(first, chunk) + threadIdx.x % 128 * (4 * TERMS));
#pragma unroll
    for (int i = 0; i < TERMS; ++i) column.value[i] = next[i];
  }
};

// The terms of a thread's two columns of eight.
struct TwoTerms {
  Vector<float, 2 * SOME_TERMS> of;

  __device__ __forceinline__ TwoTerms(unsigned place, int tile) {
    if (TERMS > 0) load_shared(place + (8 * tile + lane() % 4 * 2) * (4 * TERMS), of);
  }
  // `of_channel`: the terms of the operations.
  __device__ __forceinline__ float output(float sum, float unscale, int column, ChannelTerms of_channel,
                                          const scalar_t* to) const {
    if (SCALED) sum *= unscale;
    const float* const terms = of.value + column * TERMS;
    of_channel.bias = HAS_BIAS ? terms[TERMS - 1] : 0.f;
    return SCALED ? finish(sum, terms[0], of_channel, to) : finish(sum, of_channel, to);
  }
};

// The cells of a thread's pixels: the first of each run, and how many exist. Pixels are in rising order, so the first
// ones exist.
struct Cells {
  scalar_t* first[RUNS] = {};
  int count = 0, group = 0;

  __device__ __forceinline__ void find(const Params& params, scalar_t* y, int pixel, int group_of_channels) {
    count = 0, group = group_of_channels;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      const Pixel at(params, pixel + pixel_of(i));
      if (i % RUN == 0) first[i / RUN] = y + at.y;
      count += at.exists;
    }
  }
  __device__ __forceinline__ scalar_t* of(const Params& params, int i) const {
    return first[i / RUN] + (long long)(i % RUN * AXIS_W.stride) * params.y_stride[3];
  }
};

// A thread's accumulators: its pixels by two columns of each 8.
struct Sums : Accumulators<ROW_TILES, COLUMNS / 2> {
  // Stores to the thread's cells, VECTOR elements at a time.
  template <int VECTOR>
  __device__ __forceinline__ void store(const Params& params, int chunk, const Columns& columns, const Cells& to,
                                        const float (&unscale)[PIXELS], unsigned place,
                                        const EpilogueOperands& operands) const {
    constexpr int APART = VECTOR > 2 ? VECTOR / 2 : 1;  // pixels of a store
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
      if (!Columns::exists(chunk, column)) break;
      const long long offset = columns.offset_of(params, chunk, column);
      const TwoTerms terms(place, column);
      ChannelTerms of_channel = {};
      if constexpr (EPILOGUE) {
        const int channel = (chunk * COLUMNS + 8 * column + lane() % 4 * 2) / TAPS;
        of_channel = channel_terms(operands + to.group * OUT_CHANNELS, min(channel, OUT_CHANNELS - 1));
      }
      alignas(16) scalar_t values[2 * PIXELS];
#pragma unroll
      for (int i = 0; i < 2 * PIXELS; ++i) {
        const scalar_t* const at = to.of(params, i / 2) + offset + (long long)(i % 2) * params.y_stride[3];
        narrow(terms.output(of[i / 4][4 * column + i % 4], unscale[i / 2], i % 2, of_channel,
                            i / 2 < to.count ? at : nullptr),
               values[i]);
      }
#pragma unroll
      for (int i = 0; i < PIXELS; i += APART) {
        if (i >= to.count) continue;
        scalar_t* const first = to.of(params, i) + offset;
        if constexpr (VECTOR > 1)
          store_global(first, *(const Words<VECTOR>*)(values + 2 * i));
        else
#pragma unroll
          for (int j = 0; j < 2; ++j) first[(long long)j * params.y_stride[3]] = values[2 * i + j];
      }
    }
  }
};

// Run by one thread, before the others wait on a barrier.
__device__ __forceinline__ void init_barriers(Shared& shared) {
  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  for (int i = 0; i < STAGES; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, CONSUMER_GROUPS);
  for (int i = 0; i < CONSUMER_GROUPS; ++i) {
    mbarrier_init(shared_address(shared.order) + 8 * i, 4);
    for (int j = 0; j < PIXEL_SLOTS; ++j) {
      mbarrier_init(shared_address(&shared.pixels[i][j]), 32);
      mbarrier_init(shared_address(&shared.room[i][j]), 4);
    }
  }
  fence_mbarrier_init();
}

// Run by one warp: loads a warpgroup's pixels to its slots.
__device__ __forceinline__ void load_pixels(const Params& params, const scalar_t* x, unsigned slots, Shared& shared,
                                            int group) {
  if (params.piece == 16)
    load_pixels<16>(params, x, slots, shared, group);
  else
    load_pixels<8>(params, x, slots, shared, group);
}

// Run by one thread: loads the weights of a chunk.
__device__ __forceinline__ void load_chunk(const unsigned char*& from, unsigned weights, unsigned full, unsigned empty,
                                           PipelineState<STAGES, RESIDENT>& slot) {
  for (int stage = 0; stage < CHUNK_STAGES; ++stage, slot.next(), from += STAGE_BYTES) {
    const unsigned barrier = full + 8 * slot.index;
    if (!RESIDENT) mbarrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
    tma_load_bytes(weights + slot.index * STAGE_BYTES, from, STAGE_BYTES, barrier);
    mbarrier_arrive(barrier);
  }
}

// Stores a chunk's results, as many elements at a time as the alignment of y's rows allows.
__device__ __forceinline__ void store(const Sums& sums, const Params& params, int chunk, const Columns& columns,
                                      const Cells& to, const Rows& rows, unsigned terms,
                                      const EpilogueOperands& operands) {
  if (RUN == 4 && params.vector == 8)
    sums.store<2 * RUN>(params, chunk, columns, to, rows.unscale, Terms::place(terms, chunk), operands);
  else if (RUN > 1 && params.vector >= 4)
    sums.store<4>(params, chunk, columns, to, rows.unscale, Terms::place(terms, chunk), operands);
  else if (params.vector == 2)
    sums.store<2>(params, chunk, columns, to, rows.unscale, Terms::place(terms, chunk), operands);
  else
    sums.store<1>(params, chunk, columns, to, rows.unscale, Terms::place(terms, chunk), operands);
}

// Begins to read a warpgroup's pixels: their first channels from its slots, or all of them from memory.
__device__ __forceinline__ void begin(Rows& rows, const Params& params, const scalar_t* x, const Run& run,
                                      unsigned slots, const Shared& shared, int group, PixelSlot& pixel_slot,
                                      Seconds& seconds) {
  const long long first_in = (long long)(run.unit % params.groups * IN_CHANNELS) * params.x_stride;
  if (PREFETCH)
    rows.take<0, PIXEL_SLOTS>(slots, shared, group, pixel_slot, seconds);
  else if (RUN > 1)
    rows.load_runs(params, x + first_in, first_pixel(run.unit / params.groups), seconds);
  else
    rows.load_apart(params, x + first_in, first_pixel(run.unit / params.groups), seconds);
}

// Adds the products of a stage. `weights`: their matrix descriptor. Those of the first stage overwrite the sums.
__device__ __forceinline__ void add_stage(Sums& sums, const Rows& rows, const unsigned long long& weights, int stage) {
#pragma unroll
  for (int step = 0; step < STAGE_STEPS; ++step)
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
      wgmma(sums.of[tile], rows.of[tile][stage * STAGE_STEPS + step], weights + step * (OPERATION_BYTES / 16),
            stage + step > 0);
}

// Releases the previous stage to be filled again.
__device__ __forceinline__ void release(unsigned empty, const PipelineState<STAGES, RESIDENT>& slot) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(empty + 8 * slot.before());
}

// Reads the rest of a run's pixels, and the terms of its first chunk.
__device__ __forceinline__ void settle(const Params& params, const unsigned char* packed,
                                       const EpilogueOperands& operands, const Run& run, int chunk, unsigned slots,
                                       unsigned terms, const Shared& shared, int group, PixelSlot& pixel_slot,
                                       Seconds& seconds, Rows& rows, Terms& added) {
  if (PREFETCH) rows.take<PIXEL_SLOTS, RUN_SLOTS>(slots, shared, group, pixel_slot, seconds);
  if (SCALED) griddepcontrol_wait();
  added.load(params, packed, operands, run.unit % params.groups, chunk);
  rows.settle(seconds, params.piece > 0);
  if (TERMS > 0) named_barrier_sync(1 + group, 128);  // the previous chunk has been stored
  added.publish(terms, chunk);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    phase_gemm_pixels(const scalar_t* __restrict__ x, const unsigned char* packed,
                      const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ y,
                      const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ Shared shared;
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, y, params.y.stride[0]);
  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  const unsigned order = shared_address(shared.order);
  const unsigned weights = shared_address(shared_memory), pixels = weights + STAGES * STAGE_BYTES;
  const unsigned all_terms = pixels + (PREFETCH ? CONSUMER_GROUPS * PIXEL_SLOTS * SLOT_BYTES : 0);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  PipelineState<STAGES, RESIDENT> slot;

  if (group == CONSUMER_GROUPS) {  // the producer
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int of_group = threadIdx.x / 32 % 4 - 1;  // the consumer whose pixels the warp loads
    if (PREFETCH && of_group >= 0 && of_group < CONSUMER_GROUPS)
      load_pixels(params, x, pixels + of_group * (PIXEL_SLOTS * SLOT_BYTES), shared, of_group);
    if (threadIdx.x != 128 * CONSUMER_GROUPS) return;
    griddepcontrol_wait();
    int missing = CHUNKS;  // RESIDENT chunks not loaded yet
    Runs runs(params);
    for (Run run = runs.next(params); run.exists() && missing > 0; run = runs.next(params)) {
      if (RESIDENT) slot.index = run.first * CHUNK_STAGES;
      const unsigned char* from = packed + ((long long)(run.unit % params.groups) * CHUNKS + run.first) * CHUNK_BYTES;
      for (int chunk = run.first; chunk < run.behind && missing > 0; ++chunk) {
        if (RESIDENT) --missing;
        load_chunk(from, weights, full, empty, slot);
      }
    }
    return;
  }

  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const unsigned slots = pixels + group * (PIXEL_SLOTS * SLOT_BYTES);
  PixelSlot pixel_slot;
  unsigned order_parity = group;  // the first warpgroup begins at once
  Runs runs(params);
  Run run{};
  Rows rows;
  const unsigned terms = all_terms + group * (TERM_PLACES * TERM_BYTES);
  Terms added;
  Sums sums;
  Columns columns(params, 0);
  Cells to;
  // Each iteration stores the previous chunk, after it has issued the loads of the next pixels.
#pragma unroll 1
  for (int chunk = 0;; ++chunk) {
    const bool begins = chunk == run.behind;
    const int before = chunk - 1;
    const bool stored = run.exists();
    Seconds seconds;
    if (begins) {
      run = runs.next(params), chunk = run.first;
      if (run.exists()) begin(rows, params, x, run, slots, shared, group, pixel_slot, seconds);
    }
    if (stored) store(sums, params, before, columns, to, rows, terms, operands);
    if (begins) {
      if (!run.exists()) break;
      scalar_t* const first = y + (long long)(run.unit % params.groups * OUT_CHANNELS) * params.y_stride[0];
      to.find(params, first, first_pixel(run.unit / params.groups), run.unit % params.groups);
      if (RESIDENT) slot.index = run.first * CHUNK_STAGES;
      settle(params, packed, operands, run, chunk, slots, terms, shared, group, pixel_slot, seconds, rows, added);
    }
    mbarrier_wait(order + 8 * group, order_parity ^ 1), order_parity ^= 1;
#pragma unroll
    for (int stage = 0; stage < CHUNK_STAGES; ++stage) {
      mbarrier_wait(full + 8 * slot.index, slot.parity);
      const unsigned long long described = matrix_descriptor<16>(weights + slot.index * STAGE_BYTES, CHUNK_PITCH);
      wgmma_fence();
      add_stage(sums, rows, described, stage);
      wgmma_commit();
      if (!RESIDENT && stage > 0) {
        wgmma_wait<1>();
        release(empty, slot);
      }
      slot.next();
    }
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(order + 8 * (CONSUMER_GROUPS - 1 - group));
    columns = Columns(params, chunk);  // while the last wgmma are in flight
    if (!PREFETCH && chunk + 1 == run.behind)
      prefetch(params, x, Runs(runs).next(params));  // all prefetches are issued before the first load waits
    const bool more = chunk + 1 < run.behind;
    if (more) added.load(params, packed, operands, run.unit % params.groups, chunk + 1);
    wgmma_wait<0>();
    pin(sums.of);
    rows.pin_all();
    if (!RESIDENT) release(empty, slot);
    if (more) added.publish(terms, chunk + 1);
    named_barrier_sync(1 + group, 128);  // even without terms: the compiler spills less
  }
}
