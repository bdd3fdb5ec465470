// The taps that meet one destination element, whatever the stride and the dilation.
//
// Along each dimension they form an arithmetic progression, and so do the source elements they meet: in the forward
// pass taps tap0, tap0 + stride/gcd, … while the source falls by dilation/gcd (gcd of stride and dilation); in the
// input gradient all taps, while the source rises by the dilation. Nothing is tabulated.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"

// The x in [0, modulus) with a·x ≡ 1.
__host__ __device__ constexpr int inverse(int a, int modulus) {
  for (int x = 0; x < modulus; ++x)
    if ((long long)a * x % modulus == 1 % modulus) return x;
  return 0;
}

// The taps of one dimension that meet one destination element, and the source element that the first one meets.
struct Progression {
  int tap, src;
};

template <int KERNEL, int STRIDE, int PADDING, int DILATION>
struct Taps {
  static constexpr int GCD = gcd(STRIDE, DILATION);
  static constexpr int PERIOD = STRIDE / GCD;
  static constexpr int INVERSE = inverse(DILATION / GCD % PERIOD, PERIOD);
  static constexpr int TAP_STEP = INPUT_GRAD ? 1 : PERIOD;
  static constexpr int SRC_STEP = INPUT_GRAD ? DILATION : -(DILATION / GCD);

  static __device__ __forceinline__ Progression at(int dst) {
    if (INPUT_GRAD) return {0, dst * STRIDE - PADDING};
    // tap·DILATION ≡ dst + PADDING modulo STRIDE
    const int reach = dst + PADDING;
    if (reach % GCD != 0) return {KERNEL, 0};
    const int tap = (int)((long long)(reach / GCD % PERIOD) * INVERSE % PERIOD);
    const int distance = reach - tap * DILATION;  // a multiple of STRIDE, perhaps negative
    return {tap, distance / STRIDE};
  }
};

typedef Taps<AXIS_D.kernel, AXIS_D.stride, AXIS_D.padding, AXIS_D.dilation> TapsD;
typedef Taps<AXIS_H.kernel, AXIS_H.stride, AXIS_H.padding, AXIS_H.dilation> TapsH;
typedef Taps<AXIS_W.kernel, AXIS_W.stride, AXIS_W.padding, AXIS_W.dilation> TapsW;
