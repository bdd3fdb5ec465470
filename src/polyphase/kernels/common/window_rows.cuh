// The window of a stage as the kernels of common/window_wgmma.cuh have it, and its copies where the copy engine cannot
// bring it: rows in pieces of 16 bytes, wherever they begin in memory. An element comes to lie as many bytes behind a
// multiple of 16 as it does in the tensor; for that the steps of the window are those of the tensor, modulo 16 bytes,
// and all of a stage is `shift` bytes further on. Rows have room for the pieces that they only begin or end in.

// The first `bytes` of 16 from global to shared memory (common/copy_async.cuh), zeros for the others.
#ifndef EMULATOR
__device__ __forceinline__ void copy_async_begin(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
#else
__device__ __forceinline__ void copy_async_begin(unsigned to, const void* from, int bytes) {
  typedef Vector<unsigned char, 16> Bytes;
  Bytes copied = {};
  for (int i = 0; i < bytes; ++i) copied.value[i] = ((const unsigned char*)from)[i];
  emulator::copy_later((Bytes*)__cvta_shared_to_generic(to), copied);
}
#endif

struct Window {
  int extent[4];  // along n, d, h and w
  int step[4];    // elements from one image, slab, row and channel to the next
  int pieces;     // of a row, at most; where it is copied
};

__device__ __forceinline__ int window_bytes(const Window& window, int n, int d, int h, int w) {
  return (n * window.step[0] + d * window.step[1] + h * window.step[2] + w) * ELEMENT;
}
__device__ __forceinline__ int channel_bytes(const Window& window) { return window.step[3] * ELEMENT; }

template <int CHANNELS>
struct RowLoader {
  static constexpr int PIECE = 16 / ELEMENT;  // elements

  const Tensor5& tensor;
  const Window& window;
  Place* places;  // of each piece: its row, and the first of its elements if the row began with a piece
  int pieces;     // of a channel

  __device__ __forceinline__ RowLoader(const Tensor5& tensor, const Window& window)
      : tensor(tensor),
        window(window),
        pieces(window.extent[0] * window.extent[1] * window.extent[2] * window.pieces) {}

  __device__ __forceinline__ void init(Place* list) {
    places = list;
    const int counts[4] = {window.extent[0], window.extent[1], window.extent[2], window.pieces};
    for (int i = loader(); i < pieces; i += LOADERS) {
      int at[4];
      decode(counts, i, at);
      const int row[4] = {at[0], at[1], at[2], 0};
      places[i] = Place{(short)at[0], (short)at[1], (short)at[2], (short)(at[3] * PIECE), offset_of(tensor, row)};
    }
  }

  // The window that begins at `origin` (n, d, h, w), in `channels` channels from `from` on; those beyond are zero.
  // Returns its shift.
  __device__ __forceinline__ int load(const scalar_t* from, int channels, char* to, int batch,
                                      const int (&origin)[4]) const {
    from += offset_of(tensor, origin);
    const int shift = behind_a_piece(from) * ELEMENT;
    // Threads go along the pieces of a channel, and take channels in turn; where those are few, several at once.
    const int span = pieces > 16 ? 5 : 32 - __clz(pieces - 1);
    const int lanes = 1 << span, first = loader() >> span, at_once = LOADERS >> span;
    from += first * tensor.stride[1];
    to += shift + first * channel_bytes(window);
    for (int i = loader() % lanes; i < pieces; i += lanes) {
      const Place place = places[i];
      const bool inside = origin[0] + place.n < batch && (unsigned)(origin[1] + place.d) < (unsigned)tensor.size[0] &&
                          (unsigned)(origin[2] + place.h) < (unsigned)tensor.size[1];
      const scalar_t* row = from + place.offset;
      char* slot = to + window_bytes(window, place.n, place.d, place.h, 0);
#pragma unroll 4
      for (int channel = first; channel < CHANNELS; channel += at_once) {
        const int w = place.w - behind_a_piece(row);
        if (w < window.extent[3]) copy(row + w, slot + w * ELEMENT, origin[3] + w, inside && channel < channels);
        row += at_once * tensor.stride[1];
        slot += at_once * channel_bytes(window);
      }
    }
    return shift;
  }

 private:
  // Elements from the last multiple of 16 bytes on.
  static __device__ __forceinline__ int behind_a_piece(const scalar_t* element) {
    return (int)((unsigned long long)element / ELEMENT % PIECE);
  }

  // A piece of a row, if that `exists`, from its element `x` on, which may lie before it.
  __device__ __forceinline__ void copy(const scalar_t* from, char* to, int x, bool exists) const {
    const int left = exists ? tensor.size[2] - x : 0;
    if (x >= 0 || !exists) {
      copy_async_begin(shared_address(to), from, max(0, min(PIECE, left)) * ELEMENT);
    } else {
#pragma unroll
      for (int i = 0; i < PIECE; ++i) ((scalar_t*)to)[i] = x + i >= 0 && i < left ? read(from + i) : zero<scalar_t>();
    }
  }
};
