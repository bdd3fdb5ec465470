// Layout transpose: from a tensor of any strides to one whose channels are innermost (NCHW to NHWC), without gaps, for
// TMA boxes. NHWC to NCHW is the same with pixels and channels exchanged. The channels of each group may be padded with
// zeros; with two `parts` float32 is split into TF32 and the remainder as TF32.
//
// A block has a tile of pixels, of all images one after the other, by pieces: 16 bytes of neighbouring channels of a
// pixel. Neighbouring threads read neighbouring pixels, each the channels of a piece, and write the piece to shared
// memory, [pixel][piece], by one store. An odd pitch keeps both ways free of bank conflicts.
//
// Rows of the result are written in pieces if they are whole pieces, else in words of four bytes. A tile either has
// whole rows, which are contiguous in memory, or it also has `halo` channels of its neighbour: each row is written from
// the beginning of a sector of 32 bytes.
//
// ROWS: the same for types of 16 bits whose source has rows without gaps: a channel's pixels of an image, or a pixel's
// channels on the way back. A block has a tile of an image, `row` and `halo` channels by pixels. It copies each row to
// shared memory in aligned pieces, wherever in a piece the row's first element is. A thread has a pixel of the tile,
// gathers the eight channels of a piece of the result, and writes that piece. From eight channels to the next eight the
// offsets that a thread gathers differ by a constant. The pitch of rows is an odd number of pieces, and 32 bytes more
// every eight rows: four pieces of eight pixels are gathered without bank conflicts if either side has rows of whole
// pieces.
//
// A prologue is applied to every element that exists, when a thread has its channel: before it is split into parts.
//
// SCALED: the result is a checked copy in float16 (operand/half_copies.cuh). Units are pixels of a channel with
// BY_CHANNELS, else channels of a pixel, eight of them if there are groups; MEASURES, for the input of a forward pass,
// tells their magnitudes.
//
// SUMS: the source has partial planes in the accumulator's type, which are added in their order and narrowed (a
// split-K reduction that writes the weight's order).

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/checked_copy.cuh"
#include "operand/half_copies.cuh"
#include "operand/scaled_half.cuh"
#include "operand/tf32.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"
#include "operand/input_value.cuh"

struct Params {
  long long stride[5];   // the source's, in elements: images, channels, slabs, rows, columns
  int channels, pixels;  // channels and pixels that are written; pixels of all images
  Divisor sizes[3];      // sizes of an image along d, h, w
  Divisor padded;        // channels of a group, and those that exist
  int group, parts;
  Divisor pieces, row;   // of a pixel in the tile: pieces, and channels that are written
  int pixel_bits, halo;  // log2 of the tile's pixels; channels that two tiles have, or 0
  int advance;           // whole rows that all threads write at once
  int planes;            // partial planes; below: elements from the first of a plane to its last
  long long plane;
  int which, grouped;  // SCALED: of two tensors that are copied; whether a pixel has channels of several groups
  Divisor strides[3];  // with BY_CHANNELS: pixels that many apart along d, h, w are of one sum
  int residues;        // the product of these strides
};

constexpr int VECTOR = 16 / sizeof(operand_t);
constexpr int WORD = sizeof(operand_t) < 4 ? 4 / sizeof(operand_t) : 1;
[[maybe_unused]] constexpr int AT_ONCE = VECTOR > 4 ? 2 : 4;  // pieces that a thread reads before it writes one
using Piece = Vector<operand_t, VECTOR>;
using Values = Vector<scalar_t, VECTOR>;

typedef conditional_t<SUMS, accum_t, scalar_t> source_t;

__device__ __forceinline__ const source_t* address_of(const source_t* src, const Params& params, int pixel) {
  const int row = pixel / params.sizes[2], slab = row / params.sizes[1], image = slab / params.sizes[0];
  return src + image * params.stride[0] + slab % params.sizes[0] * params.stride[2] +
         row % params.sizes[1] * params.stride[3] + pixel % params.sizes[2] * params.stride[4];
}

// An element of a channel after the prologue; unchanged if there is no such channel.
__device__ __forceinline__ scalar_t value_of(scalar_t x, const PrologueOperands& operands, int channel, int channels) {
  return PROLOGUE && (unsigned)channel < (unsigned)channels ? InputChannels{operands, 0, channels}.value(x, channel)
                                                            : x;
}

// Channels of one pixel, from `first` on; zeros for channels that do not exist. Padded groups are whole pieces.
template <class T>
__device__ __forceinline__ Values read_values(const T* from, const Params& params, const PrologueOperands& operands,
                                              int first) {
  const bool as_they_are = params.parts == 1 && params.padded.value == params.group;
  const int of_parts = as_they_are ? 0 : first / params.padded, group = params.parts > 1 ? of_parts / 2 : of_parts;
  const int in_group = as_they_are ? first : first - of_parts * params.padded.value;
  const int channels = as_they_are ? params.channels : first < params.channels ? params.group : 0;
  from += (group * params.group + in_group) * params.stride[1];
  Values values;
  if constexpr (SUMS) {
    accum_t sums[VECTOR] = {};
#pragma unroll 1
    for (int plane = 0; plane < params.planes; ++plane, from += params.plane)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        if ((unsigned)(in_group + i) < channels) sums[i] += widen(read(from + i * params.stride[1]));
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) narrow(sums[i], values.value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i, from += params.stride[1]) {
      const bool exists = (unsigned)(in_group + i) < channels;
      scalar_t value = exists ? read(from) : zero<scalar_t>();
      if (PROLOGUE && exists) {
        const int channel = group * params.group + in_group + i;
        value = value_of(value, operands, channel, channel + 1);
      }
      values.value[i] = params.parts > 1 ? part_of(value, of_parts % 2) : value;
    }
  }
  return values;
}

// The same as they are written; SCALED by a power of two.
__device__ __forceinline__ Piece piece_of(const Values& values, [[maybe_unused]] float scale) {
#if SCALED
  const EightHalves halves = halves_of(values, scale);
  return *(const Piece*)&halves;
#else
  return values;
#endif
}

// Stores one element, or two of 16 bits, as far as they exist.
__device__ __forceinline__ void store_word(operand_t* to, operand_t first, operand_t second, bool has_first,
                                           bool has_second) {
  if (WORD == 2 && has_first && has_second) {
    *(Vector<operand_t, 2>*)to = Vector<operand_t, 2>{{first, second}};
    return;
  }
  if (has_first) to[0] = first;
  if (WORD == 2 && has_second) to[1] = second;
}

// Checks a copy by units (operand/half_copies.cuh).
struct Units {
#if SCALED
  static constexpr int MOST_PIXELS = 512;
  const Params& params;
  // Bits of the largest finite magnitude of each pixel of the tile.
  unsigned (&of_pixels)[BY_CHANNELS ? 1 : MOST_PIXELS];
  float scale = 0;
  bool inexact = false;  // as far as this thread has found
  Measured measured = {};

  __device__ __forceinline__ void begin() const {
    for (int i = threadIdx.x; !BY_CHANNELS && i < MOST_PIXELS; i += THREADS) of_pixels[i] = 0;
    if (!BY_CHANNELS) __syncthreads();
  }
  // Takes a piece and the values that it was made from, of pixel `in_tile` of the tile, which is `pixel` of the tensor.
  // Called by all threads of a warp, which have 32 neighbouring pixels.
  __device__ __forceinline__ void take(const Values& values, const Piece& piece, int in_tile, int pixel) {
    if constexpr (BY_CHANNELS) {
      const unsigned found = found_in(values, *(const EightHalves*)&piece, inexact);
      const unsigned of_warp = __reduce_or_sync(~0u, found);
      inexact |= lacks(of_warp);
      if (params.residues == 1) return;
      // Those of the warp's pixels that one tap meets are a unit, if they are several.
      const int own = residue(pixel);
      for (unsigned left = ~0u; left != 0;) {
        const unsigned taken = __ballot_sync(~0u, own == __shfl_sync(~0u, own, __ffs(left) - 1));
        const unsigned of_unit = __reduce_or_sync(~0u, taken >> threadIdx.x % 32 & 1 ? found : 0);
        inexact |= __popc(taken) > 1 && lacks(of_unit);
        left &= ~taken;
      }
    } else {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) largest = fmaxf(largest, fabsf(values.value[i]));
      if (__float_as_uint(largest) >= 0x7f800000u) {
        inexact = true, largest = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          if (fabsf(values.value[i]) <= __uint_as_float(0x7f7fffffu)) largest = fmaxf(largest, fabsf(values.value[i]));
      }
      if (largest > 0 && params.grouped)
        check(__float_as_uint(largest));
      else if (largest > 0)
        atomicMax(of_pixels + in_tile, __float_as_uint(largest));
    }
  }
  // Called by all threads, after they have taken their pieces. `of_all`: what MEASURES finds.
  __device__ __forceinline__ void end(Measured& of_all) {
    if constexpr (!BY_CHANNELS) {
      for (int i = threadIdx.x; i < MOST_PIXELS; i += THREADS)
        if (of_pixels[i] > 0) check(of_pixels[i]);
      if constexpr (MEASURES) add_measured(measured, of_all);
    }
  }

 private:
  // Checks a unit by the bits of its largest finite magnitude, which is not zero.
  __device__ __forceinline__ void check(unsigned bits) {
    const float largest = __uint_as_float(bits) * scale;
    inexact |= !(largest >= power_of_two(127 - 13) && largest < 65504.f);
    measured.take(Measured{bits, bits});
  }
  // A number that pixels have in common if one tap meets them.
  __device__ __forceinline__ int residue(int pixel) const {
    const int row = pixel / params.sizes[2], slab = row / params.sizes[1];
    const int d = slab % params.sizes[0] % params.strides[0], h = row % params.sizes[1] % params.strides[1];
    return (d * params.strides[1].value + h) * params.strides[2].value + pixel % params.sizes[2] % params.strides[2];
  }
#else
  __device__ __forceinline__ void take(const Values&, const Piece&, int, int) const {}
#endif
};

#if !SCALED
// A tile of rows, in the source and in shared memory.
struct RowTile {
  const Params& params;
  int pixels, first_row;  // pixels that exist; channel of the tile's first row
  long long start;        // source element of the first pixel of row zero
  unsigned address;       // its address in elements, which gives its position in a piece
  unsigned pitch;         // bytes from a row to the next in shared memory

  // Elements of a row's first piece before the row's first element: the same for every eighth row.
  __device__ __forceinline__ int shift(int row) const {
    return (int)(address + (unsigned)(first_row + row) * (unsigned)params.stride[1] & VECTOR - 1);
  }
  // Byte offset of a row in shared memory.
  __device__ __forceinline__ unsigned place(int row) const { return row * pitch + row / 8 * 32u; }

  // Copies the pieces of a column, of `row` and every `apart`-th row after it; `apart` is a multiple of eight.
  __device__ __forceinline__ void copy(const scalar_t* __restrict__ src, Piece* tile, int row, int apart,
                                       int column) const {
    const int offset = column - shift(row), end = min(params.row.value + params.halo, params.channels - first_row);
    if (offset >= pixels) return;
    long long element = start + (first_row + row) * params.stride[1] + offset;
    scalar_t* to = (scalar_t*)((char*)tile + place(row)) + column;
#pragma unroll 1
    for (; row < end; row += apart, element += apart * params.stride[1], to += place(apart) / sizeof(scalar_t)) {
      if (first_row + row < 0) continue;
      const bool exists = first_row + row < params.group;
      if (!exists || (element >= 0 && element + VECTOR <= params.plane)) {
        // An address that is not read must be aligned, too.
        const scalar_t* const aligned = (const scalar_t*)((unsigned long long)src & ~(sizeof(Piece) - 1));
        cp_async<16>(shared_address(to), exists ? src + element : aligned, exists);
      } else {  // partly outside the tensor
#pragma unroll 1
        for (int i = 0; i < VECTOR; ++i)
          if (element + i >= 0 && element + i < params.plane) to[i] = read(src + element + i);
      }
    }
  }

  __device__ __forceinline__ void load(const scalar_t* __restrict__ src, Piece* tile) const {
    const int columns = params.pieces.value - 1, bits = params.pixel_bits - 3, thread = threadIdx.x;
    copy(src, tile, thread >> bits, THREADS >> bits, (thread & columns - 1) * VECTOR);
    copy(src, tile, thread, THREADS, columns * VECTOR);  // one more for rows that do not begin with a piece
    cp_async_commit();
    cp_async_wait<0>();
  }

  // Stores eight channels of a pixel for each thread: four lanes have neighbouring pieces of a pixel, for eight
  // neighbouring pixels. A thread's pixels are a multiple of 32 apart, so that their rows have the same alignment.
  __device__ __forceinline__ void store(const Piece* tile, const PrologueOperands& operands, scalar_t* __restrict__ dst,
                                        long long image_pixel) const {
    static_assert(!ROWS || (THREADS == 256 && VECTOR == 8), "eight warps of eight pixels each");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int bits = max(0, 6 - params.pixel_bits);  // log2 of the warps that have the same pixels
    int pixel = (warp >> bits) * 8 + lane / 4;
    const long long start_of_row = (image_pixel + pixel) * params.channels + first_row + params.halo;
    const int before = params.halo == 0 ? 0 : (int)start_of_row & params.halo - 1;
    const int own = ((warp & (1 << bits) - 1) * 4 + lane % 4) * VECTOR, apart = 4 * VECTOR << bits;
    const int first = first_row + params.halo - before, end = min(params.row.value, params.channels - first);
    unsigned from[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const int row = params.halo - before + i;
      from[i] = place(row) + place(own) + (pixel + shift(row)) * (unsigned)sizeof(scalar_t);
    }
    scalar_t* row_of_pixel = dst + (start_of_row - before + own);
#pragma unroll 1
    for (; pixel < pixels; pixel += 64 >> bits, row_of_pixel += (long long)(64 >> bits) * params.channels) {
      const char* rows = (const char*)tile;
      scalar_t* to = row_of_pixel;
#pragma unroll 1
      for (int at = own; at < end; at += apart, rows += place(apart), to += apart) {
        Piece piece;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          piece.value[i] = value_of(*(const scalar_t*)(rows + from[i]), operands, first + at + i, params.group);
        const bool whole = first + at >= 0 && first + at + VECTOR <= params.channels;
        store_global_if(whole, to, *(const Vector<unsigned, 4>*)&piece);
        if (whole) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          if ((unsigned)(first + at + i) < (unsigned)params.channels) to[i] = piece.value[i];
      }
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) from[i] += (64 >> bits) * (unsigned)sizeof(scalar_t);
    }
  }
};

__device__ __forceinline__ void transpose_rows(const scalar_t* __restrict__ src, const PrologueOperands& operands,
                                               scalar_t* __restrict__ dst, const Params& params, Piece* tile) {
  const int all_pixels = params.sizes[2].value, tile_pixels = 1 << params.pixel_bits;
  const int across = (params.channels + max(params.halo - 1, 0) + params.row.value - 1) / params.row;
  const int block = (int)blockIdx.x / across, tiles = all_pixels + tile_pixels - 1 >> params.pixel_bits;
  const int image = block / tiles, first_pixel = (block - image * tiles) * tile_pixels;
  const int first_channel = ((int)blockIdx.x - block * across) * params.row.value;
  const long long start = image * params.stride[0] + first_pixel;
  const RowTile rows{params,
                     min(tile_pixels, all_pixels - first_pixel),
                     first_channel - params.halo,
                     start,
                     (unsigned)((unsigned long long)src / sizeof(scalar_t)) + (unsigned)start,
                     (params.pieces.value | 1) * (unsigned)sizeof(Piece)};
  rows.load(src, tile);
  __syncthreads();
  rows.store(tile, operands, dst, (long long)image * all_pixels + first_pixel);
}
#endif

// `find_scale` is called once values have been loaded.
template <class FindScale>
__device__ __forceinline__ void transpose_pixels(const source_t* __restrict__ src, const PrologueOperands& operands,
                                                 const FindScale& find_scale, Units& units, operand_t* __restrict__ dst,
                                                 const Params& params, Piece* tile) {
  const int thread = (int)threadIdx.x;
  const int tile_pixels = 1 << params.pixel_bits, count = params.pieces.value << params.pixel_bits;
  const int pitch = params.pieces.value | 1, across = (int)gridDim.x / ceil_div(params.pixels, tile_pixels);
  const int first_pixel = (int)blockIdx.x / across << params.pixel_bits;
  const int first_channel = (int)blockIdx.x % across * params.row.value;

  for (int first = 0; first < count; first += AT_ONCE * THREADS) {
    Values values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = first + thread + i * THREADS, pixel = first_pixel + (at & tile_pixels - 1);
      if (SCALED) values[i] = {};
      if (at < count && pixel < params.pixels)
        values[i] = read_values(address_of(src, params, pixel), params, operands,
                                first_channel - params.halo + (at >> params.pixel_bits) * VECTOR);
    }
    const float scale = find_scale();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = first + thread + i * THREADS, pixel = at & tile_pixels - 1;
      if (at >= count) continue;  // all lanes of a warp, or none
      const Piece piece = piece_of(values[i], scale);
      units.take(values[i], piece, pixel, min(first_pixel + pixel, params.pixels - 1));
      tile[pixel * pitch + (at >> params.pixel_bits)] = piece;
    }
  }
  __syncthreads();

  if (params.channels % VECTOR == 0) {
    for (int at = thread; at < count; at += THREADS) {
      const int in_tile = at / params.pieces, piece = at % params.pieces;
      const int pixel = first_pixel + in_tile, channel = first_channel + piece * VECTOR;
      if (pixel < params.pixels && channel < params.channels)
        *(Piece*)(dst + (long long)pixel * params.channels + channel) = tile[in_tile * pitch + piece];
    }
    return;
  }
  const int present = min(tile_pixels, params.pixels - first_pixel);
  if (params.halo == 0) {
    const operand_t* const elements = (const operand_t*)tile;
    operand_t* const to = dst + (long long)first_pixel * params.channels;
    const int total = present * params.channels, slots = pitch * VECTOR;
    int in_tile = thread * WORD / params.row, in_row = thread * WORD % params.row;
    for (int at = thread * WORD; at < total; at += THREADS * WORD) {
      const int next =
          WORD == 2 && in_row + 1 == params.row.value ? (in_tile + 1) * slots : in_tile * slots + in_row + 1;
      store_word(to + at, elements[in_tile * slots + in_row], elements[min(next, PIECES * VECTOR - 1)], true,
                 at + WORD <= total);
      in_tile += params.advance, in_row += THREADS * WORD - params.advance * params.row.value;
      if (in_row >= params.row.value) in_row -= params.row.value, ++in_tile;
    }
    return;
  }
  for (int in_tile = thread / 32; in_tile < present; in_tile += THREADS / 32) {
    const long long start = (long long)(first_pixel + in_tile) * params.channels + first_channel;
    const int shift = (int)start & params.halo - 1;
    const operand_t* const from = (const operand_t*)(tile + in_tile * pitch) + params.halo - shift;
    const int begin = shift - first_channel, end = params.channels - first_channel + shift;
    for (int at = thread % 32 * WORD; at < params.row.value; at += 32 * WORD)
      store_word(dst + start - shift + at, from[at], from[at + WORD - 1], at >= begin && at < end,
                 at + WORD - 1 >= begin && at + WORD <= end);
  }
}

#if SCALED
#define COPIES_PARAMETER , HalfCopies* __restrict__ copies
#else
#define COPIES_PARAMETER
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    transpose(const source_t* __restrict__ src PROLOGUE_PARAMETERS COPIES_PARAMETER,
              operand_t* __restrict__ dst GUARD_PARAMETER, const __grid_constant__ Params params) {
  RETURN_IF_EXACT;
  __shared__ Piece tile[PIECES];
  griddepcontrol_launch_dependents();
#if SCALED
  __shared__ unsigned of_pixels[BY_CHANNELS ? 1 : Units::MOST_PIXELS];
  Units units{params, of_pixels};
  units.begin();
  const auto find = [&]() {
    griddepcontrol_wait();  // for the samples; the tensor is read before
    return units.scale = find_scale(*copies, params.which, MEASURES);
  };
  transpose_pixels(src, PROLOGUE_OPERANDS, find, units, dst, params, tile);
  units.end(copies->measured);
  if (units.inexact) copies->inexact = 1;
  if (blockIdx.x == 0 && threadIdx.x == 0) copies->scale[params.which] = units.scale;
#else
  if constexpr (ROWS) {
    transpose_rows((const scalar_t*)src, PROLOGUE_OPERANDS, dst, params, tile);
  } else {
    Units units;
    transpose_pixels(src, PROLOGUE_OPERANDS, [] { return 1.f; }, units, dst, params, tile);
  }
  griddepcontrol_wait();  // so that a kernel that waits for this step has waited for the previous one, too
#endif
}
