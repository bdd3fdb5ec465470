// From accumulators to the destination tensor, where a row block is channels of one phase.

// Cells of the run that are stored at once: about 256 bytes of a row.
__host__ __device__ constexpr int piece_of(int cells) {
  return cells <= 8 || cells * DST_W * (int)sizeof(scalar_t) <= 256 ? cells : piece_of(cells / 2);
}
constexpr int PIECE = DST_CHANNELS_LAST ? 32 : piece_of(128);
constexpr int PIECES = ceil_div(GROUP_CELLS, PIECE);
// What a warp turns around at a time, 8 channels of a piece; channels last a warp group, the 64 channels of its cells.
// A pitch lets neighbours lie in different banks.
constexpr int STAGING_PITCH = DST_CHANNELS_LAST ? ROWS + 16 / (int)sizeof(scalar_t) : PIECE * DST_W + 8;
constexpr int STAGING = (DST_CHANNELS_LAST ? PIECE : 8) * STAGING_PITCH;
constexpr int STAGERS = DST_CHANNELS_LAST ? 128 : 32;  // threads that share it
constexpr int STAGING_BYTES = CONSUMERS * (128 / STAGERS) * STAGING * (int)sizeof(scalar_t);

// Where a cell's first element goes, from the tile's batch entry and the channel; and how many elements are ours from
// there on along depth, height and width: none of a cell that is not stored.
struct Place {
  offset_t offset;
  unsigned reach;
  static __device__ __forceinline__ unsigned reach_of(int slabs, int rows, int columns) {
    return min(slabs, DST_D) << 20 | min(rows, DST_H) << 10 | min(columns, 1023);
  }
  static __device__ __forceinline__ int columns(unsigned reach) { return reach & 1023; }
  static __device__ __forceinline__ bool has_line(unsigned reach, int depth, int height) {
    return height < (reach >> 10 & 1023) && depth < reach >> 20;
  }
};
static_assert(DST_D < 1024 && DST_H < 1024 && DST_W + 8 < 1024, "ten bits each");
constexpr int STORE_BYTES = STAGING_BYTES + CONSUMERS * GROUP_CELLS * (int)sizeof(Place);

// 16 bytes in one store, without a branch. (The compiler may take a vector apart where another path stores the same
// elements one by one, and store those that both have together.)
__device__ __forceinline__ void store_vector(scalar_t* to, const Vector<unsigned, 4>& vector, bool exists) {
#ifndef EMULATOR
  asm volatile(
      "{ .reg .pred exists; setp.ne.b32 exists, %5, 0;\n"
      "@exists st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
      "r"(vector.value[0]), "r"(vector.value[1]), "r"(vector.value[2]), "r"(vector.value[3]), "r"((int)exists)
      : "memory");
#else
  if (exists) *(Vector<unsigned, 4>*)to = vector;
#endif
}

// Stores what one warp has summed: 16 channels of each row block, all cells of its warp group's part of the run.
struct Store {
  const Geometry& g;
  const Item& item;
  const Sums& sums;
  int first_cell;                   // of the warp group, among the tile's
  scalar_t* dst;                    // the item's first channel, the tile's first batch entry
  scalar_t* staging;                // of the warp, or the warp group
  Place* places;                    // of the warp group's cells
  float starts[CHANNEL_BLOCKS][2];  // the bias of the thread's rows

  __device__ __forceinline__ Store(const Geometry& g, const Item& item, const Sums& sums, int first_cell, scalar_t* dst,
                                   const scalar_t* bias, unsigned char* memory)
      : g(g),
        item(item),
        sums(sums),
        first_cell(first_cell),
        dst(dst),
        staging((scalar_t*)memory + threadIdx.x / STAGERS * STAGING),
        places((Place*)(memory + STAGING_BYTES) + threadIdx.x / 128 * GROUP_CELLS) {
    find_places();
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = channel(block, lane() / 4 + 8 * half);
        starts[block][half] = HAS_BIAS && of < DST_CHANNELS ? widen(read(bias + of)) : 0.f;
        load_now(starts[block][half]);
      }
  }

  // The compiler leaves the load where it stands, long before its result is used.
  static __device__ __forceinline__ void load_now(float& value) {
#ifndef EMULATOR
    if (HAS_BIAS) asm volatile("" : "+f"(value));
#endif
  }

  // What is the same for every item: nothing.
  static __device__ __forceinline__ void prepare(const Geometry&, unsigned char*) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

  __device__ __forceinline__ int channel(int block, int row) const {
    return (item.channel_group * CHANNEL_BLOCKS + block) * ROWS + channel_of_row(16 * warp() + row);
  }
  // The 2 · DST_W elements of an output row that a thread's pair of cells gives. A line below zero owns no taps and is
  // bias alone. (Recursion, so that which accumulator holds an element is a constant to the compiler.)
  template <int LINE, int I = 0>
  __device__ __forceinline__ void run(float (&value)[2 * DST_W], int block, int j, int half, float start) const {
    constexpr bool owned = LINE >= 0 && has_taps(AXIS_W, I % DST_W);
    constexpr int index = owned_before(AXIS_W, I % DST_W);
    value[I] = start;
    if constexpr (owned) {
      const float (&sum)[SUMS] = sums[(block * LINES + LINE) * OWNED_W + index][j / (PIXELS / 8)];
      value[I] = sum[j % (PIXELS / 8) * 4 + 2 * half + I / DST_W];
      if (HAS_BIAS) value[I] += start;
    }
    if constexpr (I + 1 < 2 * DST_W) run<LINE, I + 1>(value, block, j, half, start);
  }
  // Channels first. The warp turns PIECE cells of 8 channels at a time around in shared memory, so that its lanes store
  // neighbouring elements of a row: whole lines are written.
  static constexpr int FIRST_BARRIER = 6;  // of the named barriers; those before are the loaders'
  static constexpr int WIDE = (DST_CHANNELS_LAST ? 16 : 8) / (int)sizeof(scalar_t);  // elements of a wide store
  static constexpr int VECTORS_OF_PIXEL = ROWS / WIDE;                               // with channels last
  static constexpr int ELEMENTS = DST_CHANNELS_LAST ? PIECE * VECTORS_OF_PIXEL / 128 : ceil_div(PIECE * DST_W, 32);

  // What a lane stores of a piece: of every row, `g.store_vector` elements at a time; or of every 128 vectors one.
  static __device__ __forceinline__ int vector(int i) { return threadIdx.x % 128 + 128 * i; }
  struct Elements {
    offset_t offset[ELEMENTS];
    int count[ELEMENTS];       // of the vector's or the cell's elements, those that exist
    unsigned reach[ELEMENTS];  // the cell's
  };

  // The threads of a warp group.
  static __device__ __forceinline__ void group_sync() { threads_sync(FIRST_BARRIER + threadIdx.x / 128, 128); }

  // By the warp group together, while its last products are on their way.
  __device__ __forceinline__ void find_places() const {
    group_sync();  // the places of the item before are no longer needed
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < GROUP_CELLS; i += 128) {
      Pixel p;
      p.locate(g, item.first + first_cell + i);
      const int d = (item.d + p.d) * DST_D, h = (item.h + p.h) * DST_H, w = (item.w + p.w) * DST_W;
      const int slabs = g.dst.size[0] - d, rows = g.dst.size[1] - h;
      const int columns = min((g.cells[2] - p.w) * DST_W, g.dst.size[2] - w);
      const bool inside = p.n < g.images && p.d < g.cells[0] && p.h < g.cells[1] && item.n + p.n < g.batch;
      const bool exists = (g.run == 0 || first_cell + i < g.run) && slabs > 0 && rows > 0 && columns > 0;
      places[i] = {offset_of(g.dst, p.n, d, h, w), inside && exists ? Place::reach_of(slabs, rows, columns) : 0u};
    }
    group_sync();
  }

  __device__ __forceinline__ void describe(int piece, Elements& elements) const {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int element = (lane() + 32 * i) * g.store_vector, phase = DST_CHANNELS_LAST ? 0 : element % DST_W;
      const int cell = piece * PIECE + (DST_CHANNELS_LAST ? vector(i) / VECTORS_OF_PIXEL : element / DST_W);
      const bool ours = (DST_CHANNELS_LAST || element < PIECE * DST_W) && cell < GROUP_CELLS;
      const Place place = places[ours ? cell : 0];
      const int columns = ours ? Place::columns(place.reach) - phase : 0;
      elements.count[i] = max(0, min(columns, DST_CHANNELS_LAST ? DST_W : g.store_vector));
      elements.offset[i] = place.offset + phase * (offset_t)g.dst.stride[4];
      elements.reach[i] = place.reach;
    }
  }
  static __device__ __forceinline__ bool exists(const Elements& elements, int i, int depth, int height) {
    if (DST_D * DST_H == 1) return true;  // else cells may exist in part
    return Place::has_line(elements.reach[i], depth, height);
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
      const long long row_bytes = g.dst.stride[1] * (int)sizeof(scalar_t);
      char* element[VECTORS];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) element[i] = (char*)(to + elements.offset[i]);
#pragma unroll
      for (int row = 0; row < 8; ++row)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
          if (count[i] > 0) *(Run*)element[i] = *(const Run*)(from + row * STAGING_PITCH + 32 * COUNT * i);
          element[i] += row_bytes;
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
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
          float value[2 * DST_W];
          alignas(16) scalar_t narrowed[2 * DST_W];
          run<LINE>(value, block, piece * (PIECE / 8) + j, half, starts[block][half]);
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

  // Channels last: a thread's two rows are neighbouring channels, eight lanes hold 16 of them, and four warps all 64.
  // The warp group turns one phase of a piece around, so that a lane stores 16 bytes and its neighbours those beside
  // them.
  template <int LINE>
  __device__ __forceinline__ void store_pixels(const Elements& elements, int piece, int depth, int height) const {
    scalar_t* const line = dst + depth * g.dst.stride[2] + height * g.dst.stride[3];
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block) {
      const int first_channel = (item.channel_group * CHANNEL_BLOCKS + block) * ROWS;
#pragma unroll
      for (int phase = 0; phase < DST_W; ++phase) {
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
          float value[2][2 * DST_W];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            run<LINE>(value[half], block, piece * (PIECE / 8) + j, half, starts[block][half]);
#pragma unroll
          for (int cell = 0; cell < 2; ++cell) {
            Vector<scalar_t, 2> pair;
#pragma unroll
            for (int half = 0; half < 2; ++half) narrow(value[half][cell * DST_W + phase], pair.value[half]);
            *(Vector<scalar_t, 2>*)(staging + (8 * j + lane() % 4 * 2 + cell) * STAGING_PITCH + 16 * warp() +
                                    lane() / 4 * 2) = pair;
          }
        }
        group_sync();
        const int from_channel = lane() % VECTORS_OF_PIXEL * WIDE,
                  remaining = DST_CHANNELS - first_channel - from_channel;
        const scalar_t* const from = staging + threadIdx.x % 128 / VECTORS_OF_PIXEL * STAGING_PITCH + from_channel;
        constexpr int APART = 128 / VECTORS_OF_PIXEL * STAGING_PITCH;
        scalar_t* const to = line + phase * g.dst.stride[4] + first_channel + from_channel;
        bool stored[ELEMENTS];
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i)
          stored[i] = phase < elements.count[i] && remaining > 0 && exists(elements, i, depth, height);
        if (g.store_vector == WIDE) {
#pragma unroll
          for (int i = 0; i < ELEMENTS; i += 2) {  // two vectors on their way together
            const Vector<unsigned, 4> first = *(const Vector<unsigned, 4>*)(from + i * APART);
            const Vector<unsigned, 4> second = *(const Vector<unsigned, 4>*)(from + (i + 1) * APART);
            store_vector(to + elements.offset[i], first, stored[i]);
            store_vector(to + elements.offset[i + 1], second, stored[i + 1]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < ELEMENTS; ++i)
            if (stored[i])
#pragma unroll 1
              for (int k = 0; k < min(WIDE, remaining); ++k) to[elements.offset[i] + k] = from[i * APART + k];
        }
        group_sync();
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
