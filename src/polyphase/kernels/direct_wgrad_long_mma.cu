// direct_wgrad_long on tensor cores, for half types: the output gradient goes from global memory to fragments.
//
//   gw[ci, co, j·stride + r] = Σ over batch and positions y of  x[n, ci, y - j] · g[n, co, y·stride + r - padding]
//
// Index mapping. Columns and steps are those of direct_wgrad_long, a column of eight neighbouring r. A warp owns eight
// columns for IN_HELD input channels at TAPS_HELD neighbouring j, which are the rows of ROW_TILES tiles of 16. Element
// v of all eight columns is one tile of mma.sync: lane / 4 is a column, and a lane has four neighbouring positions of
// each 16 of a step, whose order along k does not matter as long as both operands have the same. So a lane loads 16
// bytes of g at each of its positions, a step ahead; byte permutes of two positions make a word of each element's tile.
// A block has LANES columns, of one warp each eight, and WALKERS warps for each, which take steps in turns.
//
// x comes from the L1 cache, element by element, zeros beside a row. Sums of tensor cores end after `flush` steps, and
// are added in float32 to what the block has stored; walkers' sums are added in order through shared memory, a row tile
// at a time. Splits leave planes, which steps/reduce_splits.cu adds up.

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/types.cuh"
#include "operand/stride_columns.cuh"
#include "mainloop/accumulators.cuh"
#include "ptx/mma.cuh"

constexpr int COLUMN_WARPS = LANES / 8, THREADS = 32 * COLUMN_WARPS * WALKERS;
constexpr int CHUNKS = POSITIONS / 16;
constexpr int ROWS = IN_HELD * TAPS_HELD;
constexpr int PITCH = 8 * VECTOR + 4;  // shared sums of a row of a warp
static_assert(sizeof(scalar_t) == 2 && VECTOR == 8 && LANES % 8 == 0 && POSITIONS % 16 == 0, "fragments are whole");
static_assert(ROWS <= 16 * ROW_TILES, "a row for each input channel and j");

// The rows of x that a lane has: where each lies, and its j. A row that does not exist has a j beyond every position.
struct InputRows {
  long long offset[ROW_TILES][2];
  int tap[ROW_TILES][2];

  __device__ __forceinline__ InputRows(const Params& params, int first_in) {
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      const int row = fragment_row() + 8 * i, in = row / TAPS_HELD, j = row % TAPS_HELD;
      const bool exists = row < ROWS && first_in + in < IN_CHANNELS;
      offset[i / 2][i % 2] = exists ? in * params.x.stride[1] - (long long)j * X_PIXEL : 0;
      tap[i / 2][i % 2] = exists ? j : 1 << 30;
    }
  }
  // The element of position `at` of the rows of g.
  __device__ __forceinline__ scalar_t element(const scalar_t* x, int tile, int half, int at, int width) const {
    const bool exists = (unsigned)(at - tap[tile][half]) < (unsigned)width;
    return exists ? read(x + offset[tile][half] + (long long)at * X_PIXEL) : zero<scalar_t>();
  }
};

// What a lane loads for a step. It stays as it was loaded until it is used: nothing waits for it before.
struct Loaded {
  Vector<unsigned, 4> g[CHUNKS][4];
  scalar_t x[CHUNKS][ROW_TILES][4][2];  // two neighbouring positions of each word of a fragment

  __device__ __forceinline__ void load(const Params& params, const scalar_t* grad, const Column& at, int column,
                                       const scalar_t* input, const InputRows& input_rows, int step) {
    const Rows rows(params, grad, at, step);
    const int first = rows.first + threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int begin = column + (first + 16 * i + j) * AXIS_W.stride;
        const bool exists = at.channel < OUT_CHANNELS && rows.exists && (unsigned)begin < (unsigned)params.g.size[2];
        g[i][j] = exists ? *(const Vector<unsigned, 4>*)(rows.grad + begin) : Vector<unsigned, 4>{};
      }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < 8 * ROW_TILES; ++j) {
        const int word = j / 2 % 4;
        x[i][j / 8][word][j % 2] = input_rows.element(input + rows.image, j / 8, word % 2,
                                                      first + 16 * i + word / 2 * 2 + j % 2, params.x.size[2]);
      }
  }
};

struct Sums : Accumulators<ROW_TILES * VECTOR, 4> {
  __device__ __forceinline__ void add(const Loaded& step) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      unsigned a[ROW_TILES][4];
#pragma unroll
      for (int j = 0; j < 4 * ROW_TILES; ++j) {
        const scalar_t(&pair)[2] = step.x[i][j / 4][j % 4];
        a[j / 4][j % 4] = pair[0].bits | (unsigned)pair[1].bits << 16;
      }
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        const unsigned order = v % 2 ? 0x7632 : 0x5410;
        const unsigned first = __byte_perm(step.g[i][0].value[v / 2], step.g[i][1].value[v / 2], order);
        const unsigned second = __byte_perm(step.g[i][2].value[v / 2], step.g[i][3].value[v / 2], order);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) mma<scalar_t>(of[tile * VECTOR + v], a[tile], first, second);
      }
    }
  }

  // Adds up the walkers' sums and stores them, or adds them to what is there: `again`. `plane` is the group's.
  __device__ __forceinline__ void store(float* shared, float* plane, const Block& block, bool again) const {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
      float* const own = shared + threadIdx.x / 32 * (16 * PITCH);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
          own[(fragment_row() + i / 2 * 8) * PITCH + (fragment_column() + i % 2) * VECTOR + v] =
              of[tile * VECTOR + v][i];
      __syncthreads();
#pragma unroll 1
      for (int result = threadIdx.x; result < COLUMN_WARPS * 16 * 8 * VECTOR; result += THREADS) {
        const int element = result % (8 * VECTOR), in_tile = result / (8 * VECTOR) % 16;
        const int warp = result / (16 * 8 * VECTOR), row = tile * 16 + in_tile;
        const Column at(block.column + warp * 8 + element / VECTOR);
        const long long to = at.weight(block.in + row / TAPS_HELD, element % VECTOR, block.tap + row % TAPS_HELD);
        if (row >= ROWS || to < 0) continue;
        const float* const from = shared + (warp * 16 + in_tile) * PITCH + element;
        float total = from[0];
#pragma unroll
        for (int walker = 1; walker < WALKERS; ++walker) total += from[walker * (COLUMN_WARPS * 16 * PITCH)];
        plane[to] = again ? plane[to] + total : total;
      }
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_wgrad_long_mma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, float* partial,
                          const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Block block(params);
  const int warp = threadIdx.x / 32, walker = warp / COLUMN_WARPS;
  const Column at(block.column + warp % COLUMN_WARPS * 8 + fragment_row());
  const int column = go_to(params, block, at, x, grad, partial);
  const InputRows rows(params, block.in);

  int first = block.split * params.split_length;
  const int end = min(first + params.split_length, params.steps);
  bool again = false;
#pragma unroll 1
  do {
    Sums sums;
    sums.clear();
    const int until = min(first + params.flush, end);
    Loaded one, other;  // alternating: a copy would wait for the loads
    auto load = [&](Loaded& to, int step) {
      if (step < until) to.load(params, grad, at, column, x, rows, step);
    };
    load(one, first + walker);
#pragma unroll 1
    for (int step = first + walker; step < until; step += 2 * WALKERS) {
      load(other, step + WALKERS);
      sums.add(one);
      load(one, step + 2 * WALKERS);
      if (step + WALKERS < until) sums.add(other);
    }
    sums.store((float*)shared_memory, partial, block, again);
    first = until, again = true;
  } while (first < end);
}
