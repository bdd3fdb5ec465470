// Both gradients as products of matrices by Hopper's instruction, one stage after the other:
//
//     sum[row, column]  +=  Σ_k  window[offset of row  +  offset of k] · operand[column, k]
//
// Columns are input channels. In the weight gradient rows are pairs of output channel and tap, k are positions, and the
// operand is the input; in the input gradient rows are positions, k are pairs of output channel and tap, and the
// operand is the weight. The operand lies in memory as the cores want it, k innermost: the copy engine brings boxes of
// it, rounded to TF32, swizzled. The window (common/window.cuh) comes as it lies, in boxes, too, or where those cannot
// be had by copies of all loaders. Its elements pass the registers of those who multiply, wherever a stride or a tap
// has them: nothing is unfolded, and nothing turned around.
//
// Index mapping. GROUPS groups of 128 threads multiply, each ROW_TILES tiles of 64 rows by all COLUMNS; one more loads.
// BUFFERS stages lie in shared memory, a barrier tells that one is full, another that it is free again.

constexpr int GROUPS = WARPS / 4 - 1;
constexpr int COLUMNS = 8 * COLUMN_TILES, GROUP_ROWS = 64 * ROW_TILES, ROWS = GROUPS * GROUP_ROWS;
constexpr int BATCH = ROW_TILES >= 4 ? 1 : 4 / ROW_TILES;  // operations whose rows are read together
constexpr int WORD = 4 / ELEMENT;                          // k of four bytes

// Whether taps along the width come in pairs that are neighbours in the window, and begin at multiples of two there:
// rows of the weight gradient, k of the input gradient. The host sees to it that windows begin accordingly.
constexpr bool PAIRS =
    AXIS_W.kernel % 2 == 0 && AXIS_W.dilation == 1 && AXIS_W.stride % 2 == 0 && AXIS_W.padding % 2 == 0;
constexpr bool PAIRED_ROWS = PAIRS && !INPUT_GRAD, PAIRED_K = PAIRS && INPUT_GRAD;

// Registers of each thread: those who multiply need theirs before they find their rows.
constexpr int LOADER_REGISTERS = 72, MULTIPLIER_REGISTERS = 216;

static_assert(LOAD_WARPS == 4 && FIRST_LOAD_WARP == 4 * GROUPS, "the last group loads");

// What the engine brings of the operand for a stage: boxes of `bytes` along k, by COLUMNS columns, one behind the
// other.
struct Runs {
  int count[4];  // along n, d, h and w
  int length;    // k of a run
  int bytes;     // of a run: 32, 64 or 128, within which chunks change places
};

// The barriers of the stages.
struct Ring {
  unsigned long long full[BUFFERS], empty[BUFFERS];

  // Whether one thread alone `tells` the engine what to bring, or all copy.
  __device__ __forceinline__ void init(bool tells) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < BUFFERS; ++i) {
        barrier_init(shared_address(full + i), tells ? 1 : 2 * LOADERS);  // with what they store, and what they copy
        barrier_init(shared_address(empty + i), 4 * GROUPS);
      }
      barriers_publish();
    }
  }
};

// A stage's buffer, and the parity of its barriers.
struct Turn {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++index == BUFFERS) index = 0, parity ^= 1;
  }
};

// By one thread: the runs of a stage. `place` is the first run's first element: w, channel, h, d and n.
__device__ __forceinline__ void load_runs(const TensorMap& map, const scalar_t* tensor, const Runs& runs,
                                          const int (&place)[5], char* to, unsigned barrier) {
  const int count = runs.count[0] * runs.count[1] * runs.count[2] * runs.count[3];
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    int at[4];
    decode(runs.count, i, at);
    const int from[5] = {place[0] + at[3] * runs.length, place[1], place[2] + at[2], place[3] + at[1],
                         place[4] + at[0]};
    box_copy(shared_address(to + i * COLUMNS * runs.bytes), map, tensor, from, COLUMNS * runs.bytes, barrier);
  }
}

// The loaders' part: tell(stage, buffer, barrier), by the first of them, has the engine bring a stage; where it brings
// no windows, copy(stage, buffer) begins the copies of all.
template <class Tell, class Copy>
__device__ __forceinline__ void load_stages(int stages, bool tells, Ring& ring, char* buffers, int bytes,
                                            const Tell& tell, const Copy& copy) {
  registers_release<LOADER_REGISTERS>();
  const bool first = threadIdx.x == 128 * GROUPS;
  if (tells && !first) return;
  Turn turn;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    const unsigned full = shared_address(ring.full + turn.index);
    char* const buffer = buffers + turn.index * bytes;
    barrier_wait(shared_address(ring.empty + turn.index), turn.parity ^ 1);
    if (first) tell(stage, buffer, full);
    if (!tells) {
      copy(stage, buffer);
      barrier_arrive_with_copies(full);
    }
    barrier_arrive(full);
    turn.next();
  }
  copies_commit();
  copies_wait<0>();
}

// A float's bits as TF32, without a branch.
__device__ __forceinline__ unsigned round_unless(bool rounded, float value) {
#ifndef EMULATOR
  unsigned bits = __float_as_uint(value);
  asm("{ .reg .pred rounds; setp.eq.b32 rounds, %1, 0; @rounds cvt.rna.tf32.f32 %0, %2; }"
      : "+r"(bits)
      : "r"((int)rounded), "f"(value));
  return bits;
#else
  return __float_as_uint(rounded ? value : round_tf32(value));
#endif
}

// The sums of a group of threads.
struct Sums {
  float of[ROW_TILES][4 * COLUMN_TILES];

  // Row `i` of the thread's 2 · ROW_TILES, and its first column; sum k of tile j lies in row 2·j + k / 2 % 2 and in
  // column k / 4 · 8 + k % 2 from there on. (Which of an instruction's rows is which is all the same to the product.)
  static __device__ __forceinline__ int row(int i) {
    const int first = threadIdx.x / 128 * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + i / 2 * 64;
    return first + (PAIRED_ROWS ? threadIdx.x % 32 / 4 * 2 + i % 2 : threadIdx.x % 32 / 4 + i % 2 * 8);
  }
  static __device__ __forceinline__ int first_column() { return threadIdx.x % 4 * 2; }

  // The `steps` operations of a stage, to sums that begin with them or not. `row_offsets` are the window's, of the
  // thread's rows; with `rounded` it holds TF32.
  __device__ __forceinline__ void add(const char* window, const char* operand, const Runs& runs, const int* offsets,
                                      const int (&row_offsets)[ROW_TILES][2], int steps, bool begin, bool rounded) {
    Batch first, second;
    first.read(window, offsets, row_offsets, rounded, 0, steps);
#pragma unroll 1
    for (int step = 0; step < steps; step += 2 * BATCH) {
      multiply(first, operand, runs, step, steps, begin && step == 0);
      if (step + BATCH < steps) second.read(window, offsets, row_offsets, rounded, step + BATCH, steps);
      products_wait<0>();
      pin(first.of);
      if (step + BATCH >= steps) break;
      multiply(second, operand, runs, step + BATCH, steps, false);
      if (step + 2 * BATCH < steps) first.read(window, offsets, row_offsets, rounded, step + 2 * BATCH, steps);
      products_wait<0>();
      pin(second.of);
    }
  }

 private:
  // The rows of some operations, as the cores take them (common/mma.cuh).
  struct Batch {
    unsigned of[BATCH][ROW_TILES][4];

    __device__ __forceinline__ void read(const char* window, const int* offsets, const int (&rows)[ROW_TILES][2],
                                         bool rounded, int step, int steps) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (step + i >= steps) break;
        const int* const mine = offsets + (step + i) * OPERATION + threadIdx.x % 4 * WORD;
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const Vector<int, WORD> k = *(const Vector<int, WORD>*)(mine + chunk * (OPERATION / 2));
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile) {
            unsigned* const words = of[i][tile] + 2 * chunk;
            if constexpr (PAIRED_ROWS) {
              read_pair(window + rows[tile][0], k, rounded, words);
            } else {
#pragma unroll
              for (int half = 0; half < 2; ++half) words[half] = read_word(window + rows[tile][half], k, rounded);
            }
          }
        }
      }
    }

   private:
    static __device__ __forceinline__ unsigned read_word(const char* from, const Vector<int, WORD>& k, bool rounded) {
      if constexpr (ELEMENT == 4) return round_unless(rounded, *(const float*)(from + k.value[0]));
      if constexpr (PAIRED_K) return *(const unsigned*)(from + k.value[0]);
      return *(const unsigned short*)(from + k.value[0]) | *(const unsigned short*)(from + k.value[WORD - 1]) << 16;
    }
    // The same of two rows that are neighbours in the window.
    static __device__ __forceinline__ void read_pair(const char* from, const Vector<int, WORD>& k, bool rounded,
                                                     unsigned* words) {
      if constexpr (ELEMENT == 4) {
        const Vector<float, 2> pair = *(const Vector<float, 2>*)(from + k.value[0]);
        words[0] = round_unless(rounded, pair.value[0]), words[1] = round_unless(rounded, pair.value[1]);
      } else {
        const unsigned first = *(const unsigned*)(from + k.value[0]);
        const unsigned second = *(const unsigned*)(from + k.value[WORD - 1]);
        words[0] = (first & 0xffffu) | second << 16, words[1] = first >> 16 | (second & 0xffff0000u);
      }
    }
  };

  __device__ __forceinline__ void multiply(Batch& batch, const char* operand, const Runs& runs, int step, int steps,
                                           bool begin) {
    pin(batch.of);
    products_begin();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (step + i >= steps) break;
      const int at = (step + i) * 32, within = at & (runs.bytes - 1);
      const char* const columns = operand + (at - within) * COLUMNS + within;
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
        multiply(of[tile], batch.of[i][tile], columns, runs.bytes, i > 0 || !begin);
    }
    products_commit();
  }

#ifndef EMULATOR
  static __device__ __forceinline__ void multiply(float (&sums)[4 * COLUMN_TILES], const unsigned (&rows)[4],
                                                  const char* columns, int pitch, bool add) {
    wgmma(sums, rows, describe_matrix(shared_address(columns), pitch), add);
  }
#else
  static __device__ __forceinline__ void multiply(float (&sums)[4 * COLUMN_TILES], const unsigned (&rows)[4],
                                                  const char* columns, int pitch, bool add) {
    const unsigned from = shared_address(columns) + threadIdx.x % 32 / 4 * pitch + threadIdx.x % 4 * 4;
    for (int j = 0; j < COLUMN_TILES; ++j) {
      unsigned words[2];
      for (int chunk = 0; chunk < 2; ++chunk)
        words[chunk] = *(const unsigned*)__cvta_shared_to_generic(swizzled(from + 8 * j * pitch + chunk * 16, pitch));
      for (int i = 0; i < 4; ++i) sums[4 * j + i] = add ? sums[4 * j + i] : 0;
      mma(sums + 4 * j, rows, words[0], words[1]);
    }
  }
#endif
};

// The multiplying groups' part: add(buffer) is one stage.
template <class Add>
__device__ __forceinline__ void add_stages(int stages, Ring& ring, const char* buffers, int bytes, const Add& add) {
  Turn turn;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    barrier_wait(shared_address(ring.full + turn.index), turn.parity);
    add(buffers + turn.index * bytes);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(ring.empty + turn.index));
    turn.next();
  }
}
