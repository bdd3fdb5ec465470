// Epilogue where a row block is channels of one phase: adds the bias, narrows, transposes in shared memory and stores
// whole lines of the destination. Each consumer warpgroup does so for its own accumulators. If an operation normalises
// over channels, it first computes the `Normal` of each pixel of a piece (epilogue/normal.cuh).

#pragma once

#include "specialisation.cuh"
#include "core/row_blocks.cuh"
#include "core/types.cuh"
#include "epilogue/finish.cuh"
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "mainloop/gemm_tile.cuh"
#if EPILOGUE_NORMALIZES
#include "epilogue/normal.cuh"
#endif

// The destination's type: scalar_t, or accum_t if a later step reads sums.
typedef conditional_t<IN_SUMS, accum_t, scalar_t> result_t;

// PIECE cells of the run are stored at once.
constexpr int PIECES = ceil_div(GROUP_CELLS, PIECE);
constexpr int WIDE = 16 / (int)sizeof(result_t);  // elements of the widest store
constexpr int COLUMNS = DST_W / WIDTH_PARTS;      // elements of a cell's line, or of its part of the width
static_assert(WIDTH_PARTS == 1 || !DST_CHANNELS_LAST, "parts of lines of pixels");
// Whether the two warpgroups of a work tile own the two parts of the same lines. Two warps then transpose together.
constexpr bool JOINT = WIDTH_PARTS > 1 && WIDTH_PARTS == ROW_SHARES;
constexpr int ROW_COLUMNS = JOINT ? DST_W : COLUMNS;  // elements of a cell's line that are stored together
// Elements of one store to shared memory; a thread owns 2 · COLUMNS neighbours of a row.
constexpr int STAGED = gcd(JOINT ? COLUMNS : 2 * COLUMNS, WIDE);
// Staging of one transpose: of a warp, 8 channels of a piece; with channels last of a warpgroup, the 64 channels of its
// cells. The pitch avoids bank conflicts between neighbours.
constexpr int STAGING_PITCH =
    DST_CHANNELS_LAST ? ROWS + WIDE
                      : round_up(PIECE * ROW_COLUMNS, (PIECE * ROW_COLUMNS > 16 * WIDE ? 32 : 16) * WIDE) + 4 * STAGED;
constexpr int STAGING = (DST_CHANNELS_LAST ? PIECE : 8) * STAGING_PITCH;
constexpr int STAGERS = DST_CHANNELS_LAST ? 128 : 32;  // threads that share it
constexpr int STAGING_BYTES = CONSUMERS * (128 / STAGERS) * STAGING * (int)sizeof(result_t);

// A cell's first element in the destination, relative to the tile's batch entry and the channel, and the number of
// elements to store from there along depth, height and width: none if the cell is not stored.
struct Target {
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
// Pixels of a piece that are normalised over their channels. Each has the moments of four warps and a `Normal`.
constexpr int NORMALS = EPILOGUE_NORMALIZES ? PIECE * COLUMNS : 0;
constexpr int STORE_BYTES =
    STAGING_BYTES + CONSUMERS * (GROUP_CELLS * (int)sizeof(Target) + 5 * NORMALS * (int)sizeof(Normal));

// Whether operations read residuals, which each work tile prefetches.
constexpr bool EPILOGUE_PREFETCHES = EPILOGUE_RESIDUALS > 0 && !DST_CHANNELS_LAST;

// The bits of COUNT elements, as words.
template <int COUNT, int BYTES = COUNT * (int)sizeof(result_t)>
using Bits = conditional_t<BYTES == 2, Vector<unsigned short, 1>, Vector<unsigned, BYTES / 4>>;

// Stores a warp's accumulators: 16 channels of each row block, for all cells of its warpgroup's part of the run.
struct Epilogue {
  const Params& params;
  const WorkTile& work;
  const Sums& sums;
  int first_cell;                         // the warpgroup's first cell in the tile
  result_t* dst;                          // the work tile's first channel, the tile's first batch entry
  result_t* staging;                      // the warp's, or the warpgroup's
  Target* targets;                        // the warpgroup's cells
  ChannelTerms terms[CHANNEL_BLOCKS][2];  // the thread's rows

  __device__ __forceinline__ Epilogue(const Params& params, const WorkTile& work, const Sums& sums, int first_cell,
                                      result_t* dst, const EpilogueOperands& operands, unsigned char* memory)
      : params(params),
        work(work),
        sums(sums),
        first_cell(first_cell),
        dst(dst),
        staging((result_t*)memory + (JOINT ? warp() : threadIdx.x / STAGERS) * STAGING),
        targets((Target*)(memory + STAGING_BYTES) + threadIdx.x / 128 * GROUP_CELLS) {
    find_places();
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = channel(block, lane() / 4 + 8 * half);
        terms[block][half] = channel_terms(operands, of, of < DST_CHANNELS);
        load_now(terms[block][half].bias);
      }
  }

  // Prefetches to L2 what operations read for the work tile's lines, before its first product. Four lanes own
  // neighbours of a row; one of them prefetches for all.
  template <int LINE = 0>
  __device__ __forceinline__ void prefetch_lines() const {
    const int owned = owned_line(LINE, 16 * warp());
    if (owned < OWNED_LINES && lane() % 4 == 0) {
#pragma unroll
      for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll 4
          for (int j = 0; j < GROUP_CELLS / 8; ++j)
            prefetch(terms[block][half], places(0, j, block, half, depth_of_line(owned), height_of_line(owned),
                                                owned % WIDTH_PARTS * COLUMNS)
                                             .of(0, 0));
    }
    if constexpr (LINE + 1 < LINE_BLOCKS) prefetch_lines<LINE + 1>();
  }

  // Keeps the compiler from moving the load down to where its result is used.
  static __device__ __forceinline__ void load_now(float& value) {
    if (HAS_BIAS) materialize(value);
  }

  // Holds the bits in separate registers before the stores that follow. Otherwise the compiler reuses a few registers,
  // and each value waits for earlier stores.
  template <class Bits>
  static __device__ __forceinline__ void compute_now(Bits& bits) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(Bits) / 4; ++i) materialize(((unsigned*)&bits)[i]);
  }

  // Once per kernel: nothing to prepare.
  static __device__ __forceinline__ void prepare(const Params&, unsigned char*) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

  // The channel of a row of the warp; a channel that does not exist for a row of no line.
  __device__ __forceinline__ int channel(int block, int row) const {
    if (STACKED > 1)
      return channel_of_row(16 * warp() % LINE_ROWS + row) + (line_of_row(16 * warp()) < STACKED ? 0 : ROWS);
    return (work.channel_group * CHANNEL_BLOCKS + block) * ROWS + channel_of_row(16 * warp() + row);
  }
  // Index, among the lines that own taps, of the line that `row` of row block `line` belongs to.
  __device__ __forceinline__ int owned_line(int line, int row) const {
    return work.line_group * LINES + line * STACKED + line_of_row(row);
  }
  // Addresses of a line of the thread's pair of cells, and how many elements of each exist, for operations that read
  // operands by place.
  struct Places {
    const scalar_t* first[2];
    int columns[2];
    long long stride;

    __device__ __forceinline__ const scalar_t* of(int cell, int phase) const {
      return EPILOGUE_READS_PLACES && phase < columns[cell] ? first[cell] + phase * stride : nullptr;
    }
  };
  // Places of cell pair `j` of a piece, for row `half` of `block`; the line's elements from `first` on.
  __device__ __forceinline__ Places places(int piece, int j, int block, int half, int depth, int height,
                                           int first) const {
    Places found = {};
    if constexpr (EPILOGUE_READS_PLACES) {
      const int of = channel(block, lane() / 4 + 8 * half);
      found.stride = params.dst.stride[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int cell = piece * PIECE + 8 * j + lane() % 4 * 2 + i;
        const Target target = targets[cell < GROUP_CELLS ? cell : 0];
        const bool exists = cell < GROUP_CELLS && of < DST_CHANNELS && Target::has_line(target.reach, depth, height);
        found.first[i] = (const scalar_t*)dst + of * params.dst.stride[1] + depth * params.dst.stride[2] +
                         height * params.dst.stride[3] + target.offset + first * params.dst.stride[4];
        found.columns[i] = exists ? Target::columns(target.reach) - first : 0;
      }
    }
    return found;
  }

  // Sums of 2 · COLUMNS elements of an output row, for a thread's pair of cells. A negative line owns no taps.
  // (Recursive, so that accumulator indices are constants to the compiler.)
  template <int LINE, int I = 0>
  __device__ __forceinline__ void run(float (&value)[2 * COLUMNS], int block, int j, int half) const {
    constexpr bool owned = LINE >= 0 && (WIDTH_PARTS > 1 || has_taps(AXIS_W, I % COLUMNS));
    constexpr int index = owned_before(AXIS_W, I % COLUMNS);
    value[I] = 0;
    if constexpr (owned)
      value[I] = sums[(block * LINE_BLOCKS + LINE) * LINE_PHASES + index][j / (PIXELS / 8)]
                     [j % (PIXELS / 8) * 4 + 2 * half + I / COLUMNS];
    if constexpr (I + 1 < 2 * COLUMNS) run<LINE, I + 1>(value, block, j, half);
  }
  // Finished elements of cell pair `j` of a piece, from the line's element `first` on, for a thread's row of a row
  // block. `residuals`: their first residuals; if null they are read here.
  template <int LINE>
  __device__ __forceinline__ void finish_run(float (&value)[2 * COLUMNS], int piece, int j, int block, int half,
                                             int depth, int height, int first,
                                             const Bits<STAGED>* residuals = nullptr) const {
    const Places to = places(piece, j, block, half, depth, height, first);
    run<LINE>(value, block, piece * (PIECE / 8) + j, half);
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; ++i) {
      accum_t residual = 0;
      if (residuals) residual = widen(((const scalar_t*)(residuals + i / STAGED))[i % STAGED]);
      value[i] =
          finish(value[i], terms[block][half], to.of(i / COLUMNS, i % COLUMNS),
                 EPILOGUE_NORMALIZES ? normals()[first_pixel(j) + i] : Normal{}, residuals ? &residual : nullptr);
    }
  }

  // Loads the first residuals of PAIRS cell pairs of a piece, from `j` on, for a thread's row of a row block, in the
  // order of the results. All loads are issued before the first value is used. COUNT neighbours exist together or not
  // at all, as in the stores; the host passes residuals with the alignment of the destination.
  template <int COUNT, int PAIRS>
  __device__ __forceinline__ void load_residuals(Bits<STAGED> (*values)[2 * COLUMNS / STAGED], int piece, int j,
                                                 int block, int half, int depth, int height, int first) const {
#pragma unroll
    for (int k = 0; k < PAIRS; ++k) {
      if (piece * PIECE + 8 * (j + k) >= GROUP_CELLS) break;
      const Places to = places(piece, j + k, block, half, depth, height, first);
      alignas(16) scalar_t each[2 * COLUMNS];
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; i += COUNT) {
        const scalar_t* const place = to.of(i / COLUMNS, i % COLUMNS);
        const scalar_t* const from = residual_at(terms[block][half], place);
        if constexpr (COUNT == 1)
          load_global_if(place != nullptr, from, each[i]);
        else
          load_global_if(place != nullptr, from, *(Bits<COUNT>*)(each + i));
      }
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS / STAGED; ++i) values[k][i] = *(const Bits<STAGED>*)(each + i * STAGED);
    }
  }

  // The warpgroup's `Normal`s in shared memory: after all targets and after its four warps' moments.
  __device__ __forceinline__ Normal* normals() const {
    const int group = threadIdx.x / 128;
    return (Normal*)(targets + (CONSUMERS - group) * GROUP_CELLS) + (group * 5 + 4) * NORMALS;
  }
  // Index, among the pixels of a piece, of the first element of the thread's cell pair `j`.
  static __device__ __forceinline__ int first_pixel(int j) { return (8 * j + lane() % 4 * 2) * COLUMNS; }

#if EPILOGUE_NORMALIZES
  // Computes the `Normal`s of a line of a piece, from enough cell pairs at a time to make eight pixels or more.
  template <int LINE>
  __device__ __forceinline__ void find_normals(int piece, int depth, int height, int first) const {
    constexpr int PAIRS = ceil_div(4, COLUMNS), VALUES = round_up(2 * COLUMNS * PAIRS, 8);
    Moments* const moments = (Moments*)(normals() - (4 - warp()) * NORMALS);
#pragma unroll
    for (int from = 0; from < PIECE / 8; from += PAIRS) {
      Moments of[VALUES] = {};
      int count = 0;
#pragma unroll
      for (int row = 0; row < 2 * CHANNEL_BLOCKS; ++row) {
        const int block = row / 2, half = row % 2;
        if (!ALL_ROWS_EXIST && channel(block, lane() / 4 + 8 * half) >= DST_CHANNELS) continue;
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS * PAIRS; i += 2 * COLUMNS) {
          const int j = from + i / (2 * COLUMNS);
          if (j >= PIECE / 8 || piece * PIECE + 8 * j >= GROUP_CELLS) break;
          const Places to = places(piece, j, block, half, depth, height, first);
          float value[2 * COLUMNS];
          run<LINE>(value, block, piece * (PIECE / 8) + j, half);
#pragma unroll
          for (int k = 0; k < 2 * COLUMNS; ++k)
            of[i + k].add(normalized_value(value[k], terms[block][half], to.of(k / COLUMNS, k % COLUMNS)), count);
        }
        ++count;
      }
      add_up_rows(of, count);
#pragma unroll
      for (int k = 0; k < VALUES / 8; ++k) {
        const int i = first_column<VALUES>() + k, j = from + i / (2 * COLUMNS);
        if (i < 2 * COLUMNS * PAIRS && j < PIECE / 8) moments[first_pixel(j) + i % (2 * COLUMNS)] = of[k];
      }
    }
    group_sync();
    for (int i = threadIdx.x % 128; i < NORMALS; i += 128)
      normals()[i] = normal_of((const Moments*)normals() - 4 * NORMALS + i, NORMALS);
    group_sync();
  }
#endif

  static constexpr int FIRST_BARRIER = 6;  // of the named barriers; those before are the loaders'

  // How lanes share the stores of a piece, COUNT elements each: the lanes of a warp take each row of a channel, or two;
  // with channels last the threads of a warpgroup take the 64 channels of each cell.
  template <int COUNT>
  struct Share {
    static constexpr int LANES = DST_CHANNELS_LAST ? ROWS / COUNT : PIECE * ROW_COLUMNS <= 16 * COUNT ? 16 : 32;
    static constexpr int AT_ONCE = STAGERS / LANES;  // rows, or cells
    static constexpr int VECTORS = DST_CHANNELS_LAST ? PIECE / AT_ONCE : ceil_div(PIECE * ROW_COLUMNS, LANES* COUNT);
    offset_t offset[VECTORS];
    unsigned reach[VECTORS];  // of the cell; 0 if the vector is not stored

    __device__ __forceinline__ bool has_line(int i, int depth, int height) const {
      return DST_D * DST_H == 1 ? reach[i] != 0 : Target::has_line(reach[i], depth, height);
    }
  };

  // The threads of a warpgroup.
  static __device__ __forceinline__ void group_sync() { named_barrier_sync(FIRST_BARRIER + threadIdx.x / 128, 128); }
  // The warps that transpose the same lines.
  static __device__ __forceinline__ void lines_sync() {
    if (JOINT)
      named_barrier_sync(FIRST_BARRIER + CONSUMERS + warp(), 32 * ROW_SHARES);
    else
      __syncwarp();
  }

  // Called by a whole warpgroup, while its last products are in flight.
  __device__ __forceinline__ void find_places() const {
    group_sync();  // the targets of the previous work tile are no longer needed
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < GROUP_CELLS; i += 128) {
      Pixel p;
      p.locate(params, work.first + first_cell + i);
      const int d = (work.d + p.d) * DST_D, h = (work.h + p.h) * DST_H, w = (work.w + p.w) * DST_W;
      const int slabs = params.dst.size[0] - d, rows = params.dst.size[1] - h;
      const int columns = min((params.cells[2] - p.w) * DST_W, params.dst.size[2] - w);
      const bool inside =
          p.n < params.images && p.d < params.cells[0] && p.h < params.cells[1] && work.n + p.n < params.batch;
      const bool exists = (params.run == 0 || first_cell + i < params.run) && slabs > 0 && rows > 0 && columns > 0;
      targets[i] = {offset_of(params.dst, p.n, d, h, w),
                    inside && exists ? Target::reach_of(slabs, rows, columns) : 0u};
    }
    group_sync();
  }

  template <int COUNT>
  __device__ __forceinline__ void describe(int piece, int first, Share<COUNT>& share) const {
    constexpr int LANES = Share<COUNT>::LANES, AT_ONCE = Share<COUNT>::AT_ONCE;
#pragma unroll
    for (int i = 0; i < Share<COUNT>::VECTORS; ++i) {
      const int element = (lane() % LANES + LANES * i) * COUNT;
      const int phase = DST_CHANNELS_LAST ? 0 : first + element % ROW_COLUMNS;
      const int of_piece = DST_CHANNELS_LAST ? threadIdx.x % 128 / LANES + AT_ONCE * i : element / ROW_COLUMNS;
      const int cell = piece * PIECE + of_piece;
      const bool ours = of_piece < PIECE && cell < GROUP_CELLS;
      const Target target = targets[ours ? cell : 0];
      share.offset[i] = target.offset + phase * (offset_t)params.dst.stride[4];
      share.reach[i] = ours && phase < Target::columns(target.reach) ? target.reach : 0;
    }
  }

  // The results of a piece for a thread's row of a row block, in registers.
  template <int COUNT, int LINE>
  __device__ __forceinline__ void finish_piece(Bits<STAGED> (&values)[PIECE / 8][2 * COLUMNS / STAGED], int piece,
                                               int block, int half, int depth, int height, int first) const {
    constexpr int TOGETHER = COUNT < STAGED ? COUNT : STAGED;
    // A single 16-bit element takes a whole register, so such elements are loaded one cell pair at a time.
    constexpr int AHEAD = TOGETHER * sizeof(scalar_t) >= 4 ? PIECE / 8 : 1;
#pragma unroll
    for (int j = 0; j < PIECE / 8; ++j) {
      if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
      if constexpr (EPILOGUE_RESIDUALS > 0)
        if (j % AHEAD == 0) load_residuals<TOGETHER, AHEAD>(values + j, piece, j, block, half, depth, height, first);
      float value[2 * COLUMNS];
      alignas(16) result_t narrowed[2 * COLUMNS];
      finish_run<LINE>(value, piece, j, block, half, depth, height, first, EPILOGUE_RESIDUALS ? values[j] : nullptr);
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; ++i) narrow(value[i], narrowed[i]);
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS / STAGED; ++i) {
        values[j][i] = *(const Bits<STAGED>*)(narrowed + i * STAGED);
        compute_now(values[j][i]);
      }
    }
  }

  // Channels first. The warp transposes PIECE cells of 8 channels at a time in shared memory, so that its lanes store
  // neighbouring elements of a row: whole lines are written. If JOINT it stages the columns from `first` on of all
  // channels, and stores all columns of some channels. The host makes sure (store_vector in implicit_gemm/tile.py) that
  // COUNT elements exist together or not at all.
  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_piece(int piece, int depth, int height, int first) const {
    constexpr int LANES = Share<COUNT>::LANES, AT_ONCE = Share<COUNT>::AT_ONCE, VECTORS = Share<COUNT>::VECTORS;
    constexpr int STORED = JOINT ? 8 / ROW_SHARES : 8;                          // rows
    const int ahead = lane() / LANES + (JOINT ? first / COLUMNS * STORED : 0);  // the lane's first row
    result_t* to[VECTORS];                                                      // its address in the warp's first row
    bool exists[VECTORS];
    {
      Share<COUNT> share;
      describe(piece, JOINT ? 0 : first, share);
      result_t* const line = dst + depth * params.dst.stride[2] + height * params.dst.stride[3];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        to[i] = line + (channel(0, 0) + ahead) * params.dst.stride[1] + share.offset[i];
        exists[i] = share.has_line(i, depth, height);
      }
    }
    result_t* const to_shared =
        staging + lane() / 4 * STAGING_PITCH + lane() % 4 * 2 * ROW_COLUMNS + (JOINT ? first : 0);
    const result_t* const from = staging + ahead * STAGING_PITCH + lane() % LANES * COUNT;
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first_channel = channel(block, 8 * half);
        if ((DST_CHANNELS % GROUP_CHANNELS || STACKED == 3) && first_channel >= DST_CHANNELS) continue;
        Bits<STAGED> values[PIECE / 8][2 * COLUMNS / STAGED];
        finish_piece<COUNT, LINE>(values, piece, block, half, depth, height, first);
        lines_sync();
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
#pragma unroll
          for (int i = 0; i < 2 * COLUMNS / STAGED; ++i)
            *(Bits<STAGED>*)(to_shared + (8 * j + i * STAGED / COLUMNS) * ROW_COLUMNS + i * STAGED % COLUMNS) =
                values[j][i];
        }
        lines_sync();
        constexpr int ROWS_AT_ONCE = ceil_div(STORED / AT_ONCE, VECTORS > 2 ? 4 : VECTORS);
#pragma unroll
        for (int row = 0; row < STORED; row += AT_ONCE * ROWS_AT_ONCE) {
          Bits<COUNT> bits[ROWS_AT_ONCE][VECTORS];
#pragma unroll
          for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
              bits[k][i] = *(const Bits<COUNT>*)(from + (row + k * AT_ONCE) * STAGING_PITCH + LANES * COUNT * i);
#pragma unroll
          for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
              const int ahead_of = ROWS * block + 8 * half + row + k * AT_ONCE;  // the warp's first row
              const bool of_group = DST_CHANNELS % 8 == 0 || channel(0, 0) + ahead + ahead_of < DST_CHANNELS;
              store_global_if(exists[i] && of_group, to[i] + ahead_of * params.dst.stride[1], bits[k][i]);
            }
        }
      }
  }

  // Channels last: a thread's two rows are neighbouring channels, eight lanes hold 16 of them, and four warps all 64.
  // The warpgroup transposes one phase of a piece, so that a lane stores 16 bytes, or COUNT aligned elements, and
  // neighbouring lanes the bytes next to them.
  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_pixels(int piece, int depth, int height) const {
    Share<WIDE> share;
    if constexpr (COUNT == WIDE) describe(piece, 0, share);
    result_t* const line = STACKED > 1 ? dst : dst + depth * params.dst.stride[2] + height * params.dst.stride[3];
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; ++block) {
      const int first_channel = (work.channel_group * CHANNEL_BLOCKS + block) * ROWS;
#pragma unroll
      for (int phase = 0; phase < DST_W; ++phase) {
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
          if (piece * PIECE + 8 * j >= GROUP_CELLS) break;
          float value[2][2 * DST_W];
#pragma unroll
          for (int half = 0; half < 2; ++half) finish_run<LINE>(value[half], piece, j, block, half, depth, height, 0);
#pragma unroll
          for (int cell = 0; cell < 2; ++cell) {
            Vector<result_t, 2> pair;
#pragma unroll
            for (int half = 0; half < 2; ++half) narrow(value[half][cell * DST_W + phase], pair.value[half]);
            *(Vector<result_t, 2>*)(staging + (8 * j + lane() % 4 * 2 + cell) * STAGING_PITCH + 16 * warp() +
                                    lane() / 4 * 2) = pair;
          }
        }
        group_sync();
        result_t* const to = line + phase * params.dst.stride[4] + first_channel;
        if constexpr (COUNT == WIDE)
          store_wide<LINE>(share, to, DST_CHANNELS - first_channel, phase, depth, height);
        else
          store_narrow<COUNT, LINE>(piece, to, DST_CHANNELS - first_channel, phase, depth, height);
        group_sync();
      }
    }
  }

  // Channels last: the line and channel of a row that a thread stores. The line is that at `depth` and `height`, or
  // with STACKED lines the row's.
  struct StoredLine {
    int depth, height, channel;  // a channel that does not exist for a row of no line
    long long offset;            // elements to the channel on that line, or with STACKED lines in the tile
  };
  template <int LINE>
  __device__ __forceinline__ StoredLine stored_line(int row, int depth, int height) const {
    if (STACKED == 1) return {depth, height, row, row};
    const int owned = owned_line(LINE, row), lines = LINE < 0 ? 1 : STACKED;
    if (LINE >= 0) depth = depth_of_line(owned), height = height_of_line(owned);
    const int channel = row % LINE_ROWS + (line_of_row(row) < lines ? 0 : ROWS);
    return {depth, height, channel, depth * params.dst.stride[2] + height * params.dst.stride[3] + channel};
  }

  // Stores a phase that the warpgroup has staged, 16 bytes at a time.
  template <int LINE>
  __device__ __forceinline__ void store_wide(const Share<WIDE>& share, result_t* to, int channels, int phase, int depth,
                                             int height) const {
    constexpr int LANES = Share<WIDE>::LANES, AT_ONCE = Share<WIDE>::AT_ONCE, VECTORS = Share<WIDE>::VECTORS;
    static_assert(!DST_CHANNELS_LAST || VECTORS % 2 == 0, "a piece is too small");
    const int row = lane() % LANES * WIDE;
    const result_t* const from = staging + threadIdx.x % 128 / LANES * STAGING_PITCH + row;
    const StoredLine line = stored_line<LINE>(row, depth, height);
    to += line.offset;
    bool exists[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      exists[i] = phase < Target::columns(share.reach[i]) && line.channel < channels &&
                  share.has_line(i, line.depth, line.height);
#pragma unroll
    for (int i = 0; i < VECTORS; i += 2) {  // two vectors in flight together
      const Bits<WIDE> first = *(const Bits<WIDE>*)(from + i * AT_ONCE * STAGING_PITCH);
      const Bits<WIDE> second = *(const Bits<WIDE>*)(from + (i + 1) * AT_ONCE * STAGING_PITCH);
      store_global_if(exists[i], to + share.offset[i], first);
      store_global_if(exists[i + 1], to + share.offset[i + 1], second);
    }
  }

  // The same, COUNT elements at a time: lanes take the existing channels of a cell, then those of the next.
  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_narrow(int piece, result_t* to, int channels, int phase, int depth,
                                               int height) const {
    constexpr int OF_LINE = ceil_div(DST_CHANNELS < ROWS ? DST_CHANNELS : ROWS, COUNT), OF_CELL = STACKED * OF_LINE;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < PIECE * OF_CELL; i += 128) {
      const int cell = i / OF_CELL, row = i % OF_CELL / OF_LINE * LINE_ROWS + i % OF_LINE * COUNT;
      if (piece * PIECE + cell >= GROUP_CELLS) break;
      const Target target = targets[piece * PIECE + cell];
      const StoredLine line = stored_line<LINE>(row, depth, height);
      const bool exists =
          phase < Target::columns(target.reach) && Target::has_line(target.reach, line.depth, line.height);
      store_global_if(exists && line.channel < channels, to + target.offset + line.offset,
                      *(const Bits<COUNT>*)(staging + cell * STAGING_PITCH + row));
    }
  }

  template <int COUNT, int LINE>
  __device__ __forceinline__ void store_line(int piece, int depth, int height, int first) const {
#if EPILOGUE_NORMALIZES
    find_normals<LINE>(piece, depth, height, first);
#endif
    if constexpr (DST_CHANNELS_LAST)
      store_pixels<COUNT, LINE>(piece, depth, height);
    else
      store_piece<COUNT, LINE>(piece, depth, height, first);
  }

  template <int COUNT, int LINE = 0>
  __device__ __forceinline__ void store_lines(int piece) const {
    const int owned = owned_line(LINE, 16 * warp());
    if (STACKED > 1 || owned < OWNED_LINES)
      store_line<COUNT, LINE>(piece, depth_of_line(owned), height_of_line(owned), owned % WIDTH_PARTS * COLUMNS);
    if constexpr (LINE + 1 < LINE_BLOCKS) store_lines<COUNT, LINE + 1>(piece);
  }

  // Stores the work tile's lines, and its share of those that own no taps.
  template <int COUNT>
  __device__ __forceinline__ void store_all() const {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) store_lines<COUNT>(piece);
    if (OWNED_LINES < DST_D * DST_H * WIDTH_PARTS && (DST_CHANNELS_LAST || line_of_row(16 * warp()) == 0)) {
      int ordinal = 0;  // among the lines that own no taps
#pragma unroll 1
      for (int phase = 0; phase < DST_D * DST_H; ++phase) {
        if (has_taps(AXIS_D, phase / DST_H) && has_taps(AXIS_H, phase % DST_H)) continue;
        if (ordinal++ % LINE_GROUPS != work.line_group) continue;
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) store_line<COUNT, -1>(piece, phase / DST_H, phase % DST_H, 0);
      }
    }
  }

  // Whether there is code that stores `count` elements at a time, more than one. With channels last: those of a pixel.
  // Where channels are normalised only the widest stores have code, which takes long to compile.
  static __device__ constexpr bool may_store(int count) {
    return DST_CHANNELS_LAST ? count == gcd(DST_CHANNELS, WIDE) : count == WIDE || !EPILOGUE_NORMALIZES;
  }

  __device__ __forceinline__ void operator()() const {
    if constexpr (may_store(WIDE))
      if (store_vector(params) == WIDE) return store_all<WIDE>();
    if constexpr (may_store(WIDE / 2))
      if (store_vector(params) == WIDE / 2) return store_all<WIDE / 2>();
    if constexpr (WIDE > 4 && may_store(2))
      if (store_vector(params) == 2) return store_all<2>();
    store_all<1>();
  }
};
