// The taps that meet one destination element, whatever the stride and the dilation.
//
// Along each dimension they form an arithmetic progression, and so do the source elements they meet: in the forward
// pass taps tap0, tap0 + stride/gcd, … while the source falls by dilation/gcd (gcd of stride and dilation); in the
// input gradient all taps, while the source rises by the dilation. Nothing is tabulated.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"

// The x in [0, modulus) with a·x ≡ 1, by Euclid's algorithm: the stride may be large.
__host__ __device__ constexpr int inverse(int a, int modulus) {
  long long rest = modulus, next_rest = a, x = 0, next_x = 1;
  while (next_rest != 0) {
    const long long times = rest / next_rest, last_rest = rest, last_x = x;
    rest = next_rest;
    next_rest = last_rest - times * rest;
    x = next_x;
    next_x = last_x - times * x;
  }
  return (int)(x < 0 ? x + modulus : x);
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
    const int place = reach / GCD % PERIOD;
    const int tap = INVERSE == 1       ? place
                    : PERIOD < 1 << 15 ? place * INVERSE % PERIOD
                                       : (int)((long long)place * INVERSE % PERIOD);
    // A multiple of STRIDE, perhaps negative; arbitrary for a tap that the kernel does not have.
    const int distance = (int)((unsigned)reach - (unsigned)tap * (unsigned)DILATION);
    return {tap, distance / STRIDE};
  }
};

typedef Taps<AXIS_D.kernel, AXIS_D.stride, AXIS_D.padding, AXIS_D.dilation> TapsD;
typedef Taps<AXIS_H.kernel, AXIS_H.stride, AXIS_H.padding, AXIS_H.dilation> TapsH;
typedef Taps<AXIS_W.kernel, AXIS_W.stride, AXIS_W.padding, AXIS_W.dilation> TapsW;
