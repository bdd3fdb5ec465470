// One phase of the destination: the taps that meet it, along each dimension an arithmetic progression (core/taps.cuh).
// The input gradient has one phase, which all taps meet.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/divisor.cuh"
#include "core/geometry.cuh"
#include "core/taps.cuh"

constexpr int PHASES_H = dst_cell(AXIS_H), PHASES_W = dst_cell(AXIS_W);
constexpr int PHASES = dst_cell(AXIS_D) * PHASES_H * PHASES_W;

// The quotient of two integers, the first below 2^21, from the reciprocal of the second.
__device__ __forceinline__ int quotient(int number, float reciprocal) { return (int)((number + 0.5f) * reciprocal); }

// A phase along one dimension.
template <class T, int KERNEL>
struct PhaseAxis {
  int place;  // the phase's element in a cell
  int tap;    // first tap
  int src;    // source element that cell 0 reads at the first tap
  int count;  // taps
  float per_count;

  __device__ __forceinline__ explicit PhaseAxis(int phase) : place(phase) {
    const Progression first = T::at(phase);
    tap = first.tap, src = first.src;
    count = tap < KERNEL ? (KERNEL - tap + T::TAP_STEP - 1) / T::TAP_STEP : 0;
    per_count = 1.f / count;
  }

  // Keeps only the taps that read any of `size` source elements, given that the first tap reads positions `first` to
  // `last`. Returns how many leading taps are dropped.
  __device__ __forceinline__ int keep_met(int first, int last, int size) {
    if (count == 0) return 0;
    constexpr bool FALLS = T::SRC_STEP < 0;
    constexpr int STEP = FALLS ? -T::SRC_STEP : T::SRC_STEP;
    const int before = FALLS ? first - (size - 1) : -last, behind = FALLS ? last : size - 1 - first;
    const int skipped = before > 0 ? ceil_div(before, STEP) : 0;
    count = max(0, min(count, behind < 0 ? 0 : behind / STEP + 1) - skipped);
    tap += skipped * T::TAP_STEP, src += skipped * T::SRC_STEP;
    per_count = 1.f / count;
    return skipped;
  }
};

struct Phase {
  PhaseAxis<TapsD, AXIS_D.kernel> d;
  PhaseAxis<TapsH, AXIS_H.kernel> h;
  PhaseAxis<TapsW, AXIS_W.kernel> w;
  int taps;
  float per_taps;

  __device__ __forceinline__ explicit Phase(int index)
      : d(index / (PHASES_H * PHASES_W)), h(index / PHASES_W % PHASES_H), w(index % PHASES_W) {
    multiply_counts();
  }
  __device__ __forceinline__ void multiply_counts() {
    taps = d.count * h.count * w.count;
    per_taps = 1.f / taps;
  }
};

// A tap of a phase: its index in the weight, and the offset of its source element from the first tap's.
struct PhaseTap {
  int tap;
  int d, h, w;

  __device__ __forceinline__ PhaseTap(const Phase& phase, int index) {
    const int row = quotient(index, phase.w.per_count), slab = quotient(row, phase.h.per_count);
    const int at_w = index - row * phase.w.count, at_h = row - slab * phase.h.count;
    d = slab * TapsD::SRC_STEP, h = at_h * TapsH::SRC_STEP, w = at_w * TapsW::SRC_STEP;
    tap = ((phase.d.tap + slab * TapsD::TAP_STEP) * AXIS_H.kernel + phase.h.tap + at_h * TapsH::TAP_STEP) *
              AXIS_W.kernel +
          phase.w.tap + at_w * TapsW::TAP_STEP;
  }
};

// A tap group: CHUNK source channels at one tap. A phase's groups are numbered by taps first, then by channels, so that
// neighbouring groups read neighbouring source elements.
constexpr int PIECE = 16 / (int)sizeof(scalar_t);  // elements of one copy
[[maybe_unused]] constexpr int CHUNKS = ceil_div(SRC_CHANNELS, CHUNK);
struct TapGroup {
  int channel;  // the first
  PhaseTap tap;

  __device__ __forceinline__ TapGroup(const Phase& phase, int index)
      : TapGroup(phase, index, quotient(index, phase.per_taps)) {}

 private:
  __device__ __forceinline__ TapGroup(const Phase& phase, int index, int chunk)
      : channel(chunk * CHUNK), tap(phase, index - chunk * phase.taps) {}
};

// The source element that a cell reads at the first tap.
struct CellSource {
  int d, h, w;  // d is far outside if the cell does not exist
  int pieces;   // its offset from the tensor's first element, in PIECE elements

  __device__ __forceinline__ CellSource() {}
  __device__ __forceinline__ CellSource(const Tensor5& t, const Phase& phase, const int (&cell)[4], bool exists)
      : d(cell[1] * src_cell(AXIS_D) + phase.d.src),
        h(cell[2] * src_cell(AXIS_H) + phase.h.src),
        w(cell[3] * src_cell(AXIS_W) + phase.w.src) {
    pieces = (int)((cell[0] * t.stride[0] + d * t.stride[2] + h * t.stride[3] + w * t.stride[4]) / PIECE);
    if (!exists) d = -(1 << 30);
  }

  __device__ __forceinline__ bool meets(const Tensor5& t, int by_d, int by_h, int by_w) const {
    return (unsigned)(d + by_d) < (unsigned)t.size[0] && (unsigned)(h + by_h) < (unsigned)t.size[1] &&
           (unsigned)(w + by_w) < (unsigned)t.size[2];
  }
};

// Offset, in pieces, from the first tap's source element to that of another tap.
__device__ __forceinline__ int pieces_to(const Tensor5& t, const PhaseTap& tap) {
  return (int)((tap.d * t.stride[2] + tap.h * t.stride[3] + tap.w * t.stride[4]) / PIECE);
}

// The cell with number `index` among those of all images.
__device__ __forceinline__ void cell_at(const Divisor (&cells)[3], int index, int (&cell)[4]) {
  const int row = index / cells[2], slab = row / cells[1];
  cell[3] = index - row * cells[2].value, cell[2] = row - slab * cells[1].value;
  cell[0] = slab / cells[0], cell[1] = slab - cell[0] * cells[0].value;
}

// The destination element of a cell; -1 for none.
__device__ __forceinline__ long long dst_element(const Tensor5& t, const Phase& phase, const int (&cell)[4],
                                                 bool exists) {
  const int d = cell[1] * dst_cell(AXIS_D) + phase.d.place, h = cell[2] * dst_cell(AXIS_H) + phase.h.place;
  const int w = cell[3] * dst_cell(AXIS_W) + phase.w.place;
  if (!exists || d >= t.size[0] || h >= t.size[1] || w >= t.size[2]) return -1;
  return cell[0] * t.stride[0] + d * t.stride[2] + h * t.stride[3] + w * t.stride[4];
}
