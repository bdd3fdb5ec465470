// Sources as runs: the elements that a cell reads at the taps of a phase along the width are contiguous,
// PADDED_CHANNELS elements for each tap, in memory order (in the forward pass taps fall with it). Rows are padded, so
// that all of them exist (steps/write_planes.cu). In the input gradient there is a plane for each residue of the stride
// along d and h, in which neighbouring cells read neighbouring rows; or, if all residues have as many taps, INNER
// residues are channels of one plane.
//
// If PADDED_CHANNELS are whole tap groups these are as in core/phase.cuh. Else taps and channels are JOINED in k: a
// group is CHUNK elements of the run at one tap along d and h; a phase's groups are numbered by these taps first.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/geometry.cuh"
#include "core/phase.cuh"

// Planes along a dimension.
__host__ __device__ constexpr int planes_of(Axis axis, int inner) {
  return INPUT_GRAD && inner == 1 ? (axis.kernel < tap_step(axis) ? axis.kernel : tap_step(axis)) : 1;
}
[[maybe_unused]] constexpr int PLANES_D = planes_of(AXIS_D, INNER_D), PLANES_H = planes_of(AXIS_H, INNER_H);
[[maybe_unused]] constexpr int RUN_TAPS = ceil_div(AXIS_W.kernel, TapsW::TAP_STEP);  // most taps of a phase

// A weight: its source channel, which may not exist, and its tap.
struct RunWeight {
  int src, tap;
};

struct RunGroup {
  int element;     // first element of the run
  int at_d, at_h;  // taps of the phase; with INNER residues, taps of a residue

  __device__ __forceinline__ RunGroup(const Phase& phase, int index) {
    const int rows = count_h(phase), taps = count_d(phase) * rows, chunk = quotient(index, 1.f / taps);
    const int tap = index - chunk * taps;
    at_d = quotient(tap, 1.f / rows), at_h = tap - at_d * rows, element = chunk * CHUNK;
  }
  static __device__ __forceinline__ int count(const Phase& phase) {
    return ceil_div(phase.w.count * PADDED_CHANNELS, CHUNK) * count_d(phase) * count_h(phase);
  }

  // The weight that element `i` of the group is multiplied by.
  __device__ __forceinline__ RunWeight weight(const Phase& phase, int i) const {
    const int at = (element + i) / PADDED_CHANNELS, channel = (element + i) % PADDED_CHANNELS;
    const int residue = channel / SRC_CHANNELS;
    if (at >= phase.w.count || residue >= INNER_D * INNER_H) return {SRC_CHANNELS, 0};
    const int d = phase.d.tap + at_d * INNER_D * TapsD::TAP_STEP + residue / INNER_H;
    const int h = phase.h.tap + at_h * INNER_H * TapsH::TAP_STEP + residue % INNER_H;
    const int w = phase.w.tap + (INPUT_GRAD ? at : phase.w.count - 1 - at) * TapsW::TAP_STEP;
    return {channel - residue * SRC_CHANNELS, (d * AXIS_H.kernel + h) * AXIS_W.kernel + w};
  }

 private:
  static __device__ __forceinline__ int count_d(const Phase& phase) { return phase.d.count / INNER_D; }
  static __device__ __forceinline__ int count_h(const Phase& phase) { return phase.h.count / INNER_H; }
};

// Source of a tap group: an element of the run, a plane, and a position relative to the cell's.
struct RunPlace {
  int element, plane, d, h, w;

  __device__ __forceinline__ RunPlace(const Phase& phase, int index) {
    int at_d, at_h;
    if (JOINED) {
      const RunGroup group(phase, index);
      element = group.element, at_d = group.at_d, at_h = group.at_h;
    } else {
      const TapGroup group(phase, index);
      const int at_w = group.tap.w / TapsW::SRC_STEP;
      element = (INPUT_GRAD ? at_w : phase.w.count - 1 - at_w) * PADDED_CHANNELS + group.channel;
      at_d = group.tap.d / TapsD::SRC_STEP, at_h = group.tap.h / TapsH::SRC_STEP;
    }
    if (INPUT_GRAD) {
      constexpr int STEP_D = INNER_D > 1 ? 1 : tap_step(AXIS_D), STEP_H = INNER_H > 1 ? 1 : tap_step(AXIS_H);
      plane = at_d % STEP_D * PLANES_H + at_h % STEP_H;
      d = at_d / STEP_D * element_step(AXIS_D), h = at_h / STEP_H * element_step(AXIS_H), w = 0;
    } else {
      plane = 0, d = phase.d.src + at_d * TapsD::SRC_STEP, h = phase.h.src + at_h * TapsH::SRC_STEP;
      w = phase.w.src + (phase.w.count - 1) * TapsW::SRC_STEP - first_offset(AXIS_W);
    }
  }
};
