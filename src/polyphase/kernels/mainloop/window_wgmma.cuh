// Both gradients as products of matrices by Hopper's instruction, one stage after the other:
//
//     sum[row, column]  +=  Σ_k  window[offset of row  +  offset of k] · operand[column, k]
//
// Columns are input channels. In the weight gradient rows are pairs of output channel and tap, k are positions, and the
// operand is the input; in the input gradient rows are positions, k are pairs of output channel and tap, and the
// operand is the weight. The operand lies in memory as the tensor cores want it, k innermost, or columns where it is
// TRANSPOSED, as the tensor cores read half types, too: TMA brings boxes of it, rounded to TF32, swizzled, or all
// loaders copy it so (operand/run_loader.cuh). The window (operand/window.cuh) comes as it lies, in boxes, too, or
// where those cannot be had by copies of all loaders (operand/window_rows.cuh). Its elements pass the registers of
// consumers, wherever a stride or a tap has them: nothing is unfolded, and nothing transposed.
//
// Index mapping. GROUPS warpgroups multiply, each ROW_TILES tiles of 64 rows by all COLUMNS; one more loads.
// BUFFERS stages lie in shared memory, a barrier tells that one is full, another that it is free again.
//
// With PAIRS taps along the width come in pairs that are neighbours in the window, and begin at multiples of two there:
// rows of the weight gradient, k of the input gradient. The host sees to it that windows begin accordingly.

#pragma once

#include "specialisation.cuh"
#include "core/geometry.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "mainloop/accumulators.cuh"
#include "mainloop/multistage.cuh"

constexpr int GROUPS = WARPS / 4 - 1, CONSUMER_THREADS = 128 * GROUPS;  // the first threads
constexpr int COLUMNS = 8 * COLUMN_TILES, GROUP_ROWS = 64 * ROW_TILES, ROWS = GROUPS * GROUP_ROWS;
constexpr int BATCH = ROW_TILES >= 4 ? 1 : 4 / ROW_TILES;  // operations whose rows are read together
constexpr int WORD = 4 / ELEMENT;                          // k of four bytes

// Barriers of producers, and of consumers.
constexpr int LOADERS_MEET = 1, CONSUMERS_MEET = 2;

// Registers of each thread: consumers need theirs before they find their rows.
constexpr int PRODUCER_REGISTERS = 88, CONSUMER_REGISTERS = 208;
static_assert(registers_suffice(CONSUMER_THREADS, CONSUMER_REGISTERS, 32 * LOAD_WARPS, PRODUCER_REGISTERS),
              "too few registers");

static_assert(LOAD_WARPS == 4 && FIRST_LOAD_WARP == 4 * GROUPS, "the last group loads");

// What TMA brings of the operand for a stage: boxes of `bytes` along k, by COLUMNS columns, one behind the
// other. TRANSPOSED boxes are of `bytes` along the columns, by all k of the stage: there is a row of them.
struct Runs {
  int count[4];  // along n, d, h and w
  int length;    // k of a run, or its columns
  int bytes;     // of a run: 32, 64 or 128, within which chunks change places
  int box;       // bytes of a box
};

// Beside the barriers how far into its buffer a window is shifted, in bytes.
struct WindowBarriers : PipelineBarriers<BUFFERS> {
  int shift[BUFFERS];

  // Whether one thread alone `tells` TMA what to bring, or all copy, too.
  __device__ __forceinline__ void init(bool tells) {
    if (threadIdx.x > 0) return;
    PipelineBarriers<BUFFERS>::init(tells ? 1 : 2 * LOADERS, 4 * GROUPS);  // with what they store, and what they copy
    for (int i = 0; i < BUFFERS; ++i) shift[i] = 0;
  }
};

// By one thread: the runs of a stage. `place` is the first run's first element: w, channel, h, d and n, or channel, w
// and so on.
__device__ __forceinline__ void load_runs(const TensorMap& map, const scalar_t* tensor, const Runs& runs,
                                          const int (&place)[5], char* to, unsigned barrier) {
  const int count = runs.count[0] * runs.count[1] * runs.count[2] * runs.count[3];
  int at[4] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int from[5] = {place[0] + at[3] * runs.length, place[1], place[2] + at[2], place[3] + at[1],
                         place[4] + at[0]};
    tma_load_box(shared_address(to), map, tensor, from, runs.box, barrier);
    to += runs.box;
    advance(runs.count, at);  // divisions took longer than a copy
  }
}

// The loaders' part: tell(stage, buffer, barrier), by the first of them, has TMA bring what it can of a stage;
// where that is not all, copy(stage, buffer) begins the copies of all and returns the window's shift.
template <class Tell, class Copy>
__device__ __forceinline__ void load_stages(int stages, bool tells, WindowBarriers& ring, char* buffers, int bytes,
                                            const Tell& tell, const Copy& copy) {
  setmaxnreg_dec<PRODUCER_REGISTERS>();
  const bool first = threadIdx.x == CONSUMER_THREADS;
  if (tells && !first) return;
  PipelineState<BUFFERS> state;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    const unsigned full = shared_address(ring.full + state.index);
    char* const buffer = buffers + state.index * bytes;
    mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
    if (first) tell(stage, buffer, full);
    if (!tells) {
      const int shift = copy(stage, buffer);
      if (first) ring.shift[state.index] = shift;
      mbarrier_arrive_cp_async(full);
    }
    mbarrier_arrive(full);
    state.next();
  }
  cp_async_commit();
  cp_async_wait<0>();
}

// The sums of a group of threads.
struct Sums : Accumulators<ROW_TILES, 4 * COLUMN_TILES> {
  // Row `i` of the thread's 2 · ROW_TILES, and its first column; sum k of tile j lies in row 2·j + k / 2 % 2 and in
  // column k / 4 · 8 + k % 2 from there on. (Which of an instruction's rows is which is all the same to the product.)
  static __device__ __forceinline__ int row(int i) {
    const int first = threadIdx.x / 128 * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + i / 2 * 64;
    return first + (PAIRS && !INPUT_GRAD ? 2 * fragment_row() + i % 2 : fragment_row() + i % 2 * 8);
  }
  static __device__ __forceinline__ int first_column() { return fragment_column(); }

  // The `steps` operations of a stage, to sums that begin with them or not. `row_offsets` are the window's, of the
  // thread's rows; with `rounded` it holds TF32.
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
    if (steps >= BATCH) {  // whole batches, without a question for each operation: those would wait for one another
      Rows<BATCH> first, second;
      first.template read<ROUND>(window, offsets, row_offsets, 0);
#pragma unroll 1
      for (bool more = true; more;) {
        multiply(first, operand, runs, step, begin && step == 0);
        more = step + 2 * BATCH <= steps;
        if (more) second.template read<ROUND>(window, offsets, row_offsets, step + BATCH);
        finish(first);
        step += BATCH;
        if (!more) break;
        multiply(second, operand, runs, step, false);
        more = step + 2 * BATCH <= steps;
        if (more) first.template read<ROUND>(window, offsets, row_offsets, step + BATCH);
        finish(second);
        step += BATCH;
      }
    }
    add_rest<BATCH / 2, ROUND>(window, operand, runs, offsets, row_offsets, step, steps, begin);
    pin(of);
  }

  // What is left of a stage, less than 2 · COUNT operations.
  template <int COUNT, bool ROUND>
  __device__ __forceinline__ void add_rest(const char* window, const char* operand, const Runs& runs,
                                           const int* offsets, const int (&row_offsets)[ROW_TILES][2], int step,
                                           int steps, bool begin) {
    if constexpr (COUNT > 0) {
      if (steps - step >= COUNT) {
        Rows<COUNT> rows;
        rows.template read<ROUND>(window, offsets, row_offsets, step);
        multiply(rows, operand, runs, step, begin && step == 0);
        finish(rows);
        step += COUNT;
      }
      add_rest<COUNT / 2, ROUND>(window, operand, runs, offsets, row_offsets, step, steps, begin);
    }
  }

  // The rows of some operations, as the tensor cores read them (ptx/mma.cuh).
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
            if constexpr (PAIRS && !INPUT_GRAD) {
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
    // The same of two rows that are neighbours in the window.
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
    const int pitch = INPUT_GRAD ? 128 : runs.bytes;  // of the weight always
    const Operand columns(operand, pitch, runs.box);
    pin(rows.of);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = (step + i) * 32, within = at & (pitch - 1);
      const int bytes = TRANSPOSED ? (step + i) * OPERATION * pitch : (at - within) * COLUMNS + within;
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) columns.multiply(bytes, rows.of[i][tile], of[tile], i > 0 || !begin);
    }
    wgmma_commit();
  }

  // Waits for products: their rows may be read anew.
  template <int COUNT>
  static __device__ __forceinline__ void finish(Rows<COUNT>& rows) {
    wgmma_wait<0>();
    pin(rows.of);
  }

  // The columns of a stage, in runs of `pitch` bytes each, boxes of `box`.
  struct Operand {
    unsigned long long described;

    __device__ __forceinline__ Operand(const char* from, int pitch, int box)
        : described(swizzled_descriptor(shared_address(from), pitch, TRANSPOSED ? box : 0)) {}
    // Of the operation that begins so many bytes behind the first.
    __device__ __forceinline__ void multiply(int bytes, const unsigned (&rows)[4], float (&sums)[4 * COLUMN_TILES],
                                             bool add) const {
      wgmma(sums, rows, described + (bytes >> 4), add);
    }
  };
};

// The consumer warpgroups' part: add(stage, buffer, shift) is one stage, whose operand may have been `copied` by
// threads.
template <class Add>
__device__ __forceinline__ void add_stages(int stages, WindowBarriers& ring, const char* buffers, int bytes,
                                           bool copied, const Add& add) {
  PipelineState<BUFFERS> state;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    mbarrier_wait(shared_address(ring.full + state.index), state.parity);
    if (copied) fence_proxy_async();
    add(stage, buffers + state.index * bytes, ring.shift[state.index]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(ring.empty + state.index));
    state.next();
  }
}
