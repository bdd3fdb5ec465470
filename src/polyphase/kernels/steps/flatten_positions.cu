// Copies both operands of a weight gradient to planes with positions innermost, which wgmma reads:
//
//     planes[plane][part][c][position] = src[n, c, at(d), at(h), at(w)]
//     at(i) = i·step + first + (plane's number)·apart
//
// and zero where there is no such element. Positions run over n, d, h, w of padded images, or d, h, w, n. PARTS = 2:
// the value as TF32, and the remainder as TF32.
//
// Index mapping. The first blocks have the layer's input, the others the gradient of its output; planes are fastest, so
// that the source is read once for all of them. Words have four bytes. There is one mapping for each innermost
// dimension:
//
//     ROWS           columns, in source and planes: THREADS words of positions of some channels; a thread has CHANNELS
//                    of them in flight
//     PIECES         the same for elements of 16 bits and short steps along the width: a thread reads whole pieces of
//                    16 bytes of the source, which hold a piece of positions of all planes along the width
//     RESIDUES       the same if many planes along the width share each sector of the source: a block has neighbouring
//                    planes, and reads the source in memory order, through shared memory
//     CHANNELS_LAST  channels, in the source: TILE positions by TILE channels, through shared memory
//     BATCH          images, in the planes: TILE pixels by TILE images of channels, through shared memory

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"

// Four dimensions in the order in which positions run over them.
struct Operand {
  long long stride[4], channel_stride;  // of the source, in elements
  long long pitch;                      // elements from a channel to the next, a multiple of 16 bytes
  long long elements;                   // from the source's first element to the end
  int channels;                         // of all groups
  int positions;
  Divisor extent[3];  // of the inner three, padded
  int size[4];        // of the source
  int step[4], first[4], apart[4];
  Divisor planes[4];        // planes along each dimension
  Divisor blocks;           // blocks of positions
  Divisor images;           // images of a block (BATCH)
  Divisor residues;         // planes along the width of a block (RESIDUES)
  Divisor pieces;           // 16-byte pieces of a block's positions
  int block_channels, row;  // channels of a block; elements from a residue to the next in shared memory
};

struct Params {
  Operand x, grad;
  int x_blocks;
};

constexpr int ROWS = 0, CHANNELS_LAST = 1, BATCH = 2, RESIDUES = 3, PIECES = 4;
constexpr int WORD = 4 / (int)sizeof(scalar_t);
constexpr int CHANNELS = 8, TILE = 64;
constexpr int PIECE = 4 * WORD, AT_ONCE = 4;               // elements of 16 bytes, channels that a thread reads
constexpr int MOST_POSITIONS = 512, STRIP = 2176 * PIECE;  // of a block of many residues: elements, padded

struct Plane {
  int index;
  int first[4];

  __device__ __forceinline__ Plane(const Operand& of, int plane) : index(plane) {
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      first[i] = of.first[i] + plane % of.planes[i] * of.apart[i];
      plane = plane / of.planes[i];
    }
  }
  // Dimension i's share of a position's offset in the source; negative for none.
  __device__ __forceinline__ long long along(const Operand& of, int i, int place) const {
    const int at = place * of.step[i] + first[i];
    return (unsigned)at < (unsigned)of.size[i] ? at * of.stride[i] : -1;
  }
  // The same for the first DIMENSIONS dimensions together; `position` counts their positions.
  template <int DIMENSIONS>
  __device__ __forceinline__ long long element(const Operand& of, int position) const {
    long long sum = 0;
    bool exists = true;
#pragma unroll
    for (int i = DIMENSIONS - 1; i >= 0; --i) {
      const int outer = i > 0 ? position / of.extent[max(0, i - 1)] : 0;
      const long long share = along(of, i, i > 0 ? position - outer * of.extent[max(0, i - 1)].value : position);
      exists = exists && share >= 0, sum += share, position = outer;
    }
    return exists ? sum : -1;
  }
};

// Stores neighbouring positions of a channel, in all parts, which are `apart` elements apart.
template <int COUNT>
__device__ __forceinline__ void store_parts(const Vector<float, COUNT>& values, long long apart, float* to) {
  Vector<float, COUNT> parts[2] = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) parts[0].value[i] = values.value[i];
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (PARTS == 2) split_tf32(values.value[i], parts[0].value[i], parts[1].value[i]);
  *(Vector<float, COUNT>*)to = parts[0];
  if (PARTS == 2) *(Vector<float, COUNT>*)(to + apart) = parts[1];
}
template <class T, int COUNT>
__device__ __forceinline__ void store_parts(const Vector<T, COUNT>& values, long long, T* to) {
  *(Vector<T, COUNT>*)to = values;
}
// Stores a word of a channel.
__device__ __forceinline__ void store_word(const Operand& of, int plane, int channel, int first,
                                           const Vector<scalar_t, WORD>& values, scalar_t* planes) {
  const long long row = (long long)plane * PARTS * of.channels + channel;
  store_parts(values, of.channels * of.pitch, planes + row * of.pitch + first);
}

__device__ __forceinline__ void flatten_rows(const Operand& of, const Plane& plane, int along, int across,
                                             const scalar_t* __restrict__ src, scalar_t* __restrict__ planes) {
  const int first = (along * THREADS + (int)threadIdx.x) * WORD, first_channel = across * of.block_channels;
  if (first >= of.positions) return;
  const scalar_t* from[WORD];
  bool exists[WORD];
#pragma unroll
  for (int j = 0; j < WORD; ++j) {
    const long long element = first + j < of.positions ? plane.element<4>(of, first + j) : -1;
    exists[j] = element >= 0, from[j] = src + (element + first_channel * of.channel_stride);
  }
  scalar_t* to = planes + (((long long)plane.index * PARTS * of.channels + first_channel) * of.pitch + first);
  const int channels = min(of.block_channels, of.channels - first_channel);
#pragma unroll 1
  for (int done = 0; done < channels; done += CHANNELS) {
    Vector<scalar_t, WORD> words[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        words[i].value[j] = exists[j] && done + i < channels ? read(from[j]) : zero<scalar_t>();
        from[j] += of.channel_stride;
      }
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i, to += of.pitch)
      if (done + i < channels) store_parts(words[i], of.channels * of.pitch, to);
  }
}

// Shared memory with RESIDUES: the source offset and column of each position's element of the first residue, and values
// as [channel][residue][position].
struct Strip {
  long long starts[MOST_POSITIONS];
  int columns[MOST_POSITIONS];  // far outside for an element that does not exist
  alignas(16) scalar_t values[STRIP];
};

typedef Vector<scalar_t, PIECE> Piece;

// PIECES. The planes along the width: STEP elements from a position to the next, APART from a plane to the next. The
// elements of a piece of positions of all planes are SPAN neighbours, from LEAST on relative to the element of the
// first position and plane; they are in CHUNKS pieces of the source, wherever these begin.
template <int STEP_, int PLANES_, int APART_>
struct AlongWidth {
  static constexpr int STEP = STEP_, PLANES = PLANES_, APART = APART_;
  static constexpr int REACH = (PLANES - 1) * APART, LEAST = REACH < 0 ? REACH : 0;
  static constexpr int SPAN = (PIECE - 1) * STEP + 1 + (REACH < 0 ? -REACH : REACH);
  static constexpr int CHUNKS = ceil_div(SPAN + PIECE - 1, PIECE), WORDS = 4 * CHUNKS;
  static constexpr int CHANNELS_AT_ONCE = CHUNKS < 3 ? 4 : CHUNKS < 5 ? 2 : 1;
};

// Moves elements of 16 bits down by `count`, which is less than eight.
template <int WORDS>
__device__ __forceinline__ void shift_down(unsigned (&words)[WORDS], int count) {
#pragma unroll
  for (int by = 2; by > 0; --by)
#pragma unroll
    for (int i = 0; i + by < WORDS; ++i) words[i] = count / 2 & by ? words[i + by] : words[i];
#pragma unroll
  for (int i = 0; i + 1 < WORDS; ++i) words[i] = __byte_perm(words[i], words[i + 1], count % 2 ? 0x5432 : 0x3210);
}

// Two elements of 16 bits as a word.
template <int WORDS>
__device__ __forceinline__ unsigned pair_of(const unsigned (&words)[WORDS], int first, int second) {
  return __byte_perm(words[first / 2], words[second / 2], (first % 2 ? 0x32 : 0x10) | (second % 2 ? 0x7600 : 0x5400));
}

// Stores a piece of positions of all planes along the width, of one channel. `words`: SPAN elements of a row of the
// source, from its `first` on; what is outside the row is not read.
template <class ALONG>
__device__ __forceinline__ void store_planes(const Operand& of, const unsigned (&words)[ALONG::WORDS], int first,
                                             scalar_t* to) {
  const bool inside = first >= 0 && first + ALONG::SPAN <= of.size[3];
  const auto exists = [&](int element) { return (unsigned)(first + element) < (unsigned)of.size[3]; };
#pragma unroll
  for (int plane = 0; plane < ALONG::PLANES; ++plane) {
    alignas(16) unsigned found[PIECE / 2];
#pragma unroll
    for (int i = 0; i < PIECE; i += 2) {
      const int at = i * ALONG::STEP + plane * ALONG::APART - ALONG::LEAST;
      found[i / 2] = pair_of(words, at, at + ALONG::STEP);
      if (!inside) found[i / 2] &= (exists(at) ? 0xffff : 0) | (exists(at + ALONG::STEP) ? 0xffff0000 : 0);
    }
    store_parts(*(const Piece*)found, 0, to + plane * (of.channels * of.pitch));
  }
}

// Reads the piece of the source at `from`, of which elements from `first` to `end` are in memory; zeros for the others.
__device__ __forceinline__ void read_edge(const scalar_t* from, long long first, long long end, unsigned (&words)[4]) {
  alignas(16) scalar_t each[PIECE];
#pragma unroll
  for (int i = 0; i < PIECE; ++i) each[i] = i >= first && i < end ? read(from + i) : zero<scalar_t>();
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = ((const unsigned*)each)[i];
}

template <class ALONG>
__device__ __forceinline__ void flatten_pieces(const Operand& of, const Plane& plane, int along, int across,
                                               const scalar_t* __restrict__ src, scalar_t* __restrict__ planes) {
  constexpr int AT_ONCE = ALONG::CHANNELS_AT_ONCE;
  const int position = (along * THREADS + (int)threadIdx.x) * PIECE, first_channel = across * of.block_channels;
  if (position >= of.positions) return;
  const int row = position / of.extent[2], column = position - row * of.extent[2].value;
  const long long start = plane.element<3>(of, row);
  const int first = column * ALONG::STEP + plane.first[3] + ALONG::LEAST;  // element of the row
  scalar_t* to = planes + (((long long)plane.index * of.channels + first_channel) * of.pitch + position);
  const int channels = min(of.block_channels, of.channels - first_channel);
#pragma unroll 1
  for (int done = 0; done < channels; done += AT_ONCE) {
    unsigned words[AT_ONCE][ALONG::WORDS];
    int beside[AT_ONCE];  // elements between the first piece of the source and the first element
#pragma unroll
    for (int c = 0; c < AT_ONCE; ++c) {
      const long long begin = start + (first_channel + done + c) * of.channel_stride;
      beside[c] = (int)((unsigned long long)(src + (begin + first)) / sizeof(scalar_t) % PIECE);
#pragma unroll
      for (int i = 0; i < ALONG::CHUNKS; ++i) {
        const int at = first - beside[c] + i * PIECE;  // element of the row
        const bool exists = start >= 0 && at < of.size[3] && at + PIECE > 0 && done + c < channels;
        const bool whole = begin + at >= 0 && begin + at + PIECE <= of.elements;
        Vector<unsigned, 4> chunk;
        load_global_if(exists && whole, src + (begin + at), chunk);
        if (exists && !whole)  // before the tensor's first element, or beyond its last
          read_edge(src + (begin + at), -begin - at, of.elements - begin - at, chunk.value);
#pragma unroll
        for (int j = 0; j < 4; ++j) words[c][4 * i + j] = chunk.value[j];
      }
    }
#pragma unroll
    for (int c = 0; c < AT_ONCE; ++c, to += of.pitch) {
      if (done + c >= channels) break;
      shift_down(words[c], beside[c]);
      store_planes<ALONG>(of, words[c], first, to);
    }
  }
}

// Reads pieces of positions of one residue, for some channels.
__device__ __forceinline__ void read_pieces(const Operand& of, int residue, int position, int channels,
                                            const scalar_t* __restrict__ src, const Strip& strip, scalar_t* to) {
  const int beside = residue * of.apart[3];
  const scalar_t* from[PIECE];
  bool exists[PIECE];
#pragma unroll
  for (int j = 0; j < PIECE; ++j) {
    exists[j] = (unsigned)(strip.columns[position + j] + beside) < (unsigned)of.size[3];
    from[j] = src + (strip.starts[position + j] + beside * of.stride[3]);
  }
#pragma unroll(AT_ONCE / (WORD * WORD))
  for (int i = 0; i < AT_ONCE; ++i) {
    Piece piece = {};
#pragma unroll
    for (int j = 0; j < PIECE; ++j)
      if (exists[j] && i < channels) piece.value[j] = read(from[j]);
    *(Piece*)(to + i * of.residues.value * of.row) = piece;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) from[j] += of.channel_stride;
  }
}

__device__ __forceinline__ void flatten_residues(const Operand& of, const Plane& plane, int along, int across,
                                                 const scalar_t* __restrict__ src, scalar_t* __restrict__ planes,
                                                 Strip& strip) {
  const int all = of.pieces.value * PIECE, first = along * all, residues = of.residues.value;
  const int first_channel = across * of.block_channels, channels = min(of.block_channels, of.channels - first_channel);
  const int existing = min(residues, of.planes[3].value - plane.index % of.planes[3]);
  for (int i = threadIdx.x; i < all; i += THREADS) {
    const int rest = (first + i) / of.extent[2], column = (first + i - rest * of.extent[2].value) * of.step[3];
    const long long start = first + i < of.positions ? plane.element<3>(of, rest) : -1;
    strip.columns[i] = start < 0 ? -(1 << 30) : column + plane.first[3];
    strip.starts[i] = start + (column + plane.first[3]) * of.stride[3];
  }
  __syncthreads();

  src += first_channel * of.channel_stride;
  const int units = of.pieces.value * residues * (of.block_channels / AT_ONCE);
#pragma unroll 1
  for (int unit = threadIdx.x; unit < units; unit += THREADS) {
    const int rest = unit / of.residues, residue = unit - rest * residues;
    const int channel = rest / of.pieces * AT_ONCE, position = rest % of.pieces * PIECE;
    if (channel >= channels || residue >= existing) continue;
    read_pieces(of, residue, position, channels - channel, src + channel * of.channel_stride, strip,
                strip.values + (channel * residues + residue) * of.row + position);
  }
  __syncthreads();

#pragma unroll 2
  for (int i = threadIdx.x; i < of.pieces.value * residues * channels; i += THREADS) {
    const int row = i / of.pieces, position = (i - row * of.pieces.value) * PIECE;
    const int channel = row / of.residues, residue = row - channel * residues;
    if (residue >= existing || first + position >= of.positions) continue;
    const long long to = (long long)(plane.index + residue) * PARTS * of.channels + first_channel + channel;
    store_parts(*(const Piece*)(strip.values + row * of.row + position), of.channels * of.pitch,
                planes + (to * of.pitch + first + position));
  }
}

// Shared memory of the other mappings: source offsets of the tile's rows and columns (negative for none), and the tile.
struct Tile {
  long long rows[TILE], columns[TILE];
  scalar_t values[TILE][TILE + WORD];

  // Called by all threads; neighbouring threads load neighbouring columns.
  __device__ __forceinline__ void load(const scalar_t* __restrict__ src) {
    __syncthreads();
    const long long column = columns[threadIdx.x % TILE];
    scalar_t found[TILE * TILE / THREADS];
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i) {
      const long long row = rows[threadIdx.x / TILE + i * (THREADS / TILE)];
      found[i] = row >= 0 && column >= 0 ? read(src + row + column) : zero<scalar_t>();
    }
#pragma unroll
    for (int i = 0; i < TILE * TILE / THREADS; ++i)
      values[threadIdx.x / TILE + i * (THREADS / TILE)][threadIdx.x % TILE] = found[i];
    __syncthreads();
  }
};

// Rows of the tile are positions, columns channels.
__device__ __forceinline__ void flatten_channels_last(const Operand& of, const Plane& plane, int along, int across,
                                                      const scalar_t* __restrict__ src, scalar_t* __restrict__ planes,
                                                      Tile& tile) {
  const int first = along * TILE, first_channel = across * TILE, lane = threadIdx.x;
  if (lane < TILE) {
    tile.rows[lane] = first + lane < of.positions ? plane.element<4>(of, first + lane) : -1;
    tile.columns[lane] = first_channel + lane < of.channels ? (first_channel + lane) * of.channel_stride : -1;
  }
  tile.load(src);
  const int at = lane % (TILE / WORD) * WORD;
  if (first + at >= of.positions) return;
#pragma unroll
  for (int i = lane / (TILE / WORD); i < TILE; i += THREADS / (TILE / WORD)) {
    if (first_channel + i >= of.channels) break;
    Vector<scalar_t, WORD> word;
#pragma unroll
    for (int j = 0; j < WORD; ++j) word.value[j] = tile.values[at + j][i];
    store_word(of, plane.index, first_channel + i, first + at, word, planes);
  }
}

// Rows of the tile are images of each of some channels, columns pixels.
__device__ __forceinline__ void flatten_batch(const Operand& of, const Plane& plane, int along, int across,
                                              const scalar_t* __restrict__ src, scalar_t* __restrict__ planes,
                                              Tile& tile) {
  const int all = of.extent[2], images = of.images, blocks = ceil_div(all, images), of_block = TILE / images;
  const int first_pixel = along / blocks * TILE, first_image = along % blocks * images, lane = threadIdx.x;
  const int first_channel = across * of_block, pixels = of.positions / of.extent[2];
  if (lane < TILE) {
    const int channel = lane / of.images, image = first_image + lane % of.images;
    const long long at = image < all ? plane.along(of, 3, image) : -1;
    const bool exists = channel < of_block && first_channel + channel < of.channels && at >= 0;
    tile.rows[lane] = exists ? at + (first_channel + channel) * of.channel_stride : -1;
    tile.columns[lane] = first_pixel + lane < pixels ? plane.element<3>(of, first_pixel + lane) : -1;
  }
  tile.load(src);
  const int words = images / WORD;  // words of a pixel
#pragma unroll 4
  for (int i = lane; i < TILE * words * of_block; i += THREADS) {
    const int line = i * WORD / of.images, image = i * WORD % of.images;
    const int pixel = line % TILE, channel = line / TILE;
    if (first_pixel + pixel >= pixels || first_channel + channel >= of.channels || first_image + image >= all) continue;
    Vector<scalar_t, WORD> word;
#pragma unroll
    for (int j = 0; j < WORD; ++j) word.value[j] = tile.values[channel * images + image + j][pixel];
    store_word(of, plane.index, first_channel + channel, (first_pixel + pixel) * all + first_image + image, word,
               planes);
  }
}

__host__ __device__ constexpr int bytes_of(int way) {
  return way == RESIDUES ? sizeof(Strip) : way == ROWS || way == PIECES ? 16 : sizeof(Tile);
}
constexpr int SHARED_BYTES = bytes_of(X_WAY) > bytes_of(GRAD_WAY) ? bytes_of(X_WAY) : bytes_of(GRAD_WAY);

template <int WAY, class ALONG>
__device__ __forceinline__ void flatten(const Operand& of, int index, const scalar_t* __restrict__ src,
                                        scalar_t* __restrict__ planes, unsigned char* shared) {
  const int of_block = WAY == RESIDUES ? of.residues.value : WAY == PIECES ? ALONG::PLANES : 1;  // planes of a block
  const int along_w = ceil_div(of.planes[3].value, of_block);
  const int all_planes = of.planes[0].value * of.planes[1].value * of.planes[2].value * along_w;
  const int block = index / all_planes, along = block % of.blocks, across = block / of.blocks;
  const int in_block = index - block * all_planes;
  if constexpr (WAY == RESIDUES) {
    const int outer = in_block / along_w, residue = (in_block - outer * along_w) * of_block;
    const Plane plane(of, outer * of.planes[3].value + residue);
    flatten_residues(of, plane, along, across, src, planes, *(Strip*)shared);
  } else {
    const Plane plane(of, in_block * of_block);
    if constexpr (WAY == PIECES)
      flatten_pieces<ALONG>(of, plane, along, across, src, planes);
    else if constexpr (WAY == ROWS)
      flatten_rows(of, plane, along, across, src, planes);
    else if constexpr (WAY == CHANNELS_LAST)
      flatten_channels_last(of, plane, along, across, src, planes, *(Tile*)shared);
    else if constexpr (WAY == BATCH)
      flatten_batch(of, plane, along, across, src, planes, *(Tile*)shared);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flatten_positions(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad,
                      scalar_t* __restrict__ x_planes, scalar_t* __restrict__ grad_planes,
                      const __grid_constant__ Params params) {
  __shared__ __align__(16) unsigned char shared[SHARED_BYTES];
  griddepcontrol_launch_dependents();
  const bool is_x = (int)blockIdx.x < params.x_blocks;
  const int index = (int)blockIdx.x - (is_x ? 0 : params.x_blocks);
  typedef AlongWidth<X_STEP, X_PLANES, X_APART> AlongX;
  typedef AlongWidth<GRAD_STEP, GRAD_PLANES, GRAD_APART> AlongGrad;
  if (X_WAY == GRAD_WAY && X_WAY != PIECES)  // shares the code, which takes long to compile
    flatten<X_WAY, AlongX>(is_x ? params.x : params.grad, index, is_x ? x : grad, is_x ? x_planes : grad_planes,
                           shared);
  else if (is_x)
    flatten<X_WAY, AlongX>(params.x, index, x, x_planes, shared);
  else
    flatten<GRAD_WAY, AlongGrad>(params.grad, index, grad, grad_planes, shared);
}
