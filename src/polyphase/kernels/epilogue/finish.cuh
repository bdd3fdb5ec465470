// What happens to a sum before it is an output: one place for every kernel of the forward pass.
//
//   y = narrow(finish(sum, terms, to))        finish(sum, terms, to) = operations(sum + terms.bias)
//
// A sum stays accum_t until here, and is narrowed once, last. The operations are data (problem/epilogue.py) from which
// epilogue/operations.cuh is generated for each kernel; without operations a sum only gets its bias. Operands of an
// output channel are in `ChannelTerms`. Operands of a single output (a residual, values per sample) are read at `to`,
// its place in the destination; `to` is null for an output that is not stored, and then nothing is read.
//
// With EPILOGUE_NORMALIZES an operation normalises over the channels of a pixel. A kernel that holds all channels first
// takes `normalized_value` of each sum, computes a `Normal` from them (epilogue/normal.cuh), and passes it to `finish`.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

#if EPILOGUE
#include "epilogue/activations.cuh"
#include "epilogue/read_if.cuh"
#include "ptx/memory.cuh"
#endif

#include "epilogue/operations.cuh"

// Mean of a pixel's outputs and one over their standard deviation; for a softmax their maximum and one over the sum of
// exponentials.
struct Normal {
  accum_t center, factor;
};

#if EPILOGUE

// Addresses of the epilogue's operands, from a channel on. A kernel makes them from its parameters, then adds channels.
struct EpilogueOperands {
  const scalar_t* bias;
  int channel;
  const scalar_t* dst;      // the whole destination
  long long sample_stride;  // of it
  OperationOperands operations;

  __device__ __forceinline__ EpilogueOperands operator+(int channels) const {
    return {bias + (HAS_BIAS ? channels : 0), channel + channels, dst, sample_stride, operations};
  }
  __device__ __forceinline__ void operator+=(int channels) { *this = *this + channels; }
};

// The operands of a channel, which a kernel keeps in registers.
struct ChannelTerms {
  accum_t bias;
  OperationTerms operations;
  int channel;
  const scalar_t* dst;
  long long sample_stride;
};

// The terms of channel `channel`, relative to the operands' first. Nothing is read for a channel that does not exist.
__device__ __forceinline__ ChannelTerms channel_terms(const EpilogueOperands& of, int channel, bool exists = true) {
  const int all = EPILOGUE_CHANNEL(of.channel + channel);
  return {HAS_BIAS && exists ? widen(read(of.bias + channel)) : (accum_t)0, operation_terms(of.operations, all, exists),
          all, of.dst, of.sample_stride};
}

// Address of the first residual of the output at `to`.
__device__ __forceinline__ const scalar_t* residual_at(const ChannelTerms& terms, const scalar_t* to) {
  return first_residual(terms.operations) + (to - terms.dst);
}

// The sample of the output at `place`: a quotient, estimated twice in float32 and then exact. (A division of 64 bits
// takes longer than all else that happens to an output, and loops would be unrolled for each.)
__device__ __forceinline__ int sample_of(long long place, long long sample_stride) {
  const float per_element = 1.f / (float)sample_stride;
  int sample = (int)((float)place * per_element);
  sample += (int)floorf((float)(place - sample * sample_stride) * per_element);
  const long long rest = place - sample * sample_stride;
  return sample + (rest >= sample_stride) - (rest < 0);
}

// Applies the operations to a sum that has its bias. `residual`: its first residual, if it was loaded before.
__device__ __forceinline__ accum_t operate(accum_t value, const ChannelTerms& terms, const scalar_t* to,
                                           const Normal& normal = {}, const accum_t* residual = nullptr) {
  const long long place = EPILOGUE_READS_PLACES && to ? to - terms.dst : 0;
  const long long sample = EPILOGUE_PER_SAMPLE && to ? sample_of(place, terms.sample_stride) : 0;
  return operations(value, terms.operations, terms.channel, sample, place, to != nullptr, residual, normal.center,
                    normal.factor);
}

// Prefetches the operands of the output at `to` to L2; nothing if it is null.
__device__ __forceinline__ void prefetch(const ChannelTerms& terms, const scalar_t* to) {
  if (to) prefetch_residuals(terms.operations, to - terms.dst);
}

#else

typedef const scalar_t* EpilogueOperands;

struct ChannelTerms {
  accum_t bias;
};

template <class Index>
__device__ __forceinline__ ChannelTerms channel_terms(const scalar_t* bias, Index channel, bool exists = true) {
  return {HAS_BIAS && exists ? widen(read(bias + channel)) : (accum_t)0};
}

__device__ __forceinline__ accum_t operate(accum_t value, const ChannelTerms&, const scalar_t*, const Normal& = {},
                                           const accum_t* = nullptr) {
  return value;
}
__device__ __forceinline__ const scalar_t* residual_at(const ChannelTerms&, const scalar_t*) { return nullptr; }
__device__ __forceinline__ void prefetch(const ChannelTerms&, const scalar_t*) {}

#endif

// Adds the bias alone: to a partial sum, or to a sum that is tested before it is finished.
__device__ __forceinline__ accum_t add_bias(accum_t sum, const ChannelTerms& terms) {
  return HAS_BIAS ? sum + terms.bias : sum;
}
__device__ __forceinline__ accum_t finish(accum_t sum, const ChannelTerms& terms, const scalar_t* to,
                                          const Normal& normal = {}, const accum_t* residual = nullptr) {
  return operate(add_bias(sum, terms), terms, to, normal, residual);
}
// The same for scaled operands (float32 only): multiplies by `scale` first.
__device__ __forceinline__ accum_t finish(accum_t sum, float scale, const ChannelTerms& terms, const scalar_t* to) {
  return operate(HAS_BIAS ? fmaf((float)sum, scale, (float)terms.bias) : sum * scale, terms, to);
}

#if EPILOGUE_NORMALIZES
// The value that is normalised over channels.
__device__ __forceinline__ accum_t normalized_value(accum_t sum, const ChannelTerms& terms, const scalar_t* to) {
  const long long place = EPILOGUE_READS_PLACES && to ? to - terms.dst : 0;
  const long long sample = EPILOGUE_PER_SAMPLE && to ? sample_of(place, terms.sample_stride) : 0;
  return normalized_value(add_bias(sum, terms), terms.operations, terms.channel, sample, place, to != nullptr, nullptr);
}
#endif

// The place of an output; null if it is not stored, or if no operation reads it.
__device__ __forceinline__ const scalar_t* place_if(bool stored, const scalar_t* place) {
  return EPILOGUE_READS_PLACES && stored ? place : nullptr;
}

// An output that no tap reaches.
__device__ __forceinline__ accum_t finish_empty(const ChannelTerms& terms, const scalar_t* to) {
  return finish((accum_t)0, terms, to);
}
