// Phases of a cell as columns of the product, beside its channels, along the dimensions in which AXIS has stride 1 and
// LAYER, the layer itself, has not. Cells begin at multiples of the stride in the output before it is cropped, so that
// all phases of a cell read the same source elements: phase r meets the element of tap j of AXIS at the layer's tap
// r + j·stride, which may not exist.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"

constexpr int MERGED_D = LAYER_D.stride / AXIS_D.stride, MERGED_H = LAYER_H.stride / AXIS_H.stride;
constexpr int MERGED_W = LAYER_W.stride / AXIS_W.stride, MERGED = MERGED_D * MERGED_H * MERGED_W;
constexpr int CHANNELS = DST_CHANNELS / MERGED;  // destination channels of a group

// A column of a group.
struct Column {
  int channel, d, h, w;  // its destination channel, and its output in a cell

  __device__ __forceinline__ explicit Column(int index) {
    const int output = CHANNELS_INNERMOST ? index / CHANNELS : index % MERGED;
    channel = CHANNELS_INNERMOST ? index % CHANNELS : index / MERGED;
    d = output / (MERGED_H * MERGED_W), h = output / MERGED_W % MERGED_H, w = output % MERGED_W;
  }

  // The layer's tap that is tap `tap` of AXIS for this column; negative for none.
  __device__ __forceinline__ int layer_tap(int tap) const {
    const int of_w = layer_tap(LAYER_W, MERGED_W, w, tap % AXIS_W.kernel);
    const int of_h = layer_tap(LAYER_H, MERGED_H, h, tap / AXIS_W.kernel % AXIS_H.kernel);
    const int of_d = layer_tap(LAYER_D, MERGED_D, d, tap / (AXIS_W.kernel * AXIS_H.kernel));
    return (of_d | of_h | of_w) < 0 ? -1 : (of_d * LAYER_H.kernel + of_h) * LAYER_W.kernel + of_w;
  }

  // A word with a bit for each output of a cell along d, h and w; and those bits of the `count` outputs from `first` on
  // that lie in [0, size).
  __device__ __forceinline__ unsigned bits() const {
    return 1u << d | 1u << (MERGED_D + h) | 1u << (MERGED_D + MERGED_H + w);
  }
  static __device__ __forceinline__ unsigned inside(int first, int count, int size) {
    const int begin = max(0, -first), end = min(count, size - first);
    return end > begin ? (1u << end) - (1u << begin) : 0;
  }

 private:
  static __device__ __forceinline__ int layer_tap(Axis layer, int merged, int output, int tap) {
    const int found = merged == 1 ? tap : output + tap * merged;
    return found < layer.kernel ? found : -1;
  }
};

// How many outputs of the first cell are cropped.
__host__ __device__ constexpr int cropped(Axis layer, int merged) { return merged == 1 ? 0 : layer.padding % merged; }
