// Computes what no epilogue can, after a layer: values pooled over windows, then reduced or normalised over groups.
//
//   v[i]   = prologue(pool of the window i of src)             i: a pooled element, (outer, length, inner)
//   dst[g] = operations(reduced v of the group g)              g: one (outer, inner), the `length` values of which are
//   dst[i] = operations(v[i] normalised over its group)           reduced or normalised together
//
// Index mapping. A block has THREADS / TEAM groups, a team of threads for each. With ROWS `inner` is 1: a team is
// neighbouring threads, each with VECTOR neighbours of a row at a time; else neighbouring threads have neighbouring
// groups. A thread loads UNROLL vectors, computes their moments, and combines these with the earlier ones. With KEPT
// these are all vectors, and it normalises them in registers; else it loads all a second time. With WHOLE_ROUNDS every
// thread of a team has UNROLL vectors in each round. A team's moments are combined by shuffles and through shared
// memory, in a fixed order.
//
// If there are few groups each is split over blocks, in two launches: in the first (SPLIT of 1) each block writes the
// moments of its share to `partials`; the second (SPLIT of 2) combines them.

#include "specialisation.cuh"
#include "core/divisor.cuh"
#include "core/moments.cuh"
#include "core/types.cuh"
#include "epilogue/activations.cuh"
#include "epilogue/finish.cuh"
#include "operand/prologue.cuh"

struct Params {
  int groups, length, splits, span;  // length, span: values of a group, and of a split of it
  Divisor inner;
  Divisor run, channels;  // channel of dst[i]: i / run % channels
  Divisor run_before, channels_before;
  Divisor depth, height, width;  // sizes after pooling
  int src_depth, src_height, src_width;
  long long sample_stride;  // dst's
  double epsilon;
};

enum Pool { NO_POOL, MAX_POOL, AVERAGE_POOL };
constexpr bool NORMALISES = OVER == NORM || OVER == SOFTMAX, REDUCES = OVER != NOTHING && !NORMALISES;
constexpr int BETWEEN = TEAM * VECTOR, ROUND = BETWEEN * UNROLL;

__device__ __forceinline__ accum_t reduced(const Moments& of, int length) {
  if (OVER == MEAN) return of.center / length;
  return OVER == LOGSUMEXP ? logarithm(of.spread) + of.center : of.center;
}

// The `Normal` of a group's values. Infinities give NaN, as in PyTorch.
__device__ __forceinline__ Normal normal_of(const Moments& of, accum_t epsilon) {
  if (OVER == SOFTMAX) return {of.center, 1 / of.spread + (of.spread - of.spread)};
  return {of.center, 1 / square_root(of.spread / of.count + epsilon)};
}

__device__ __forceinline__ accum_t normalised(accum_t v, const Normal& by) {
  if (OVER == NOTHING) return v;
  return (OVER == SOFTMAX ? exponential(v - by.center) : v - by.center) * by.factor;
}

// The pool of a window.
__device__ __forceinline__ accum_t pooled(const Params& params, const scalar_t* __restrict__ src, int element) {
  const int line = element / params.width, plane = line / params.height, image = plane / params.depth;
  const int x = element - line * params.width, y = line - plane * params.height, z = plane - image * params.depth;
  const long long corner = (long long)image * params.src_depth + z * WINDOW_D;
  const scalar_t* const from = src + (corner * params.src_height + y * WINDOW_H) * params.src_width + x * WINDOW_W;
  accum_t found = POOL == MAX_POOL ? -infinity() : (accum_t)0;
#pragma unroll
  for (int d = 0; d < WINDOW_D; ++d)
#pragma unroll
    for (int h = 0; h < WINDOW_H; ++h)
#pragma unroll
      for (int w = 0; w < WINDOW_W; ++w) {
        const accum_t v = widen(read(from + ((long long)d * params.src_height + h) * params.src_width + w));
        found = POOL == MAX_POOL ? larger(found, v) : found + v;
      }
  return POOL == AVERAGE_POOL ? found / (WINDOW_D * WINDOW_H * WINDOW_W) : found;
}

// A thread's share of a group: the offsets of its values.
struct Share {
  int base, stride, first, end;

  __device__ __forceinline__ int place(int first, int vector) const {
    return base + (first + vector * BETWEEN) * stride;
  }
  // How many vectors exist from value `first` on, if any.
  __device__ __forceinline__ int vectors(int first) const {
    if (WHOLE_ROUNDS) return UNROLL;
    const int left = first < end ? (end - first + BETWEEN - 1) / BETWEEN : 0;
    return left < UNROLL ? left : UNROLL;
  }
};

// Loads the values from `first` on; returns the number of vectors.
__device__ __forceinline__ int load(const Params& params, const scalar_t* __restrict__ src,
                                    const PrologueOperands& operands, const Share& share, int first, Values& values) {
  const int vectors = share.vectors(first);
  Vector<scalar_t, VECTOR> raw[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (i >= vectors) continue;
    if (POOL == NO_POOL) raw[i] = *(const Vector<scalar_t, VECTOR>*)(src + share.place(first, i));
    if (POOL != NO_POOL) values[i][0] = pooled(params, src, share.place(first, i));
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (i >= vectors) continue;
      if (POOL == NO_POOL) values[i][j] = widen(raw[i].value[j]);
#if PROLOGUE
      const int channel = (share.place(first, i) + j) / params.run_before % params.channels_before;
      values[i][j] = prologue(values[i][j], prologue_terms(operands, channel, true));
#endif
    }
  return vectors;
}

// Normalises values from `first` on, applies the operations and stores them.
__device__ __forceinline__ void store(const Params& params, const EpilogueOperands& operands, const Share& share,
                                      int first, int vectors, const Values& values, const Normal& by, scalar_t* dst) {
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (i >= vectors) continue;
    const int element = share.place(first, i), line = BY_POSITION ? first + i * BETWEEN : element / params.run;
    const int left = BY_POSITION ? 1 : params.run - (element - line * params.run);  // elements left in the channel
    ChannelTerms terms = channel_terms(operands, BY_POSITION ? line : line % params.channels);
    Vector<scalar_t, VECTOR> result;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (BY_POSITION && j > 0) terms = channel_terms(operands, line + j);
      if (!BY_POSITION && !ONE_CHANNEL && j >= left)
        terms = channel_terms(operands, (element + j) / params.run % params.channels);
      narrow(operate(normalised(values[i][j], by), terms, dst + element + j), result.value[j]);
    }
    *(Vector<scalar_t, VECTOR>*)(dst + element) = result;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    reduce_groups(const scalar_t* __restrict__ src EPILOGUE_PARAMETERS PROLOGUE_PARAMETERS,
#if SPLIT
                  Moments* __restrict__ partials,
#endif
                  scalar_t* __restrict__ dst, const __grid_constant__ Params params) {
  const int thread = threadIdx.x, member = ROWS ? thread % TEAM : thread / GROUPS;
  const int of_block = ROWS ? thread / TEAM : thread % GROUPS, splits = SPLIT == 2 && REDUCES ? 1 : params.splits;
  const int split = blockIdx.x % splits, counted = (int)(blockIdx.x / splits) * GROUPS + of_block;
  const bool exists = counted < params.groups;
  const int group = exists ? counted : 0, start = split * params.span, left = params.length - start;
  const int outer = ROWS ? group : group / params.inner, stride = ROWS ? 1 : params.inner.value;
  const Share share{outer * params.length * stride + (group - outer * stride) * !ROWS, stride, start + member * VECTOR,
                    exists ? start + (params.span < left ? params.span : left) : 0};
  Values values;
  Moments moments = of_none();
#if SPLIT == 2
  for (int i = member; exists && i < params.splits; i += TEAM)
    moments = both(moments, partials[(long long)group * params.splits + i]);
#else
  for (int first = share.first; OVER != NOTHING && first < share.end; first += ROUND) {
    const int vectors = load(params, src, PROLOGUE_OPERANDS, share, first, values);
    moments = both(moments, moments_of(values, vectors));
    if (KEPT) break;
  }
#endif
  if (OVER != NOTHING) moments = of_team(moments, of_block);
#if SPLIT == 1
  if (exists && member == 0) partials[(long long)group * params.splits + split] = moments;
#else
  const EpilogueOperands operands = EPILOGUE_OPERANDS(nullptr, dst, params.sample_stride);
  if (REDUCES) {
    if (!exists || member > 0) return;
    const ChannelTerms terms = channel_terms(operands, group / params.run % params.channels);
    narrow(operate(reduced(moments, params.length), terms, dst + group), dst[group]);
    return;
  }
  const Normal by = normal_of(moments, (accum_t)params.epsilon);
  for (int first = share.first; first < share.end; first += ROUND) {
    const int vectors = KEPT ? share.vectors(first) : load(params, src, PROLOGUE_OPERANDS, share, first, values);
    store(params, operands, share, first, vectors, values, by, dst);
    if (KEPT) break;
  }
#endif
}
