#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/swizzle.cuh"
#include "ptx/cp_async.cuh"
#include "operand/window_rows.cuh"
#include "mainloop/multistage.cuh"
#include "mainloop/window_wgmma.cuh"

// B of mainloop/window_wgmma.cuh if TMA cannot load it: half types whose strides are multiples of 4 or 8 bytes, not of
// 16. All producer threads copy it by cp.async of as many bytes to where TMA would write it, swizzle included.
//
// A thread copies the same piece of every `at_once`-th column, so that its address is computed once a stage.
class RunLoader {
 public:
  const Tensor5& tensor;
  const Runs& runs;

  __device__ __forceinline__ RunLoader(const Tensor5& tensor, const Runs& runs, int piece_bytes,
                                       const int (&tile_extent)[4], int joined)
      : tensor(tensor), runs(runs), joined(joined), length(joined ? tile_extent[2] * joined : tile_extent[3]) {
    const int of_run = runs.bytes / piece_bytes;
    const int pieces = volume(runs.count) * of_run;
    const int piece = loader() % pieces;
    decode(runs.count, piece / of_run, at);
    at[3] = at[3] * runs.length + piece % of_run * (piece_bytes / ELEMENT);
    at_once = LOADERS / pieces, first = loader() / pieces;
    place = piece / of_run * runs.box + piece % of_run * piece_bytes;
  }

  // Copies the tile at `origin` (n, d, h, w), in `channels` channels from `from` on; elements beyond become zero.
  template <int PIECE>
  __device__ __forceinline__ void load(const scalar_t* from, int channels, char* to, int batch,
                                       const int (&origin)[4]) const {
    if (first >= at_once) return;
    // Joined rows: H and W of a slab are one long row.
    const int begin = joined ? origin[2] * joined : origin[3], w = begin + at[3];
    const int end = min(joined ? joined * tensor.size[1] : tensor.size[2], begin + length);
    const bool inside = origin[0] + at[0] < batch && origin[1] + at[1] < tensor.size[0] &&
                        (joined || origin[2] + at[2] < tensor.size[1]);
    const int bytes = inside ? max(0, min(PIECE, (end - w) * ELEMENT)) : 0;
    const long long step = at_once * tensor.stride[1];
    from += offset_of(tensor, origin) + offset_of(tensor, at) + first * tensor.stride[1];
    unsigned slot = shared_address(to) + place + first * runs.bytes;
#pragma unroll 2
    for (int column = first; column < COLUMNS; column += at_once) {
      cp_async_part<PIECE>(swizzled(slot, runs.bytes), from, column < channels ? bytes : 0);
      from += step, slot += at_once * runs.bytes;
    }
  }

 private:
  int joined, length;  // elements of a joined row; of a tile's row
  int at[4];           // the piece, relative to the tile's first position
  int first, at_once;  // first column; columns that all threads copy at once
  int place;           // offset in a stage of the first column's piece, before swizzling
};
