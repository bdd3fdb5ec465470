// The host's threads share no registers.

#pragma once

template <int>
inline void setmaxnreg_dec() {}
template <int>
inline void setmaxnreg_inc() {}

constexpr bool registers_suffice(int consumers, int claimed, int producers, int kept) {
  const int threads = consumers + producers, at_launch = 65536 / threads / 8 * 8;
  return consumers * claimed + producers * kept <= threads * at_launch;
}
