// Batch norm in training, followed by an activation, for a contiguous tensor (N, C, *spatial); and their gradients.
//
//   y = activation(v),  v = n·weight + bias,  n = (x - mean)·factor,  factor = 1 / √(variance + epsilon)
//   h = dy·activation'(v),  dbias = Σ h,  dweight = Σ h·n,  dx = weight·factor·(h - (dbias + n·dweight) / count)
//
// Means, variances and sums are over the `count` values of a channel.
//
// Index mapping. A channel has `run` vectors in each image. Vectors are numbered through all images; each of `splits`
// blocks processes `span` vectors, and neighbouring blocks process neighbouring channels. STAGE: forward takes two
// launches, MOMENTS and NORMALISE, backward takes two, SUMS and BACKWARD. In the first, each block writes the partial
// result of its share to `partials`; in the second, each block combines its channel's partials in a fixed order and
// writes its share of the result. A channel's first block also writes the per-channel results. `stats`: means, factors.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/moments.cuh"
#include "core/types.cuh"
#include "epilogue/activation_gradients.cuh"
#include "epilogue/finish.cuh"

struct Params {
  int channels, splits, span, length;  // span, length: vectors of a share, and of a channel
  Divisor run;
  double epsilon, momentum;
  double first, second;  // constants of the activation
};

enum Stage { MOMENTS, NORMALISE, SUMS, BACKWARD };
constexpr bool IS_BACKWARD = STAGE == SUMS || STAGE == BACKWARD, STORES = STAGE == NORMALISE || STAGE == BACKWARD;

// The type of per-channel parameters (weight, bias, running statistics): if WIDE, float32 beside half types.
typedef conditional_t<WIDE, accum_t, scalar_t> param_t;

// A block's share of a channel's vectors; a thread processes every THREADS-th vector.
struct Share {
  int channel, end;

  __device__ __forceinline__ int place(const Params& params, int vector) const {
    const int image = vector / params.run;
    return ((image * params.channels + channel) * params.run.value + vector - image * params.run.value) * VECTOR;
  }
  // The number of this thread's vectors from `first` on, at most UNROLL.
  __device__ __forceinline__ int vectors(int first) const {
    const int left = first < end ? (end - first + THREADS - 1) / THREADS : 0;
    return left < UNROLL ? left : UNROLL;
  }
  // Loads these vectors, from `first` on; missing ones are zeros.
  __device__ __forceinline__ void load(const Params& params, const scalar_t* __restrict__ from, int first,
                                       Values& values) const {
    const int count = vectors(first);
    Vector<scalar_t, VECTOR> raw[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      if (i < count) raw[i] = *(const Vector<scalar_t, VECTOR>*)(from + place(params, first + i * THREADS));
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) values[i][j] = i < count ? widen(raw[i].value[j]) : (accum_t)0;
  }
  __device__ __forceinline__ void store(const Params& params, const Values& values, int first, scalar_t* to) const {
    const int count = vectors(first);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (i >= count) continue;
      Vector<scalar_t, VECTOR> result;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) narrow(values[i][j], result.value[j]);
      *(Vector<scalar_t, VECTOR>*)(to + place(params, first + i * THREADS)) = result;
    }
  }
};

// A channel's mean and factor, which normalise its values, and the weight and bias, which scale and shift them.
struct Affine {
  accum_t mean, factor, weight, bias;

  __device__ __forceinline__ accum_t normal(accum_t x) const { return (x - mean) * factor; }
};

// Updates the running statistic of a channel, if there is one.
__device__ __forceinline__ void move(accum_t batch, const Params& params, param_t* running, int channel) {
  if (!running) return;
  const accum_t before = widen(running[channel]);
  narrow(before + (batch - before) * (accum_t)params.momentum, running[channel]);
}

// Combines the partial results of all blocks of a channel.
__device__ __forceinline__ Moments of_channel(const Params& params, const Moments* partials, int channel) {
  Moments found = of_none();
  for (int i = threadIdx.x; i < params.splits; i += THREADS)
    found = both(found, partials[(long long)channel * params.splits + i]);
  return of_team(found, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    batch_norm(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, const param_t* __restrict__ weight,
               const param_t* __restrict__ bias, param_t* __restrict__ running_mean,
               param_t* __restrict__ running_variance, Moments* __restrict__ partials, accum_t* __restrict__ stats,
               param_t* __restrict__ of_weight, param_t* __restrict__ of_bias, scalar_t* __restrict__ dst,
               const __grid_constant__ Params params) {
  const int channel = blockIdx.x % params.channels, split = blockIdx.x / params.channels, thread = threadIdx.x;
  const int start = split * params.span, left = params.length - start;
  const Share share{channel, start + (params.span < left ? params.span : left)};
  const accum_t first_constant = (accum_t)params.first, second_constant = (accum_t)params.second;
  const accum_t count = (accum_t)params.length * VECTOR;
  const bool is_first = split == 0 && thread == 0;
  Affine of{0, 0, weight ? widen(read(weight + channel)) : (accum_t)1, bias ? widen(read(bias + channel)) : (accum_t)0};
  if (IS_BACKWARD) of.mean = stats[channel], of.factor = stats[params.channels + channel];

  Moments found = STORES ? of_channel(params, partials, channel) : of_none();
  if (STAGE == NORMALISE) {
    of.mean = found.center;
    of.factor = 1 / square_root(found.spread / count + (accum_t)params.epsilon);
    if (is_first) {
      stats[channel] = of.mean;
      stats[params.channels + channel] = of.factor;
      move(found.center, params, running_mean, channel);
      move(found.spread / (count - 1), params, running_variance, channel);
    }
  }
  if (STAGE == BACKWARD && is_first) {
    if (of_weight) narrow(found.spread, of_weight[channel]);
    if (of_bias) narrow(found.center, of_bias[channel]);
  }

  const ChannelTerms terms = channel_terms(EPILOGUE_OPERANDS(nullptr, dst, 1), channel);
  const accum_t mean_bias = found.center / count, mean_weight = found.spread / count, slope = of.weight * of.factor;
  for (int first = start + thread; first < share.end; first += THREADS * UNROLL) {
    Values values, gradients;
    share.load(params, x, first, values);
    if (STAGE == MOMENTS) found = both(found, moments_of(values, share.vectors(first)));
    if (IS_BACKWARD) share.load(params, grad, first, gradients);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        accum_t& value = values[i][j];
        const accum_t normal = of.normal(value), v = normal * of.weight + of.bias;
        if (STAGE == NORMALISE) value = operate(v, terms, dst);
        if (!IS_BACKWARD) continue;
        const accum_t h = activation_gradient(gradients[i][j], v, first_constant, second_constant);
        if (STAGE == SUMS) found.center += h, found.spread += h * normal;
        if (STAGE == BACKWARD) value = slope * (h - mean_bias - normal * mean_weight);
      }
    if (STORES) share.store(params, values, first, dst);
  }
  if (!STORES) {
    found = of_team(found, 0);
    if (thread == 0) partials[(long long)channel * params.splits + split] = found;
  }
}
