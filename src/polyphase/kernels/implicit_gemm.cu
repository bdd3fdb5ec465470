// The forward pass as products of matrices on tensor cores, all phases of a tile in one block.
//
// A tile of cells and the halo around it lie in shared memory as one flat run of pixels, every row of the halo behind
// the one before: 16 bytes (CHUNK channels) a pixel, chunk by chunk. In that run a tap is a constant distance, so the
// pixels that a tap needs for PIXELS neighbouring cells are the operand of one instruction, at another address
// (matrix.cuh), and a tile is read once for all its taps. Cells of the run that lie in the halo are computed and not
// stored.
//
// Some warp groups load: pixels are copied asynchronously LOOKAHEAD stages ahead, in the order in which they lie in
// memory, and then turned around (channels innermost) and rounded on their way from shared to shared memory. The others
// multiply: each its part of the tile's cells; or all cells and its own row group (SPLIT_ROWS); or a tile of its own
// (TAKE_TURNS), and one stores while the other multiplies. Blocks stay, and take every gridDim.x-th item: the next tile
// is being loaded while the last one is stored. RESIDENT weights stay, too: then the items of a block are of the same
// row groups, and stages are pixels alone.

constexpr int LOADERS = LOADER_THREADS / LOADER_GROUPS;  // threads that load one stage
constexpr int THREADS = LOADER_THREADS + CONSUMERS * 128;
constexpr int SHARERS = TAKE_TURNS ? 1 : CONSUMERS;    // warp groups that work on one item
constexpr int GROUP_CELLS = PIXEL_BLOCKS * PIXELS;     // cells of a warp group
constexpr int ROW_PARTS = SPLIT_ROWS ? CONSUMERS : 1;  // row groups of an item
constexpr int CELL_PARTS = SHARERS / ROW_PARTS;
constexpr int CELLS = CELL_PARTS * GROUP_CELLS;  // of an item
constexpr int STAGE_CHANNELS = K_STEPS * STEP_CHANNELS;
constexpr int STAGE_CHUNKS = 2 * K_STEPS;
constexpr int STAGES_OF_ITEM = STEPS / K_STEPS;
constexpr int WEIGHT_STAGE = K_STEPS * OPERATIONS * OPERATION_BYTES;  // bytes of a row group's weights in a stage
constexpr long long WEIGHT_ITEM = (long long)STAGES_OF_ITEM * WEIGHT_STAGE;  // and in all stages
constexpr int WEIGHT_SLOT = RESIDENT ? 0 : ROW_PARTS * WEIGHT_STAGE;
constexpr int RESIDENT_WEIGHTS = RESIDENT ? ROW_PARTS * (int)WEIGHT_ITEM : 0;
// The pixels are copied to where they are used: channels last, or as the cores can take PIXELS_INNERMOST.
constexpr bool IN_PLACE = SRC_CHANNELS_LAST || PIXELS_INNERMOST;
static_assert(!PIXELS_INNERMOST || (!SRC_CHANNELS_LAST && sizeof(scalar_t) == 2 && WGMMA_INSTRUCTION),
              "not on the cores");
// Stages of its own that a loading group copies ahead of the one it turns around.
constexpr int LOOKAHEAD = IN_PLACE ? (STAGES - 2) / LOADER_GROUPS : RAW_STAGES - 1;
// A stage is given back when the next one is there, so a group that waits for a free one must not owe that next one.
static_assert(LOOKAHEAD >= 1 && STAGES >= 2, "too few stages");
// The parity of a barrier tells its last use from the one before only, so nobody may wait further ahead.
static_assert(STAGES >= LOADER_GROUPS, "too few stages");
static_assert(OPERATIONS <= CHANNEL_BLOCKS * TAPS, "an operation is a tap");
constexpr int DST_D = AXIS_D.stride, DST_H = AXIS_H.stride, DST_W = AXIS_W.stride;
constexpr int REACH_D = last_offset(AXIS_D) - first_offset(AXIS_D);
constexpr int REACH_H = last_offset(AXIS_H) - first_offset(AXIS_H);

// Cells of the run that are stored at once: about 256 bytes of a row.
__host__ __device__ constexpr int piece_of(int cells) {
  return cells <= 8 || cells * DST_W * (int)sizeof(scalar_t) <= 256 ? cells : piece_of(cells / 2);
}
constexpr int PIECE = DST_CHANNELS_LAST ? (GROUP_CELLS % 16 == 0 ? 16 : 8) : piece_of(128);
constexpr int PIECES = ceil_div(GROUP_CELLS, PIECE);
constexpr int STAGING_PITCH = PIECE * DST_W + 8;

struct Geometry {
  Tensor5 src, dst;
  int batch;
  int images;        // batch entries of a tile
  int cells[3];      // of a tile, along depth, height and width
  int tiles[4];      // along batch, depth, height and width
  int items;         // tiles by the row groups, ROW_PARTS at a time
  int tile_items;    // of one tile
  int pitch[3];      // pixels of the run from one image, slab and row to the next
  int halo;          // pixels of the run that are loaded
  int raw_pitch;     // pixels of the run in a copied stage
  int chunk_bytes;   // of the run in a stage
  int skew;          // columns before the first that is needed, so that copies are aligned
  int copy_bytes;    // of one copy: 16, 8, 4 or 2
  int store_vector;  // elements of a store
  int run;           // whether tiles are runs of CELLS cells across rows and images, which taps without reach allow
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
constexpr offset_t PADDING = ~(offset_t)0;

// Elements from a tensor's first of a batch entry and channel; offset_t has 32 bits where those suffice.
__device__ __forceinline__ offset_t offset_of(const Tensor5& t, int n, int d, int h, int w) {
  return byte_offset<char>(t, n, d, h, w);
}

struct Item {
  int n, d, h, w;  // the tile's first cell
  int first;       // in a run: of the cells of batch entry n
  int group, channel_group, line_group, row_group;

  // `part` is the row group among the item's.
  __device__ __forceinline__ void locate(const Geometry& g, int index, int part) {
    row_group = index % g.tile_items * ROW_PARTS + part, index /= g.tile_items;
    line_group = row_group % LINE_GROUPS;
    channel_group = row_group / LINE_GROUPS % CHANNEL_GROUPS;
    group = row_group / (LINE_GROUPS * CHANNEL_GROUPS);
    w = index % g.tiles[3] * g.cells[2], index /= g.tiles[3];
    h = index % g.tiles[2] * g.cells[1], index /= g.tiles[2];
    d = index % g.tiles[1] * g.cells[0], index /= g.tiles[1];
    n = g.run ? index * CELLS / g.pitch[0] : index * g.images;
    first = g.run ? index * CELLS - n * g.pitch[0] : 0;
  }
};

// What the block keeps in shared memory, apart from the stages.
struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  unsigned long long turn[CONSUMERS];            // of each warp group to multiply
  int operations[OPERATIONS * LINE_GROUPS + 1];  // distance of each operation's pixels, in bytes
  int counts[ROW_BLOCKS * LINE_GROUPS];          // operations of each row block
  unsigned cells[CELLS];                         // position of each cell of the run, or NOWHERE
};

// A warp group gives a slot back. Its warps multiply together with wgmma, and each at its own pace with mma.sync.
constexpr int RELEASES = WGMMA_INSTRUCTION ? 1 : 4;
__device__ __forceinline__ void release(unsigned barrier) {
  if (RELEASES > 1) __syncwarp();
  if (threadIdx.x % (128 / RELEASES) == 0) barrier_arrive(barrier);
}

// A slot of a ring, and the parity of its barriers.
template <int SLOTS>
struct Slot {
  int index = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void skip(int count) {
    const int sum = index + count;
    index = sum % SLOTS, parity ^= sum / SLOTS & 1;
  }
};

struct Loader {
  const Geometry& g;
  const unsigned* halo;  // position of each copied run of pixels, or NOWHERE
  offset_t* offsets;     // and where it lies in the source, from the tile's batch entry and channel, in elements
  int thread;

  __device__ __forceinline__ void find_pixels(const Item& item) const {
    const int copied = SRC_CHANNELS_LAST ? 1 : g.copy_bytes / (int)sizeof(scalar_t);
    for (int i = thread; i * copied < g.halo; i += LOADERS) {
      const unsigned position = g.run ? 0 : halo[i];
      Pixel p;
      if (g.run)
        p.locate(g, item.first + i * copied);
      else
        p.unpack(position);
      const int d = item.d + p.d + first_offset(AXIS_D), h = item.h + p.h + first_offset(AXIS_H);
      const int w = item.w + p.w + first_offset(AXIS_W) - g.skew;
      const bool inside = position != NOWHERE && item.n + p.n < g.batch && (unsigned)d < (unsigned)g.src.size[0] &&
                          (unsigned)h < (unsigned)g.src.size[1] && (unsigned)w < (unsigned)g.src.size[2];
      offsets[i] = inside ? offset_of(g.src, p.n, d, h, w) : PADDING;
    }
  }

  template <int BYTES>
  static __device__ __forceinline__ void copy(unsigned char* to, const scalar_t* from, bool exists) {
    if constexpr (BYTES == 2)
      *(scalar_t*)to = exists ? read(from) : zero<scalar_t>();
    else
      copy_async<BYTES>(shared_address(to), from, exists);
  }

  // Channels first: COUNT neighbouring pixels of every channel of the stage. Lanes take pixels, warps channels.
  template <int BYTES>
  __device__ __forceinline__ void copy_rows(const scalar_t* base, int channel, scalar_t* raw) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t), WARPS = LOADERS / 32;
    const int warp = thread / 32;
    const scalar_t* const first = base + warp * g.src.stride[1];
    raw += warp * g.raw_pitch;
    for (int v = thread % 32; v * COUNT < g.halo; v += 32) {
      const offset_t offset = offsets[v];
      const scalar_t* from = first + (offset == PADDING ? 0 : offset);
      unsigned char* to = (unsigned char*)(raw + v * COUNT);
#pragma unroll 4
      for (int i = 0; i < STAGE_CHANNELS / WARPS; ++i) {
        const bool exists =
            offset != PADDING && (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel + warp + i * WARPS < SRC_CHANNELS);
        copy<BYTES>(to, exists ? from : base, exists);
        from += WARPS * g.src.stride[1];
        to += WARPS * g.raw_pitch * (int)sizeof(scalar_t);
      }
    }
  }

  // Channels last: the chunks of every pixel, piece by piece where they are not aligned.
  template <int BYTES>
  __device__ __forceinline__ void copy_pixels(const scalar_t* base, int channel, unsigned char* to) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t);
    const int chunk = thread % STAGE_CHUNKS;
    const scalar_t* const from = base + chunk * CHUNK;
    to += chunk * g.chunk_bytes;
#pragma unroll 4
    for (int pixel = thread / STAGE_CHUNKS; pixel < g.halo; pixel += LOADERS / STAGE_CHUNKS) {
      const offset_t offset = offsets[pixel];
#pragma unroll
      for (int i = 0; i < CHUNK; i += COUNT) {
        const bool exists = offset != PADDING && channel + chunk * CHUNK + i < SRC_CHANNELS;
        copy<BYTES>(to + pixel * 16 + i * (int)sizeof(scalar_t), exists ? from + offset + i : base, exists);
      }
    }
  }

  // Channels first, as they are used: lanes take the eight channels of a chunk, each neighbouring pixels of one.
  template <int BYTES>
  __device__ __forceinline__ void copy_blocks(const scalar_t* base, int channel, unsigned char* to) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t);
    const int row = thread % 8;
    for (int v = thread / 8; v * COUNT < g.halo; v += LOADERS / 8) {
      const offset_t offset = offsets[v];
      const scalar_t* from = base + row * g.src.stride[1] + (offset == PADDING ? 0 : offset);
      unsigned char* target = to + v * COUNT / 8 * 128 + row * 16 + v * COUNT % 8 * (int)sizeof(scalar_t);
#pragma unroll
      for (int chunk = 0; chunk < STAGE_CHUNKS; ++chunk) {
        const bool exists = offset != PADDING && channel + chunk * CHUNK + row < SRC_CHANNELS;
        copy<BYTES>(target, exists ? from : base, exists);
        from += CHUNK * g.src.stride[1];
        target += g.chunk_bytes;
      }
    }
  }

  template <int BYTES>
  __device__ __forceinline__ void copy_stage(const scalar_t* base, int channel, unsigned char* to) const {
    if constexpr (SRC_CHANNELS_LAST)
      copy_pixels<BYTES>(base, channel, to);
    else if constexpr (PIXELS_INNERMOST)
      copy_blocks<BYTES>(base, channel, to);
    else
      copy_rows<BYTES>(base, channel, (scalar_t*)to);
  }

  // A stage of the tile that `find_pixels` has seen; `base` is its first channel's first element.
  __device__ __forceinline__ void load(const scalar_t* base, int stage, unsigned char* to) const {
    const int channel = stage * STAGE_CHANNELS;
    base += channel * g.src.stride[1];
    if (g.copy_bytes == 16)
      copy_stage<16>(base, channel, to);
    else if (!SRC_CHANNELS_LAST && g.copy_bytes == 8)
      copy_stage<8>(base, channel, to);
    else if (!SRC_CHANNELS_LAST && sizeof(scalar_t) == 2 && g.copy_bytes == 4)
      copy_stage<4>(base, channel, to);
    else
      copy_stage<sizeof(scalar_t)>(base, channel, to);
  }

  // A copied stage as the tensor cores take it: warps take a chunk of 32 pixels at a time.
  __device__ __forceinline__ void convert(const unsigned char* copied, unsigned char* to) const {
    if (IN_PLACE && sizeof(scalar_t) == 2) return;
    const int lane = thread % 32, blocks = (g.halo + 31) / 32;
#pragma unroll(sizeof(scalar_t) == 4 ? 2 : 1)
    for (int i = thread / 32; i < blocks * STAGE_CHUNKS; i += LOADERS / 32) {
      const int chunk = i % STAGE_CHUNKS, first = i / STAGE_CHUNKS * 32;
      unsigned char* const target = to + chunk * g.chunk_bytes + first * 16;
      if constexpr (sizeof(scalar_t) == 4) {
        Vector<float, 4> channels, high, low;
        if (IN_PLACE) channels = ((const Vector<float, 4>*)(copied + chunk * g.chunk_bytes + first * 16))[lane];
        const float* const row = (const float*)copied + chunk * 4 * g.raw_pitch + first + lane;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (!IN_PLACE) channels.value[k] = row[k * g.raw_pitch];
          split_tf32(channels.value[k], high.value[k], low.value[k]);
        }
        ((Vector<float, 4>*)target)[lane] = high;
        if (PARTS == 2) ((Vector<float, 4>*)(target + STAGE_CHUNKS * g.chunk_bytes))[lane] = low;
      } else {
        // Four matrices of 8 channels by 8 pixels are turned around at once.
        unsigned turned[4];
        const scalar_t* const row =
            (const scalar_t*)copied + (chunk * 8 + lane % 8) * g.raw_pitch + first + lane / 8 * 8;
        load_matrices<true>(turned, shared_address(row));
#pragma unroll
        for (int k = 0; k < 4; ++k) ((unsigned*)target)[32 * k + lane] = turned[k];
      }
    }
  }
};

// An item and a stage of it; `index` is not below g.items behind the last.
struct Cursor {
  int index, stage;

  // `count` stages on; true where that is another item.
  __device__ __forceinline__ bool skip(int count) {
    const int before = index;
    for (stage += count; stage >= STAGES_OF_ITEM; stage -= STAGES_OF_ITEM) index += gridDim.x;
    return index != before;
  }
};

typedef float Sums[ROW_BLOCKS][PIXEL_BLOCKS][SUMS];

template <class Function>
__device__ __forceinline__ void for_each(Function function, Sums& sums, Sums& totals) {
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block)
#pragma unroll
    for (int part = 0; part < PIXEL_BLOCKS; ++part)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) function(sums[block][part][i], totals[block][part][i]);
}

// Stores what one warp has summed: 16 channels of each row block, all cells of its warp group's part of the run.
struct Store {
  const Geometry& g;
  const Item& item;
  const Sums& sums;
  int first_cell;         // of the warp group, among the tile's
  const unsigned* cells;  // and the positions of its cells
  scalar_t* dst;          // the item's first channel, the tile's first batch entry
  const scalar_t* bias;   // of the item's first channel
  scalar_t* staging;      // of the warp

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

  __device__ __forceinline__ int channel(int block, int row) const {
    return (item.channel_group * CHANNEL_BLOCKS + block) * ROWS + channel_of_row(16 * warp() + row);
  }
  __device__ __forceinline__ float start(int channel) const {
    return HAS_BIAS && channel < DST_CHANNELS ? widen(read(bias + channel)) : 0.f;
  }
  // The 2 · DST_W elements of an output row that a thread's pair of cells gives. A line below zero owns no taps and is
  // bias alone. (Recursion, so that which accumulator holds an element is a constant to the compiler.)
  template <int LINE, int I = 0>
  __device__ __forceinline__ void run(float (&value)[2 * DST_W], int block, int j, int half, float start) const {
    constexpr bool owned = LINE >= 0 && has_taps(AXIS_W, I % DST_W);
    constexpr int index = owned_before(AXIS_W, I % DST_W);
    value[I] = start;
    if constexpr (owned)
      value[I] +=
          sums[(block * LINES + LINE) * OWNED_W + index][j / (PIXELS / 8)][j % (PIXELS / 8) * 4 + 2 * half + I / DST_W];
    if constexpr (I + 1 < 2 * DST_W) run<LINE, I + 1>(value, block, j, half, start);
  }
  // Channels first. The warp turns PIECE cells of 8 channels at a time around in shared memory, so that its lanes store
  // neighbouring elements of a row: whole lines are written.
  static constexpr int WIDE = 8 / (int)sizeof(scalar_t);  // elements of a wide store
  static constexpr int ELEMENTS = DST_CHANNELS_LAST ? PIECE / 4 : ceil_div(PIECE * DST_W, 32);

  // What a lane stores of a piece: of every row, `g.store_vector` elements at a time; or its cells, two of every eight.
  struct Elements {
    offset_t offset[ELEMENTS];
    int count[ELEMENTS];  // of the vector's or the cell's elements, those that exist
    int rows[ELEMENTS];   // rows of a slab (low half) and slabs that exist from the cell's first on
  };

  __device__ __forceinline__ void describe(int piece, Elements& elements) const {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int element = (lane() + 32 * i) * g.store_vector, phase = DST_CHANNELS_LAST ? 0 : element % DST_W;
      const int cell = piece * PIECE + (DST_CHANNELS_LAST ? i / 2 * 8 + lane() % 4 * 2 + i % 2 : element / DST_W);
      elements.count[i] = 0, elements.offset[i] = 0, elements.rows[i] = 0;
      if ((!DST_CHANNELS_LAST && element >= PIECE * DST_W) || cell >= GROUP_CELLS) continue;
      Pixel p;
      if (g.run)
        p.locate(g, item.first + first_cell + cell);
      else
        p.unpack(cells[cell]);
      if ((!g.run && cells[cell] == NOWHERE) || item.n + p.n >= g.batch) continue;
      const int d = (item.d + p.d) * DST_D, h = (item.h + p.h) * DST_H, w = (item.w + p.w) * DST_W + phase;
      const int columns = min((g.cells[2] - p.w) * DST_W - phase, g.dst.size[2] - w);  // from here on that are ours
      if (d >= g.dst.size[0] || h >= g.dst.size[1]) continue;
      elements.count[i] = max(0, min(columns, DST_CHANNELS_LAST ? DST_W : g.store_vector));
      elements.offset[i] = offset_of(g.dst, p.n, d, h, w);
      elements.rows[i] = min(g.dst.size[1] - h, 0x7fff) | min(g.dst.size[0] - d, 0x7fff) << 16;
    }
  }
  static __device__ __forceinline__ bool exists(const Elements& elements, int i, int depth, int height) {
    if (DST_D * DST_H == 1) return true;  // else cells may exist in part
    return height < (elements.rows[i] & 0xffff) && depth < elements.rows[i] >> 16;
  }

  template <int COUNT>
  __device__ __forceinline__ void store_rows(const Elements& elements, int depth, int height, int first_channel,
                                             scalar_t* line) const {
    typedef Vector<scalar_t, COUNT> Run;
    constexpr int VECTORS = ceil_div(PIECE * DST_W, 32 * COUNT);
    int count[VECTORS];
    bool whole = first_channel + 8 <= DST_CHANNELS;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      count[i] = exists(elements, i, depth, height) ? elements.count[i] : 0;
      whole = whole && (count[i] == COUNT || count[i] == 0);
    }
    const scalar_t* from = staging + lane() * COUNT;
    scalar_t* to = line + first_channel * g.dst.stride[1];
    if (__all_sync(0xffffffffu, whole)) {
#pragma unroll
      for (int row = 0; row < 8; ++row) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
          if (count[i] > 0)
            *(Run*)(to + elements.offset[i]) = *(const Run*)(from + row * STAGING_PITCH + 32 * COUNT * i);
        to += g.dst.stride[1];
      }
      return;
    }
#pragma unroll 1
    for (int row = 0; row < min(8, DST_CHANNELS - first_channel); ++row) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
          if (k < count[i])
            to[elements.offset[i] + k * g.dst.stride[4]] = from[row * STAGING_PITCH + 32 * COUNT * i + k];
      to += g.dst.stride[1];
    }
  }

  template <int LINE>
  __device__ __forceinline__ void store_piece(const Elements& elements, int piece, int depth, int height) const {
    scalar_t* const to = dst + depth * g.dst.stride[2] + height * g.dst.stride[3];
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = start(channel(block, lane() / 4 + 8 * half));
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
          float value[2 * DST_W];
          alignas(16) scalar_t narrowed[2 * DST_W];
          run<LINE>(value, block, piece * (PIECE / 8) + j, half, first);
#pragma unroll
          for (int i = 0; i < 2 * DST_W; ++i) narrow(value[i], narrowed[i]);
          scalar_t* const to_shared = staging + lane() / 4 * STAGING_PITCH + (8 * j + lane() % 4 * 2) * DST_W;
          constexpr int COUNT = DST_W % 2 == 0 && sizeof(scalar_t) * DST_W <= 8 ? 2 * DST_W : 2;
#pragma unroll
          for (int i = 0; i < 2 * DST_W; i += COUNT)
            *(Vector<scalar_t, COUNT>*)(to_shared + i) = *(const Vector<scalar_t, COUNT>*)(narrowed + i);
        }
        __syncwarp();
        const int first_channel = channel(block, 8 * half);
        if (g.store_vector == WIDE)
          store_rows<WIDE>(elements, depth, height, first_channel, to);
        else if (WIDE > 2 && g.store_vector == 2)
          store_rows<2>(elements, depth, height, first_channel, to);
        else
          store_rows<1>(elements, depth, height, first_channel, to);
        __syncwarp();
      }
  }

  // Channels last: a thread's two rows are neighbouring channels, and eight lanes 16 of them.
  template <int LINE>
  __device__ __forceinline__ void store_pixels(const Elements& elements, int piece, int depth, int height) const {
#pragma unroll
    for (int cell = 0; cell < ELEMENTS; ++cell) {
      if (!exists(elements, cell, depth, height)) continue;
      scalar_t* const pixel = dst + elements.offset[cell] + depth * g.dst.stride[2] + height * g.dst.stride[3];
#pragma unroll
      for (int block = 0; block < CHANNEL_BLOCKS; ++block) {
        const int first = channel(block, lane() / 4);
        if (first >= DST_CHANNELS) continue;
        float value[2][2 * DST_W];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          run<LINE>(value[half], block, piece * (PIECE / 8) + cell / 2, half, start(first + half));
#pragma unroll
        for (int i = 0; i < DST_W; ++i) {
          if (i >= elements.count[cell]) continue;
          Vector<scalar_t, 2> pair;
#pragma unroll
          for (int half = 0; half < 2; ++half) narrow(value[half][cell % 2 * DST_W + i], pair.value[half]);
          scalar_t* const to = pixel + i * g.dst.stride[4] + first;
          if (g.store_vector == 2) {
            *(Vector<scalar_t, 2>*)to = pair;
          } else {
            to[0] = pair.value[0];
            if (first + 1 < DST_CHANNELS) to[1] = pair.value[1];
          }
        }
      }
    }
  }

  template <int LINE>
  __device__ __forceinline__ void store_line(const Elements& elements, int piece, int depth, int height) const {
    if constexpr (DST_CHANNELS_LAST)
      store_pixels<LINE>(elements, piece, depth, height);
    else
      store_piece<LINE>(elements, piece, depth, height);
  }

  template <int LINE = 0>
  __device__ __forceinline__ void store_lines(const Elements& elements, int piece) const {
    const int owned = item.line_group * LINES + LINE;
    if (owned < OWNED_LINES)
      store_line<LINE>(elements, piece, owned_phase(AXIS_D, owned / OWNED_H), owned_phase(AXIS_H, owned % OWNED_H));
    if constexpr (LINE + 1 < LINES) store_lines<LINE + 1>(elements, piece);
  }

  // The item's lines; and one item stores those that own no taps.
  __device__ __forceinline__ void operator()() const {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      Elements elements;
      describe(piece, elements);
      store_lines(elements, piece);
      if (OWNED_LINES < DST_D * DST_H && item.line_group == 0) {
#pragma unroll 1
        for (int phase = 0; phase < DST_D * DST_H; ++phase)
          if (!has_taps(AXIS_D, phase / DST_H) || !has_taps(AXIS_H, phase % DST_H))
            store_line<-1>(elements, piece, phase / DST_H, phase % DST_H);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    implicit_gemm(const scalar_t* __restrict__ src, const unsigned char* __restrict__ packed,
                  const scalar_t* __restrict__ bias, scalar_t* __restrict__ dst, const Geometry g) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(8) Shared shared;
  const int thread = threadIdx.x;
  const int warp_group = __shfl_sync(0xffffffffu, thread / 128, 0);
  const int pixel_stage = PARTS * STAGE_CHUNKS * g.chunk_bytes;  // bytes
  const int stage_bytes = WEIGHT_SLOT + pixel_stage;
  const int raw_stage = STAGE_CHANNELS * g.raw_pitch * (int)sizeof(scalar_t);
  unsigned char* const resident = shared_memory + STAGES * stage_bytes;
  unsigned char* raw = resident + RESIDENT_WEIGHTS;
  scalar_t* const staging = (scalar_t*)(raw + (IN_PLACE ? 0 : LOADER_GROUPS * RAW_STAGES * raw_stage));
  unsigned* const halo = (unsigned*)(staging + (DST_CHANNELS_LAST ? 0 : CONSUMERS * 4 * 8 * STAGING_PITCH));

  const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty);
  const unsigned turns = shared_address(shared.turn);
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, LOADERS);
      barrier_init(empty + 8 * i, SHARERS * RELEASES);
    }
    for (int i = 0; i < CONSUMERS; ++i) barrier_init(turns + 8 * i, 1);
    barriers_publish();
  }
  // Positions are the same for every tile.
  const int copied = SRC_CHANNELS_LAST ? 1 : g.copy_bytes / (int)sizeof(scalar_t);
  for (int i = thread; i * copied < g.halo; i += THREADS) {
    Pixel p;
    p.locate(g, i * copied);
    const bool inside = p.n < g.images && p.d < g.cells[0] + REACH_D && p.h < g.cells[1] + REACH_H;
    halo[i] = inside ? p.packed() : NOWHERE;
  }
  for (int i = thread; i < CELLS; i += THREADS) {
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
  for (int i = thread; i < ROW_BLOCKS * LINE_GROUPS; i += THREADS)
    shared.counts[i] = operations_of(i % ROW_BLOCKS, i / ROW_BLOCKS * LINES);
  for (int i = thread * 16; i < RESIDENT_WEIGHTS; i += THREADS * 16)
    *(Vector<unsigned, 4>*)(resident + i) =
        *(const Vector<unsigned, 4>*)(packed + (long long)(blockIdx.x % g.tile_items) * RESIDENT_WEIGHTS + i);
  publish_shared();
  __syncthreads();

  if (warp_group >= CONSUMERS) {
    registers_release();
    // The loading groups take stages in turn.
    const int loader_thread = thread - CONSUMERS * 128;
    const int loader_group = __shfl_sync(0xffffffffu, loader_thread / LOADERS, 0);
    raw += loader_group * RAW_STAGES * raw_stage;
    const int table = ceil_div(g.halo, copied);
    const Loader loader{g, halo, (offset_t*)(halo + round_up(table, 2)) + loader_group * table,
                        loader_thread % LOADERS};
    Cursor ahead{(int)blockIdx.x, 0}, now{(int)blockIdx.x, 0};
    ahead.skip(loader_group), now.skip(loader_group);
    Slot<STAGES> slot, slot_ahead;
    slot.skip(loader_group), slot_ahead.skip(loader_group);
    Slot<RAW_STAGES> copy_ahead, copy_now;
    const scalar_t* base = src;
    const unsigned char* weights = packed;
    bool new_item = true, new_weights = true;
    auto start_copy = [&]() {
      if (ahead.index < g.items) {
        if (new_item) {
          Item item;
          item.locate(g, ahead.index, 0);
          base = src + item.n * g.src.stride[0] + (long long)item.group * SRC_CHANNELS * g.src.stride[1];
          threads_sync(1 + loader_group, LOADERS);  // all have copied the tile before
          loader.find_pixels(item);
          threads_sync(1 + loader_group, LOADERS);
        }
        if (IN_PLACE) {
          barrier_wait(empty + 8 * slot_ahead.index, slot_ahead.parity ^ 1);
          loader.load(base, ahead.stage, shared_memory + slot_ahead.index * stage_bytes + WEIGHT_SLOT);
          slot_ahead.skip(LOADER_GROUPS);
        } else {
          loader.load(base, ahead.stage, raw + copy_ahead.index * raw_stage);
          copy_ahead.skip(1);
        }
        new_item = ahead.skip(LOADER_GROUPS);
      }
      copies_commit();
    };
    for (int i = 0; i < LOOKAHEAD; ++i) start_copy();
    while (now.index < g.items) {
      unsigned char* const stage = shared_memory + slot.index * stage_bytes;
      if (new_weights) weights = packed + now.index % g.tile_items * (ROW_PARTS * WEIGHT_ITEM);
      if (!IN_PLACE) barrier_wait(empty + 8 * slot.index, slot.parity ^ 1);
#if BULK_COPY
      if (!RESIDENT && loader.thread == 0)
        for (int part = 0; part < ROW_PARTS; ++part)
          bulk_copy(shared_address(stage + part * WEIGHT_STAGE),
                    weights + part * WEIGHT_ITEM + now.stage * WEIGHT_STAGE, WEIGHT_STAGE, full + 8 * slot.index);
      copies_wait<LOOKAHEAD - 1>();
#else
      copies_wait<LOOKAHEAD - 1>();
      for (int i = loader.thread * 16; i < WEIGHT_SLOT; i += LOADERS * 16)
        copy_async<16>(shared_address(stage + i),
                       weights + i / WEIGHT_STAGE * WEIGHT_ITEM + now.stage * WEIGHT_STAGE + i % WEIGHT_STAGE, true);
      copies_commit();
#endif
      threads_sync(1 + loader_group, LOADERS);
      start_copy();
      loader.convert(IN_PLACE ? stage + WEIGHT_SLOT : raw + copy_now.index * raw_stage, stage + WEIGHT_SLOT);
#if !BULK_COPY
      copies_wait<1>();
#endif
      publish_shared();
      barrier_arrive(full + 8 * slot.index);
      slot.skip(LOADER_GROUPS);
      copy_now.skip(1);
      new_weights = now.skip(LOADER_GROUPS);
    }
    copies_wait<0>();
  } else {
    registers_claim();
    Slot<STAGES> slot;
    Sums sums, totals;  // the latter for PARTS = 2
    const int turn = TAKE_TURNS ? warp_group : 0;
    const int row_part = ROW_PARTS > 1 ? warp_group : 0, cell_part = CELL_PARTS > 1 ? warp_group : 0;
    slot.skip(turn * STAGES_OF_ITEM);
    unsigned turn_parity = 0;
    for (int index = blockIdx.x + turn * gridDim.x; index < g.items; index += CONSUMERS / SHARERS * gridDim.x) {
      Item item;
      item.locate(g, index, row_part);
      int counts[ROW_BLOCKS];
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS; ++i)
        counts[i] = LINE_GROUPS == 1 ? operations_of(i, 0) : shared.counts[item.line_group * ROW_BLOCKS + i];
      int previous = -1;
      // The parity of a slot tells its last use from the one before only, so nobody may wait further ahead.
      if (TAKE_TURNS) barrier_wait(turns + 8 * turn, turn_parity ^ (turn == 0));
      turn_parity ^= 1;
      if constexpr (PARTS == 2) for_each([](float& sum, float& total) { total = 0, clear(sum); }, sums, totals);
#pragma unroll 1
      for (int stage = 0; stage < STAGES_OF_ITEM; ++stage) {
        barrier_wait(full + 8 * slot.index, slot.parity);
        const unsigned held = shared_address(shared_memory + slot.index * stage_bytes);
        const unsigned weights = RESIDENT
                                     ? shared_address(resident) + row_part * (int)WEIGHT_ITEM + stage * WEIGHT_STAGE
                                     : held + row_part * WEIGHT_STAGE;
        const unsigned pixels = held + WEIGHT_SLOT + cell_part * (GROUP_CELLS * 16);
        products_begin();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          unsigned a = weights + step * OPERATIONS * OPERATION_BYTES;
          const int* distances = shared.operations + item.line_group * OPERATIONS;
          int distance = *distances;
#pragma unroll
          for (int block = 0; block < ROW_BLOCKS; ++block) {
#pragma unroll 2
            for (int i = 0; i < counts[block]; ++i) {
              const unsigned b = pixels + step * 2 * g.chunk_bytes + distance;
              distance = *++distances;  // in time for the next operation
              const bool add = PARTS == 2 || stage + step + i > 0;
#pragma unroll
              for (int part = 0; part < PIXEL_BLOCKS; ++part) {
                float (&to)[SUMS] = sums[block][part];
                const unsigned from = b + part * (PIXELS * 16);
                if (PARTS == 2) {
                  add_product(to, a, from + STAGE_CHUNKS * g.chunk_bytes, g.chunk_bytes, add);
                  add_product(to, a + 2 * A_CHUNK, from, g.chunk_bytes, true);
                }
                add_product(to, a, from, g.chunk_bytes, add);
              }
              a += OPERATION_BYTES;
            }
          }
        }
        products_commit();
        if constexpr (PARTS == 2) {
          // The cores cut sums off, and the loss grows with every addition: float32 adds up the stages, and rounds.
          products_wait<0>();
          for_each([](float& sum, float& total) { total += sum, clear(sum); }, sums, totals);
        } else {
          products_wait<1>();
        }
        if (previous >= 0) release(empty + 8 * previous);
        previous = slot.index;
        slot.skip(1);
      }
      products_wait<0>();
      if constexpr (PARTS == 2) for_each([](float& sum, float& total) { sum = total; }, sums, totals);
      release(empty + 8 * previous);
      if (TAKE_TURNS) {
        slot.skip(STAGES_OF_ITEM);
        if (thread % 128 == 0) barrier_arrive(turns + 8 * (CONSUMERS - 1 - turn));
      }

      const int first_channel = item.group * DST_CHANNELS;
      const Store store{g,
                        item,
                        sums,
                        cell_part * GROUP_CELLS,
                        shared.cells + cell_part * GROUP_CELLS,
                        dst + item.n * g.dst.stride[0] + first_channel * g.dst.stride[1],
                        bias + first_channel,
                        staging + thread / 32 * (8 * STAGING_PITCH)};
      store();
    }
  }
}
