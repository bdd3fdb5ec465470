// Products of matrices whose operands the copy engine brings in boxes, and the cores take as they come:
//
//     sum[row, column]  +=  Σ_k  A[row, k] · B[k, column]
//
// Channels are innermost. Where k are channels, a row of A, or a column of B, is a row of a box. Where k are positions
// (TRANSPOSED), it is an element of all rows of a box, and as many as lie in a box's row share it: ROW_PITCH bytes of
// A, COLUMN_PITCH of B. The engine changes the order of 16-byte chunks within a row (swizzling), which cores or threads
// undo.
//
// The instruction is Hopper's, but for transposed operands of 32 bits, which it does not take: those pass registers.
//
// Index mapping. Two groups of 128 threads multiply, each ROW_TILES tiles of 64 rows by COLUMNS columns: they have
// other rows of the same columns, or with ROW_GROUPS 1 other columns of the same rows. Of LOADERS threads more some
// have the engine bring what comes next. A stage is STEPS operations deep.

constexpr int ELEMENT = sizeof(scalar_t);
constexpr int OPERATION = 32 / ELEMENT;  // k of one instruction
constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + LOADERS;
constexpr int GROUP_ROWS = 64 * ROW_TILES;

// Registers change hands where a whole group loads, which needs few; else each thread has its share.
constexpr int LOADER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;
static_assert(LOADERS == 32 || registers_suffice(MULTIPLIERS, MULTIPLIER_REGISTERS, LOADERS, LOADER_REGISTERS),
              "too few registers");
template <bool MULTIPLIES>
__device__ __forceinline__ void registers_change() {
  if constexpr (LOADERS == 128 && MULTIPLIES) registers_claim<MULTIPLIER_REGISTERS>();
  if constexpr (LOADERS == 128 && !MULTIPLIES) registers_release<LOADER_REGISTERS>();
}

// A transposed operand: bytes of a box, and rows or columns in it.
__host__ __device__ constexpr int box_bytes(int pitch) { return STEPS * OPERATION * pitch; }
constexpr int ROW_BOX = ROW_PITCH / ELEMENT, COLUMN_BOX = COLUMN_PITCH / ELEMENT;
// Bytes of a tile of rows, of either operand, and of a stage.
constexpr int A_TILE = TRANSPOSED ? 64 / ROW_BOX * box_bytes(ROW_PITCH) : 64 * ROW_PITCH;
constexpr int A_BYTES = ROW_GROUPS * ROW_TILES * A_TILE;
constexpr int B_GROUP = TRANSPOSED ? COLUMNS / COLUMN_BOX * box_bytes(COLUMN_PITCH) : COLUMNS * COLUMN_PITCH;
constexpr int B_BYTES = 2 / ROW_GROUPS * B_GROUP;
constexpr int STAGE_BYTES = ceil_div(A_BYTES + B_BYTES, 1024) * 1024;
static_assert(TRANSPOSED ? COLUMNS % COLUMN_BOX == 0 : ROW_PITCH == 32 * STEPS && COLUMN_PITCH == 32 * STEPS,
              "operands are whole boxes, or whole operations deep");

// The sums of a thread: number i of a tile lies in row `row(tile, i)` of the block's, and of the group's in column
// i / 4 · 8 + lane % 4 · 2 + i % 2.
struct Sums {
  float of[ROW_TILES][COLUMNS / 2];

  static __device__ __forceinline__ int row(int tile, int i) {
    const int group = ROW_GROUPS == 1 ? 0 : threadIdx.x / 128 * GROUP_ROWS;
    return group + tile * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) of[tile][i] = 0;
  }
  // Adds others, or begins with them.
  __device__ __forceinline__ void take(const Sums& others, bool begin) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) of[tile][i] = others.of[tile][i] + (begin ? 0 : of[tile][i]);
  }

  // The products of `stages` stages from `turn` on, to sums that begin with them.
  __device__ __forceinline__ void multiply(int stages, Ring& ring, Turn& turn, const unsigned char* buffers) {
    int before = 0;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      barrier_wait(shared_address(ring.full + turn.index), turn.parity);
      const unsigned char* const a = buffers + turn.index * STAGE_BYTES;
      const int group = threadIdx.x / 128;
      add_stage(a + (ROW_GROUPS == 1 ? 0 : group * ROW_TILES * A_TILE),
                a + A_BYTES + (ROW_GROUPS == 1 ? group * B_GROUP : 0), stage > 0);
      if (stage > 0) release(ring, before);
      before = turn.index;
      turn.next();
    }
    products_wait<0>();
    pin(of);
    if (stages > 0) release(ring, before);
  }

 private:
  // The buffer may be filled again.
  static __device__ __forceinline__ void release(Ring& ring, int index) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(ring.empty + index));
  }

#if BY_THREADS
  // Adds a stage, or begins with it. Of eight positions a lane takes two that are neighbours, so that those of a warp
  // lie in different banks: which k an operation calls by which name is all the same to the product.
  __device__ __forceinline__ void add_stage(const unsigned char* a, const unsigned char* b, bool more) {
    if (!more) clear();
    const int strip = threadIdx.x / 32 % 4 * 16;  // the warp's rows of a tile
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      unsigned rows[ROW_TILES][4];
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          rows[tile][i] = element<ROW_PITCH>(a + tile * A_TILE, strip + i % 2 * 8, step * OPERATION + i / 2);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const unsigned first = element<COLUMN_PITCH>(b, 8 * j, step * OPERATION);
        const unsigned second = element<COLUMN_PITCH>(b, 8 * j, step * OPERATION + 1);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) mma(of[tile] + 4 * j, rows[tile], first, second);
      }
    }
    __syncwarp();
  }
  // The lane's row or column of those from `i` on, at its k of those from `k` on.
  template <int PITCH>
  static __device__ __forceinline__ unsigned element(const unsigned char* matrix, int i, int k) {
    const int lane = threadIdx.x % 32, box = PITCH / ELEMENT;
    const int within = lane % 4 * 2 * PITCH + lane / 4 * ELEMENT + (k & 1) * PITCH, row = i % box * ELEMENT;
    const int at = within ^ row ^ (within >> 7 & (PITCH / 16 - 1)) << 4;  // neither carries into the other
    return *(const unsigned*)(matrix + i / box * box_bytes(PITCH) + (k & ~1) * PITCH + at);
  }
#else
  // Adds a stage, or begins with it, when those before have come to an end.
  __device__ __forceinline__ void add_stage(const unsigned char* a, const unsigned char* b, bool more) {
    constexpr int ROW_STEP = TRANSPOSED ? OPERATION * ROW_PITCH : 32;
    constexpr int COLUMN_STEP = TRANSPOSED ? OPERATION * COLUMN_PITCH : 32;
    const unsigned rows = shared_address(a), columns = shared_address(b);
    products_begin();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
        add_product(of[tile], rows + tile * A_TILE + step * ROW_STEP, columns + step * COLUMN_STEP, more || step > 0);
    products_commit();
    products_wait<1>();
  }
#ifndef EMULATOR
  static __device__ __forceinline__ void add_product(float (&sums)[COLUMNS / 2], unsigned a, unsigned b, bool add) {
    wgmma(sums, describe_matrix<ROW_PITCH>(a, TRANSPOSED ? box_bytes(ROW_PITCH) : 0),
          describe_matrix<COLUMN_PITCH>(b, TRANSPOSED ? box_bytes(COLUMN_PITCH) : 0), add);
  }
#else
  // Row or column i of a matrix at element k.
  static float element(unsigned matrix, int i, int k, int pitch) {
    const int box = pitch / ELEMENT;
    const unsigned at =
        TRANSPOSED ? i / box * box_bytes(pitch) + k * pitch + i % box * ELEMENT : i * pitch + k * ELEMENT;
    return operand(*(const scalar_t*)__cvta_shared_to_generic(swizzled(matrix + at, pitch)));
  }
  static void add_product(float (&sums)[COLUMNS / 2], unsigned a, unsigned b, bool add) {
    float* const to = sums;
    const int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    emulator::later(emulator::Async::products, [=, first_column = threadIdx.x % 4 * 2] {
      for (int i = 0; i < COLUMNS / 2; ++i) {
        float sum = add ? to[i] : 0;
        for (int k = 0; k < OPERATION; ++k)
          sum += element(a, first + i / 2 % 2 * 8, k, ROW_PITCH) *
                 element(b, first_column + i / 4 * 8 + i % 2, k, COLUMN_PITCH);
        to[i] = sum;
      }
    });
  }
#endif
#endif
};

// A row's two sums of each of two tiles of eight columns, in half precision. Two lanes exchange halves: each has four
// neighbours then, of one of both tiles, from column `first_exchanged()` of the sixteen on. All lanes are here.
__device__ __forceinline__ Vector<unsigned, 2> exchanged(const float* first, const float* second) {
  Vector<scalar_t, 2> words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) narrow(first[i], words[0].value[i]), narrow(second[i], words[1].value[i]);
  const unsigned mine[2] = {*(const unsigned*)&words[0], *(const unsigned*)&words[1]};
  const bool odd = threadIdx.x % 2;
  const unsigned other = __shfl_xor_sync(~0u, odd ? mine[0] : mine[1], 1);
  return {odd ? other : mine[0], odd ? mine[1] : other};
}
__device__ __forceinline__ int first_exchanged() { return threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4; }
