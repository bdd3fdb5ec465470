// Copies a tensor of any strides to planes of padded rows, channels innermost (core/run_groups.cuh):
//
//     [part][group][residue along d][residue along h][image][position][channel]
//
// Position i of residue r along a dimension is the source's element i·step + first + r·apart, or zero where there is
// none. INNER residues are not planes but channels, [residue][channel of the source]. Float32 may be split into two
// PARTS.
//
// Index mapping. A block has a tile of positions, of all planes of a part one after the other, by pieces: 16 bytes of
// neighbouring channels of a position. Neighbouring threads read neighbouring positions, each the channels of a piece,
// and write the piece to shared memory, [position][piece]. An odd pitch keeps both ways free of bank conflicts. Rows of
// whole pieces are written in pieces, others (a tile has whole rows then) in words of four bytes. Source offsets of
// channels are computed once a tile: dividing by residues for every piece takes longer than copying it. Tiles of the
// same positions have neighbouring numbers, since they write the same sectors.
//
// Positions of few channels, DIRECTLY bytes (4, 8 or 16), are written without shared memory. A thread has several of a
// tile, THREADS apart, and finds each from the one before if both are in a row.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/tf32.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  long long stride[5];  // the source's, in elements: images, channels, slabs, rows, columns
  int size[3], step[3], first[3], apart[2];
  Divisor padded[3], images, residues[2];  // positions of an image; images; planes of an image along d and h
  Divisor inner[2];                        // residues that are channels
  Divisor group;                           // channels of the source
  int channels, positions;                 // written channels; written positions, of all planes of a part
  Divisor pieces, row;                     // pieces, and channels, of a position in the tile
  Divisor across;                          // tiles that share a position's channels
  int position_bits;                       // log2 of the tile's positions
};

constexpr int VECTOR = 16 / sizeof(scalar_t);
constexpr int AT_ONCE = VECTOR > 4 && DIRECTLY == 0 ? 2 : 4;  // pieces that a thread reads before it writes one
constexpr int WORD = 4 / sizeof(scalar_t);
using Piece = Vector<scalar_t, VECTOR>;
using Word = Vector<scalar_t, WORD>;
using Direct = Vector<scalar_t, (DIRECTLY > 0 ? DIRECTLY : 16) / sizeof(scalar_t)>;  // all channels of a position

// A part of neighbouring elements.
template <int COUNT>
__device__ __forceinline__ Vector<float, COUNT> part_of(Vector<float, COUNT> whole, int part) {
#pragma unroll
  for (int i = 0; i < COUNT && PARTS > 1; ++i) whole.value[i] = part_of(whole.value[i], part);
  return whole;
}

constexpr int MOST_CHANNELS = MOST_PIECES * VECTOR;  // most channels of a tile
constexpr int NOWHERE = -(1 << 30);                  // position of an element that does not exist

// Source offset of a channel of the result, relative to a position's first element.
struct Channel {
  long long offset;
  int d, h;

  __device__ __forceinline__ Channel(const Params& params, int index) {
    const int inner = index / params.group, of_d = inner / params.inner[1];
    const bool exists = of_d < params.inner[0].value;
    d = exists ? of_d * params.apart[0] : NOWHERE;
    h = (inner - of_d * params.inner[1].value) * params.apart[1];
    offset = (index - inner * params.group.value) * params.stride[1] + d * params.stride[2] + h * params.stride[3];
  }
};

// A position whose channels a thread reads.
struct Position {
  int index, column;  // of all positions; of its row
  int d, h;           // of the source; d is NOWHERE if there is no such element
  const scalar_t* from;

  __device__ __forceinline__ Position(const scalar_t* src, const Params& params, int index) : index(index) {
    const int row = index / params.padded[2], slab = row / params.padded[1], of_plane = slab / params.padded[0];
    const int plane = of_plane / params.images, plane_d = plane / params.residues[1];
    const int group = plane_d / params.residues[0];
    column = index - row * params.padded[2].value;
    of_row =
        slab % params.padded[0] * params.step[0] + params.first[0] + plane_d % params.residues[0] * params.apart[0];
    h = row % params.padded[1] * params.step[1] + params.first[1] + plane % params.residues[1] * params.apart[1];
    from = src + of_plane % params.images * params.stride[0] + group * params.group.value * params.stride[1] +
           of_row * params.stride[2] + h * params.stride[3] + width(params) * params.stride[4];
    find(params);
  }
  __device__ __forceinline__ void advance(const scalar_t* src, const Params& params, int by) {
    if (column + by >= params.padded[2].value) {
      *this = Position(src, params, index + by);
      return;
    }
    index += by, column += by, from += by * params.step[2] * params.stride[4];
    find(params);
  }

  // Reads all channels.
  __device__ __forceinline__ Direct read_all(const Params& params, const Channel* channels) const {
    Direct all;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Direct) / sizeof(scalar_t)); ++i) {
      const Channel channel = channels[i];
      all.value[i] = has(params, channel) ? read(from + channel.offset) : zero<scalar_t>();
    }
    return all;
  }

  // Reads a piece of neighbouring channels, the first of which is in the tile. If groups are whole pieces they belong
  // to one residue.
  __device__ __forceinline__ Piece read_piece(const Params& params, const Channel* channels) const {
    Piece piece;
    if (params.group.value % VECTOR == 0) {
      const Channel channel = *channels;
      const scalar_t* at = from + channel.offset;
      const bool exists = has(params, channel);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i, at += params.stride[1]) piece.value[i] = exists ? read(at) : zero<scalar_t>();
    } else {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const Channel channel = channels[i];
        piece.value[i] = has(params, channel) ? read(from + channel.offset) : zero<scalar_t>();
      }
    }
    return piece;
  }

 private:
  int of_row;  // d of the row's elements

  __device__ __forceinline__ int width(const Params& params) const { return column * params.step[2] + params.first[2]; }
  __device__ __forceinline__ void find(const Params& params) {
    const bool exists = index < params.positions && (unsigned)width(params) < (unsigned)params.size[2];
    d = exists ? of_row : NOWHERE;
  }
  __device__ __forceinline__ bool has(const Params& params, const Channel& channel) const {
    return (unsigned)(d + channel.d) < (unsigned)params.size[0] && (unsigned)(h + channel.h) < (unsigned)params.size[1];
  }
};

// Writes the positions of a tile directly.
__device__ __forceinline__ void write_directly(const scalar_t* src, Direct* dst, const Params& params,
                                               const Channel* channels, int first_position) {
  const int thread = (int)threadIdx.x, present = min(1 << params.position_bits, params.positions - first_position);
  Position position(src, params, first_position + thread);
  dst += first_position;
#pragma unroll 1
  for (int first = thread; first < present; first += AT_ONCE * THREADS) {
    Direct values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i * THREADS >= present) break;
      values[i] = position.read_all(params, channels);
      position.advance(src, params, THREADS);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (first + i * THREADS < present)
          dst[(long long)part * params.positions + first + i * THREADS] = part_of(values[i], part);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    write_planes(const scalar_t* __restrict__ src, scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  __shared__ Piece tile[PIECES];
  __shared__ __align__(16) unsigned char shared_channels[MOST_CHANNELS * sizeof(Channel)];
  Channel* const channels = (Channel*)shared_channels;
  griddepcontrol_launch_dependents();
  const int thread = (int)threadIdx.x, tile_positions = 1 << params.position_bits, pitch = params.pieces.value | 1;
  const int block = (int)blockIdx.x / params.across;
  const int first_position = block << params.position_bits;
  const int first_channel = ((int)blockIdx.x - block * params.across.value) * params.row.value;
#pragma unroll 1
  for (int i = thread; i < params.pieces.value * VECTOR; i += THREADS) channels[i] = Channel(params, first_channel + i);
  if constexpr (DIRECTLY > 0) {
    __syncthreads();
    return write_directly(src, (Direct*)dst, params, channels, first_position);
  }

  const int mine = thread & tile_positions - 1, apart = THREADS >> params.position_bits;
  const Position position(src, params, first_position + mine);
  __syncthreads();
#pragma unroll 1
  for (int first = thread >> params.position_bits; first < params.pieces.value; first += AT_ONCE * apart) {
    Piece pieces[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * apart < params.pieces.value)
        pieces[i] = position.read_piece(params, channels + (first + i * apart) * VECTOR);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * apart < params.pieces.value) tile[mine * pitch + first + i * apart] = pieces[i];
  }
  __syncthreads();

  const int present = min(tile_positions, params.positions - first_position);
  const long long part_elements = (long long)params.positions * params.channels;
  if (params.channels % VECTOR == 0) {
    const int count = present * params.pieces.value;
    for (int at = thread; at < count; at += THREADS) {
      const int in_tile = at / params.pieces, piece = at - in_tile * params.pieces.value;
      const int channel = first_channel + piece * VECTOR;
      if (channel >= params.channels) continue;
      const Piece whole = tile[in_tile * pitch + piece];
      scalar_t* const to = dst + (long long)(first_position + in_tile) * params.channels + channel;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) *(Piece*)(to + part * part_elements) = part_of(whole, part);
    }
    return;
  }
  const int count = present * params.channels;
  scalar_t* const to = dst + (long long)first_position * params.channels;
  for (int at = thread * WORD; at < count; at += THREADS * WORD) {
    const int in_tile = at / params.row, channel = at - in_tile * params.row.value;
    const Word word = *(const Word*)((const scalar_t*)(tile + in_tile * pitch) + channel);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) *(Word*)(to + part * part_elements + at) = part_of(word, part);
  }
}
