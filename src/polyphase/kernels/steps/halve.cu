// A checked copy in float16 (operand/half_copies.cuh) of a float32 tensor whose channels are innermost, without gaps
// and with the channels of each group padded with zeros.
//
// Pixels are in classes: of one class are those that are `apart` pixels from each other along d, h and w, in all
// images. A thread copies a piece, eight channels, of `run` pixels of a class that follow each other; the last of a
// class copies what is left, up to twice as many. Neighbouring threads have neighbouring pieces of a pixel, then
// neighbouring pixels, which are of different classes.
//
// Units of the check are, with BY_CHANNELS, a thread's pixels of a channel: `apart` is a multiple of the layer's
// stride, so that one sum has them all. Else they are `unit` neighbouring pieces of a pixel; MEASURES tells their
// magnitudes.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/types.cuh"
#include "operand/checked_copy.cuh"
#include "ptx/griddepcontrol.cuh"

struct Params {
  long long stride[4];  // the source's, in elements: images, slabs, rows, columns
  int batch, sizes[3];  // images; their sizes along d, h, w
  Divisor apart[3];
  Divisor pieces, padded;  // of a pixel of the copy: pieces; channels of a group, and those that exist
  int group;
  int run, unit;
  int which, aligned;  // which of two tensors; whether pieces of the source are aligned in it
};

constexpr int AT_ONCE = 4;  // pieces that a thread reads before it writes one

// A pixel of a class, and the next one of the class.
struct Pixel {
  int first[3], at[3], image;

  __device__ __forceinline__ void next(const Params& params) {
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      at[i] += params.apart[i].value;
      if (at[i] < params.sizes[i]) return;
      at[i] = first[i];
    }
    ++image;
  }
  __device__ __forceinline__ long long source(const Params& params) const {
    return image * params.stride[0] + at[0] * params.stride[1] + at[1] * params.stride[2] + at[2] * params.stride[3];
  }
  __device__ __forceinline__ int copy(const Params& params) const {
    return ((image * params.sizes[0] + at[0]) * params.sizes[1] + at[1]) * params.sizes[2] + at[2];
  }
};

// Eight channels, of which `exist`.
__device__ __forceinline__ EightFloats read_piece(const float* from, int exist, bool aligned) {
  EightFloats values;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 2; ++i) ((Vector<float, 4>*)&values)[i] = ((const Vector<float, 4>*)from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) values.value[i] = i < exist ? from[i] : 0;
  }
  return values;
}

// Of the unit of a pixel: bits of its largest finite magnitude, if that is not zero.
__device__ __forceinline__ Measured measured_in(const EightFloats& values, int unit) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned bits = __float_as_uint(values.value[i]) & 0x7fffffffu;
    if (bits < 0x7f800000u) largest = max(largest, bits);
  }
  for (int by = 1; by < unit; by *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, by));
  return largest > 0 ? Measured{largest, largest} : Measured{};
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    halve(const float* __restrict__ src, HalfCopies* __restrict__ copies, float16* __restrict__ dst,
          const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  const int thread = blockIdx.x * THREADS + threadIdx.x, of_class = thread / params.pieces;
  const int channel = (thread - of_class * params.pieces.value) * 8;
  const int width = of_class / params.apart[2], height = width / params.apart[1], index = height / params.apart[0];
  Pixel pixel{{height % params.apart[0], width % params.apart[1], of_class % params.apart[2]}};
  int sizes[3], pixels = params.batch;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    sizes[i] = (params.sizes[i] - pixel.first[i] + params.apart[i].value - 1) / params.apart[i];
    pixels *= sizes[i];
  }
  const int runs = max(1, pixels / params.run), first = index * params.run;
  const int count = index >= runs ? 0 : index + 1 < runs ? params.run : pixels - first;
  int at = first;
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const int outer = at / max(1, sizes[i]);
    pixel.at[i] = pixel.first[i] + (at - outer * sizes[i]) * params.apart[i].value;
    at = outer;
  }
  pixel.image = at;

  const int group = channel / params.padded, in_group = channel - group * params.padded.value;
  const int exist = params.group - in_group;
  const bool aligned = params.aligned && (unsigned long long)src % 16 == 0;
  src += group * params.group + in_group, dst += channel;
  const int channels = params.pieces.value * 8;
  int most = count;
  if (!BY_CHANNELS)
#pragma unroll
    for (int by = 1; by < 32; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
  // Lanes of the unit of a pixel.
  const int lane = threadIdx.x % 32;
  const unsigned unit = (~0u >> 32 - params.unit) << (lane & ~(params.unit - 1));

  float scale = 0;
  bool inexact = false;
  unsigned of_channels = 0;
  Measured measured;
  int done = 0;
#pragma unroll 1
  do {
    EightFloats values[AT_ONCE];
    float16* to[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool exists = done + i < count;
      values[i] = exists ? read_piece(src + pixel.source(params), exist, aligned) : EightFloats{};
      to[i] = exists ? dst + (long long)pixel.copy(params) * channels : nullptr;
      pixel.next(params);
    }
    if (done == 0) {
      griddepcontrol_wait();  // for the samples; the tensor is read before
      scale = find_scale(*copies, params.which, MEASURES);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const EightHalves halves = halves_of(values[i], scale);
      const unsigned found = found_in(values[i], halves, inexact);
      if constexpr (BY_CHANNELS) {
        of_channels |= found;
      } else {
        const unsigned large = __ballot_sync(~0u, large_in(found) != 0);
        const unsigned nonzero = __ballot_sync(~0u, nonzero_in(found) != 0);
        inexact |= (nonzero & unit) != 0 && (large & unit) == 0;
        if constexpr (MEASURES) measured.take(measured_in(values[i], params.unit));
      }
      if (to[i] != nullptr) *(EightHalves*)to[i] = halves;
    }
    done += AT_ONCE;
  } while (done < most);
  inexact |= BY_CHANNELS && lacks(of_channels);
  if constexpr (MEASURES) add_measured(measured, copies->measured);
  if (inexact) copies->inexact = 1;
  if (thread == 0) copies->scale[params.which] = scale;
}
