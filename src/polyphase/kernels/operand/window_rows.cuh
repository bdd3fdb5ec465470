// The window of a stage in the kernels of mainloop/window_wgmma.cuh, and its copy if TMA cannot load it as a box: a
// bulk copy for each row, whatever its alignment, and cp.async of 16 bytes where a row of the tensor begins or ends.
// The address of an element modulo 16 is the same in shared memory and in the tensor: the window's pitches equal the
// tensor's modulo 16 bytes, and the window starts `shift` bytes after its stage. Rows have room for the 16-byte pieces
// that they fill in part.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"
#include "mainloop/multistage.cuh"

struct Window {
  int extent[4];  // along n, d, h and w
  int step[4];    // elements from one image, slab, row and channel to the next
  int joined;     // elements from one of the tensor's rows to the next, if the rows of a slab are copied as one; else 0
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
  Place* places;  // one for each row
  int rows;       // rows of a channel

  // Rows are dealt to threads, channel after channel: a thread's first row, and the distance to its next. All warps get
  // as many rows, since a warp issues its bulk copies one after the other.
  int first_channel, first_row, skipped_channels, skipped_rows;

  __device__ __forceinline__ RowLoader(const Tensor5& tensor, const Window& window) : tensor(tensor), window(window) {}

  __device__ __forceinline__ void init(Place* list) {
    places = list;
    rows = window.extent[0] * window.extent[1] * window.extent[2];
    const int first = loader() % 32 * LOAD_WARPS + loader() / 32;
    first_channel = first / rows, first_row = first % rows;
    skipped_channels = LOADERS / rows, skipped_rows = LOADERS % rows;
    const int counts[4] = {window.extent[0], window.extent[1], window.extent[2], 1};
    for (int i = loader(); i < rows; i += LOADERS) {
      int at[4];
      decode(counts, i, at);
      places[i] = Place{(short)at[0], (short)at[1], (short)at[2], 0, offset_of(tensor, at)};
    }
  }

  // Copies the window at `origin` (n, d, h, w), in `channels` channels from `from` on; further channels become zero.
  // Copies arrive at `barrier`. Returns the window's shift.
  __device__ __forceinline__ int load(const scalar_t* from, int channels, char* to, int batch, const int (&first)[4],
                                      unsigned barrier) const {
    int origin[4] = {first[0], first[1], first[2], first[3]}, width = tensor.size[2], height = tensor.size[1];
    from += offset_of(tensor, origin);
    if (window.joined) {
      origin[3] += origin[2] * window.joined, origin[2] = 0;
      width += (height - 1) * window.joined, height = 1;
    }
    const int shift = behind_a_piece(from);
    // The end and the beginning of the tensor's rows, in bytes of the window's rows. The bytes before a row that begins
    // earlier than the window are arbitrary.
    const int beyond = window.extent[3] + PIECE;
    const int end = min(width - origin[3], beyond) * ELEMENT;
    const int begin = origin[3] < 0 ? min(-origin[3], beyond) * ELEMENT : -PIECE;
    const long long stride = tensor.stride[1] * ELEMENT;
    const int pitch = channel_pitch(window);
    const unsigned slots = shared_address(to) + shift;
    fence_proxy_async();  // between the threads' writes of an earlier stage and bulk copies
    bool by_pieces = false;
    for (int channel = first_channel, index = first_row; channel < CHANNELS;) {
      const Place place = places[index];
      const bool inside = origin[0] + place.n < batch && (unsigned)(origin[1] + place.d) < (unsigned)tensor.size[0] &&
                          (unsigned)(origin[2] + place.h) < (unsigned)height;
      const char* const row = (const char*)(from + place.offset) + channel * stride;
      const int behind = behind_a_piece(row);
      const unsigned slot = slots + window_offset(window, place.n, place.d, place.h, 0) + channel * pitch;
      const int last = inside && channel < channels ? end + behind : 0;
      by_pieces |=
          load_row(slot - behind, row - behind, begin + behind, last, window.extent[3] * ELEMENT + behind, barrier);
      channel += skipped_channels, index += skipped_rows;
      if (index >= rows) index -= rows, ++channel;
    }
    if (by_pieces) mbarrier_expect_cp_async(barrier);
    return shift;
  }

 private:
  static __device__ __forceinline__ int behind_a_piece(const void* address) {
    return (int)((unsigned long long)address % PIECE);
  }

  // Copies `bytes` of a row from a piece's beginning on; those outside `begin` to `end` become zero. Returns whether
  // any are copied by cp.async.
  static __device__ __forceinline__ bool load_row(unsigned to, const char* from, int begin, int end, int bytes,
                                                  unsigned barrier) {
    int at = 0;
    const bool begins = begin > 0 && end > 0;
    // A first element that is half a word is loaded first, and waited for after all copies have been issued.
    const bool odd = ELEMENT == 2 && begins && begin % 4 > 0 && begin < bytes;
    const scalar_t first = odd && begin < end ? read((const scalar_t*)(from + begin)) : zero<scalar_t>();
    if (begins) {
      for (; at + PIECE <= min(begin, bytes); at += PIECE) cp_async<PIECE>(to + at, from, false);
      if (begin > at && at < bytes) copy_words(to + at, from + at, begin - at, end - at), at += PIECE;
    }
    const int whole = max(0, min(end, bytes + PIECE - 1) / PIECE * PIECE - at);
    const bool by_pieces = at > 0 || at + whole < bytes;
    if (whole > 0) tma_load_bytes(to + at, from + at, whole, barrier);
    for (at += whole; at < bytes; at += PIECE) cp_async_part<PIECE>(to + at, from + at, max(0, min(PIECE, end - at)));
    if (odd) {
      scalar_t* const pair = (scalar_t*)__cvta_shared_to_generic(to + begin - 2);
      pair[0] = zero<scalar_t>(), pair[1] = first;
    }
    return by_pieces;
  }

  // Copies the words of a piece from byte `begin` to `end`, where the row begins or ends; not a word that it begins
  // amid.
  static __device__ __forceinline__ void copy_words(unsigned to, const char* from, int begin, int end) {
#pragma unroll
    for (int i = 0; i < PIECE; i += 4)
      if (begin != i + 2) cp_async_part<4>(to + i, from + i, begin > i ? 0 : max(0, min(4, end - i)));
  }
};
