// The window of a stage in the kernels of mainloop/window_wgmma.cuh, and its copy where TMA cannot load it: cp.async
// of 16 bytes, whatever the alignment of its rows. The address of an element modulo 16 is the same in shared memory as
// in the tensor. For that the window's pitches equal the tensor's modulo 16 bytes, and the window starts `shift` bytes
// late in its stage. Rows have room for the 16-byte pieces that they fill in part.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/cp_async.cuh"
#include "mainloop/multistage.cuh"

struct Window {
  int extent[4];  // along n, d, h and w
  int step[4];    // elements from one image, slab, row and channel to the next
  int pieces;     // of a row, at most; where it is copied
};

__device__ __forceinline__ int window_offset(const Window& window, int n, int d, int h, int w) {
  return (n * window.step[0] + d * window.step[1] + h * window.step[2] + w) * ELEMENT;
}
__device__ __forceinline__ int channel_pitch(const Window& window) { return window.step[3] * ELEMENT; }

template <int CHANNELS>
struct RowLoader {
  static constexpr int PIECE = 16;  // bytes

  const Tensor5& tensor;
  const Window& window;
  Place* places;  // of each piece: its row, and its number there
  int pieces;     // of a channel

  // A row lies the same way beyond a piece in channels that are so many apart: what to copy is found once for them.
  int apart;
  // Threads share out the pieces of the channels below `apart`, one channel's behind the other's: where a thread
  // begins, and how far on its next piece is.
  int first_channel, first_piece, skipped_channels, skipped_pieces;

  __device__ __forceinline__ RowLoader(const Tensor5& tensor, const Window& window) : tensor(tensor), window(window) {}

  __device__ __forceinline__ void init(Place* list) {
    places = list;
    pieces = window.extent[0] * window.extent[1] * window.extent[2] * window.pieces;
    apart = PIECE >> (__ffs((int)(tensor.stride[1] * ELEMENT) | PIECE) - 1);
    while (apart < CHANNELS && apart * pieces < LOADERS) apart *= 2;
    first_channel = loader() / pieces, first_piece = loader() % pieces;
    skipped_channels = LOADERS / pieces, skipped_pieces = LOADERS % pieces;
    const int counts[4] = {window.extent[0], window.extent[1], window.extent[2], window.pieces};
    for (int i = loader(); i < pieces; i += LOADERS) {
      int at[4];
      decode(counts, i, at);
      const int row[4] = {at[0], at[1], at[2], 0};
      places[i] = Place{(short)at[0], (short)at[1], (short)at[2], (short)at[3], offset_of(tensor, row)};
    }
  }

  // The window that begins at `origin` (n, d, h, w), in `channels` channels from `from` on; those beyond are zero.
  // Returns its shift.
  __device__ __forceinline__ int load(const scalar_t* from, int channels, char* to, int batch,
                                      const int (&origin)[4]) const {
    from += offset_of(tensor, origin);
    const int shift = behind_a_piece(from);
    // The end and the beginning of the tensor's rows, in bytes of the window's. Before a row that begins earlier than
    // the window there may be anything.
    const int beyond = window.extent[3] + PIECE;
    const int end = min(tensor.size[2] - origin[3], beyond) * ELEMENT;
    const int begin = origin[3] < 0 ? min(-origin[3], beyond) * ELEMENT : -PIECE;
    const long long stride = tensor.stride[1] * ELEMENT;
    const int pitch = channel_pitch(window);
    const unsigned slots = shared_address(to) + shift;
    for (int channel = first_channel, piece = first_piece; channel < min(apart, CHANNELS);) {
      const Place place = places[piece];
      const bool inside = origin[0] + place.n < batch && (unsigned)(origin[1] + place.d) < (unsigned)tensor.size[0] &&
                          (unsigned)(origin[2] + place.h) < (unsigned)tensor.size[1];
      const char* const row = (const char*)(from + place.offset) + channel * stride;
      const int at = place.w * PIECE - behind_a_piece(row);
      if (at < window.extent[3] * ELEMENT) {
        const int before = begin - at, bytes = before < PIECE ? max(0, min(PIECE, end - at)) : 0;
        const int existing = inside && bytes > 0 ? min(CHANNELS, channels) : 0;
        const unsigned slot = slots + window_offset(window, place.n, place.d, place.h, 0) + channel * pitch + at;
        Copies copies{channel, apart, row + at, apart * stride, slot, apart * pitch};
        if (before > 0)  // the row begins amid the piece
          copies.run(existing, [&](unsigned to, const char* from) { copy_words(to, from, before, bytes); });
        else
          copies.run(existing, [&](unsigned to, const char* from) { cp_async_part<PIECE>(to, from, bytes); });
        copies.run(CHANNELS, [&](unsigned to, const char* from) { cp_async<PIECE>(to, from, false); });
      }
      channel += skipped_channels, piece += skipped_pieces;
      if (piece >= pieces) piece -= pieces, ++channel;
    }
    return shift;
  }

 private:
  // The same piece of channels that are so many `apart`.
  struct Copies {
    int channel, apart;
    const char* from;
    long long step;
    unsigned to;
    int pitch;

    // copy(to, from) one by one, below channel `end`.
    template <class Copy>
    __device__ __forceinline__ void run(int end, const Copy& copy) {
#pragma unroll 2
      for (; channel < end; channel += apart) {
        copy(to, from);
        from += step, to += pitch;
      }
    }
  };

  static __device__ __forceinline__ int behind_a_piece(const void* address) {
    return (int)((unsigned long long)address % PIECE);
  }

  // A piece that a row begins in, `begin` bytes on, and ends `end` bytes on.
  static __device__ __forceinline__ void copy_words(unsigned to, const char* from, int begin, int end) {
#pragma unroll
    for (int i = 0; i < PIECE; i += 4) {
      if (ELEMENT == 2 && begin == i + 2) {
        scalar_t* const pair = (scalar_t*)__cvta_shared_to_generic(to + i);
        pair[0] = zero<scalar_t>(), pair[1] = end > i + 2 ? read((const scalar_t*)(from + i) + 1) : zero<scalar_t>();
      } else {
        cp_async_part<4>(to + i, from + i, begin > i ? 0 : max(0, min(4, end - i)));
      }
    }
  }
};
