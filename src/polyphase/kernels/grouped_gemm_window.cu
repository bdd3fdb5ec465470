// Groups of few channels on tensor cores, forward pass and input gradient: a tile's window is staged in shared memory
// with channels innermost, and every tap reads it there.
//
//   destination[cd, cell·DST + output] = bias[cd] + Σ over pixels and cs of   w[cs, cd, tap] · source[cs, cell·SRC +
//   pixel]
//
// with cells of core/geometry.cuh, of which FOLD_D × FOLD_H × FOLD_W neighbours are one here. Rows of the product are
// the cells of a tile, columns are pairs of one of a cell's outputs and a destination channel, and k runs over the
// pixels that a cell reads, 16 bytes of channels at a time: pieces. Where output and pixel have no tap the weight is
// zero. Folding fills the columns where channels are few, and a pixel's operand then serves several outputs.
//
// Each set of outputs is a product of its own: all that a cell has (MERGED), or those of one phase. A set's columns are
// COLUMN_TILES tiles of 8, block after block.
//
// Index mapping. A block owns a group and takes every n-th tile. Its weights are put in the order of fragments once. A
// warp owns ROW_TILES tiles of 16 cells; ldmatrix reads one piece of each of 16 cells and the next piece of the same
// cells; a table has the pieces' offsets in the window.
//
// float32 is rounded to TF32. A sum may be wrong: a piece that no tap of an output reads is multiplied by zero, and
// Inf or NaN times zero is NaN. Sums that are NaN are computed again without tensor cores.
//
// Shared memory: weights [step][column block][column tile][lane], offsets of pieces, places of cells and
// columns, window [16 bytes of channels][n][d][h][w].

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "mainloop/accumulators.cuh"
#include "operand/plain_sum.cuh"
#include "operand/tf32.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

struct Params {
  Tensor5 src, dst;
  int batch, groups;
  Divisor tile_extent[4];  // cells of a tile along n, d, h, w
  Divisor tiles[4];        // tiles along n, d, h, w
  Divisor extent[4];       // of the window along n, d, h and, in vectors, w
  int first[3];            // the window's first pixel along d, h, w, counted from the tile's first cell
  int skew;                // pixels along w from there to the first that any tap reads
  int vector;              // pixels along w of one load; 0: one load reads the channels of a piece
  int apart[4];            // source elements from a channel, slab, row and vector to the next
  int blocks;              // blocks of a group
  int pairs;               // whether two neighbouring cells are stored together
};

constexpr int THREADS = 32 * WARPS;
constexpr int PIECE = 16 / (int)sizeof(scalar_t);      // channels of a piece
constexpr int PIECES = ceil_div(SRC_CHANNELS, PIECE);  // pieces of a pixel
constexpr int WORD = 4 / (int)sizeof(scalar_t);        // channels of four bytes

// One dimension. A cell's outputs along it are dealt to `sets` sets of `each` outputs: output i is in set i % sets.
struct Side {
  Axis axis;
  int fold, sets, each;

  __host__ __device__ constexpr Side(Axis axis, int fold)
      : axis(axis), fold(fold), sets(MERGED ? 1 : dst_cell(axis)), each(fold * dst_cell(axis) / sets) {}

  __host__ __device__ constexpr int outputs() const { return fold * dst_cell(axis); }
  __host__ __device__ constexpr int step() const { return fold * src_cell(axis); }  // pixels from a cell to the next

  // The tap that joins an output and a pixel, both relative to the cell's first; -1 for none.
  __host__ __device__ constexpr int tap(int output, int pixel) const {
    const int far =
        INPUT_GRAD ? pixel - output * axis.stride + axis.padding : output + axis.padding - pixel * axis.stride;
    return far >= 0 && far % axis.dilation == 0 && far / axis.dilation < axis.kernel ? far / axis.dilation : -1;
  }
};
constexpr Side SIDE_D(AXIS_D, FOLD_D), SIDE_H(AXIS_H, FOLD_H), SIDE_W(AXIS_W, FOLD_W);
constexpr int SETS = SIDE_D.sets * SIDE_H.sets * SIDE_W.sets;
constexpr int COLUMNS = SIDE_D.each * SIDE_H.each * SIDE_W.each * DST_CHANNELS;  // columns of a set
constexpr int BLOCK_COLUMNS = 8 * COLUMN_TILES, COLUMN_BLOCKS = ceil_div(COLUMNS, BLOCK_COLUMNS);

// The pixels that a set's outputs read along one dimension: `count` of them, `step` apart.
struct Pixels {
  int first = 0, step = 1, count = 0;

  __host__ __device__ constexpr Pixels(Side side, int set) {
    int last = 0;
    bool any = false;
    for (int pass = 0; pass < 2; ++pass) {  // the first and the last; then the common divisor of distances
      if (pass == 1) step = 0;
      for (int i = 0; i < side.each; ++i)
        for (int tap = 0; tap < side.axis.kernel; ++tap) {
          const int output = i * side.sets + set, cell = dst_cell(side.axis);
          if (dst_offset(side.axis, tap) != output % cell) continue;
          const int pixel = output / cell * src_cell(side.axis) + src_offset(side.axis, tap);
          if (pass == 1) step = gcd(pixel - first, step);
          if (pass == 0) first = any && first < pixel ? first : pixel, last = any && last > pixel ? last : pixel;
          any = true;
        }
    }
    if (step == 0) step = 1;
    if (any) count = (last - first) / step + 1;
  }
};

// A set, by its number.
struct Set {
  int d, h, w;
  Pixels of_d, of_h, of_w;

  __host__ __device__ constexpr Set(int set)
      : d(set / (SIDE_H.sets * SIDE_W.sets)),
        h(set / SIDE_W.sets % SIDE_H.sets),
        w(set % SIDE_W.sets),
        of_d(SIDE_D, d),
        of_h(SIDE_H, h),
        of_w(SIDE_W, w) {}

  __host__ __device__ constexpr int pieces() const { return of_d.count * of_h.count * of_w.count * PIECES; }
};
// The first step of each set; a step is two pieces.
struct Steps {
  int first[SETS + 1] = {};
  __host__ __device__ constexpr Steps() {
    for (int i = 0; i < SETS; ++i) first[i + 1] = first[i] + ceil_div(Set(i).pieces(), 2);
  }
};
__device__ constexpr Steps STEPS;
constexpr int ALL_STEPS = Steps().first[SETS];
constexpr int TILE_BYTES = 256, STEP_BYTES = COLUMN_BLOCKS * COLUMN_TILES * TILE_BYTES;
constexpr int WEIGHT_BYTES = ALL_STEPS * STEP_BYTES, OFFSET_BYTES = round_up(8 * ALL_STEPS, 16);
constexpr int ALL_COLUMNS = SETS * COLUMN_BLOCKS * BLOCK_COLUMNS, ROWS = 16 * ROW_TILES * WARPS;
constexpr int TABLE_BYTES = OFFSET_BYTES + 16 * ALL_COLUMNS + 16 * ROWS;

// A piece of a set: a pixel, relative to the cell's first, and the number of the piece among the pixel's pieces.
struct Piece {
  int d, h, w, number;
  bool exists;

  __device__ __forceinline__ Piece(const Set& set, int index) {
    exists = index < set.pieces();
    if (!exists) index = 0;
    number = index % PIECES, index /= PIECES;
    const int across = max(1, set.of_w.count), down = max(1, set.of_h.count);
    w = set.of_w.first + index % across * set.of_w.step, index /= across;
    h = set.of_h.first + index % down * set.of_h.step;
    d = set.of_d.first + index / down * set.of_d.step;
  }
};

// A column of a set: an output, relative to its cell's first, and its channel.
struct Column {
  int d, h, w, channel;
  bool exists;

  __device__ __forceinline__ Column(int set, int column) {
    exists = column < COLUMNS;
    channel = column % DST_CHANNELS;
    const int output = column / DST_CHANNELS;
    w = output % SIDE_W.each * SIDE_W.sets + set % SIDE_W.sets;
    h = output / SIDE_W.each % SIDE_H.each * SIDE_H.sets + set / SIDE_W.sets % SIDE_H.sets;
    d = output / (SIDE_W.each * SIDE_H.each) * SIDE_D.sets + set / (SIDE_W.sets * SIDE_H.sets);
  }
};

// Position of a column's output relative to its cell's first, or of a cell's first output relative to the tile's; far
// outside the tensor for none.
struct alignas(16) Place {
  long long bytes;
  short d, h, w;
  short number;  // the column's channel, or the cell's image
};
constexpr short NOWHERE = 0x4000;

__device__ __forceinline__ int weight_at(int src, int dst, int tap) {
  return INPUT_GRAD ? weight_offset(dst, src, tap) : weight_offset(src, dst, tap);
}

// Writes a group's weights in the order of fragments, and the offsets of the pieces that they are multiplied with.
__device__ __forceinline__ void prepare(const Params& params, const scalar_t* weight, char* weights, int* offsets,
                                        Place* places) {
  for (int i = threadIdx.x; i < ROWS; i += THREADS) {
    int at[4];
    decode(params.tile_extent, i, at);
    at[1] *= SIDE_D.outputs(), at[2] *= SIDE_H.outputs(), at[3] *= SIDE_W.outputs();
    places[i] = {offset_of(params.dst, at) * (int)sizeof(scalar_t),
                 at[0] < params.tile_extent[0] ? (short)at[1] : NOWHERE, (short)at[2], (short)at[3], (short)at[0]};
  }
  for (int i = threadIdx.x; i < ALL_COLUMNS; i += THREADS) {
    const Column column(i / (COLUMN_BLOCKS * BLOCK_COLUMNS), i % (COLUMN_BLOCKS * BLOCK_COLUMNS));
    const int at[4] = {0, column.d, column.h, column.w};
    const long long element = offset_of(params.dst, at) + column.channel * params.dst.stride[1];
    places[ROWS + i] = {element * (int)sizeof(scalar_t), column.exists ? (short)column.d : NOWHERE, (short)column.h,
                        (short)column.w, (short)column.channel};
  }
  const int plane = params.extent[0] * params.extent[1] * params.extent[2] * params.extent[3] * max(1, params.vector);
#pragma unroll 1
  for (int step = threadIdx.x / 32; step < ALL_STEPS; step += WARPS) {
    int number = 0;
    while (step >= STEPS.first[number + 1]) ++number;
    const Set set(number);
    const int lane = threadIdx.x % 32, of_set = step - STEPS.first[number];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const Piece piece(set, 2 * of_set + half);
      const int row = ((piece.d - first_offset(AXIS_D)) * params.extent[2] + piece.h - first_offset(AXIS_H)) *
                      (params.extent[3] * max(1, params.vector));
      if (lane == 0)
        offsets[2 * step + half] = (piece.number * plane + row + piece.w - first_offset(AXIS_W) + params.skew) * 16;
#pragma unroll 1
      for (int tile = 0; tile < COLUMN_BLOCKS * COLUMN_TILES; ++tile) {
        const Column column(number, 8 * tile + lane / 4);
        const int d = SIDE_D.tap(column.d, piece.d), h = SIDE_H.tap(column.h, piece.h);
        const int w = SIDE_W.tap(column.w, piece.w), tap = (d * AXIS_H.kernel + h) * AXIS_W.kernel + w;
        const bool meets = piece.exists && column.exists && d >= 0 && h >= 0 && w >= 0;
        scalar_t values[WORD];
#pragma unroll
        for (int i = 0; i < WORD; ++i) {
          const int channel = piece.number * PIECE + lane % 4 * WORD + i;
          const bool exists = meets && channel < SRC_CHANNELS;
          values[i] = exists ? read(weight + weight_at(channel, column.channel, tap)) : zero<scalar_t>();
        }
        unsigned* const to = (unsigned*)(weights + step * STEP_BYTES + tile * TILE_BYTES) + 2 * lane + half;
        *to = word_of(values[0], values[WORD - 1]);
      }
    }
  }
}

// Address of the vector at `at` along n, d, h and w of a window, and whether it exists. `src`: the group's first
// channel at the window's first pixel, `first`; vectors have `width` pixels.
__device__ __forceinline__ const scalar_t* find_vector(const Params& params, const scalar_t* src, const int (&first)[4],
                                                       const int (&at)[4], int width, bool& exists) {
  exists = first[0] + at[0] < params.batch && (unsigned)(first[1] + at[1]) < (unsigned)params.src.size[0] &&
           (unsigned)(first[2] + at[2]) < (unsigned)params.src.size[1] &&
           (unsigned)(first[3] + at[3] * width) < (unsigned)params.src.size[2];
  return src + (at[0] * params.src.stride[0] + (long long)at[1] * params.apart[1] + (long long)at[2] * params.apart[2] +
                (long long)at[3] * params.apart[3]);
}

// Copies a window to shared memory, channels innermost. One step of a thread loads VECTOR neighbours along w of all
// channels of a piece.
template <int VECTOR>
struct WindowLoader {
  static constexpr int AT_ONCE = MIN_BLOCKS > 2 ? 2 : 4;  // steps whose loads are issued before the first store
  static constexpr int WORDS = VECTOR * (int)sizeof(scalar_t) / 4;
  typedef Vector<scalar_t, VECTOR> Row;
  typedef Vector<scalar_t, PIECE> Pixel;

  const Params& params;
  const scalar_t* const src;
  const int (&first)[4];

  __device__ __forceinline__ void load(int index, Row (&to)[PIECE]) const {
    int at[4];
    bool inside;
    decode(params.extent, index, at);
    const int piece = at[0] / params.extent[0];
    at[0] = at[0] % params.extent[0];
    const char* from =
        (const char*)(find_vector(params, src, first, at, VECTOR, inside) + (long long)piece * PIECE * params.apart[0]);
    const long long apart = (long long)params.apart[0] * (int)sizeof(scalar_t);
#pragma unroll
    for (int i = 0; i < PIECE; ++i, from += apart) {
      const bool exists = inside && (SRC_CHANNELS % PIECE == 0 || piece * PIECE + i < SRC_CHANNELS);
      if constexpr (VECTOR == 1)
        load_global_if(exists, (const scalar_t*)from, to[i].value[0]);
      else
        load_global_if<scalar_t>(exists, (const scalar_t*)from, (Vector<unsigned, WORDS>&)to[i]);
    }
  }

  // Neighbouring lanes store their two pixels in opposite order, so that their banks differ.
  __device__ __forceinline__ void store(const Row (&rows)[PIECE], char* to) const {
    Pixel pixels[VECTOR];
#pragma unroll
    for (int i = 0; i < PIECE * VECTOR; ++i)
      pixels[i % VECTOR].value[i / VECTOR] = rounded(rows[i / VECTOR].value[i % VECTOR]);
    const bool swapped = VECTOR == 2 && threadIdx.x / 4 % 2;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      *(Pixel*)(to + (swapped ? VECTOR - 1 - i : i) * 16) = swapped ? pixels[VECTOR - 1 - i] : pixels[i];
  }

  __device__ __forceinline__ void load_all(char* window) const {
    const int count = PIECES * params.extent[0] * params.extent[1] * params.extent[2] * params.extent[3];
#pragma unroll 1
    for (int index = threadIdx.x; index < count; index += AT_ONCE * THREADS) {
      Row rows[AT_ONCE][PIECE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) load(min(index + i * THREADS, count - 1), rows[i]);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (index + i * THREADS < count) store(rows[i], window + (index + i * THREADS) * (16 * VECTOR));
    }
  }
};

// The same for contiguous channels of a pixel, in whole pieces.
__device__ __forceinline__ void load_pixels(const Params& params, const scalar_t* src, const int (&first)[4],
                                            char* window) {
  const int pixels = params.extent[0] * params.extent[1] * params.extent[2] * params.extent[3];
#pragma unroll 4
  for (int index = threadIdx.x; index < PIECES * pixels; index += THREADS) {
    const int piece = index % PIECES, pixel = index / PIECES;
    int at[4];
    bool inside;
    decode(params.extent, pixel, at);
    const scalar_t* const from = find_vector(params, src, first, at, 1, inside) + piece * PIECE;
    Vector<scalar_t, PIECE> value = {};
    if (inside) value = *(const Vector<scalar_t, PIECE>*)from;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) value.value[i] = rounded(value.value[i]);
    *(Vector<scalar_t, PIECE>*)(window + (piece * pixels + pixel) * 16) = value;
  }
}

// The warp's sums of a column block.
struct Sums : Accumulators<ROW_TILES, 4 * COLUMN_TILES> {
  // Adds a step's products. `rows`: address in the window of the lane's row of each row tile, at the lane's piece.
  __device__ __forceinline__ void add(const unsigned (&rows)[ROW_TILES], int offset, const char* weights) {
    typedef Vector<unsigned, 2> Words;
    Words columns[COLUMN_TILES];
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; ++i)
      columns[i] = *(const Words*)(weights + i * TILE_BYTES + threadIdx.x % 32 * 8);
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      unsigned words[4];
      ldmatrix(words, rows[i] + offset);
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
        mma<scalar_t>(of[i] + 4 * j, words, columns[j].value[0], columns[j].value[1]);
    }
  }
};

// The outputs of a warp's column block. A lane stores a column of each column tile at two neighbouring cells, the first
// of which is even; lanes exchange sums so that one lane has both.
struct Outputs {
  const Params& params;
  const int (&at)[4];         // the tile's first output
  const Place* const cells;   // cells of the tile
  const Place* const places;  // columns of the column block
  const EpilogueOperands& operands;
  scalar_t* const dst;  // the tile's first output in the group

  // The first cell of half `i` of a row tile.
  __device__ __forceinline__ const Place* cell(int i) const {
    return cells + (threadIdx.x / 32 * ROW_TILES + i / 2) * 16 + fragment_row() / 2 * 2 + i % 2 * 8;
  }
  __device__ __forceinline__ const Place& place(int tile) const {
    return places[8 * tile + fragment_column() + fragment_row() % 2];
  }
  // WHOLE: all outputs of the tile's cells exist.
  template <bool WHOLE>
  __device__ __forceinline__ bool exists(const Place& cell, const Place& place) const {
    if (WHOLE) return (cell.d != NOWHERE) & (place.d != NOWHERE);
    return cell.d != NOWHERE && place.d != NOWHERE && cell.d + place.d < params.dst.size[0] - at[1] &&
           cell.h + place.h < params.dst.size[1] - at[2] && cell.w + place.w < params.dst.size[2] - at[3] &&
           cell.number < params.batch - at[0];
  }
  __device__ __forceinline__ scalar_t* of(const Place& cell, const Place& place) const {
    return (scalar_t*)((char*)dst + cell.bytes + place.bytes);
  }

  // Stores outputs that are not NaN. Returns a bit for each of the others.
  template <bool WHOLE>
  __device__ __forceinline__ unsigned long long store(const Sums& sums) const {
    const bool odd = fragment_row() % 2;
    unsigned long long doubtful = 0;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      const Place one = cell(i)[0], next = cell(i)[1];
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j) {
        const float* const pair = sums.of[i / 2] + 4 * j + i % 2 * 2;
        const float kept = odd ? pair[1] : pair[0], got = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 4);
        const float both[2] = {odd ? got : kept, odd ? kept : got};
        const Place place = this->place(j);
        bool stored[2] = {exists<WHOLE>(one, place), exists<WHOLE>(next, place)};
        const ChannelTerms terms = channel_terms(operands, place.number, stored[0] || stored[1]);
        Vector<scalar_t, 2> values;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const bool trusted = both[k] == both[k];
          if (stored[k] && !trusted) doubtful |= 1ull << ((i * COLUMN_TILES + j) * 2 + k);
          stored[k] = stored[k] && trusted;
          narrow(finish(both[k], terms, place_if(stored[k], of(k ? next : one, place))), values.value[k]);
        }
        if (params.pairs && stored[0] && stored[1]) {
          *(Vector<scalar_t, 2>*)of(one, place) = values;
        } else {
          if (stored[0]) *of(one, place) = values.value[0];
          if (stored[1]) *of(next, place) = values.value[1];
        }
      }
    }
    return doubtful;
  }

  __device__ __forceinline__ void mend(unsigned long long doubtful, const scalar_t* src, const scalar_t* weight) const {
#pragma unroll 1
    for (int index = 0; doubtful > 0; ++index, doubtful >>= 1) {
      if (doubtful % 2 == 0) continue;
      const Place& one = cell(index / (2 * COLUMN_TILES))[index % 2];
      const Place& place = this->place(index / 2 % COLUMN_TILES);
      const int output[4] = {at[0] + one.number, at[1] + one.d + place.d, at[2] + one.h + place.h,
                             at[3] + one.w + place.w};
      const float sum = plain_sum(params.src, src, weight + weight_at(0, place.number, 0), SRC_CHANNELS, output);
      scalar_t* const to = of(one, place);
      narrow(finish(sum, channel_terms(operands, place.number), to), *to);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    grouped_gemm_window(const scalar_t* __restrict__ src, const scalar_t* __restrict__ weight,
                        const scalar_t* __restrict__ bias EPILOGUE_PARAMETERS, scalar_t* __restrict__ dst,
                        const Params params) {
  extern __shared__ __align__(16) char shared_memory[];
  char* const weights = shared_memory;
  int* const offsets = (int*)(shared_memory + WEIGHT_BYTES);
  Place* const places = (Place*)(shared_memory + WEIGHT_BYTES + OFFSET_BYTES);
  char* const window = shared_memory + WEIGHT_BYTES + TABLE_BYTES;
  const int group = blockIdx.x % params.groups;
  const EpilogueOperands operands = EPILOGUE_OPERANDS(bias, dst, params.dst.stride[0]) + group * DST_CHANNELS;
  src += (long long)group * SRC_CHANNELS * params.src.stride[1];
  weight += (long long)group * SRC_CHANNELS * DST_CHANNELS * TAPS;
  dst += (long long)group * DST_CHANNELS * params.dst.stride[1];
  prepare(params, weight, weights, offsets, places);

  const int cells = params.tile_extent[0] * params.tile_extent[1] * params.tile_extent[2] * params.tile_extent[3];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = params.extent[3] * max(1, params.vector);
  unsigned rows[ROW_TILES];
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    int at[4];
    decode(params.tile_extent, min((warp * ROW_TILES + i) * 16 + lane % 16, cells - 1), at);
    const int row = (at[0] * params.extent[1] + at[1] * SIDE_D.step()) * params.extent[2] + at[2] * SIDE_H.step();
    rows[i] = shared_address(window + (row * width + at[3] * SIDE_W.step()) * 16);
  }
  const int tiles = params.tiles[0] * params.tiles[1] * params.tiles[2] * params.tiles[3];
#pragma unroll 1
  for (int tile = blockIdx.x / params.groups; tile < tiles; tile += params.blocks) {
    int first[4], pixel[4];
    tile_origin(params.tiles, params.tile_extent, tile, first);
    pixel[0] = first[0], pixel[1] = first[1] * SIDE_D.step() + params.first[0];
    pixel[2] = first[2] * SIDE_H.step() + params.first[1], pixel[3] = first[3] * SIDE_W.step() + params.first[2];
    const scalar_t* const from = src + offset_of(params.src, pixel);
    __syncthreads();  // the previous window has been read
    if (params.vector == 0)
      load_pixels(params, from, pixel, window);
    else if (params.vector == 2)
      WindowLoader<2>{params, from, pixel}.load_all(window);
    else
      WindowLoader<1>{params, from, pixel}.load_all(window);
    __syncthreads();
    if (warp * ROW_TILES * 16 >= cells) continue;
    const int output[4] = {first[0], first[1] * SIDE_D.outputs(), first[2] * SIDE_H.outputs(),
                           first[3] * SIDE_W.outputs()};
    scalar_t* const to = dst + offset_of(params.dst, output);
    const bool whole = output[0] + params.tile_extent[0] <= params.batch &&
                       output[1] + params.tile_extent[1] * SIDE_D.outputs() <= params.dst.size[0] &&
                       output[2] + params.tile_extent[2] * SIDE_H.outputs() <= params.dst.size[1] &&
                       output[3] + params.tile_extent[3] * SIDE_W.outputs() <= params.dst.size[2];
#pragma unroll 1
    for (int set = 0; set < SETS; ++set)
#pragma unroll 1
      for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        Sums sums;
        sums.clear();
#pragma unroll 2
        for (int step = STEPS.first[set]; step < STEPS.first[set + 1]; ++step)
          sums.add(rows, offsets[2 * step + lane / 16],
                   weights + step * STEP_BYTES + block * (COLUMN_TILES * TILE_BYTES));
        const Place* const of_block = places + ROWS + (set * COLUMN_BLOCKS + block) * BLOCK_COLUMNS;
        const Outputs outputs{params, output, places, of_block, operands, to};
        const unsigned long long doubtful = whole ? outputs.store<true>(sums) : outputs.store<false>(sums);
        if (doubtful > 0) outputs.mend(doubtful, src, weight);
      }
  }
}
