// From the source tensor to tensor-core operands: a stage of a work tile's pixels, loaded by one group of threads, or
// by TMA if the tensor's strides allow boxes. A prologue is computed when pixels are transposed (channels first); the
// planner gives none to kernels that read operands in place.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "core/swizzle.cuh"
#include "core/tile_scheduler.cuh"
#include "core/types.cuh"
#include "ptx/arch.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tma.cuh"
#include "operand/input_value.cuh"
#include "operand/tf32.cuh"
#include "mainloop/gemm_tile.cuh"
#include "operand/bands.cuh"
#if SCALED
#include "operand/half_copies.cuh"
#include "operand/measured_bands.cuh"
#endif

#if COPIED
typedef operand_t boxed_t;  // elements of boxes
#else
typedef scalar_t boxed_t;
#endif

#if BOX_COPY
// TMA boxes of a work tile's pixels: with TMA_OPERANDS in the order that tensor cores read, else transposed afterwards.
// With channels last a box is pixel by pixel, else channel by channel.
struct BoxLoader {
  const Params& params;
  const boxed_t* src;
  int channel, w, h, d, n;  // origin of the work tile's first box

  __device__ __forceinline__ BoxLoader(const Params& params, const boxed_t* src) : params(params), src(src) {}

  __device__ __forceinline__ void locate(int index) {
    WorkTile work;
    work.locate(params, index, 0);
    const bool one_row = params.run != 0;  // all pixels of an image (channels last: of the tensor) are one row
    channel = work.group * SRC_CHANNELS;
    w = one_row ? work.first + (SRC_CHANNELS_LAST ? work.n * params.pitch[0] : 0)
                : work.w + first_offset(AXIS_W) - params.skew;
    h = one_row ? 0 : work.h + first_offset(AXIS_H);
    d = one_row ? 0 : work.d + first_offset(AXIS_D);
    n = one_row && SRC_CHANNELS_LAST ? 0 : work.n;
  }
  // Loads stage `stage` of the work tile; `barrier` waits for its bytes.
  __device__ __forceinline__ void load(int stage, unsigned char* to, unsigned barrier) const {
    const int bytes = params.box_pixels * STAGE_CHANNELS * (int)sizeof(boxed_t),
              from = channel + stage * STAGE_CHANNELS;
#pragma unroll 1
    for (int i = 0; i < params.boxes; ++i) {
      // One box, or one row of boxes; MN_MAJOR operands of whole images have a box for each image.
      const bool images = MN_MAJOR && WHOLE_IMAGES;
      const int column = images ? w : w + i * params.box_pixels;
      if (SRC_CHANNELS_LAST)
        tma_load_box(shared_address(to + i * bytes), params.box, src, {from, column, h, d, n}, bytes, barrier);
      else
        tma_load_box(shared_address(to + i * bytes), params.box, src, {column, h, d, images ? n + i : n, from}, bytes,
                     barrier);
    }
  }
};
#endif

#if COPIED
// Gathers a stage of a work tile from a float32 source of any strides, for TMA_OPERANDS, if the copy that TMA loads is
// inexact. Slow, and seldom needed.
__device__ __forceinline__ void gather_pixels(const Params& params, const scalar_t* src, const WorkTile& work,
                                              const PixelBand& band, int stage, unsigned char* to, int thread) {
  const int channel = stage * STAGE_CHANNELS;
  src += work.group * SRC_CHANNELS * params.src.stride[1];
  for (int i = thread; i < params.run_pixels * STAGE_CHUNKS; i += LOADERS) {
    const int chunk = i / params.run_pixels, pixel = i - chunk * params.run_pixels;
    const int first = channel + chunk * CHUNK;
    Pixel p;
    p.locate(params, params.run ? work.first + pixel : pixel);
    const int n = work.n + p.n;
    const int d = params.run ? p.d : work.d + p.d + first_offset(AXIS_D);
    const int h = params.run ? p.h : work.h + p.h + first_offset(AXIS_H);
    const int w = params.run ? p.w : work.w + p.w + first_offset(AXIS_W) - params.skew;
    const bool inside = p.n < params.images && n < params.batch && (unsigned)d < (unsigned)params.src.size[0] &&
                        (unsigned)h < (unsigned)params.src.size[1] && (unsigned)w < (unsigned)params.src.size[2];
    const int place[4] = {n, d, h, w};
    const scalar_t* const from = src + (inside ? offset_of(params.src, place) : 0) + first * params.src.stride[1];
    Vector<operand_t, CHUNK> values;
#pragma unroll
    for (int k = 0; k < CHUNK; ++k) {
      const bool exists = inside && first + k < SRC_CHANNELS;
      narrow(exists ? band.of(read(from + k * params.src.stride[1])) : 0.f, values.value[k]);
    }
    const unsigned begin = shared_address(to);
    *(Vector<operand_t, CHUNK>*)(to + (swizzled(begin + pixel * PIXEL_PITCH + chunk * 16, PIXEL_PITCH) - begin)) =
        values;
  }
}
#endif

// Transposing copied pixels into the order that tensor cores read: a warp takes TRANSPOSED_PIXELS pixels of a chunk.
constexpr int TRANSPOSED_PIXELS = 128 / (int)sizeof(scalar_t);

// The upper or the lower halves of two words, the first one's below.
__device__ __forceinline__ unsigned join_halves(unsigned first, unsigned second, bool upper) {
  return __byte_perm(first, second, upper ? 0x7632 : 0x5410);
}

__device__ __forceinline__ void store_rounded(const Params& params, unsigned char* to,
                                              const Vector<float, 4>& channels) {
  Vector<float, 4> high, low;
#pragma unroll
  for (int k = 0; k < 4; ++k) split_tf32(channels.value[k], high.value[k], low.value[k]);
  *(Vector<float, 4>*)to = high;
  if (PARTS == 2) *(Vector<float, 4>*)(to + STAGE_CHUNKS * params.chunk_bytes) = low;
}

// The band of magnitudes and the prologue by which the pixels of a stage become operands.
struct StageInput {
  PixelBand band;
  InputChannels channels;
};

// Transposes the first `wanted` pixels, of which the first `filled` were copied; the others are zero. WHOLE: all were
// copied. `of_chunk`: the chunk's channels.
template <bool WHOLE>
__device__ __forceinline__ void transpose_pixels(const Params& params, unsigned char* to, const scalar_t* from,
                                                 int filled, int wanted, const PixelBand& band,
                                                 const InputChannels& of_chunk) {
  const int lane = threadIdx.x % 32;
#if SCALED
  Vector<unsigned, 4> channels[PARTS];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      pair[j] = band.of(of_chunk.value(
          WHOLE || lane < filled ? ((const float*)from)[(2 * k + j) * params.raw_pitch + lane] : 0.f, 2 * k + j));
    split_halves(pair[0], pair[1], channels, k);
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    ((Vector<unsigned, 4>*)(to + part * (STAGE_CHUNKS * params.chunk_bytes)))[lane] = channels[part];
#else
  if constexpr (sizeof(scalar_t) == 4) {
    Vector<float, 4> channels;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      channels.value[k] =
          of_chunk.value(WHOLE || lane < filled ? ((const float*)from)[k * params.raw_pitch + lane] : 0.f, k);
    if (WHOLE && PARTS == 1 && !PROLOGUE)
      ((Vector<float, 4>*)to)[lane] = channels;
    else
      store_rounded(params, to + lane * 16, channels);
  } else {
    // Each lane has two neighbouring pixels; every other four lanes store the second first, to avoid bank conflicts.
    const bool second = lane & 4, exists = WHOLE || 2 * lane < filled;
    Vector<unsigned, 4> pixels[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        pair[j] =
            of_chunk.pair(exists ? ((const unsigned*)(from + (2 * k + j) * params.raw_pitch))[lane] : 0u, 2 * k + j);
      pixels[0].value[k] = join_halves(pair[0], pair[1], second);
      pixels[1].value[k] = join_halves(pair[0], pair[1], !second);
    }
    if (!WHOLE && 2 * lane >= wanted) return;
    ((Vector<unsigned, 4>*)to)[2 * lane + second] = pixels[0];
    ((Vector<unsigned, 4>*)to)[2 * lane + !second] = pixels[1];
  }
#endif
}

// Rounds float32 in channels last in place.
__device__ __forceinline__ void round_pixels(const Params& params, unsigned char* pixels) {
  unsigned char* const mine = pixels + threadIdx.x % 32 * 16;
  store_rounded(params, mine, *(const Vector<float, 4>*)mine);
}

// Transposes a stage of boxes, split among WARPS; pixels that no box fills become zero.
template <int WARPS>
__device__ __forceinline__ void transpose_boxes(const Params& params, const unsigned char* copied, unsigned char* to,
                                                int warp, const StageInput& input) {
  const scalar_t* box = (const scalar_t*)copied;
  const int whole = params.box_pixels / TRANSPOSED_PIXELS * STAGE_CHUNKS;
  int i = warp, before = 0;  // before: pixels of earlier boxes
  for (int j = 0; j < params.boxes; ++j) {
#pragma unroll 2
    for (i = warp; i < whole; i += WARPS) {
      const int chunk = i % STAGE_CHUNKS, pixel = i / STAGE_CHUNKS * TRANSPOSED_PIXELS;
      transpose_pixels<true>(params, to + chunk * params.chunk_bytes + (before + pixel) * 16,
                             box + chunk * CHUNK * params.raw_pitch + pixel, 0, 0, input.band,
                             input.channels + chunk * CHUNK);
    }
    if (j + 1 < params.boxes) box += STAGE_CHANNELS * params.box_pixels, before += params.box_pixels;
  }
  const int wanted = params.run_pixels - before;
  for (; i < ceil_div(wanted, TRANSPOSED_PIXELS) * STAGE_CHUNKS; i += WARPS) {
    const int chunk = i % STAGE_CHUNKS, pixel = i / STAGE_CHUNKS * TRANSPOSED_PIXELS;
    transpose_pixels<false>(params, to + chunk * params.chunk_bytes + (before + pixel) * 16,
                            box + chunk * CHUNK * params.raw_pitch + pixel, params.box_pixels - pixel, wanted - pixel,
                            input.band, input.channels + chunk * CHUNK);
  }
}

// An element of the source: a constant unless a step before the kernel writes it.
template <class T>
__device__ __forceinline__ T read_source(const T* address) {
#if SRC_WRITTEN
  return *address;
#else
  return read(address);
#endif
}

struct Loader {
  const Params& params;
  const unsigned* pixel_table;  // position of each copied run of pixels, or NOWHERE
  offset_t* offsets;            // its offset in the source from the tile's batch entry and channel, in elements
  int thread;

  __device__ __forceinline__ void find_pixels(const WorkTile& work) const {
    const int copied = SRC_CHANNELS_LAST ? 1 : copy_bytes(params) / (int)sizeof(scalar_t);
    for (int i = thread; i * copied < params.run_pixels; i += LOADERS) {
      const unsigned position = params.run ? 0 : pixel_table[i];
      Pixel p;
      if (params.run)
        p.locate(params, work.first + i * copied);
      else
        p.unpack(position);
      const int d = params.run ? p.d : work.d + p.d + first_offset(AXIS_D);
      const int h = params.run ? p.h : work.h + p.h + first_offset(AXIS_H);
      const int w = params.run ? p.w : work.w + p.w + first_offset(AXIS_W) - params.skew;
      const bool inside = position != NOWHERE && p.n < params.images && work.n + p.n < params.batch &&
                          (unsigned)d < (unsigned)params.src.size[0] && (unsigned)h < (unsigned)params.src.size[1] &&
                          (unsigned)w < (unsigned)params.src.size[2];
      offsets[i] = inside ? offset_of(params.src, p.n, d, h, w) : PADDING;
    }
  }

  // Channels first: copies COUNT neighbouring pixels of every channel of the stage. Lanes take pixels, warps channels.
  template <int BYTES>
  __device__ __forceinline__ void copy_rows(const scalar_t* base, int channel, scalar_t* raw) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t), WARPS = LOADERS / 32;
    const int warp = thread / 32;
    const scalar_t* const first = base + warp * params.src.stride[1];
    raw += warp * params.raw_pitch;
    for (int v = thread % 32; v * COUNT < params.run_pixels; v += 32) {
      const offset_t offset = offsets[v];
      const scalar_t* from = first + (offset == PADDING ? 0 : offset);
      unsigned char* to = (unsigned char*)(raw + v * COUNT);
#pragma unroll 4
      for (int i = 0; i < STAGE_CHANNELS / WARPS; ++i) {
        const bool exists =
            offset != PADDING && (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel + warp + i * WARPS < SRC_CHANNELS);
        cp_async<BYTES>(shared_address(to), exists ? from : base, exists);
        from += WARPS * params.src.stride[1];
        to += WARPS * params.raw_pitch * (int)sizeof(scalar_t);
      }
    }
  }

  // Channels last: copies the chunks of every pixel, whole or (float32) piece by piece.
  template <int BYTES>
  __device__ __forceinline__ void copy_pixels(const scalar_t* base, int channel, unsigned char* to) const {
    constexpr int COUNT = BYTES / (int)sizeof(scalar_t);
    const int chunk = thread % STAGE_CHUNKS;
    const scalar_t* const from = base + chunk * CHUNK;
    to += chunk * params.chunk_bytes;
#pragma unroll 4
    for (int pixel = thread / STAGE_CHUNKS; pixel < params.run_pixels; pixel += LOADERS / STAGE_CHUNKS) {
      const offset_t offset = offsets[pixel];
#pragma unroll
      for (int i = 0; i < CHUNK; i += COUNT) {
        const bool exists = offset != PADDING && channel + chunk * CHUNK + i < SRC_CHANNELS;
        cp_async<BYTES>(shared_address(to + pixel * 16 + i * (int)sizeof(scalar_t)), exists ? from + offset + i : base,
                        exists);
      }
    }
  }

  // Single elements of two bytes are too small for cp.async and go through registers. MOVED loads are issued before the
  // first store.
  static constexpr int MOVED = 16;

  __device__ __forceinline__ void move_rows(const scalar_t* base, int channel, scalar_t* raw) const {
    constexpr int WARPS = LOADERS / 32, ROWS = STAGE_CHANNELS / WARPS, RUNS = ceil_div(MOVED, ROWS);
    const int warp = thread / 32;
    base += warp * params.src.stride[1], raw += warp * params.raw_pitch, channel += warp;
    for (int first = thread % 32; first < params.run_pixels; first += 32 * RUNS) {
      scalar_t elements[RUNS][ROWS];
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        const offset_t offset = first + run * 32 < params.run_pixels ? offsets[first + run * 32] : PADDING;
        const scalar_t* from = base + (offset == PADDING ? 0 : offset);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const bool exists =
              offset != PADDING && (SRC_CHANNELS % STAGE_CHANNELS == 0 || channel + i * WARPS < SRC_CHANNELS);
          elements[run][i] = exists ? read_source(from) : zero<scalar_t>();
          from += WARPS * params.src.stride[1];
        }
      }
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
          if (first + run * 32 < params.run_pixels)
            raw[i * WARPS * params.raw_pitch + first + run * 32] = elements[run][i];
    }
  }

  // The same with channels last, a chunk at a time, which fits the registers.
  __device__ __forceinline__ void move_pixels(const scalar_t* base, int channel, unsigned char* to) const {
    const int chunk = thread % STAGE_CHUNKS;
    base += chunk * CHUNK, channel += chunk * CHUNK;
    to += chunk * params.chunk_bytes;
    for (int pixel = thread / STAGE_CHUNKS; pixel < params.run_pixels; pixel += LOADERS / STAGE_CHUNKS) {
      const offset_t offset = offsets[pixel];
      const scalar_t* const from = base + (offset == PADDING ? 0 : offset);
      Vector<scalar_t, CHUNK> elements;
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        const bool exists = offset != PADDING && channel + i < SRC_CHANNELS;
        elements.value[i] = exists ? read_source(from + i) : zero<scalar_t>();
      }
      *(Vector<scalar_t, CHUNK>*)(to + pixel * 16) = elements;
    }
  }

  template <int BYTES>
  __device__ __forceinline__ void copy_stage(const scalar_t* base, int channel, unsigned char* to) const {
    if constexpr (SRC_CHANNELS_LAST && BYTES >= 4)
      copy_pixels<BYTES>(base, channel, to);
    else if constexpr (SRC_CHANNELS_LAST)
      move_pixels(base, channel, to);
    else if constexpr (BYTES >= 4)
      copy_rows<BYTES>(base, channel, (scalar_t*)to);
    else
      move_rows(base, channel, (scalar_t*)to);
  }

  // Loads a stage of the tile that `find_pixels` was called for; `base`: its first channel's first element.
  __device__ __forceinline__ void load(const scalar_t* base, int stage, unsigned char* to) const {
    const int channel = stage * STAGE_CHANNELS;
    base += channel * params.src.stride[1];
    if (copy_bytes(params) == 16)
      copy_stage<16>(base, channel, to);
    else if (!SRC_CHANNELS_LAST && copy_bytes(params) == 8)
      copy_stage<8>(base, channel, to);
    else if (!SRC_CHANNELS_LAST && sizeof(scalar_t) == 2 && copy_bytes(params) == 4)
      copy_stage<4>(base, channel, to);
    else
      copy_stage<sizeof(scalar_t)>(base, channel, to);
  }

  // Converts a copied stage to operands.
  __device__ __forceinline__ void convert(const unsigned char* copied, unsigned char* to,
                                          const StageInput& input) const {
    if constexpr (!IN_PLACE || sizeof(scalar_t) == 4) {
#pragma unroll(sizeof(scalar_t) == 4 ? CHUNKS_AT_ONCE : 1)
      for (int i = thread / 32; i < ceil_div(params.run_pixels, TRANSPOSED_PIXELS) * STAGE_CHUNKS; i += LOADERS / 32) {
        const int chunk = i % STAGE_CHUNKS, pixel = i / STAGE_CHUNKS * TRANSPOSED_PIXELS;
        unsigned char* const target = to + chunk * params.chunk_bytes + pixel * 16;
        const scalar_t* const row = (const scalar_t*)copied + chunk * CHUNK * params.raw_pitch + pixel;
        if constexpr (IN_PLACE)
          round_pixels(params, target);
        else
          transpose_pixels<false>(params, target, row, params.run_pixels - pixel, params.run_pixels - pixel, input.band,
                                  input.channels + chunk * CHUNK);
      }
    }
  }
};
