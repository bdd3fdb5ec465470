// The forward pass as products of matrices on tensor cores, all phases of a tile in one block.
//
// A tile of cells and the halo around it lie in shared memory as one flat run of pixels, every row of the halo behind
// the one before: 16 bytes (CHUNK channels) a pixel, chunk by chunk. In that run a tap is a constant distance, so the
// pixels that a tap needs for PIXELS neighbouring cells are the operand of one instruction, at another address
// (matrix.cuh), and a tile is read once for all its taps. Cells of the run that lie in the halo are computed and not stored.
//
// One warp group loads: pixels are copied asynchronously LOOKAHEAD stages ahead, in the order in which they lie in memory, and
// then turned around (channels innermost) and rounded on their way from shared to shared memory. The others multiply, each
// its PIXELS of the tile, and store. Blocks stay, and take every gridDim.x-th item: the next tile is being
// loaded while the last one is stored.

constexpr int LOADERS = 128;
constexpr int THREADS = LOADERS + CONSUMERS * 128;
constexpr int STAGE_CHANNELS = K_STEPS * STEP_CHANNELS;
constexpr int STAGE_CHUNKS = 2 * K_STEPS;
constexpr int STAGES_OF_ITEM = STEPS / K_STEPS;
constexpr int WEIGHT_STAGE = K_STEPS * OPERATIONS * OPERATION_BYTES;
constexpr bool IN_PLACE = SRC_CHANNELS_LAST;  // the pixels are copied to where they are used
constexpr int LOOKAHEAD = IN_PLACE ? STAGES - 2 : RAW_STAGES - 1;
constexpr int DST_D = AXIS_D.stride, DST_H = AXIS_H.stride, DST_W = AXIS_W.stride;
constexpr int REACH_D = last_offset(AXIS_D) - first_offset(AXIS_D);
constexpr int REACH_H = last_offset(AXIS_H) - first_offset(AXIS_H);
constexpr int RUN = 2 * DST_W;  // neighbouring elements of an output row that one thread computes

struct Geometry {
  Tensor5 src, dst;
  int batch;
  int images;       // batch entries of a tile
  int cells[3];     // of a tile, along depth, height and width
  int tiles[4];     // along batch, depth, height and width
  int items;        // tiles by groups by channel groups by line groups
  int row_groups;   // items of a tile
  int pitch[3];     // pixels of the run from one image, slab and row to the next
  int halo;         // pixels of the run that are loaded
  int raw_pitch;    // pixels of the run in a copied stage
  int chunk_bytes;  // of the run in a stage
  int skew;         // columns before the first that is needed, so that copies are aligned
  int copy_bytes;   // of one copy: 16, 4 or 2
  int store_vector; // elements of a store
};

// Position of a pixel in a run.
struct Pixel {
  int n, d, h, w;

  __device__ __forceinline__ void locate(const Geometry& g, int index) {
    n = index / g.pitch[0], index -= n * g.pitch[0];
    d = index / g.pitch[1], index -= d * g.pitch[1];
    h = index / g.pitch[2], w = index - h * g.pitch[2];
  }
  __device__ __forceinline__ unsigned packed() const { return n << 26 | d << 20 | h << 10 | w; }
  __device__ __forceinline__ void unpack(unsigned bits) {
    n = bits >> 26, d = bits >> 20 & 63, h = bits >> 10 & 1023, w = bits & 1023;
  }
};
constexpr unsigned NOWHERE = 0xffffffffu;

struct Item {
  int n, d, h, w;  // the tile's first cell
  int group, channel_group, line_group, row_group;

  __device__ __forceinline__ void locate(const Geometry& g, int index) {
    row_group = index % g.row_groups, index /= g.row_groups;
    line_group = row_group % LINE_GROUPS;
    channel_group = row_group / LINE_GROUPS % CHANNEL_GROUPS;
    group = row_group / (LINE_GROUPS * CHANNEL_GROUPS);
    w = index % g.tiles[3] * g.cells[2], index /= g.tiles[3];
    h = index % g.tiles[2] * g.cells[1], index /= g.tiles[2];
    d = index % g.tiles[1] * g.cells[0], index /= g.tiles[1];
    n = index * g.images;
  }
};

// What the block keeps in shared memory, apart from the stages.
struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  int operations[OPERATIONS * LINE_GROUPS];  // distance of each operation's pixels, in bytes
  unsigned cells[CONSUMERS * PIXELS];        // position of each cell of the run, or NOWHERE
};

// A slot of a ring, and the parity of its barriers.
template <int SLOTS>
struct Slot {
  int index = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == SLOTS) index = 0, parity ^= 1;
  }
};

struct Loader {
  const Geometry& g;
  const unsigned* halo;  // position of each copied run of pixels, or NOWHERE
  int thread;

  // Where the pixels at `position` lie in the tile's part of the source; false for padding.
  __device__ __forceinline__ bool find(const Item& item, unsigned position, int& offset) const {
    Pixel p;
    p.unpack(position);
    const int d = item.d + p.d + first_offset(AXIS_D), h = item.h + p.h + first_offset(AXIS_H);
    const int w = item.w + p.w + first_offset(AXIS_W) - g.skew;
    const bool inside = position != NOWHERE && item.n + p.n < g.batch && (unsigned)d < (unsigned)g.src.size[0] &&
                        (unsigned)h < (unsigned)g.src.size[1] && (unsigned)w < (unsigned)g.src.size[2];
    offset = inside ? p.n * (int)g.src.stride[0] + d * (int)g.src.stride[2] + h * (int)g.src.stride[3] +
                          w * (int)g.src.stride[4]
                    : 0;
    return inside;
  }

  template <int BYTES>
  static __device__ __forceinline__ void copy(unsigned char* to, const scalar_t* from, bool exists) {
    if constexpr (BYTES == 2)
      *(scalar_t*)to = exists ? read(from) : zero<scalar_t>();
    else
      copy_async<BYTES>(shared_address(to), from, exists);
  }

  // Channels first: COUNT neighbouring pixels of every channel of the stage.
  template <int BYTES>
  __device__ __forceinline__ void copy_rows(const Item& item, const scalar_t* base, int channel, scalar_t* raw) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t);
    for (int v = thread; v * COUNT < g.halo; v += LOADERS) {
      int offset;
      const bool inside = find(item, halo[v], offset);
      const scalar_t* from = base + offset;
#pragma unroll
      for (int i = 0; i < STAGE_CHANNELS; ++i) {
        const bool exists = inside && (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel + i < SRC_CHANNELS);
        copy<BYTES>((unsigned char*)(raw + i * g.raw_pitch + v * COUNT), exists ? from : base, exists);
        from += g.src.stride[1];
      }
    }
  }

  // Channels last: the chunks of every pixel, piece by piece where they are not aligned.
  template <int BYTES>
  __device__ __forceinline__ void copy_pixels(const Item& item, const scalar_t* base, int channel,
                                              unsigned char* to) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t);
    for (int v = thread; v < g.halo * STAGE_CHUNKS; v += LOADERS) {
      const int pixel = v / STAGE_CHUNKS, chunk = v % STAGE_CHUNKS;
      int offset;
      const bool inside = find(item, halo[pixel], offset);
#pragma unroll
      for (int i = 0; i < CHUNK; i += COUNT) {
        const bool exists = inside && channel + chunk * CHUNK + i < SRC_CHANNELS;
        copy<BYTES>(to + chunk * g.chunk_bytes + pixel * 16 + i * (int)sizeof(scalar_t),
                    exists ? base + offset + chunk * CHUNK + i : base, exists);
      }
    }
  }

  __device__ __forceinline__ void load(const Item& item, const scalar_t* src, int stage, unsigned char* to) const {
    const int channel = stage * STAGE_CHANNELS;
    const scalar_t* base =
        src + item.n * g.src.stride[0] + ((long long)item.group * SRC_CHANNELS + channel) * g.src.stride[1];
    if constexpr (IN_PLACE) {
      if (g.copy_bytes == 16) copy_pixels<16>(item, base, channel, to);
      else copy_pixels<sizeof(scalar_t)>(item, base, channel, to);
    } else {
      if (g.copy_bytes == 16) copy_rows<16>(item, base, channel, (scalar_t*)to);
      else if (sizeof(scalar_t) == 2 && g.copy_bytes == 4) copy_rows<4>(item, base, channel, (scalar_t*)to);
      else copy_rows<sizeof(scalar_t)>(item, base, channel, (scalar_t*)to);
    }
  }

  // A copied stage as the tensor cores take it.
  __device__ __forceinline__ void convert(const unsigned char* copied, unsigned char* to) const {
    if constexpr (sizeof(scalar_t) == 4) {
#pragma unroll 2
      for (int pixel = thread; pixel < g.halo; pixel += LOADERS) {
#pragma unroll
        for (int chunk = 0; chunk < STAGE_CHUNKS; ++chunk) {
          unsigned char* const target = to + chunk * g.chunk_bytes + pixel * 16;
          Vector<float, 4> channels, high, low;
          if (IN_PLACE) channels = *(const Vector<float, 4>*)(copied + chunk * g.chunk_bytes + pixel * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (!IN_PLACE) channels.value[i] = ((const float*)copied)[(chunk * 4 + i) * g.raw_pitch + pixel];
            split_tf32(channels.value[i], high.value[i], low.value[i]);
          }
          *(Vector<float, 4>*)target = high;
          if (PARTS == 2) *(Vector<float, 4>*)(target + STAGE_CHUNKS * g.chunk_bytes) = low;
        }
      }
    } else if constexpr (!IN_PLACE) {
      // Four matrices of 8 channels by 8 pixels are turned around at once.
      const int lane = thread % 32;
      for (int first = thread / 32 * 32; first < g.halo; first += LOADERS) {
#pragma unroll
        for (int chunk = 0; chunk < STAGE_CHUNKS; ++chunk) {
          const scalar_t* row = (const scalar_t*)copied + (chunk * 8 + lane % 8) * g.raw_pitch + first + lane / 8 * 8;
          unsigned turned[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(turned[0]), "=r"(turned[1]), "=r"(turned[2]), "=r"(turned[3])
                       : "r"(shared_address(row))
                       : "memory");
          unsigned* const target = (unsigned*)(to + chunk * g.chunk_bytes + first * 16) + lane;
#pragma unroll
          for (int i = 0; i < 4; ++i) target[i * 32] = turned[i];
        }
      }
    }
  }
};

// The next item and stage to load; `index` is not below g.items behind the last.
struct Cursor {
  Item item;
  int index, stage;

  __device__ __forceinline__ void next(const Geometry& g) {
    if (++stage < STAGES_OF_ITEM) return;
    stage = 0, index += gridDim.x;
    item.locate(g, index);
  }
};

typedef float Sums[ROW_BLOCKS][SUMS];

// Channels first: a thread's pair of cells gives RUN neighbouring elements of an output row.
template <bool OWNED>
__device__ __forceinline__ void store_run(const Geometry& g, scalar_t* to, const float (&value)[RUN], int count) {
  const long long step = g.dst.stride[4];
  constexpr int WIDEST = RUN % 8 == 0 && sizeof(scalar_t) == 2 ? 8 : RUN % 4 == 0 ? 4 : 2;
  if (g.store_vector == WIDEST && count >= RUN) {
#pragma unroll
    for (int i = 0; i < RUN; i += WIDEST) {
      Vector<scalar_t, WIDEST> vector;
#pragma unroll
      for (int k = 0; k < WIDEST; ++k) narrow(value[i + k], vector.value[k]);
      *(Vector<scalar_t, WIDEST>*)(to + i) = vector;
    }
  } else {
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      if (i < count) narrow(value[i], to[i * step]);
  }
}

// Stores the row blocks of one line, or the bias of a line without taps (line < 0).
__device__ __forceinline__ void store_line(const Geometry& g, const Item& item, const Sums& sums, int line, int depth,
                                           int height, scalar_t* dst, const scalar_t* bias, const unsigned* cells) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_row = 16 * warp + lane / 4;
#pragma unroll
  for (int block = 0; block < CHANNEL_BLOCKS; ++block) {
    int channel[2];
    float start[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      channel[half] =
          (item.channel_group * CHANNEL_BLOCKS + block) * ROWS + channel_of_row(first_row + 8 * half);
      start[half] =
          HAS_BIAS && channel[half] < DST_CHANNELS ? widen(read(bias + item.group * DST_CHANNELS + channel[half])) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < PIXELS / 8; ++j) {
      const unsigned position = cells[8 * j + lane % 4 * 2];
      if (position == NOWHERE) continue;
      Pixel p;
      p.unpack(position);
      const int d = (item.d + p.d) * DST_D + depth, h = (item.h + p.h) * DST_H + height;
      const int w = (item.w + p.w) * DST_W;
      if (item.n + p.n >= g.batch || d >= g.dst.size[0] || h >= g.dst.size[1]) continue;
      const int count = min((g.cells[2] - p.w) * DST_W, g.dst.size[2] - w);  // elements from here on that are ours
      scalar_t* const pixel = dst + p.n * g.dst.stride[0] + d * g.dst.stride[2] + h * g.dst.stride[3] +
                              w * g.dst.stride[4];
      if (!DST_CHANNELS_LAST) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (channel[half] >= DST_CHANNELS) continue;
          float value[RUN];
#pragma unroll
          for (int i = 0; i < RUN; ++i) {
            value[i] = start[half];
            if (line >= 0 && has_taps(AXIS_W, i % DST_W))
              value[i] += sums[(block * LINES + line) * OWNED_W + owned_before(AXIS_W, i % DST_W)]
                              [4 * j + 2 * half + i / DST_W];
          }
          store_run<true>(g, pixel + channel[half] * g.dst.stride[1], value, count);
        }
      } else if (channel[0] < DST_CHANNELS) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
          if (i >= count) continue;
          Vector<scalar_t, 2> pair;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float value = start[half];
            if (line >= 0 && has_taps(AXIS_W, i % DST_W))
              value += sums[(block * LINES + line) * OWNED_W + owned_before(AXIS_W, i % DST_W)]
                           [4 * j + 2 * half + i / DST_W];
            narrow(value, pair.value[half]);
          }
          scalar_t* const to = pixel + i * g.dst.stride[4] + channel[0];
          if (g.store_vector == 2) {
            *(Vector<scalar_t, 2>*)to = pair;
          } else {
            to[0] = pair.value[0];
            if (channel[1] < DST_CHANNELS) to[1] = pair.value[1];
          }
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    implicit_gemm(const scalar_t* __restrict__ src, const unsigned char* __restrict__ packed,
                  const scalar_t* __restrict__ bias, scalar_t* __restrict__ dst, const Geometry g) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(8) Shared shared;
  const int thread = threadIdx.x;
  const int warp_group = __shfl_sync(0xffffffffu, thread / 128, 0);
  const int pixel_stage = PARTS * STAGE_CHUNKS * g.chunk_bytes;  // bytes
  const int stage_bytes = WEIGHT_STAGE + pixel_stage;
  const int raw_stage = STAGE_CHANNELS * g.raw_pitch * (int)sizeof(scalar_t);
  unsigned char* const raw = shared_memory + STAGES * stage_bytes;
  unsigned* const halo = (unsigned*)(raw + (IN_PLACE ? 0 : RAW_STAGES * raw_stage));

  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, LOADERS);
      barrier_init(empty + 8 * i, CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Positions are the same for every tile.
  const int copied = IN_PLACE ? 1 : g.copy_bytes / (int)sizeof(scalar_t);
  for (int i = thread; i * copied < g.halo; i += THREADS) {
    Pixel p;
    p.locate(g, i * copied);
    const bool inside = p.n < g.images && p.d < g.cells[0] + REACH_D && p.h < g.cells[1] + REACH_H;
    halo[i] = inside ? p.packed() : NOWHERE;
  }
  for (int i = thread; i < CONSUMERS * PIXELS; i += THREADS) {
    Pixel p;
    p.locate(g, i);
    const bool inside = p.n < g.images && p.d < g.cells[0] && p.h < g.cells[1] && p.w < g.cells[2];
    shared.cells[i] = inside ? p.packed() : NOWHERE;
  }
  for (int i = thread; i < OPERATIONS * LINE_GROUPS; i += THREADS) {
    Operation o;
    int pixels = 0;
    if (find_operation(i % OPERATIONS, i / OPERATIONS * LINES, o))
      pixels = (src_offset(AXIS_D, o.depth_tap) - first_offset(AXIS_D)) * g.pitch[1] +
               (src_offset(AXIS_H, o.height_tap) - first_offset(AXIS_H)) * g.pitch[2] +
               src_offset(AXIS_W, o.width_tap) - first_offset(AXIS_W) + g.skew;
    shared.operations[i] = pixels * 16;
  }
  __syncthreads();

  if (warp_group == CONSUMERS) {
    registers_release();
    const Loader loader{g, halo, thread - CONSUMERS * 128};
    Cursor ahead{Item{}, (int)blockIdx.x, 0}, now{Item{}, (int)blockIdx.x, 0};
    ahead.item.locate(g, ahead.index);
    now.item.locate(g, now.index);
    Slot<STAGES> slot, slot_ahead;
    Slot<RAW_STAGES> copy_ahead, copy_now;
    auto start_copy = [&]() {
      if (ahead.index < g.items) {
        if (IN_PLACE) {
          barrier_wait(empty + 8 * slot_ahead.index, slot_ahead.parity ^ 1);
          loader.load(ahead.item, src, ahead.stage, shared_memory + slot_ahead.index * stage_bytes + WEIGHT_STAGE);
          slot_ahead.next();
        } else {
          loader.load(ahead.item, src, ahead.stage, raw + copy_ahead.index * raw_stage);
          copy_ahead.next();
        }
        ahead.next(g);
      }
      copies_commit();
    };
    for (int i = 0; i < LOOKAHEAD; ++i) start_copy();
    while (now.index < g.items) {
      unsigned char* const stage = shared_memory + slot.index * stage_bytes;
      const unsigned char* const weights =
          packed + ((long long)now.item.row_group * STAGES_OF_ITEM + now.stage) * WEIGHT_STAGE;
      if (!IN_PLACE) barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
#if __CUDA_ARCH__ >= 900
      if (loader.thread == 0) bulk_copy(shared_address(stage), weights, WEIGHT_STAGE, full + 8 * slot.index);
      copies_wait<LOOKAHEAD - 1>();
#else
      copies_wait<LOOKAHEAD - 1>();
      for (int i = loader.thread * 16; i < WEIGHT_STAGE; i += LOADERS * 16)
        copy_async<16>(shared_address(stage + i), weights + i, true);
      copies_commit();
#endif
      threads_sync(1, LOADERS);
      start_copy();
      loader.convert(IN_PLACE ? stage + WEIGHT_STAGE : raw + copy_now.index * raw_stage, stage + WEIGHT_STAGE);
#if __CUDA_ARCH__ < 900
      copies_wait<1>();
#endif
      publish_shared();
      barrier_arrive(full + 8 * slot.index);
      slot.next();
      copy_now.next();
      now.next(g);
    }
    copies_wait<0>();
  } else {
    registers_claim();
    Slot<STAGES> slot;
    Sums sums;
    for (int index = blockIdx.x; index < g.items; index += gridDim.x) {
      Item item;
      item.locate(g, index);
      const int* const distances = shared.operations + item.line_group * OPERATIONS;
      const int first_line = item.line_group * LINES;
      int previous = -1;
#pragma unroll 1
      for (int stage = 0; stage < STAGES_OF_ITEM; ++stage) {
        barrier_wait(full + 8 * slot.index, slot.parity);
        const unsigned weights = shared_address(shared_memory + slot.index * stage_bytes);
        const unsigned pixels = weights + WEIGHT_STAGE + warp_group * (PIXELS * 16);
        products_begin();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          unsigned a = weights + step * OPERATIONS * OPERATION_BYTES;
          const int* distance = distances;
#pragma unroll
          for (int block = 0; block < ROW_BLOCKS; ++block) {
            const int count = operations_of(block, first_line);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
              const unsigned b = pixels + step * 2 * g.chunk_bytes + *distance++;
              const bool add = stage + step + i > 0;
              if (PARTS == 2) {
                const unsigned b_low = b + STAGE_CHUNKS * g.chunk_bytes, a_low = a + 2 * A_CHUNK;
                add_product(sums[block], a, b_low, g.chunk_bytes, add);
                add_product(sums[block], a_low, b, g.chunk_bytes, true);
              }
              add_product(sums[block], a, b, g.chunk_bytes, PARTS == 2 || add);
              a += OPERATION_BYTES;
            }
          }
        }
        products_commit();
        products_wait<1>();
        if (previous >= 0 && thread % 128 == 0) barrier_arrive(empty + 8 * previous);
        previous = slot.index;
        slot.next();
      }
      products_wait<0>();
      if (thread % 128 == 0) barrier_arrive(empty + 8 * previous);

      scalar_t* const to = dst + item.n * g.dst.stride[0] + (long long)item.group * DST_CHANNELS * g.dst.stride[1];
      const unsigned* const cells = shared.cells + warp_group * PIXELS;
#pragma unroll
      for (int line = 0; line < LINES; ++line) {
        const int owned = first_line + line;
        if (owned < OWNED_LINES)
          store_line(g, item, sums, line, owned_phase(AXIS_D, owned / OWNED_H), owned_phase(AXIS_H, owned % OWNED_H), to,
                     bias, cells);
      }
      if (OWNED_LINES < DST_D * DST_H && item.line_group == 0) {
#pragma unroll 1
        for (int phase = 0; phase < DST_D * DST_H; ++phase)
          if (!has_taps(AXIS_D, phase / DST_H) || !has_taps(AXIS_H, phase % DST_H))
            store_line(g, item, sums, -1, phase / DST_H, phase % DST_H, to, bias, cells);
      }
    }
  }
}
