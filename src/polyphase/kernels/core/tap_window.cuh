// The tap groups of a stage: CHUNK source channels at up to WINDOW taps of a phase along the width, which are STEP taps
// apart and read elements SHIFT cells apart (in the input gradient those of one residue of the stride). A phase's
// stages are numbered by windows along the width first, then by taps along h and d, then by channels, so that
// neighbouring stages read neighbouring source elements.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/phase.cuh"

struct TapWindow {
  static constexpr int STEP = WINDOW > 1 && INPUT_GRAD ? tap_step(AXIS_W) : 1, SHIFT = element_step(AXIS_W);

  int channel;           // first channel
  int at_d, at_h, at_w;  // indices among the phase's taps; at_w: of the window's first tap
  int taps;

  // For a phase without taps, which has no stages, the values do not matter.
  __device__ __forceinline__ TapWindow(const Phase& phase, int index) {
    const int along = max(1, along_w(phase)), rows = max(1, phase.h.count) * along, all = max(1, phase.d.count) * rows;
    const int chunk = quotient(index, 1.f / all), of_chunk = index - chunk * all;
    at_d = quotient(of_chunk, 1.f / rows);
    at_h = quotient(of_chunk - at_d * rows, 1.f / along);
    const int window = of_chunk - at_d * rows - at_h * along, residues = max(1, min(STEP, phase.w.count));
    const int before = window / residues;
    channel = chunk * CHUNK, at_w = before * (WINDOW * STEP) + window - before * residues;
    taps = min(WINDOW, ceil_div(phase.w.count - at_w, STEP));
  }

  // Advances to the next stage. (Computing it from the stage's number would take longer than a short stage.)
  __device__ __forceinline__ void next(const Phase& phase) {
    const int residue = at_w % (WINDOW * STEP);
    const bool in_turn = residue + 1 < STEP && at_w + 1 < phase.w.count;
    at_w = in_turn ? at_w + 1 : at_w - residue + WINDOW * STEP;
    if (at_w >= phase.w.count) {
      at_w = 0;
      if (++at_h == phase.h.count) at_h = 0, ++at_d;
      if (at_d == phase.d.count) at_d = 0, channel += CHUNK;
    }
    taps = min(WINDOW, ceil_div(phase.w.count - at_w, STEP));
  }

  // Source elements from the phase's first tap to the box's first element.
  __device__ __forceinline__ int w() const { return (INPUT_GRAD ? at_w : at_w + taps - 1) * TapsW::SRC_STEP; }

  // Stages of a phase.
  static __device__ __forceinline__ int count(const Phase& phase) {
    return CHUNKS * phase.d.count * phase.h.count * along_w(phase);
  }

 private:
  // Windows at one tap along d and h; a residue may have fewer taps than others.
  static __device__ __forceinline__ int along_w(const Phase& phase) {
    const int full = max(0, ceil_div(phase.w.count, WINDOW * STEP) - 1), rest = phase.w.count - full * (WINDOW * STEP);
    return full * min(STEP, phase.w.count) + min(STEP, rest);
  }
};

// Cells along the width by which a box exceeds a tile.
constexpr int HALO = (WINDOW - 1) * TapWindow::SHIFT;
