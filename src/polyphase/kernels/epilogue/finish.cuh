// What happens to a sum before it is an output: one place for every kernel of the forward pass.
//
//   y = narrow(finish(sum, terms, to))        finish(sum, terms, to) = operations(sum + terms.bias)
//
// A sum stays accum_t until here, and is narrowed once, last. The operations are data (problem/epilogue.py), of which
// epilogue/operations.cuh is made for each kernel; without any a sum gets its bias alone. What they need of an output
// channel is in `ChannelTerms`; what they need of an output itself (a residual, what differs between samples) they read
// at `to`, its place in the destination, or nothing where that is null: an output that is not stored.
//
// With EPILOGUE_NORMALIZES an operation normalises over the channels of a pixel. A kernel that can have all of these
// has `normalized_value` of each sum first, makes `Normal` of them (epilogue/normal.cuh), and gives that to `finish`.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

#if EPILOGUE
#include "epilogue/activations.cuh"
#include "ptx/memory.cuh"
#endif

#include "epilogue/operations.cuh"

// What the outputs of a pixel are normalised by: their mean, and one over their standard deviation; for a softmax the
// largest of them, and one over the sum of exponentials.
struct Normal {
  accum_t center, factor;
};

#if EPILOGUE

// Addresses of what the epilogue reads, from a channel on: a kernel makes them of its parameters, and adds channels.
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

// What the outputs of a channel have in common, as a kernel keeps it in registers.
struct ChannelTerms {
  accum_t bias;
  OperationTerms operations;
  int channel;
  const scalar_t* dst;
  long long sample_stride;
};

// The terms of channel `channel`, counted from the operands' first. Nothing is read of a channel that does not exist.
__device__ __forceinline__ ChannelTerms channel_terms(const EpilogueOperands& of, int channel, bool exists = true) {
  const int all = EPILOGUE_CHANNEL(of.channel + channel);
  return {HAS_BIAS && exists ? widen(read(of.bias + channel)) : (accum_t)0, operation_terms(of.operations, all, exists),
          all, of.dst, of.sample_stride};
}

// The bias alone: of a partial sum, or of a sum that is looked at before it is finished.
__device__ __forceinline__ accum_t add_bias(accum_t sum, const ChannelTerms& terms) {
  return HAS_BIAS ? sum + terms.bias : sum;
}
__device__ __forceinline__ accum_t add_bias(accum_t sum, float scale, const ChannelTerms& terms) {
  return HAS_BIAS ? fmaf((float)sum, scale, (float)terms.bias) : sum * scale;
}

// Where the first residual of the output at `to` lies.
__device__ __forceinline__ const scalar_t* residual_at(const ChannelTerms& terms, const scalar_t* to) {
  return first_residual(terms.operations) + (to - terms.dst);
}

// The operations alone, of a sum with its bias; its first residual is `residual`, where that is known.
__device__ __forceinline__ accum_t operate(accum_t value, const ChannelTerms& terms, const scalar_t* to,
                                           const Normal& normal = {}, const accum_t* residual = nullptr) {
  const long long place = EPILOGUE_READS_PLACES && to ? to - terms.dst : 0;
  const long long sample = EPILOGUE_PER_SAMPLE && to ? place / terms.sample_stride : 0;
  return operations(value, terms.operations, terms.channel, sample, place, to != nullptr, residual, normal.center,
                    normal.factor);
}

__device__ __forceinline__ accum_t finish(accum_t sum, const ChannelTerms& terms, const scalar_t* to,
                                          const Normal& normal = {}, const accum_t* residual = nullptr) {
  return operate(add_bias(sum, terms), terms, to, normal, residual);
}

#if EPILOGUE_NORMALIZES
// What is normalised over channels.
__device__ __forceinline__ accum_t normalized_value(accum_t sum, const ChannelTerms& terms, const scalar_t* to) {
  const long long place = EPILOGUE_READS_PLACES && to ? to - terms.dst : 0;
  const long long sample = EPILOGUE_PER_SAMPLE && to ? place / terms.sample_stride : 0;
  return normalized_value(add_bias(sum, terms), terms.operations, terms.channel, sample, place, to != nullptr, nullptr);
}
#endif

// Has what is read for the output at `to` come to L2, if there is one.
__device__ __forceinline__ void prefetch(const ChannelTerms& terms, const scalar_t* to) {
  if (to) prefetch_residuals(terms.operations, to - terms.dst);
}

// The same where operands were scaled, which only float32's are: `scale` undoes it.
__device__ __forceinline__ accum_t finish(accum_t sum, float scale, const ChannelTerms& terms, const scalar_t* to) {
  return operate(add_bias(sum, scale, terms), terms, to);
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

__device__ __forceinline__ accum_t add_bias(accum_t sum, ChannelTerms terms) {
  return HAS_BIAS ? sum + terms.bias : sum;
}
__device__ __forceinline__ accum_t operate(accum_t value, ChannelTerms, const scalar_t*) { return value; }
__device__ __forceinline__ const scalar_t* residual_at(ChannelTerms, const scalar_t*) { return nullptr; }
__device__ __forceinline__ accum_t finish(accum_t sum, ChannelTerms terms, const scalar_t*, Normal = {},
                                          const accum_t* = nullptr) {
  return add_bias(sum, terms);
}
__device__ __forceinline__ void prefetch(ChannelTerms, const scalar_t*) {}
__device__ __forceinline__ accum_t finish(accum_t sum, float scale, ChannelTerms terms, const scalar_t*) {
  return HAS_BIAS ? fmaf((float)sum, scale, (float)terms.bias) : sum * scale;
}

#endif

// The place of an output, or nothing where it is not stored, or no operation asks.
__device__ __forceinline__ const scalar_t* place_if(bool stored, const scalar_t* place) {
  return EPILOGUE_READS_PLACES && stored ? place : nullptr;
}

// An output that no tap reaches.
__device__ __forceinline__ accum_t finish_empty(const ChannelTerms& terms, const scalar_t* to) {
  return finish((accum_t)0, terms, to);
}
