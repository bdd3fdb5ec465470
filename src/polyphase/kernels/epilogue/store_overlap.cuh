// Epilogue where a row is one tap of one channel (TAPS_IN_ROWS): col2im (overlap-add), bias, narrowing and stores.
//
// A column of the product holds what one pixel adds to every output that it reaches. The columns of a work tile, its
// halo included, are written to shared memory, a row of PARTIAL_PITCH floats for each tap. Then each lane takes a cell
// of the tile, neighbouring lanes neighbouring cells, and adds for every output of one row of the cell the taps of its
// phase, each from the pixel that the tap reads. Named barriers separate writing rows and adding them. With
// WHOLE_IMAGES the columns have no halo: taps that read outside the image are skipped. Shared memory holds the columns
// of a work tile and one set; with channels last SETS sets of the images of ROUND_PIXELS columns, round by round, so
// that more channels of a pixel are written at once.

#pragma once

#include "specialisation.cuh"
#include "core/row_blocks.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "ptx/named_barrier.cuh"
#include "mainloop/gemm_tile.cuh"

typedef scalar_t result_t;  // the destination's type

constexpr int PARTIAL_ROWS = most_rows();
constexpr int CELLS = CELL_SHARES * GROUP_CELLS;  // cells of a work tile, halo included
static_assert(SETS == 1 ? ROUND_PIXELS == CELLS : WHOLE_IMAGES && DST_CHANNELS_LAST && CHANNEL_BLOCKS % SETS == 0,
              "rounds are whole images, and whole sets");
constexpr int ROUND_COLUMNS = ROUND_PIXELS + (SETS > 1 ? 2 : 0);    // pairs may begin before and end after the pixels
constexpr int PARTIAL_PITCH = round_up(ROUND_COLUMNS - 8, 32) + 8;  // 4 rows by 8 columns lie in different banks
constexpr int PARTIALS = SETS * PARTIAL_ROWS * PARTIAL_PITCH;       // partial products of a round
constexpr bool ALONE = PING_PONG || COOPERATIVE;                    // warpgroups store for themselves
constexpr int PARTIAL_BYTES = (ALONE ? CONSUMERS : 1) * PARTIALS * (int)sizeof(float);
constexpr int STORE_BYTES = PARTIAL_BYTES + CELLS * (int)sizeof(unsigned);
constexpr int FIRST_STORE_BARRIER = 6;  // of the named barriers; those before are the loaders'

// Channels that a lane adds at a time, independently of each other: with several sets all channels; with whole images
// and channels first as many as make 16 sums; else the channels that it stores together.
constexpr int ROUND_CHANNELS = SETS * ROW_CHANNELS;
__host__ __device__ constexpr int at_a_time(int channels) {
  int found = 1;
  for (int i = 1; i <= channels && i * DST_W <= 16; ++i)
    if (channels % i == 0) found = i;
  return found;
}
constexpr int VECTOR_ELEMENTS = 16 / (int)sizeof(scalar_t);
constexpr int CHANNELS = SETS > 1            ? ROUND_CHANNELS
                         : DST_CHANNELS_LAST ? at_a_time(gcd(ROW_CHANNELS, VECTOR_ELEMENTS))
                         : WHOLE_IMAGES      ? at_a_time(ROW_CHANNELS)
                                             : 1;
// Elements of one store: neighbouring channels, or elements of a cell's row.
constexpr int WIDE = gcd(DST_CHANNELS_LAST ? CHANNELS : DST_W, VECTOR_ELEMENTS);

constexpr bool EPILOGUE_PREFETCHES = false;  // residuals are not prefetched

struct Epilogue {
  const Params& params;
  const WorkTile& work;
  const Sums& sums;
  int first_cell;                   // the warpgroup's first cell among the tile's columns
  const unsigned* cells;            // positions of the tile's cells
  scalar_t* dst;                    // the work tile's first channel, the tile's first batch entry
  const EpilogueOperands operands;  // the work tile's first channel's
  float* partials;                  // partial products of a round

  __device__ __forceinline__ void prefetch_lines() const {}

  static constexpr int STORERS = ALONE ? 128 : CONSUMERS * 128;

  __device__ __forceinline__ Epilogue(const Params& params, const WorkTile& work, const Sums& sums, int first_cell,
                                      scalar_t* dst, const EpilogueOperands& operands, unsigned char* memory)
      : params(params),
        work(work),
        sums(sums),
        first_cell(first_cell),
        cells((const unsigned*)(memory + PARTIAL_BYTES)),
        dst(dst + work.channel_group * GROUP_CHANNELS * params.dst.stride[1]),
        operands(operands + work.channel_group * GROUP_CHANNELS),
        partials((float*)memory + (ALONE ? threadIdx.x / 128 * PARTIALS : 0)) {}

  // Cell `i` of the tile, counted without the halo.
  static __device__ __forceinline__ Pixel find_cell(const Params& params, int i) {
    Pixel p;
    p.w = i % params.cells[2], i = i / params.cells[2];
    p.h = i % params.cells[1], i = i / params.cells[1];
    p.d = i % params.cells[0], p.n = i / params.cells[0];
    return p;
  }
  // Once per kernel: positions of the tile's cells, the same for every work tile. (Whole images may have more cells
  // than pixels.)
  static __device__ __forceinline__ void prepare(const Params& params, unsigned char* memory) {
    for (int cell = threadIdx.x; !WHOLE_IMAGES && cell < CELLS; cell += THREADS) {
      const Pixel p = find_cell(params, cell);
      ((unsigned*)(memory + PARTIAL_BYTES))[cell] = p.n < params.images ? p.packed() : NOWHERE;
    }
  }

  // Writes a round of the sets from FIRST on: columns `begin` (even) to `end` - 1.
  template <int FIRST>
  __device__ __forceinline__ void write_partials(int begin, int end) const {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int first_column = first_cell + lane % 4 * 2 - begin;
#pragma unroll
    for (int block = 0; block < SETS * SET_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block % SET_BLOCKS * ROWS + first_row + 8 * half;
        if (row >= PARTIAL_ROWS) continue;
        float* const to = partials + (block / SET_BLOCKS * PARTIAL_ROWS + row) * PARTIAL_PITCH + first_column;
#pragma unroll
        for (int part = 0; part < PIXEL_BLOCKS; ++part)
#pragma unroll
          for (int j = 0; j < PIXELS / 8; ++j) {
            const int column = part * PIXELS + 8 * j;
            if (SETS > 1 && (unsigned)(first_column + column) >= (unsigned)(end - begin)) continue;
            const float (&sum)[SUMS] = sums[FIRST * SET_BLOCKS + block][part];
            const Vector<float, 2> pair = {sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]};
            *(Vector<float, 2>*)(to + column) = pair;
          }
      }
  }

  // Writes a cell's row: its first `columns` elements, for `channels` of CHANNELS.
  __device__ __forceinline__ void write(const float (&value)[CHANNELS][DST_W], scalar_t* to, int columns,
                                        int channels) const {
    constexpr bool LAST = DST_CHANNELS_LAST;
    constexpr int INNER = LAST ? CHANNELS : DST_W;
    const int inner = LAST ? channels : columns, outer = LAST ? columns : channels;
    const long long inner_stride = LAST ? 1 : params.dst.stride[4], outer_stride = params.dst.stride[LAST ? 4 : 1];
    alignas(16) scalar_t narrowed[DST_W * CHANNELS];  // in memory order
#pragma unroll
    for (int i = 0; i < DST_W * CHANNELS; ++i)
      narrow(LAST ? value[i % INNER][i / INNER] : value[i / INNER][i % INNER], narrowed[i]);
    if (WIDE > 1 && inner >= INNER && store_vector(params) == WIDE) {
#pragma unroll
      for (int i = 0; i < DST_W * CHANNELS; i += WIDE)
        if (i / INNER < outer)
          *(Vector<scalar_t, WIDE>*)(to + i / INNER * outer_stride + i % INNER) =
              *(const Vector<scalar_t, WIDE>*)(narrowed + i);
    } else {
#pragma unroll
      for (int i = 0; i < DST_W * CHANNELS; ++i)
        if (i / INNER < outer && i % INNER < inner)
          to[i / INNER * outer_stride + i % INNER * inner_stride] = narrowed[i];
    }
  }

  // One past a round's last channel; like `first` relative to the work tile's first channel.
  __device__ __forceinline__ int channels_behind(int first) const {
    return min(first + ROUND_CHANNELS, DST_CHANNELS - work.channel_group * GROUP_CHANNELS);
  }
  // Reads the terms of channels `channel` to `behind` - 1.
  __device__ __forceinline__ void read_terms(ChannelTerms (&of)[CHANNELS], int channel, int behind) const {
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) of[i] = channel_terms(operands, channel + i, channel + i < behind);
  }
  // Finishes sums for `write`.
  __device__ __forceinline__ void finish_all(float (&value)[CHANNELS][DST_W], const ChannelTerms (&terms)[CHANNELS],
                                             const scalar_t* to, int columns, int channels) const {
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
      for (int j = 0; j < DST_W; ++j) {
        const scalar_t* const place = to + i * params.dst.stride[1] + j * params.dst.stride[4];
        value[i][j] = finish(value[i][j], terms[i], i < channels && j < columns ? place : nullptr);
      }
  }

  // A cell: its place in the image; its first pixel among the columns (WHOLE_IMAGES: its own pixel); its first element
  // in the work tile's first channel; and the elements from there to the end of the destination.
  struct Cell {
    int d, h, w, from, columns, rows, slabs;
    scalar_t* to;
  };

  // Number of the tile's cells.
  __device__ __forceinline__ int tile() const {
    return params.run && !WHOLE_IMAGES ? params.run
                                       : params.images * params.cells[0] * params.cells[1] * params.cells[2];
  }

  // Finds cell `i` of the tile; false if it does not exist.
  __device__ __forceinline__ bool locate(int i, Cell& cell) const {
    if (i >= tile()) return false;
    Pixel p;
    if (WHOLE_IMAGES)
      p = find_cell(params, i);
    else if (params.run == 0)
      p.unpack(cells[i]);
    else
      p.locate(params, work.first + i);
    cell.d = work.d + p.d, cell.h = work.h + p.h, cell.w = work.w + p.w;
    const int d = cell.d * DST_D, h = cell.h * DST_H, w = cell.w * DST_W;
    const bool by_order = params.run && !WHOLE_IMAGES;
    cell.from =
        by_order ? i : p.n * params.pitch[0] + p.d * params.pitch[1] + p.h * params.pitch[2] + p.w + params.skew;
    cell.columns = min(DST_W, params.dst.size[2] - w), cell.rows = params.dst.size[1] - h,
    cell.slabs = params.dst.size[0] - d;
    cell.to = dst + offset_of(params.dst, p.n, d, h, w);
    return p.n < params.images && work.n + p.n < params.batch && cell.columns > 0 && cell.rows > 0 && cell.slabs > 0;
  }

  // Pixels from a cell's first to the one that a tap reads.
  static __device__ __forceinline__ int distance(Axis axis, int tap) {
    return src_offset(axis, tap) - (WHOLE_IMAGES ? 0 : first_offset(axis));
  }
  // Whether a tap reads within the image.
  static __device__ __forceinline__ bool reads(Axis axis, int cell, int tap, int size) {
    return !WHOLE_IMAGES || (unsigned)(cell + src_offset(axis, tap)) < (unsigned)size;
  }

  // Stores line LINE of a cell, all channels. (Recursive, so that the taps of a line are constants to the compiler.)
  template <int LINE = 0>
  __device__ __forceinline__ void add_lines(const Cell& cell, int first_channel) const {
    constexpr int DEPTH = owned_phase(AXIS_D, LINE / OWNED_H), HEIGHT = owned_phase(AXIS_H, LINE % OWNED_H);
    constexpr int ALONG_D = tap_count(AXIS_D, DEPTH), ALONG_H = tap_count(AXIS_H, HEIGHT);
    constexpr int FIRST_ROW = rows_of_lines(LINE / LINES * LINES, LINE);
    constexpr int ROWS_OF_CHANNEL = ALONG_D * ALONG_H * AXIS_W.kernel;
    if ((LINE_GROUPS == 1 || LINE / LINES == work.line_group) && HEIGHT < cell.rows && DEPTH < cell.slabs) {
      const float* row = partials + FIRST_ROW * PARTIAL_PITCH + cell.from;
      scalar_t* to =
          cell.to + first_channel * params.dst.stride[1] + DEPTH * params.dst.stride[2] + HEIGHT * params.dst.stride[3];
      const int behind = channels_behind(first_channel);
      ChannelTerms terms[CHANNELS], next[CHANNELS];
      read_terms(next, first_channel, behind);
#pragma unroll 1
      for (int channel = first_channel; channel < behind; channel += CHANNELS) {
        float value[CHANNELS][DST_W] = {};
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) terms[i] = next[i];
        read_terms(next, channel + CHANNELS, behind);  // in flight during these channels
#pragma unroll
        for (int i = 0; i < ALONG_D * ALONG_H; ++i) {
          const int depth_tap = first_tap(AXIS_D, DEPTH) + i / ALONG_H * tap_step(AXIS_D);
          const int height_tap = first_tap(AXIS_H, HEIGHT) + i % ALONG_H * tap_step(AXIS_H);
          const float* const pixels =
              row + distance(AXIS_D, depth_tap) * params.pitch[1] + distance(AXIS_H, height_tap) * params.pitch[2];
          if (!reads(AXIS_D, cell.d, depth_tap, params.src.size[0]) ||
              !reads(AXIS_H, cell.h, height_tap, params.src.size[1]))
            continue;
#pragma unroll
          for (int tap = 0; tap < AXIS_W.kernel; ++tap)
            if (reads(AXIS_W, cell.w, tap, params.src.size[2]))
#pragma unroll
              for (int j = 0; j < CHANNELS; ++j) {
                const int first = j / ROW_CHANNELS * PARTIAL_ROWS + j % ROW_CHANNELS * ROWS_OF_CHANNEL;
                value[j][phase_of(AXIS_W, tap)] +=
                    pixels[(first + i * AXIS_W.kernel + tap) * PARTIAL_PITCH + distance(AXIS_W, tap)];
              }
        }
        finish_all(value, terms, to, cell.columns, behind - channel);
        write(value, to, cell.columns, behind - channel);
        row += CHANNELS * ROWS_OF_CHANNEL * PARTIAL_PITCH;
        to += CHANNELS * params.dst.stride[1];
      }
    }
    if constexpr (LINE + 1 < OWNED_LINES) add_lines<LINE + 1>(cell, first_channel);
  }

  // Stores the work tile's share of the lines that own no taps.
  __device__ __forceinline__ void fill_lines(const Cell& cell, int first_channel) const {
    int ordinal = 0;  // among these
#pragma unroll 1
    for (int phase = 0; phase < DST_D * DST_H; ++phase) {
      const int depth = phase / DST_H, height = phase % DST_H;
      if (has_taps(AXIS_D, depth) && has_taps(AXIS_H, height)) continue;
      const bool ours = ordinal++ % LINE_GROUPS == work.line_group;
      if (!ours || height >= cell.rows || depth >= cell.slabs) continue;
#pragma unroll 1
      for (int channel = first_channel; channel < channels_behind(first_channel); channel += CHANNELS) {
        float value[CHANNELS][DST_W] = {};
        ChannelTerms terms[CHANNELS];
        read_terms(terms, channel, channels_behind(first_channel));
        scalar_t* const line = cell.to + depth * params.dst.stride[2] + height * params.dst.stride[3];
        scalar_t* const to = line + channel * params.dst.stride[1];
        finish_all(value, terms, to, cell.columns, channels_behind(first_channel) - channel);
        write(value, to, cell.columns, channels_behind(first_channel) - channel);
      }
    }
  }

  // Computes a round of the sets from FIRST on: cells `cell` to `behind` - 1, whose partial products are in columns
  // `begin` (even) to `end` - 1.
  template <int FIRST>
  __device__ __forceinline__ void store_round(int begin, int end, int cell, int behind) const {
    const int barrier = FIRST_STORE_BARRIER + (ALONE ? threadIdx.x / 128 : 0), first_channel = FIRST * ROW_CHANNELS;
    named_barrier_sync(barrier, STORERS);
    write_partials<FIRST>(begin, end);
    named_barrier_sync(barrier, STORERS);
#pragma unroll 1
    for (int i = cell + threadIdx.x % STORERS; i < behind; i += STORERS) {
      Cell here;
      if (!locate(i, here)) continue;
      here.from -= begin;
      add_lines(here, first_channel);
      if (OWNED_LINES < DST_D * DST_H) fill_lines(here, first_channel);
    }
  }

  template <int FIRST = 0>
  __device__ __forceinline__ void store_sets() const {
    if constexpr (SETS == 1) {
      store_round<FIRST>(0, CELLS, 0, tile());
    } else {
      const int images = ROUND_PIXELS / params.pitch[0], cells = tile() / params.images;  // of a round; of an image
#pragma unroll 1
      for (int image = 0; image < params.images; image += images)
        store_round<FIRST>(image * params.pitch[0] & ~1, (image + images) * params.pitch[0], image * cells,
                           min(image + images, params.images) * cells);
    }
    if constexpr (FIRST + SETS < CHANNEL_BLOCKS) store_sets<FIRST + SETS>();
  }

  __device__ __forceinline__ void operator()() const { store_sets(); }
};
