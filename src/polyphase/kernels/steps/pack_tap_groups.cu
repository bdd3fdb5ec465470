// Packs the weights for tap_gemm: for every group, phase and block of ROWS destination channels
//
//     [stage][part][row][k]
//
// SWIZZLED, the pieces of a row are swizzled as wgmma reads them (core/swizzle.cuh).
//
// k runs over the tap groups of the phase (core/phase.cuh). A row may be a channel's output in a cell
// (core/merged_phases.cuh). Weights that do not exist are zero.
//
// Index mapping. A transpose through shared memory. A block has a tile of TILE_ROWS rows by TILE_TAPS taps by
// the channels of a tap group. A thread reads 16 bytes of a pair of row and tap, channel by channel, in the weight's
// memory order, so that a warp's reads are coalesced; they are written as pieces of their rows. An odd pitch keeps both
// ways free of bank conflicts.

#include "specialisation.cuh"
#include "core/counters.cuh"
#include "core/geometry.cuh"
#include "core/merged_phases.cuh"
#include "core/phase.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int PIECES = CHUNK / PIECE;        // pieces of a row in a tap group
constexpr int ROW_PIECES = DEPTH / PIECE;    // pieces of a row in a stage
constexpr int STAGE_GROUPS = DEPTH / CHUNK;  // tap groups
constexpr int ROW_BLOCKS = ceil_div(DST_CHANNELS, ROWS);
constexpr int ROW_TILES = ceil_div(ROW_BLOCKS * ROWS, TILE_ROWS), TAP_TILES = ceil_div(TAPS, TILE_TAPS);
constexpr int PAIRS = TILE_ROWS * TILE_TAPS, ITEMS = PAIRS * PIECES, PITCH = PIECES | 1;
constexpr int AT_ONCE = PIECE > 4 ? 2 : 4;  // pieces that a thread reads before it stores the first
constexpr int SRC_STRIDE = INPUT_GRAD ? WEIGHT_STRIDE_OUT : WEIGHT_STRIDE_IN;
constexpr int ROW_STRIDE = INPUT_GRAD ? WEIGHT_STRIDE_IN : WEIGHT_STRIDE_OUT;
constexpr bool TAPS_INNERMOST = WEIGHT_STRIDE_TAP <= (INPUT_GRAD ? SRC_STRIDE : ROW_STRIDE);
static_assert(DEPTH % CHUNK == 0 && (!SWIZZLED || DEPTH == CHUNK), "a stage is whole tap groups, or one");
typedef Vector<scalar_t, PIECE> Piece;

// An item of a tile: a piece of a pair, in the weight's memory order.
struct Item {
  int row, tap, piece;

  __device__ __forceinline__ explicit Item(int index) {
    if (INPUT_GRAD) {  // a row is an input channel's weights
      const int in_row = index % (TILE_TAPS * PIECES);
      row = index / (TILE_TAPS * PIECES);
      tap = TAPS_INNERMOST ? in_row % TILE_TAPS : in_row / PIECES;
      piece = TAPS_INNERMOST ? in_row / TILE_TAPS : in_row % PIECES;
    } else {
      const int pair = index % PAIRS;
      piece = index / PAIRS;
      row = TAPS_INNERMOST ? pair / TILE_TAPS : pair % TILE_ROWS;
      tap = TAPS_INNERMOST ? pair % TILE_TAPS : pair / TILE_ROWS;
    }
  }
  __device__ __forceinline__ int pair() const { return row * TILE_TAPS + tap; }
};

__device__ __forceinline__ Piece read_piece(const scalar_t* from, int channels) {
  if (SRC_STRIDE == 1 && channels >= PIECE && (unsigned long long)from % sizeof(Piece) == 0) return *(const Piece*)from;
  Piece piece;
#pragma unroll
  for (int i = 0; i < PIECE; ++i)
    piece.value[i] = i < channels ? read(from + (long long)i * SRC_STRIDE) : zero<scalar_t>();
  return piece;
}

// A tap of an axis: its phase, and its index among the phase's taps.
struct AxisPlace {
  int phase, index, count;

  template <class T>
  static __device__ __forceinline__ AxisPlace of(Axis axis, int tap) {
    return {dst_offset(axis, tap), tap / T::TAP_STEP, ceil_div(axis.kernel - tap % T::TAP_STEP, T::TAP_STEP)};
  }
};

// Packed offset, in pieces, of a pair's row of a tap group; and tap groups after it that do not exist.
struct Place {
  unsigned at;
  int missing;

  __device__ __forceinline__ Place(int group, int chunk, int row, int tap) {
    const AxisPlace d = AxisPlace::of<TapsD>(AXIS_D, tap / (AXIS_H.kernel * AXIS_W.kernel));
    const AxisPlace h = AxisPlace::of<TapsH>(AXIS_H, tap / AXIS_W.kernel % AXIS_H.kernel);
    const AxisPlace w = AxisPlace::of<TapsW>(AXIS_W, tap % AXIS_W.kernel);
    const int phase = (d.phase * PHASES_H + h.phase) * PHASES_W + w.phase, taps = d.count * h.count * w.count;
    const int tap_group = chunk * taps + (d.index * h.count + h.index) * w.count + w.index;
    const unsigned block = (unsigned)(group * PHASES + phase) * ROW_BLOCKS + row / ROWS;
    const unsigned stage = block * PACKED_STAGES + tap_group / STAGE_GROUPS;
    at = (stage * PARTS * ROWS + row % ROWS) * ROW_PIECES + tap_group % STAGE_GROUPS * PIECES;
    missing = tap_group + 1 == CHUNKS * taps ? STAGE_GROUPS - 1 - tap_group % STAGE_GROUPS : 0;
  }
};

__device__ __forceinline__ void write_piece(Piece* packed, unsigned at, const Piece& piece) {
  alignas(16) scalar_t parts[PARTS][PIECE];
#pragma unroll
  for (int i = 0; i < PIECE; ++i) prepare(piece.value[i], parts, i);
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    packed[(long long)at + part * (ROWS * ROW_PIECES)] = *(const Piece*)parts[part];
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_tap_groups(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  __shared__ Piece tile[PAIRS * PITCH];
  __shared__ unsigned places[PAIRS];
  __shared__ int missing[PAIRS];
  griddepcontrol_launch_dependents();
  packed = clear_counters(packed);
  int block = blockIdx.x;
  const int first_tap = block % TAP_TILES * TILE_TAPS;
  block /= TAP_TILES;
  const int first_row = block % ROW_TILES * TILE_ROWS;
  block /= ROW_TILES;
  const int chunk = block % CHUNKS, group = block / CHUNKS;
  const scalar_t* const from = weight + (long long)group * (INPUT_GRAD ? CHANNELS : SRC_CHANNELS) * WEIGHT_STRIDE_IN;

#pragma unroll 1
  for (int first = threadIdx.x; first < ITEMS; first += AT_ONCE * THREADS) {
    Piece pieces[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const Item item(first + i * THREADS);
      const int row = first_row + item.row, channel = chunk * CHUNK + item.piece * PIECE;
      const Column of(row);
      const int tap = first_tap + item.tap < TAPS ? of.layer_tap(first_tap + item.tap) : -1;
      const bool exists = first + i * THREADS < ITEMS && row < DST_CHANNELS && tap >= 0 && channel < SRC_CHANNELS;
      pieces[i] = Piece{};
      if (exists) {
        const int offset =
            INPUT_GRAD ? weight_offset(of.channel, channel, tap) : weight_offset(channel, of.channel, tap);
        pieces[i] = read_piece(from + offset, SRC_CHANNELS - channel);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const Item item(first + i * THREADS);
      if (first + i * THREADS < ITEMS) tile[item.pair() * PITCH + item.piece] = pieces[i];
    }
  }
  for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
    const Place place(group, chunk, first_row + pair / TILE_TAPS, min(first_tap + pair % TILE_TAPS, TAPS - 1));
    places[pair] = place.at, missing[pair] = place.missing;
  }
  __syncthreads();

#pragma unroll 2
  for (int index = threadIdx.x; index < ITEMS; index += THREADS) {
    const int pair = index / PIECES, piece = index % PIECES;
    if (first_row + pair / TILE_TAPS >= ROW_BLOCKS * ROWS || first_tap + pair % TILE_TAPS >= TAPS) continue;
    unsigned at = places[pair] + piece;
    if (SWIZZLED) at ^= at >> 3 & (ROW_PIECES - 1);  // core/swizzle.cuh, in pieces
    write_piece((Piece*)packed, at, tile[pair * PITCH + piece]);
    if (STAGE_GROUPS > 1)
      for (int i = 1; i <= missing[pair]; ++i) write_piece((Piece*)packed, at + i * PIECES, Piece{});
  }
  griddepcontrol_wait();  // so that a kernel that waits for this step has waited for the previous one, too
}
