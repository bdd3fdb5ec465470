// The weight gradient of any layer by TMA and wgmma. Along each dimension a tap is r + j·STEP: taps STEP apart meet
// elements of the same residue of the stride, SHIFT positions apart:
//
//   gw[cb, cp, tap] = Σ over positions k of   base[cb, k - shift(j_w)] · phased[plane(r), cp, k + shift(j_d, j_h)]
//
// Both operands are flattened (steps/flatten_positions.cu): copies of padded images with positions innermost, so that a
// shift is a distance in memory, and elements outside an image are multiplied by zero. "base" is the layer's input, and
// "phased" the gradient of its output, one copy for each residue; with stride 1 they may be SWAPPED, and taps count
// backwards. TMA boxes begin at multiples of 16 bytes, and so do rows of a padded image. So a shift along d or h moves
// the box, and for shifts along the width there are COPIES copies of the base, each shifted by another tap. With SPREAD
// every tap along the width has its own copy of the phased operand instead. A base without shifts along the width, or
// the gradient of a layer with a single tap, may be the tensor itself. Then a stage stays within one image, or one slab
// where only the phased operand pads its rows. TMA fills the rest with zeros.
//
// Index mapping. An item is CHUNK channels at one tap index: items of the base are numbered by j_w, items of the phased
// operand by the remaining indices (r, j_d, j_h). With WINDOW all j number the base and all r the phased operand, which
// is then read less often. A tile has ROW_ITEMS items of one side by COLUMN_ITEMS items of the other; MIRRORED: rows
// are items of the base. k runs over positions, split among `splits` blocks, each of which writes a partial plane
// (added by steps/transpose.cu, or reduce_splits.cu if no transpose is needed); complete sums are `narrowed` to the
// tensors' type at once. Two consumer warpgroups multiply; the lanes of one producer warp issue TMA, one box each.
// Blocks are persistent and take every gridDim-th work tile (tile of the phased side fastest, then of the base, group,
// split).
//
// Tensor-core accumulation truncates at every step. So accumulators are flushed: after `flush` stages they are added in
// float32 to the partial plane in memory; if float32 is split into two parts, after PROMOTE stages to registers.
//
// Shared memory: STAGES stages (mainloop/k_major_product.cuh).

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/pipeline.cuh"
#include "core/shared_address.cuh"
#include "core/types.cuh"
#include "mainloop/k_major_product.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(registers_suffice(CONSUMER_THREADS, CONSUMER_REGISTERS, 128, PRODUCER_REGISTERS), "too few registers");

struct Params {
  TensorMap base_box, phased_box;
  int groups, splits, work_tiles;
  int stages, slab_stages, slabs;  // all stages; stages of a slab; slabs of an image (1 if positions span all images)
  int flush;
  int again;              // whether the partial planes already hold the sums of other images
  int narrowed;           // whether sums are complete after the first flush, and stored in the tensors' type
  int column, row, slab;  // positions to the next column, row and slab of a padded image; slab 0 with several `slabs`
  int base_image, phased_image;  // the first image of a tensor that is read in place; 0 in a copy
  long long plane;               // elements of a partial plane
};

// One dimension: number of residues, taps of the first residue, and positions between taps that are STEP apart.
struct Residues {
  int count, taps, shift;
};
__host__ __device__ constexpr Residues residues(Axis axis, int step) {
  return {axis.kernel < step ? axis.kernel : step, ceil_div(axis.kernel, step), element_step(axis)};
}
constexpr int STEP_D = tap_step(AXIS_D), STEP_H = tap_step(AXIS_H);
constexpr int STEP_W = SPREAD ? AXIS_W.kernel : tap_step(AXIS_W);
constexpr Residues ALONG_D = residues(AXIS_D, STEP_D), ALONG_H = residues(AXIS_H, STEP_H);
constexpr Residues ALONG_W = residues(AXIS_W, STEP_W);
constexpr int TAPS = AXIS_D.kernel * AXIS_H.kernel * AXIS_W.kernel;
// Tap indices along d and h that number the items of each side.
constexpr int BASE_D = WINDOW_D ? ALONG_D.taps : 1, BASE_H = WINDOW_H ? ALONG_H.taps : 1;
constexpr int PHASED_D = WINDOW_D ? ALONG_D.count : AXIS_D.kernel, PHASED_H = WINDOW_H ? ALONG_H.count : AXIS_H.kernel;
static_assert(BASE_D * PHASED_D == AXIS_D.kernel && BASE_H * PHASED_H == AXIS_H.kernel, "taps that do not exist");
// Positions spanned by COPIES taps. If there are more taps this is a multiple of 16 bytes, so they reuse the copies at
// another start.
constexpr int COPIES_SHIFT = COPIES * ALONG_W.shift;
constexpr int IN_CHANNELS = SWAPPED ? PHASED_CHANNELS : BASE_CHANNELS;
constexpr int OUT_CHANNELS = SWAPPED ? BASE_CHANNELS : PHASED_CHANNELS;  // innermost in the result

constexpr int BASE_CHUNK = MIRRORED ? ROW_CHUNK : COLUMN_CHUNK, PHASED_CHUNK = MIRRORED ? COLUMN_CHUNK : ROW_CHUNK;
constexpr int BASE_ITEMS = MIRRORED ? ROW_ITEMS : COLUMN_ITEMS, PHASED_ITEMS = MIRRORED ? COLUMN_ITEMS : ROW_ITEMS;
constexpr int BASE_CHUNKS = ceil_div(BASE_CHANNELS, BASE_CHUNK);
constexpr int PHASED_CHUNKS = ceil_div(PHASED_CHANNELS, PHASED_CHUNK);
constexpr int DEPTH = PITCH / (int)sizeof(scalar_t);
static_assert(ROW_ITEMS * ROW_CHUNK <= ROWS && COLUMN_ITEMS * COLUMN_CHUNK == COLUMNS, "a tile is items");

// Tiles. The last j_w may exist for some residues only; its tiles have fewer items on the phased side.
constexpr int LAST_RESIDUES = AXIS_W.kernel - (ALONG_W.taps - 1) * STEP_W;
constexpr int ITEMS_OF_TAP = BASE_D * BASE_H * BASE_CHUNKS;  // items of the base with the same j_w
constexpr int BASE_TILES = ceil_div(ALONG_W.taps * ITEMS_OF_TAP, BASE_ITEMS);
constexpr int WHOLE_TILES =  // tiles of the base whose j_w exists for all residues
    LAST_RESIDUES >= ALONG_W.count ? BASE_TILES : ceil_div((ALONG_W.taps - 1) * ITEMS_OF_TAP, BASE_ITEMS);
__host__ __device__ constexpr int phased_items(int residues_w) {
  return residues_w * PHASED_D * PHASED_H * PHASED_CHUNKS;
}
constexpr int MANY = ceil_div(phased_items(ALONG_W.count), PHASED_ITEMS);
constexpr int FEW = ceil_div(phased_items(LAST_RESIDUES < ALONG_W.count ? LAST_RESIDUES : ALONG_W.count), PHASED_ITEMS);
constexpr int TILES = WHOLE_TILES * MANY + (BASE_TILES - WHOLE_TILES) * FEW;

// A work tile: the first items of both sides, and its stages.
struct WorkTile {
  int base, phased, group, split, first, stages;

  __device__ __forceinline__ WorkTile(const Params& params, int index) {
    const int tile = index % TILES;
    index /= TILES;
    const bool whole = tile < WHOLE_TILES * MANY;
    const int rest = tile - WHOLE_TILES * MANY;
    base = (whole ? tile / MANY : WHOLE_TILES + rest / FEW) * BASE_ITEMS;
    phased = (whole ? tile % MANY : rest % FEW) * PHASED_ITEMS;
    group = index % params.groups, split = index / params.groups;
    const int each = ceil_div(params.stages, params.splits);
    first = split * each, stages = max(0, min(each, params.stages - first));
  }
};

// CHUNK channels of a group, the first of which is `channel`, at one tap index of their side.
struct Item {
  int channel, d, h, w;
  bool exists;
};
// d, h, w: j along each dimension.
struct BaseItem : Item {
  __device__ __forceinline__ explicit BaseItem(int index) {
    channel = index % BASE_CHUNKS * BASE_CHUNK;
    h = index / BASE_CHUNKS % BASE_H, d = index / (BASE_CHUNKS * BASE_H) % BASE_D, w = index / ITEMS_OF_TAP;
    exists = w < ALONG_W.taps;
  }
};
// w: the residue along the width; d, h: the tap, or with WINDOW its residue.
struct PhasedItem : Item {
  __device__ __forceinline__ explicit PhasedItem(int index) {
    channel = index % PHASED_CHUNKS * PHASED_CHUNK;
    const int tap = index / PHASED_CHUNKS;
    h = tap % PHASED_H, d = tap / PHASED_H % PHASED_D, w = tap / (PHASED_H * PHASED_D);
    exists = w < ALONG_W.count;
  }
};
// Distance in positions for a tap index difference of (d, h).
__device__ __forceinline__ int apart(const Params& params, int d, int h) {
  return d * ALONG_D.shift * params.slab + h * ALONG_H.shift * params.row;
}

// Origin of a box: position and slab relative to those of its stage, channel, and copy of the operand (`plane`).
struct Box {
  int position, channel, plane, slab;
  unsigned offset;  // in the stage's shared memory
  bool exists, base;

  __device__ __forceinline__ Box(const Params& params, const WorkTile& work, int index) {
    constexpr int ITEMS = ROW_ITEMS + COLUMN_ITEMS;
    const int part = index / ITEMS, in_part = index % ITEMS;
    const bool is_row = in_part < ROW_ITEMS;
    const int item = is_row ? in_part : in_part - ROW_ITEMS;
    offset = is_row ? part * A_BYTES + item * (ROW_CHUNK * PITCH)
                    : PARTS * A_BYTES + part * B_BYTES + item * (COLUMN_CHUNK * PITCH);
    base = is_row == MIRRORED;
    exists = index < PARTS * ITEMS;
    if (base) {
      const BaseItem at(work.base + item);
      position = -(at.w / COPIES * COPIES_SHIFT * params.column) - apart(params, at.d, at.h);
      channel = work.group * BASE_CHANNELS + at.channel;
      plane = at.w % COPIES * PARTS + part, slab = -at.d * ALONG_D.shift, exists = exists && at.exists;
    } else {
      const PhasedItem at(work.phased + item);
      position = apart(params, at.d / STEP_D, at.h / STEP_H), slab = at.d / STEP_D * ALONG_D.shift;
      channel = work.group * PHASED_CHANNELS + at.channel;
      const int residue_d = at.d % STEP_D, residue_h = at.h % STEP_H;
      plane = ((residue_d * ALONG_H.count + residue_h) * ALONG_W.count + at.w) * PARTS + part;
      exists = exists && at.exists;
    }
    if (params.slabs == 1) slab = 0;  // `position` includes it
  }
};
constexpr int BOXES_OF_LANE = ceil_div(PARTS * (ROW_ITEMS + COLUMN_ITEMS), 32);

// Run by one warp: loads the boxes of all stages of the block's work tiles.
__device__ __forceinline__ void load_items(const Params& params, const scalar_t* x, const scalar_t* grad,
                                           PipelineBarriers<STAGES>& ring, const unsigned char* buffers) {
  griddepcontrol_wait();
  PipelineState<STAGES> state;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
    const WorkTile work(params, index);
    int places[BOXES_OF_LANE][4];
    unsigned offsets[BOXES_OF_LANE];
    bool exist[BOXES_OF_LANE], of_base[BOXES_OF_LANE];
#pragma unroll
    for (int i = 0; i < BOXES_OF_LANE; ++i) {
      const Box box(params, work, threadIdx.x % 32 + 32 * i);
      places[i][0] = box.position, places[i][1] = box.channel, places[i][2] = box.plane, places[i][3] = box.slab;
      offsets[i] = box.offset, exist[i] = box.exists, of_base[i] = box.base;
    }
    const int outer = work.first / params.slab_stages;
    int image = outer / params.slabs, slab = outer - image * params.slabs;
    int in_slab = work.first - outer * params.slab_stages;
#pragma unroll 1
    for (int stage = 0; stage < work.stages; ++stage) {
      const unsigned to = shared_address(buffers + state.index * STAGE_BYTES);
      const unsigned full = shared_address(ring.full + state.index);
      mbarrier_wait(shared_address(ring.empty + state.index), state.parity ^ 1);
#pragma unroll
      for (int i = 0; i < BOXES_OF_LANE; ++i) {
        const int from[5] = {places[i][0] + in_slab * DEPTH, places[i][1], places[i][2], places[i][3] + slab,
                             image + (of_base[i] ? params.base_image : params.phased_image)};
        if (exist[i] && of_base[i])
          tma_load_box(to + offsets[i], params.base_box, SWAPPED ? grad : x, from, BASE_CHUNK * PITCH, full);
        if (exist[i] && !of_base[i])
          tma_load_box(to + offsets[i], params.phased_box, SWAPPED ? x : grad, from, PHASED_CHUNK * PITCH, full);
      }
      mbarrier_arrive(full);
      state.next();
      if (++in_slab == params.slab_stages) {
        in_slab = 0;
        if (++slab == params.slabs) slab = 0, ++image;
      }
    }
  }
}

// Where a row's or a column's sums are stored: its share of the element in the group's weights, and of the tap along w.
// tap_w is AXIS_W.kernel for a row or column that does not exist.
struct Place {
  int element, tap_w;

  __device__ __forceinline__ Place(int item, int in_item, bool base) {
    constexpr int ONE_TAP = SWAPPED ? -OUT_CHANNELS : OUT_CHANNELS;
    const Item at = base ? (Item)BaseItem(item) : (Item)PhasedItem(item);
    const int channel = at.channel + in_item, steps[3] = {base ? STEP_D : 1, base ? STEP_H : 1, base ? STEP_W : 1};
    const bool exists = at.exists && channel < (base ? BASE_CHANNELS : PHASED_CHANNELS);
    tap_w = exists ? at.w * steps[2] : AXIS_W.kernel;
    element = channel * (base == SWAPPED ? 1 : TAPS * OUT_CHANNELS) +
              ((at.d * steps[0] * AXIS_H.kernel + at.h * steps[1]) * AXIS_W.kernel + tap_w) * ONE_TAP;
  }
};
__device__ __forceinline__ Place row_place(const WorkTile& work, int row) {
  const int item = row / ROW_CHUNK;
  Place found((MIRRORED ? work.base : work.phased) + item, row % ROW_CHUNK, MIRRORED);
  if (item >= ROW_ITEMS) found.tap_w = AXIS_W.kernel;
  return found;
}
// Place of a column; `eight` is known at compile time. A chunk is a multiple of eight columns, so eight columns belong
// to one item.
__device__ __forceinline__ Place column_place(int first_item, int eight, int column) {
  return Place(first_item + 8 * eight / COLUMN_CHUNK, 8 * eight % COLUMN_CHUNK + column, !MIRRORED);
}

// Two neighbouring columns are neighbouring output channels.
constexpr bool PAIRS = MIRRORED != SWAPPED && OUT_CHANNELS % 2 == 0;
constexpr int TOGETHER = PAIRS ? 2 : 1;  // columns of a store
typedef Vector<float, TOGETHER> Stored;
typedef Vector<scalar_t, TOGETHER> Narrowed;
constexpr int STORES = 2 / TOGETHER;    // for two columns
constexpr int AT_ONCE = 4 / ROW_TILES;  // eights of columns whose earlier sums are loaded together
constexpr int OF_ROW = AT_ONCE * STORES, ROWS_OF_THREAD = 2 * ROW_TILES;

// Stores the sums of a work tile; `again`: adds them to the sums that earlier stages or images left.
__device__ __forceinline__ void store(const Params& params, const WorkTile& work, const Sums& sums, void* partial,
                                      bool again) {
  const long long from = work.split * params.plane + (long long)work.group * (IN_CHANNELS * TAPS * OUT_CHANNELS) +
                         (SWAPPED ? (TAPS - 1) * OUT_CHANNELS : 0);
  float* const to = (float*)partial + from;
  int elements[ROWS_OF_THREAD], taps[ROWS_OF_THREAD];
#pragma unroll
  for (int i = 0; i < ROWS_OF_THREAD; ++i) {
    const Place row = row_place(work, Sums::row(i));
    elements[i] = row.element, taps[i] = row.tap_w;
  }
#pragma unroll
  for (int first = 0; first < COLUMNS / 8; first += AT_ONCE) {
    // Opaque, so that the compiler does not compute all columns' places at once, which would spill.
    const int first_item = (int)opaque(MIRRORED ? work.phased : work.base);
    int places[OF_ROW], at_taps[OF_ROW];
#pragma unroll
    for (int j = 0; j < OF_ROW; ++j) {
      const int eight = first + j / STORES;
      const Place place = column_place(first_item, eight, fragment_column() + j % STORES);
      places[j] = place.element, at_taps[j] = eight < COLUMNS / 8 ? place.tap_w : AXIS_W.kernel;
    }
    Stored before[ROWS_OF_THREAD * OF_ROW] = {};
    if (again) {
#pragma unroll
      for (int i = 0; i < ROWS_OF_THREAD; ++i)
#pragma unroll
        for (int j = 0; j < OF_ROW; ++j)
          if (taps[i] + at_taps[j] < AXIS_W.kernel)
            before[i * OF_ROW + j] = *(const Stored*)(to + elements[i] + places[j]);
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; ++i)
#pragma unroll
      for (int j = 0; j < OF_ROW; ++j) {
        const int tile = first + j / STORES;
        if (tile >= COLUMNS / 8 || taps[i] + at_taps[j] >= AXIS_W.kernel) continue;
        const float* const found = sums.of[i / 2] + 4 * tile + i % 2 * 2 + j % STORES;
        Stored& sum = before[i * OF_ROW + j];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) sum.value[k] += found[k];
        if (sizeof(scalar_t) == 2 && params.narrowed) {
          Narrowed result;
#pragma unroll
          for (int k = 0; k < TOGETHER; ++k) narrow(sum.value[k], result.value[k]);
          *(Narrowed*)((scalar_t*)partial + from + elements[i] + places[j]) = result;
        } else {
          *(Stored*)(to + elements[i] + places[j]) = sum;
        }
      }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tap_gemm_wgrad_tma(const scalar_t* __restrict__ x, const scalar_t* __restrict__ grad, void* __restrict__ partial,
                       const __grid_constant__ Params params) {
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ __align__(8) PipelineBarriers<STAGES> ring;
  if (threadIdx.x == 0) ring.init(32, CONSUMER_THREADS / 32);
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < CONSUMER_THREADS + 32) load_items(params, x, grad, ring, shared_memory);
    return;
  }
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  PipelineState<STAGES> state;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
    const WorkTile work(params, index);
    int stage = 0;
#pragma unroll 1
    do {
      const int count = min(params.flush, work.stages - stage);
      Sums sums, total;
      if (PROMOTE > 0) {
        total.clear();
#pragma unroll 1
        for (int i = 0; i < count; i += PROMOTE) {
          sums.multiply(min(PROMOTE, count - i), ring, state, shared_memory);
          total.take(sums, i == 0);
        }
      } else {
        sums.multiply(count, ring, state, shared_memory);
        if (count == 0) sums.clear();  // an empty batch
      }
      store(params, work, PROMOTE > 0 ? total : sums, partial, stage > 0 || params.again);
      stage += count;
    } while (stage < work.stages);
  }
}
