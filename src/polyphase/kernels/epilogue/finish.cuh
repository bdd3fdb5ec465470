// What happens to a sum before it is an output: one place for every kernel of the forward pass.
//
//   y[channel] = narrow(finish(sum, terms))        finish(sum, terms) = sum + terms.bias
//
// A sum stays accum_t until here, and is narrowed once, last. A scale, an activation or a residual of the output goes
// into `finish`; what it needs of an output channel into `ChannelTerms`; a second output beside the call of `narrow`.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

// What the outputs of a channel have in common, as a kernel keeps it in registers.
struct ChannelTerms {
  accum_t bias;
};

// The terms of channel `channel`, counted from the first that `bias` has. Nothing is read of a channel that does not
// exist.
template <class Index>
__device__ __forceinline__ ChannelTerms channel_terms(const scalar_t* bias, Index channel, bool exists = true) {
  return {HAS_BIAS && exists ? widen(read(bias + channel)) : (accum_t)0};
}

__device__ __forceinline__ accum_t finish(accum_t sum, ChannelTerms terms) { return HAS_BIAS ? sum + terms.bias : sum; }

// An output that no tap reaches.
__device__ __forceinline__ accum_t finish_empty(ChannelTerms terms) { return finish((accum_t)0, terms); }

// The same where operands were scaled, which only float32's are: `scale` undoes it.
__device__ __forceinline__ accum_t finish(accum_t sum, float scale, ChannelTerms terms) {
  return HAS_BIAS ? fmaf((float)sum, scale, (float)terms.bias) : sum * scale;
}
