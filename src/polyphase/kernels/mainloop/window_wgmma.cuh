// Mainloop of both gradients by wgmma, A from registers and B from shared memory:
//
//     sum[m, n]  +=  Σ_k  window[offset of m  +  offset of k] · B[n, k]
//
// N are input channels. In the weight gradient M are (output channel, tap) pairs, K are positions, and B is the input;
// in the input gradient M are positions, K are (output channel, tap) pairs, and B is the weight. (Rows are those of M,
// columns those of N, `operand` is B.)
//
// B is K-major in memory, or MN_MAJOR, which wgmma reads in half types only. TMA loads boxes of it, rounded to TF32
// and swizzled, or all producers copy it to the same places (operand/run_loader.cuh). The window of the output gradient
// (operand/window.cuh) keeps its order in memory: TMA loads boxes, or all producers copy it row by row if strides are
// no multiples of 16 bytes (operand/window_rows.cuh). Consumers gather A fragments from the window into registers: a
// tap or a stride is an offset there, so there is no im2col and no transpose.
//
// CONSUMER_GROUPS consumer warpgroups, each with ROW_TILES m64 tiles by all COLUMNS, and one producer warpgroup. STAGES
// pipeline stages, each with a full and an empty mbarrier.
//
// With PAIRS, two neighbouring taps along w are read by one load, at an even offset in the window. They are rows of the
// weight gradient, K of the input gradient. The host aligns the window's start and pitches (`in_pairs`). With
// ROWS_IN_PAIRS a thread's rows 2·i and 2·i + 1 are neighbours: the two taps of the weight gradient, or two positions
// of the input gradient.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "mainloop/accumulators.cuh"
#include "mainloop/multistage.cuh"

constexpr int CONSUMER_GROUPS = WARPS / 4 - 1,
              CONSUMER_THREADS = 128 * CONSUMER_GROUPS;  // consumers are the first threads
constexpr int COLUMNS = 8 * COLUMN_TILES, GROUP_ROWS = 64 * ROW_TILES, ROWS = CONSUMER_GROUPS * GROUP_ROWS;
constexpr int BATCH = ROW_TILES >= 4 ? 1 : 4 / ROW_TILES;  // k-steps whose A fragments are gathered together
constexpr int WORD = 4 / ELEMENT;                          // K elements of a 32-bit word

// Named barriers of producers, and of consumers.
constexpr int LOADERS_MEET = 1, CONSUMERS_MEET = 2;

// Registers a thread (setmaxnreg). CONSUMER_GROUPS = 2 consumer warpgroups (schedules/window_gemm/wgmma_tile.py) and
// one producer share the multiprocessor's 64K. Consumers hold 128 accumulators and two sets of A fragments.
constexpr int PRODUCER_REGISTERS = 88, CONSUMER_REGISTERS = 208;
static_assert(registers_suffice(CONSUMER_THREADS, CONSUMER_REGISTERS, 32 * LOAD_WARPS, PRODUCER_REGISTERS),
              "too few registers");

static_assert(LOAD_WARPS == 4 && FIRST_LOAD_WARP == 4 * CONSUMER_GROUPS, "the last group loads");

// B of a stage: consecutive boxes of `bytes` along K by COLUMNS columns. MN_MAJOR: consecutive boxes of `bytes` along N
// by all K of the stage.
struct Runs {
  int count[4];  // boxes along n, d, h and w
  int length;    // elements of a run: along K, or along N if MN_MAJOR
  int bytes;     // of a run, the swizzle's width: 32, 64 or 128
  int box;       // bytes of a box
};

// The barriers, and each stage's window shift in bytes (operand/window_rows.cuh).
struct WindowBarriers : PipelineBarriers<STAGES> {
  int shift[STAGES];

  // `all_by_tma`: one producer thread arrives; else every producer warp does.
  __device__ __forceinline__ void init(bool all_by_tma) {
    if (threadIdx.x > 0) return;
    PipelineBarriers<STAGES>::init(all_by_tma ? 1 : LOAD_WARPS, 4 * CONSUMER_GROUPS);
    for (int i = 0; i < STAGES; ++i) shift[i] = 0;
  }
};

// Run by one thread: TMA loads of B's boxes. `place`: the first box's origin in the tensor map's order, innermost
// first.
__device__ __forceinline__ void load_runs(const TensorMap& map, const scalar_t* tensor, const Runs& runs,
                                          const int (&place)[5], char* to, unsigned barrier) {
  const int count = volume(runs.count);
  int at[4] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int from[5] = {place[0] + at[3] * runs.length, place[1], place[2] + at[2], place[3] + at[1],
                         place[4] + at[0]};
    tma_load_box(shared_address(to), map, tensor, from, runs.box, barrier);
    to += runs.box;
    advance(runs.count, at);  // without divisions, which took longer than the TMA load
  }
}

// Producers: issue(stage, memory, barrier), by the first thread, issues TMA loads; unless these are all, copy(stage,
// memory, barrier), by all threads, starts the rest and returns the window's shift.
template <class Issue, class Copy>
__device__ __forceinline__ void load_stages(int stages, bool all_by_tma, WindowBarriers& ring,
                                            PipelineState<STAGES>& state, char* stage_memory, int bytes,
                                            const Issue& issue, const Copy& copy) {
  const bool first = threadIdx.x == CONSUMER_THREADS;
  if (all_by_tma && !first) return;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    const unsigned full = shared_address(ring.full + state.index);
    char* const memory = stage_memory + state.index * bytes;
    mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
    if (first) issue(stage, memory, full);
    if (!all_by_tma) {
      const int shift = copy(stage, memory, full);
      if (first) ring.shift[state.index] = shift;
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    state.next();
  }
}

// The accumulators of a warpgroup.
struct Sums : Accumulators<ROW_TILES, 4 * COLUMN_TILES> {
  // Row `i` of the thread's 2 · ROW_TILES rows, and its first column. Sum k of tile j is at row 2·j + k / 2 % 2 and
  // column first_column() + k / 4 · 8 + k % 2. (The order of rows within an instruction is free, as long as loads of A
  // and stores agree.)
  static __device__ __forceinline__ int row(int i) {
    const int first = threadIdx.x / 128 * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + i / 2 * 64;
    return first + (ROWS_IN_PAIRS ? 2 * fragment_row() + i % 2 : fragment_row() + i % 2 * 8);
  }
  static __device__ __forceinline__ int first_column() { return fragment_column(); }

  // Multiplies the `steps` k-steps of a stage. `begin`: they overwrite the accumulators (scale-d = 0). `row_offsets`:
  // offsets of the thread's rows in the window. `rounded`: the window holds TF32 already.
  __device__ __forceinline__ void add(const char* window, const char* operand, const Runs& runs, const int* offsets,
                                      const int (&row_offsets)[ROW_TILES][2], int steps, bool begin, bool rounded) {
    if (ELEMENT == 4 && !rounded)
      add_stage<true>(window, operand, runs, offsets, row_offsets, steps, begin);
    else
      add_stage<false>(window, operand, runs, offsets, row_offsets, steps, begin);
  }

 private:
  template <bool ROUND>
  __device__ __forceinline__ void add_stage(const char* window, const char* operand, const Runs& runs,
                                            const int* offsets, const int (&row_offsets)[ROW_TILES][2], int steps,
                                            bool begin) {
    int step = 0;
    // Two sets of A fragments: one is gathered while wgmma reads the other. Whole batches first, without a branch for
    // each k-step, which would serialise the wgmma's.
    if (steps >= BATCH) {
      Rows<BATCH> first, second;
      first.template read<ROUND>(window, offsets, row_offsets, 0);
#pragma unroll 1
      for (bool more = true; more;) {
        multiply(first, operand, runs, step, begin && step == 0);
        more = step + 2 * BATCH <= steps;
        if (more) second.template read<ROUND>(window, offsets, row_offsets, step + BATCH);
        wait_for(first);
        step += BATCH;
        if (!more) break;
        multiply(second, operand, runs, step, false);
        more = step + 2 * BATCH <= steps;
        if (more) first.template read<ROUND>(window, offsets, row_offsets, step + BATCH);
        wait_for(second);
        step += BATCH;
      }
    }
    add_rest<BATCH / 2, ROUND>(window, operand, runs, offsets, row_offsets, step, steps, begin);
    pin(of);
  }

  // The rest of a stage, less than 2 · COUNT k-steps.
  template <int COUNT, bool ROUND>
  __device__ __forceinline__ void add_rest(const char* window, const char* operand, const Runs& runs,
                                           const int* offsets, const int (&row_offsets)[ROW_TILES][2], int step,
                                           int steps, bool begin) {
    if constexpr (COUNT > 0) {
      if (steps - step >= COUNT) {
        Rows<COUNT> rows;
        rows.template read<ROUND>(window, offsets, row_offsets, step);
        multiply(rows, operand, runs, step, begin && step == 0);
        wait_for(rows);
        step += COUNT;
      }
      add_rest<COUNT / 2, ROUND>(window, operand, runs, offsets, row_offsets, step, steps, begin);
    }
  }

  // A fragments of COUNT k-steps, in wgmma's layout (ptx/mma.cuh).
  template <int COUNT>
  struct Rows {
    unsigned of[COUNT][ROW_TILES][4];

    template <bool ROUND>
    __device__ __forceinline__ void read(const char* window, const int* offsets, const int (&rows)[ROW_TILES][2],
                                         int step) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const int* const mine = offsets + (step + i) * OPERATION + threadIdx.x % 4 * WORD;
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const Vector<int, WORD> k = *(const Vector<int, WORD>*)(mine + chunk * (OPERATION / 2));
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile) {
            unsigned* const words = of[i][tile] + 2 * chunk;
            if constexpr (!INPUT_GRAD && ROWS_IN_PAIRS) {
              read_pair<ROUND>(window + rows[tile][0], k, words);
            } else {
#pragma unroll
              for (int half = 0; half < 2; ++half) words[half] = read_word<ROUND>(window + rows[tile][half], k);
            }
          }
        }
      }
    }

   private:
    template <bool ROUND>
    static __device__ __forceinline__ unsigned word(float value) {
      return __float_as_uint(ROUND ? round_tf32(value) : value);
    }
    template <bool ROUND>
    static __device__ __forceinline__ unsigned read_word(const char* from, const Vector<int, WORD>& k) {
      if constexpr (ELEMENT == 4) return word<ROUND>(*(const float*)(from + k.value[0]));
      if constexpr (PAIRS && INPUT_GRAD) return *(const unsigned*)(from + k.value[0]);
      return *(const unsigned short*)(from + k.value[0]) | *(const unsigned short*)(from + k.value[WORD - 1]) << 16;
    }
    // The same for two rows that are neighbours in the window.
    template <bool ROUND>
    static __device__ __forceinline__ void read_pair(const char* from, const Vector<int, WORD>& k, unsigned* words) {
      if constexpr (ELEMENT == 4) {
        const Vector<float, 2> pair = *(const Vector<float, 2>*)(from + k.value[0]);
        words[0] = word<ROUND>(pair.value[0]), words[1] = word<ROUND>(pair.value[1]);
      } else {
        const unsigned first = *(const unsigned*)(from + k.value[0]);
        const unsigned second = *(const unsigned*)(from + k.value[WORD - 1]);
        words[0] = (first & 0xffffu) | second << 16, words[1] = first >> 16 | (second & 0xffff0000u);
      }
    }
  };

  template <int COUNT>
  __device__ __forceinline__ void multiply(Rows<COUNT>& rows, const char* operand, const Runs& runs, int step,
                                           bool begin) {
    const int pitch = INPUT_GRAD ? 128 : runs.bytes;  // the weight's is always 128
    const unsigned long long columns = swizzled_descriptor(shared_address(operand), pitch, MN_MAJOR ? runs.box : 0);
    pin(rows.of);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool add = i > 0 || !begin;
      const int at = (step + i) * 32, within = at & (pitch - 1);
      const int bytes = MN_MAJOR ? (step + i) * OPERATION * pitch : (at - within) * COLUMNS + within;
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) wgmma(of[tile], rows.of[i][tile], columns + (bytes >> 4), add);
    }
    wgmma_commit();
  }

  // Waits for the wgmma's that read these fragments: they may be overwritten.
  template <int COUNT>
  static __device__ __forceinline__ void wait_for(Rows<COUNT>& rows) {
    wgmma_wait<0>();
    pin(rows.of);
  }
};

// Consumers: add(stage, memory, shift) multiplies one stage. `copied`: threads wrote B, so wgmma needs a proxy fence.
template <class Add>
__device__ __forceinline__ void add_stages(int stages, WindowBarriers& ring, PipelineState<STAGES>& state,
                                           const char* stage_memory, int bytes, bool copied, const Add& add) {
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    mbarrier_wait(shared_address(ring.full + state.index), state.parity);
    if (copied) fence_proxy_async();
    add(stage, stage_memory + state.index * bytes, ring.shift[state.index]);
    ring.release(state.index);
    state.next();
  }
}
