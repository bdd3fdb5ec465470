// Copies boxes of tensors to shared memory, stage after stage; by cp.async if pieces have 4 bytes or more. The
// specialisation defines WARPS, and which of a block's warps load.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/cp_async.cuh"
#include "mainloop/cp_async_stages.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int LOADERS = 32 * LOAD_WARPS;
constexpr int ELEMENT = sizeof(scalar_t);
[[maybe_unused]] constexpr int OPERATION = 32 / ELEMENT;  // k of one instruction

// A tensor's part of a stage: a box of each channel (of the weight: row), copied in pieces.
struct StageBox {
  int extent[4];  // along n, d, h and w
  int piece;      // elements of one copy: along w, or of neighbouring channels
  int pitch;      // bytes in shared memory from one channel to the next
};

// The thread's index among the loading threads.
__device__ __forceinline__ int loader() { return threadIdx.x - 32 * FIRST_LOAD_WARP; }

__device__ __forceinline__ bool exists(const Tensor5& t, int batch, int n, int d, int h, int w) {
  return n < batch && (unsigned)d < (unsigned)t.size[0] && (unsigned)h < (unsigned)t.size[1] &&
         (unsigned)w < (unsigned)t.size[2];
}

// The pieces of a box that has the same origin at every stage.
struct Still {
  long long* offsets;  // from the channel's first element; negative for no piece
  int pieces;          // pieces of a channel

  // Lists the pieces of `count` elements; beyond the box there are none. The box begins at `origin` (n, d, h, w).
  __device__ __forceinline__ void init(const Tensor5& t, const StageBox& stage_box, long long* list, int count,
                                       int along_w, int batch, const int (&origin)[4]) {
    offsets = list;
    pieces = count / along_w;
    for (int i = loader(); i < pieces; i += LOADERS) {
      int at[4];
      decode(stage_box.extent, i * along_w, at);
      const bool in_box = at[0] < stage_box.extent[0];
#pragma unroll
      for (int j = 0; j < 4; ++j) at[j] += origin[j];
      offsets[i] = in_box && exists(t, batch, at[0], at[1], at[2], at[3]) ? offset_of(t, at) : -16;  // aligned
    }
  }

  __device__ __forceinline__ long long begin(const Tensor5&) const { return 0; }
  // Whether piece `i` exists, and its offset from the channel's first element.
  __device__ __forceinline__ bool find(const Tensor5&, int i, long long& offset) const {
    offset = offsets[i];
    return offset >= 0;
  }
};

// A piece of a box whose origin changes from stage to stage.
struct alignas(16) Place {
  short n, d, h, w;  // relative to the box's first element; n is -1 for no piece
  long long offset;  // from the box's first element
};
struct Moving {
  Place* places;
  int pieces;  // pieces of a channel

  __device__ __forceinline__ void init(const Tensor5& t, const StageBox& stage_box, Place* list, int count,
                                       int along_w) {
    places = list;
    pieces = count / along_w;
    for (int i = loader(); i < pieces; i += LOADERS) {
      int at[4];
      decode(stage_box.extent, i * along_w, at);
      const short n = at[0] < stage_box.extent[0] ? (short)at[0] : -1;
      places[i] = Place{n, (short)at[1], (short)at[2], (short)at[3], offset_of(t, at)};
    }
  }

  // The same for the box that begins at `origin` (n, d, h, w).
  __device__ __forceinline__ long long begin(const Tensor5& t, int /* batch */, const int (&origin)[4]) const {
    return offset_of(t, origin);
  }
  __device__ __forceinline__ bool find(const Tensor5& t, int i, long long& offset, int batch,
                                       const int (&origin)[4]) const {
    const Place place = places[i];
    offset = place.offset;
    return place.n >= 0 &&
           exists(t, batch, origin[0] + place.n, origin[1] + place.d, origin[2] + place.h, origin[3] + place.w);
  }
};

// Copies one StageBox of a stage to shared memory; channels last are transposed. Up to 1 << SPAN threads copy the
// pieces of a channel.
template <bool CHANNELS_LAST, int CHANNELS, class Box, int SPAN = 5>
struct StageBoxLoader {
  static constexpr int VECTOR = CHANNELS % (16 / ELEMENT) == 0 ? 16 / ELEMENT : 1;  // channels at once

  const Tensor5& tensor;
  const StageBox& stage_box;
  Box box;

  __device__ __forceinline__ StageBoxLoader(const Tensor5& tensor, const StageBox& stage_box)
      : tensor(tensor), stage_box(stage_box) {}

  // `list` has room for the pieces of `count` elements; `more`: further arguments of the box.
  template <class Entry, class... More>
  __device__ __forceinline__ void init(Entry* list, int count, const More&... more) {
    box.init(tensor, stage_box, list, count, CHANNELS_LAST ? 1 : stage_box.piece, more...);
  }

  // Copies the box of `channels` channels from `from` on; further channels become zero. `at`: origin of a moving box.
  template <class... At>
  __device__ __forceinline__ void load(const scalar_t* from, int channels, char* to, const At&... at) const {
    from += box.begin(tensor, at...);
    if constexpr (CHANNELS_LAST) {
      if (VECTOR > 1 && stage_box.piece > 1)
        load_channels<VECTOR>(from, channels, to, at...);
      else
        load_channels<1>(from, channels, to, at...);
    } else {
      switch (stage_box.piece * ELEMENT) {
        case 16:
          return load_pieces<16>(from, channels, to, at...);
        case 8:
          return load_pieces<8>(from, channels, to, at...);
        case 4:
          return load_pieces<4>(from, channels, to, at...);
        default:
          return load_pieces<ELEMENT>(from, channels, to, at...);
      }
    }
  }

 private:
  // Threads copy along a row, one channel after the other; if rows are short, several channels at once.
  template <int BYTES, class... At>
  __device__ __forceinline__ void load_pieces(const scalar_t* from, int channels, char* to, const At&... at) const {
    if (box.pieces > 1 << (SPAN - 1))
      load_rows<BYTES>(SPAN, from, channels, to, at...);
    else
      load_rows<BYTES>(32 - __clz(box.pieces - 1), from, channels, to, at...);
  }

  // With 1 << `span` lanes along a row.
  template <int BYTES, class... At>
  __device__ __forceinline__ void load_rows(int span, const scalar_t* from, int channels, char* to,
                                            const At&... at) const {
    const int lanes = 1 << span, first = loader() >> span, at_once = LOADERS >> span;  // channels
    const bool whole = (CHANNELS & (at_once - 1)) == 0;
    from += first * tensor.stride[1];
    to += first * stage_box.pitch;
    for (int i = loader() & (lanes - 1); i < box.pieces; i += lanes) {
      long long offset;
      const bool inside = box.find(tensor, i, offset, at...);
      const scalar_t* source = from + offset;
      char* slot = to + i * BYTES;
      if constexpr (BYTES >= 4) {
#pragma unroll 4
        for (int channel = 0; channel < CHANNELS; channel += at_once) {
          if (whole || first + channel < CHANNELS)
            cp_async<BYTES>(shared_address(slot), source, inside && first + channel < channels);
          source += at_once * tensor.stride[1];
          slot += at_once * stage_box.pitch;
        }
      } else {  // too small for cp.async: several loads are issued before the first store
        constexpr int MOVED = CHANNELS < 8 ? CHANNELS : 8;
#pragma unroll 1
        for (int channel = first; channel < CHANNELS; channel += MOVED * at_once) {
          scalar_t elements[MOVED];
#pragma unroll
          for (int j = 0; j < MOVED; ++j, source += at_once * tensor.stride[1])
            elements[j] = inside && channel + j * at_once < min(CHANNELS, channels) ? read(source) : zero<scalar_t>();
#pragma unroll
          for (int j = 0; j < MOVED; ++j, slot += at_once * stage_box.pitch)
            if (channel + j * at_once < CHANNELS) *(scalar_t*)slot = elements[j];
        }
      }
    }
  }

  // Lanes copy neighbouring channels.
  template <int WIDTH, class... At>
  __device__ __forceinline__ void load_channels(const scalar_t* from, int channels, char* to, const At&... at) const {
    constexpr int VECTORS = CHANNELS / WIDTH, MOVED = WIDTH == 1 ? 4 : 2;
    const int count = box.pieces * VECTORS;
#pragma unroll 1
    for (int begin = loader(); begin < count; begin += MOVED * LOADERS) {
      Vector<scalar_t, WIDTH> vectors[MOVED] = {};  // all loads are issued before the first store
#pragma unroll
      for (int k = 0; k < MOVED; ++k) {
        const int i = begin + k * LOADERS, channel = i % VECTORS * WIDTH;
        long long offset;
        if (i < count && box.find(tensor, i / VECTORS, offset, at...) && channel < channels)
          vectors[k] = *(const Vector<scalar_t, WIDTH>*)(from + offset + channel);
      }
#pragma unroll
      for (int k = 0; k < MOVED; ++k) {
        const int i = begin + k * LOADERS;
        if (i >= count) break;
        char* const slot = to + i % VECTORS * WIDTH * stage_box.pitch + i / VECTORS * ELEMENT;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) *(scalar_t*)(slot + j * stage_box.pitch) = vectors[k].value[j];
      }
    }
  }
};
