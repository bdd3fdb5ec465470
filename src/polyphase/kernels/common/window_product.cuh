// Both gradients as products of matrices on tensor cores, one stage after the other:
//
//     sum[row, column]  +=  Σ_k  A[row, k] · window[offset of k  +  offset of column]
//
// Rows are input channels. In the weight gradient columns are pairs of output channel and tap, k are positions, and A
// is the input; in the input gradient columns are positions, k are pairs of output channel and tap, and A is the
// weight.
//
// A window is what a tile of input positions meets of the output gradient, its halo included. It lies in shared memory
// as it does in the tensor, and serves every tap: the element that a position meets at a tap is the sum of two offsets,
// one of the position, one of the output channel and the tap. So neither operand is ever unfolded.
//
// Index mapping. 8 warps are ROW_WARPS × the rest; a warp computes 16·ROW_TILES rows and 8·COLUMN_TILES columns, with
// the fragments of common/mma.cuh: A's by ldmatrix, the window's element by element; float32 is rounded to TF32 there.
//
// Shared memory of a stage: A as [row][k], A_PITCH bytes a row, which no eight rows of ldmatrix find in one bank; the
// window as [output channel][n][d][h][w].

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int COLUMN_WARPS = WARPS / ROW_WARPS;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, COLUMNS = 8 * COLUMN_TILES * COLUMN_WARPS;
constexpr int ELEMENT = sizeof(scalar_t);
constexpr int OPERATION = 32 / ELEMENT;  // k of one instruction
constexpr int CHUNK_TAPS = OUT_CHUNK * TAPS;
constexpr int DEPTH = INPUT_GRAD ? round_up(CHUNK_TAPS, OPERATION) : POSITIONS;  // k of a stage
constexpr int A_PITCH = DEPTH * ELEMENT + 16;
constexpr int A_BYTES = ROWS * A_PITCH;

static_assert(DEPTH % OPERATION == 0, "a stage is whole operations");

// What a stage holds of a tensor: of each channel (of the weight: row) a box, moved in pieces.
struct Part {
  int extent[4];  // along n, d, h and w
  int piece;      // elements moved at once: along w, or of neighbouring channels
  int pitch;      // bytes in shared memory from one channel to the next
};

__device__ __forceinline__ int elements(const Part& part) {
  return part.extent[0] * part.extent[1] * part.extent[2] * part.extent[3];
}

// Where a piece begins, counted from the box's first element.
struct alignas(8) Place {
  short n, d, h, w;
};

// A part of one tensor on its way to shared memory.
template <bool CHANNELS_LAST, int CHANNELS>
struct PartLoader {
  static constexpr int VECTOR = CHANNELS % (16 / ELEMENT) == 0 ? 16 / ELEMENT : 1;  // channels at once

  Place* places;
  int pieces;  // of a channel

  // Lists the places of `count` elements, of which those beyond the box are zero.
  __device__ __forceinline__ void init(const Part& part, Place* list, int count) {
    places = list;
    const int along_w = CHANNELS_LAST ? 1 : part.piece;
    pieces = count / along_w;
    for (int i = threadIdx.x; i < pieces; i += THREADS) {
      int at = i * along_w;
      Place place = {-1, 0, 0, 0};
      if (at < elements(part)) {
        place.w = (short)(at % part.extent[3]);
        at /= part.extent[3];
        place.h = (short)(at % part.extent[2]);
        at /= part.extent[2];
        place.d = (short)(at % part.extent[1]);
        place.n = (short)(at / part.extent[1]);
      }
      places[i] = place;
    }
  }

  __device__ __forceinline__ Place* end() const { return places + pieces; }

  // The box that begins at `origin` (n, d, h, w), of `channels` channels from `from` on; those beyond are zero.
  __device__ __forceinline__ void load(const Tensor5& t, const Part& part, const scalar_t* from, int channels,
                                       int batch, const int (&origin)[4], char* to) const {
    if constexpr (CHANNELS_LAST) {
      if (VECTOR > 1 && part.piece > 1)
        load_channels<VECTOR>(t, part, from, channels, batch, origin, to);
      else
        load_channels<1>(t, part, from, channels, batch, origin, to);
    } else {
      switch (part.piece * ELEMENT) {
        case 16:
          return load_pieces<16>(t, part, from, channels, batch, origin, to);
        case 8:
          return load_pieces<8>(t, part, from, channels, batch, origin, to);
        case 4:
          return load_pieces<4>(t, part, from, channels, batch, origin, to);
        default:
          return load_pieces<ELEMENT>(t, part, from, channels, batch, origin, to);
      }
    }
  }

 private:
  // Whether the piece exists, and its offset in elements.
  static __device__ __forceinline__ bool locate(const Tensor5& t, Place place, int batch, const int (&origin)[4],
                                                long long& offset) {
    const int n = origin[0] + place.n, d = origin[1] + place.d, h = origin[2] + place.h, w = origin[3] + place.w;
    offset = n * t.stride[0] + d * t.stride[2] + h * t.stride[3] + w * t.stride[4];
    return place.n >= 0 && n < batch && (unsigned)d < (unsigned)t.size[0] && (unsigned)h < (unsigned)t.size[1] &&
           (unsigned)w < (unsigned)t.size[2];
  }

  // Lanes go along a row, warps take channels in turn; where rows are short a warp takes several channels at once.
  template <int BYTES>
  __device__ __forceinline__ void load_pieces(const Tensor5& t, const Part& part, const scalar_t* from, int channels,
                                              int batch, const int (&origin)[4], char* to) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int span = pieces < 32 ? 1 << (32 - __clz(pieces - 1)) : 32;
    for (int i = lane % span; i < pieces; i += span) {
      long long offset;
      const bool inside = locate(t, places[i], batch, origin, offset);
      const int step = WARPS * (32 / span);
      int channel = warp * (32 / span) + lane / span;
      const scalar_t* source = from + offset + channel * t.stride[1];
      char* slot = to + channel * part.pitch + i * BYTES;
#pragma unroll 4
      for (; channel < CHANNELS; channel += step, source += step * t.stride[1], slot += step * part.pitch) {
        const bool exists = inside && channel < channels;
        if constexpr (BYTES >= 4)
          copy_async<BYTES>(shared_address(slot), source, exists);
        else
          *(scalar_t*)slot = exists ? read(source) : zero<scalar_t>();
      }
    }
  }

  // Lanes go along channels, which are turned around on their way.
  template <int WIDTH>
  __device__ __forceinline__ void load_channels(const Tensor5& t, const Part& part, const scalar_t* from, int channels,
                                                int batch, const int (&origin)[4], char* to) const {
    constexpr int VECTORS = CHANNELS / WIDTH;
#pragma unroll 4
    for (int i = threadIdx.x; i < pieces * VECTORS; i += THREADS) {
      const int channel = i % VECTORS * WIDTH;
      long long offset;
      const bool inside = locate(t, places[i / VECTORS], batch, origin, offset);
      typedef Vector<scalar_t, WIDTH> Vectors;
      Vectors vector = {};
      if (inside && channel < channels) vector = *(const Vectors*)(from + offset + channel);
      char* const slot = to + channel * part.pitch + i / VECTORS * ELEMENT;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) *(scalar_t*)(slot + j * part.pitch) = vector.value[j];
    }
  }
};

// Bytes from the window's first element to what the first tap of a position meets, or those of a tap beyond the first.
__device__ __forceinline__ int window_bytes(const Part& window, int n, int d, int h, int w) {
  return (((n * window.extent[1] + d) * window.extent[2] + h) * window.extent[3] + w) * ELEMENT;
}
__device__ __forceinline__ int offset_of_tap(const Part& window, int channel, int tap) {
  return channel * window.pitch + window_bytes(window, 0, tap / (AXIS_W.kernel * AXIS_H.kernel) * AXIS_D.dilation,
                                               tap / AXIS_W.kernel % AXIS_H.kernel * AXIS_H.dilation,
                                               tap % AXIS_W.kernel * AXIS_W.dilation);
}

// A tile of input positions: lanes[4] of them along n, d, h and w. Beyond the last, a position is the first.
struct Position {
  int n, d, h, w;
  bool exists;

  __device__ __forceinline__ void init(const int (&lanes)[4], int index) {
    exists = index < lanes[0] * lanes[1] * lanes[2] * lanes[3];
    if (!exists) index = 0;
    w = index % lanes[3];
    index /= lanes[3];
    h = index % lanes[2];
    index /= lanes[2];
    d = index % lanes[1];
    n = index / lanes[1];
  }
};
__device__ __forceinline__ void list_positions(int* offsets, int count, const Part& window, const int (&lanes)[4],
                                               int skew) {
  for (int i = threadIdx.x; i < count; i += THREADS) {
    Position position;
    position.init(lanes, i);
    offsets[i] = window_bytes(window, position.n, position.d * AXIS_D.stride, position.h * AXIS_H.stride,
                              position.w * AXIS_W.stride + skew);
  }
}

// Which tile comes where.
struct Tile {
  int at[4];  // along n, d, h and w, in tiles

  __device__ __forceinline__ void init(const int (&tiles)[4], long long index) {
#pragma unroll
    for (int i = 3; i > 0; --i) {
      at[i] = (int)(index % tiles[i]);
      index /= tiles[i];
    }
    at[0] = (int)index;
  }
  __device__ __forceinline__ void next(const int (&tiles)[4]) {
#pragma unroll
    for (int i = 3; i > 0; --i) {
      if (++at[i] < tiles[i]) return;
      at[i] = 0;
    }
    ++at[0];
  }
  __device__ __forceinline__ void first_position(const int (&lanes)[4], int (&origin)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) origin[i] = at[i] * lanes[i];
  }
  __device__ __forceinline__ void first_of_window(const int (&lanes)[4], int skew, int (&origin)[4]) const {
    first_position(lanes, origin);
    origin[1] = origin[1] * AXIS_D.stride - AXIS_D.padding;
    origin[2] = origin[2] * AXIS_H.stride - AXIS_H.padding;
    origin[3] = origin[3] * AXIS_W.stride - AXIS_W.padding - skew;
  }
};

// The sums of a warp.
struct Sums {
  float of[ROW_TILES][COLUMN_TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROW_TILES * COLUMN_TILES * 4; ++i) (&of[0][0][0])[i] = 0;
  }

  // The first row and column of the thread's sums; sum i of a tile lies i / 2 · 8 rows and i % 2 columns on.
  static __device__ __forceinline__ int first_row() {
    return threadIdx.x / 32 / COLUMN_WARPS * (16 * ROW_TILES) + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int first_column() {
    return threadIdx.x / 32 % COLUMN_WARPS * (8 * COLUMN_TILES) + threadIdx.x % 4 * 2;
  }

  // One stage. `columns` are the window's offsets of column lane / 4 of each tile.
  __device__ __forceinline__ void add(const char* a, const char* window, const int* offsets,
                                      const int (&columns)[COLUMN_TILES]) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 / COLUMN_WARPS * (16 * ROW_TILES);
    __syncwarp();  // lanes may have loaded different numbers of pieces
    const unsigned rows_at = shared_address(a) + (first_row + lane % 16) * A_PITCH + lane / 16 * 16;
#pragma unroll 2
    for (int operation = 0; operation < DEPTH / OPERATION; ++operation) {
      unsigned rows[ROW_TILES][4];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        load_matrices(rows[i], rows_at + i * 16 * A_PITCH + operation * 32);
        if constexpr (ELEMENT == 4) {
#pragma unroll
          for (int j = 0; j < 4; ++j) rows[i][j] = __float_as_uint(round_tf32(__uint_as_float(rows[i][j])));
        }
      }
      constexpr int EACH = 4 / ELEMENT;  // k of a word
      const char* from[2 * EACH];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Vector<int, EACH> two =
            *(const Vector<int, EACH>*)(offsets + operation * OPERATION + half * (OPERATION / 2) + lane % 4 * EACH);
#pragma unroll
        for (int i = 0; i < EACH; ++i) from[half * EACH + i] = window + two.value[i];
      }
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j) {
        unsigned column[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (ELEMENT == 4)
            column[half] = __float_as_uint(round_tf32(*(const float*)(from[half] + columns[j])));
          else
            column[half] = *(const unsigned short*)(from[half * EACH] + columns[j]) |
                           *(const unsigned short*)(from[half * EACH + EACH - 1] + columns[j]) << 16;
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) mma(of[i][j], rows[i], column[0], column[1]);
      }
    }
  }
};
