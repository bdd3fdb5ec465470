// The forward pass by Hopper's instruction where every output has one tap: kernel = stride, no padding. All elements of
// a cell read the same pixel, so pixels are the rows of one product of matrices, and the columns of a group are
//
//     column  =  (output channel · phases along d, h  +  phase along d, h) · stride along w  +  phase along w
//
// which is the order in which weights lie in memory, and in which a cell's elements of a row are neighbours.
//
// Index mapping. Two groups of 128 threads multiply, one more loads. A tile is TILE pixels, of all images one after the
// other, ROW_TILES · 64 for each of the two. The channels of its pixels stay in registers for all columns: they come
// from memory as the cores take them, nothing is turned around. COLUMNS columns are a chunk; its weights
// (pack_columns.cu) come stage by stage through shared memory, STAGE_STEPS operations each, or are all there
// (RESIDENT). One group stores a chunk while the other multiplies. Tiles are dealt out one by one, so that neighbours
// are stored together; the chunks of those that are left over are shared out.
//
// Which of a tile's pixels are which of the product's rows is all the same to it. Where a cell is two elements wide a
// thread's pixels are neighbours, hence its outputs, too: 16 bytes.

struct Geometry {
  Tensor5 x, y;
  int pixels;        // of all images
  Divisor sizes[3];  // of an image along d, h, w
  Divisor groups;    // of channels
  int rounds;        // units that each block has for itself
  int units, share;  // all of them; of the chunks that are left over, those of a block
  int together;      // whether a thread's pixels are neighbours in memory that are read at once
  int vector;        // outputs that are stored at once: of all its pixels, of two, of one, or one alone
  int x_stride;      // of channels
  int y_stride[4];   // of channels, d, h and w
};

constexpr int GROUPS = 2, THREADS = 128 * (GROUPS + 1), TILE = 64 * ROW_TILES * GROUPS;
constexpr int PIXELS = 2 * ROW_TILES;                                                // of a thread
constexpr int ELEMENT = sizeof(scalar_t), WORD = 4 / ELEMENT, DEPTH = 32 / ELEMENT;  // channels: of 4 and of 32 bytes
constexpr int STEPS = ceil_div(IN_CHANNELS, DEPTH);
constexpr int LINES = AXIS_D.stride * AXIS_H.stride;
constexpr int ALL_COLUMNS = OUT_CHANNELS * TAPS, COLUMNS = 8 * COLUMN_TILES;
constexpr int CHUNKS = ceil_div(ALL_COLUMNS, COLUMNS);
constexpr int CHUNK_STAGES = STEPS / STAGE_STEPS;
constexpr int CHUNK_PITCH = COLUMNS * 16, OPERATION_BYTES = 2 * CHUNK_PITCH;
constexpr int STAGE_BYTES = STAGE_STEPS * OPERATION_BYTES, CHUNK_BYTES = CHUNK_STAGES * STAGE_BYTES;
constexpr bool NEIGHBOURS = AXIS_W.stride == 2;  // a thread's pixels
constexpr int LOADER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;

static_assert(STEPS % STAGE_STEPS == 0, "stages are whole");
static_assert(ROW_TILES == WORD, "a thread's outputs are 16 bytes");
static_assert(!RESIDENT || STAGES == CHUNKS * CHUNK_STAGES, "all stages are there");
static_assert(TAPS == LINES * AXIS_W.stride, "the kernel is the stride");
static_assert(AXIS_W.stride % 2 == 0, "a thread's two columns are neighbours in a row");

struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  unsigned long long turn[GROUPS];  // a group's, to multiply; told by the other's warps
};

// A slot of the ring, and the parity of its barriers. Where all stages are there, each has its slot.
struct Slot {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++index == STAGES) index = 0, parity ^= RESIDENT ? 0 : 1;
  }
  __device__ __forceinline__ int before() const { return index == 0 ? STAGES - 1 : index - 1; }
};

// Some chunks of a unit, which is a tile and a group of channels.
struct Run {
  int unit, first, behind;
};

// Calls each(run) for the runs of a block, in order.
template <class Each>
__device__ __forceinline__ void for_runs(const Geometry& g, const Each& each) {
  long long index = 0, behind = 0;  // chunks that are left over
#pragma unroll 1
  for (int round = 0;; ++round) {
    Run run;
    if (round < g.rounds) {
      run = {round * (int)gridDim.x + (int)blockIdx.x, 0, CHUNKS};
    } else {
      if (round == g.rounds) {
        index = (long long)blockIdx.x * g.share, behind = index + g.share;
        const long long all = (long long)(g.units - g.rounds * (int)gridDim.x) * CHUNKS;
        if (behind > all) behind = all;
      }
      if (index >= behind) return;
      const int of_unit = (int)(index / CHUNKS);
      run.unit = g.rounds * (int)gridDim.x + of_unit, run.first = (int)(index - (long long)of_unit * CHUNKS);
      run.behind = run.first + (int)(behind - index) < CHUNKS ? run.first + (int)(behind - index) : CHUNKS;
      index += run.behind - run.first;
    }
    each(run);
  }
}

// Where one of the pixels lies, and its cell, from a tensor's first channel on.
struct Pixel {
  long long x, y;
  bool exists;

  __device__ __forceinline__ Pixel(const Geometry& g, int index) : exists(index < g.pixels) {
    if (!exists) index = 0;
    const int row = index / g.sizes[2], slab = row / g.sizes[1], image = slab / g.sizes[0];
    const int w = index % g.sizes[2], h = row % g.sizes[1], d = slab % g.sizes[0];
    x = image * g.x.stride[0] + d * g.x.stride[2] + h * g.x.stride[3] + w * g.x.stride[4];
    y = image * g.y.stride[0] + d * AXIS_D.stride * g.y.stride[2] + h * AXIS_H.stride * g.y.stride[3] +
        w * AXIS_W.stride * g.y.stride[4];
  }
};

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// The first pixel of a warp, and those of a thread from there on.
__device__ __forceinline__ int first_pixel(int tile) { return tile * TILE + threadIdx.x / 32 * (16 * ROW_TILES); }
__device__ __forceinline__ int pixel_of(int i) { return NEIGHBOURS ? lane() / 4 * PIXELS + i : lane() / 4 + 8 * i; }

// All channels of a thread's pixels, as the cores take them (common/mma.cuh).
struct Rows {
  unsigned of[ROW_TILES][STEPS][4];

  // `x` is the group's first channel. Pixels that do not exist are read where others lie.
  __device__ __forceinline__ void load(const Geometry& g, const scalar_t* x, int first) {
    const int channel = lane() % 4 * WORD;
    const scalar_t* from[PIXELS];
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) from[i] = x + (long long)channel * g.x_stride + Pixel(g, first + pixel_of(i)).x;
    if (NEIGHBOURS && g.together)
      load_all<true>(g.x_stride, from, channel);
    else
      load_all<false>(g.x_stride, from, channel);
    if constexpr (ELEMENT == 4)  // when all are on their way
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) of[0][step][i] = __float_as_uint(round_tf32(__uint_as_float(of[0][step][i])));
    pin_steps(0, STEPS);
  }
  __device__ __forceinline__ void pin_steps(int first, int behind) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        if (step >= first && step < behind) pin(of[tile][step]);
  }

 private:
  template <bool TOGETHER>
  __device__ __forceinline__ void load_all(int stride, const scalar_t* (&from)[PIXELS], int first) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<scalar_t, PIXELS> channels[WORD];
#pragma unroll
        for (int i = 0; i < WORD; ++i) {
          const int channel = first + step * DEPTH + half * (DEPTH / 2) + i;
          channels[i] = {};
          if (IN_CHANNELS % DEPTH != 0 && channel >= IN_CHANNELS) continue;
          if constexpr (TOGETHER) {
            channels[i] = *(const Vector<scalar_t, PIXELS>*)(from[0] + (long long)i * stride);
          } else {
#pragma unroll
            for (int j = 0; j < PIXELS; ++j) channels[i].value[j] = read_now(from[j] + (long long)i * stride);
          }
        }
#pragma unroll
        for (int j = 0; j < PIXELS; ++j) {
          of[j / 2][step][2 * half + j % 2] = word(channels, j);
          from[j] += DEPTH / 2 * stride;
        }
      }
      // Halves of a word are registers, too, until both are there.
      if (ELEMENT == 2 && !TOGETHER) __syncwarp();
    }
  }
  static __device__ __forceinline__ float read_now(const float* from) { return read(from); }
  template <class T>
  static __device__ __forceinline__ T read_now(const T* from) {
    return T{*(const volatile unsigned short*)from};
  }
  static __device__ __forceinline__ unsigned word(const Vector<float, PIXELS> (&channels)[1], int pixel) {
    return __float_as_uint(channels[0].value[pixel]);
  }
  template <class T>
  static __device__ __forceinline__ unsigned word(const Vector<T, PIXELS> (&channels)[2], int pixel) {
    return channels[0].value[pixel].bits | (unsigned)channels[1].value[pixel].bits << 16;
  }
};

// Has a unit's pixels come to the L2 cache: a warp's, a channel for each lane.
__device__ __forceinline__ void prefetch(const Geometry& g, const scalar_t* x, int unit) {
#ifndef EMULATOR
  const Pixel pixel(g, first_pixel(unit / g.groups));
  if (unit >= g.units || !pixel.exists) return;
  const scalar_t* const from = x + pixel.x + (long long)(unit % g.groups * IN_CHANNELS + lane()) * g.x_stride;
#pragma unroll
  for (int first = 0; first < IN_CHANNELS; first += 32)
    if (first + lane() < IN_CHANNELS)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + (long long)first * g.x_stride));
#endif
}

// Where a thread's two columns of each 8 go, from the first element of a cell on.
struct Columns {
  long long offset;  // of the first, and where all are alike the distance of the next
  int step;

  // As many whole channels in each 8 columns.
  static constexpr bool ALIKE = 8 % TAPS == 0;

  __device__ __forceinline__ Columns(const Geometry& g, int chunk)
      : offset(offset_of(g, column(chunk, 0))), step(8 / AXIS_W.stride / LINES * g.y_stride[0]) {}
  static __device__ __forceinline__ int column(int chunk, int tile) {
    return chunk * COLUMNS + 8 * tile + lane() % 4 * 2;
  }
  static __device__ __forceinline__ bool exists(int chunk, int tile) {
    return ALL_COLUMNS % COLUMNS == 0 || column(chunk, tile) < ALL_COLUMNS;
  }
  static __device__ __forceinline__ long long offset_of(const Geometry& g, int column) {
    const int line = column / AXIS_W.stride;
    return (long long)(line / LINES) * g.y_stride[0] +
           (long long)(line / AXIS_H.stride % AXIS_D.stride) * g.y_stride[1] +
           (long long)(line % AXIS_H.stride) * g.y_stride[2] + (long long)(column % AXIS_W.stride) * g.y_stride[3];
  }
  __device__ __forceinline__ long long offset_of(const Geometry& g, int chunk, int tile) const {
    return ALIKE ? offset + (long long)tile * step : offset_of(g, column(chunk, tile));
  }
};

// The weights of a stage, as the cores are told of them.
struct Stage {
#ifndef EMULATOR
  unsigned long long described;
  __device__ __forceinline__ explicit Stage(unsigned address) : described(describe_matrix<16>(address, CHUNK_PITCH)) {}
#else
  unsigned address;
  explicit Stage(unsigned address) : address(address) {}
#endif
};

// COUNT elements, stored by one instruction: left to itself the compiler takes vectors apart.
template <int COUNT>
using Words = Vector<unsigned, COUNT * ELEMENT / 4>;
#ifndef EMULATOR
__device__ __forceinline__ void store_whole(void* to, const Vector<unsigned, 4>& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.value[0]), "r"(words.value[1]),
               "r"(words.value[2]), "r"(words.value[3])
               : "memory");
}
__device__ __forceinline__ void store_whole(void* to, const Vector<unsigned, 2>& words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.value[0]), "r"(words.value[1]) : "memory");
}
__device__ __forceinline__ void store_whole(void* to, const Vector<unsigned, 1>& words) {
  *(unsigned*)to = words.value[0];
}
#else
template <class Whole>
__device__ __forceinline__ void store_whole(void* to, const Whole& words) {
  *(Whole*)to = words;
}
#endif

// The sums of a thread: of its pixels, and of two columns of each 8.
struct Sums {
  float of[ROW_TILES][COLUMNS / 2];

  // The bias, to which all is added.
  __device__ __forceinline__ void begin(int chunk, const scalar_t* biases) {
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
      const float bias = Columns::exists(chunk, tile) ? widen(read(biases + Columns::column(chunk, tile) / TAPS)) : 0.f;
#pragma unroll
      for (int i = 0; i < 4 * ROW_TILES; ++i) of[i / 4][4 * tile + i % 4] = bias;
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) pin(of[tile]);
  }

  // Operation `step` of a stage, for a tile of rows.
  __device__ __forceinline__ void add(int tile, const unsigned (&rows)[4], const Stage& stage, int step, bool add) {
#ifndef EMULATOR
    wgmma(of[tile], rows, stage.described + step * (OPERATION_BYTES / 16), add);
#else
    typedef Vector<scalar_t, WORD> Word;
    struct {
      const unsigned* rows[4];
    } lanes;
    const auto all = emulator::all_lanes(~0u, (const unsigned*)rows);
    for (int i = 0; i < 4; ++i) lanes.rows[i] = all.of[lane() / 4 * 4 + i];
    float* const to = of[tile];
    const int first = lane() % 4 * 2;
    const unsigned columns = stage.address + step * OPERATION_BYTES;
    emulator::later(emulator::Async::products, [=] {
      for (int i = 0; i < COLUMNS / 2; ++i) {
        float sum = add ? to[i] : 0;
        for (int k = 0; k < 8; ++k) {
          const unsigned at = columns + k / 4 * CHUNK_PITCH + (i / 4 * 8 + first + i % 2) * 16 + k % 4 * 4;
          const Word& row = *(const Word*)(lanes.rows[k % 4] + i % 4 / 2 + k / 4 * 2);
          const Word& column = *(const Word*)__cvta_shared_to_generic(at);
          for (int j = 0; j < WORD; ++j) sum += operand(row.value[j]) * operand(column.value[j]);
        }
        to[i] = sum;
      }
    });
#endif
  }

  // To the thread's cells, VECTOR elements at a time.
  template <int VECTOR>
  __device__ __forceinline__ void store(const Geometry& g, int chunk, const Columns& columns,
                                        scalar_t* const (&to)[PIXELS], const bool (&exists)[PIXELS]) const {
    constexpr int APART = VECTOR > 2 ? VECTOR / 2 : 1;  // pixels of a store
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
      if (!Columns::exists(chunk, column)) break;
      const long long offset = columns.offset_of(g, chunk, column);
      alignas(16) scalar_t values[2 * PIXELS];
#pragma unroll
      for (int i = 0; i < 2 * PIXELS; ++i) narrow(of[i / 4][4 * column + i % 4], values[i]);
#pragma unroll
      for (int i = 0; i < PIXELS; i += APART) {
        if (!exists[i]) continue;
        scalar_t* const first = to[i] + offset;
        if constexpr (VECTOR > 1)
          store_whole(first, *(const Words<VECTOR>*)(values + 2 * i));
        else
#pragma unroll
          for (int j = 0; j < 2; ++j) first[(long long)j * g.y_stride[3]] = values[2 * i + j];
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pixel_gemm(const scalar_t* __restrict__ x, const unsigned char* __restrict__ packed,
               const scalar_t* __restrict__ bias, scalar_t* __restrict__ y, const __grid_constant__ Geometry g) {
  extern __shared__ __align__(128) unsigned char weights[];
  __shared__ __align__(8) Shared shared;
  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  const unsigned turns = shared_address(shared.turn);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, GROUPS);
    for (int i = 0; i < GROUPS; ++i) barrier_init(turns + 8 * i, 4);
    barriers_publish();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Slot slot;

  if (group == GROUPS) {  // loads
    registers_release<LOADER_REGISTERS>();
    if (threadIdx.x != 128 * GROUPS) return;
    wait_for_prologue();
    int missing = CHUNKS;  // of those that stay
    for_runs(g, [&](const Run& run) {
      if (RESIDENT) slot.index = run.first * CHUNK_STAGES;
      const unsigned char* from = packed + ((long long)(run.unit % g.groups) * CHUNKS + run.first) * CHUNK_BYTES;
      for (int chunk = run.first; chunk < run.behind && missing > 0; ++chunk) {
        if (RESIDENT) --missing;
        for (int stage = 0; stage < CHUNK_STAGES; ++stage, slot.next(), from += STAGE_BYTES) {
          const unsigned barrier = full + 8 * slot.index;
          if (!RESIDENT) barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
          bulk_copy(shared_address(weights) + slot.index * STAGE_BYTES, from, STAGE_BYTES, barrier);
          barrier_arrive(barrier);
        }
      }
    });
    return;
  }

  registers_claim<MULTIPLIER_REGISTERS>();
  unsigned turn = group;  // the parity of the barrier that tells a group that it is its turn: the first's, at once
  for_runs(g, [&](const Run& run) {
    const int first = first_pixel(run.unit / g.groups), channels = run.unit % g.groups;
    Rows rows;
    rows.load(g, x + (long long)(channels * IN_CHANNELS) * g.x_stride, first);
    prefetch(g, x, run.unit + (int)gridDim.x);
    scalar_t* to[PIXELS];
    bool exists[PIXELS];
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      const Pixel pixel(g, first + pixel_of(i));
      to[i] = y + (long long)(channels * OUT_CHANNELS) * g.y_stride[0] + pixel.y, exists[i] = pixel.exists;
    }
    if (RESIDENT) slot.index = run.first * CHUNK_STAGES;
#pragma unroll 1
    for (int chunk = run.first; chunk < run.behind; ++chunk) {
      Sums sums;
      if (HAS_BIAS) sums.begin(chunk, bias + channels * OUT_CHANNELS);
      barrier_wait(turns + 8 * group, turn ^ 1), turn ^= 1;
#pragma unroll
      for (int stage = 0; stage < CHUNK_STAGES; ++stage) {
        barrier_wait(full + 8 * slot.index, slot.parity);
        const Stage columns(shared_address(weights) + slot.index * STAGE_BYTES);
        products_begin();
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; ++step)
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile)
            sums.add(tile, rows.of[tile][stage * STAGE_STEPS + step], columns, step, HAS_BIAS || stage + step > 0);
        products_commit();
        if (!RESIDENT && stage > 0) {
          products_wait<1>();
          if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * slot.before());
        }
        slot.next();
      }
      __syncwarp();
      if (lane() == 0) barrier_arrive(turns + 8 * (GROUPS - 1 - group));
      const Columns columns(g, chunk);  // while the last products are on their way
      products_wait<0>();
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) pin(sums.of[tile]);
      rows.pin_steps(0, STEPS);
      if (!RESIDENT && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * slot.before());
      if (NEIGHBOURS && g.vector == 2 * PIXELS)
        sums.store<2 * PIXELS>(g, chunk, columns, to, exists);
      else if (NEIGHBOURS && PIXELS > 2 && g.vector == 4)
        sums.store<4>(g, chunk, columns, to, exists);
      else if (g.vector == 2)
        sums.store<2>(g, chunk, columns, to, exists);
      else
        sums.store<1>(g, chunk, columns, to, exists);
    }
  });
}
