// Conversions by the host's _Float16, and by bits.

#pragma once

inline float float_of_f16(unsigned short bits) {
  union {
    unsigned short bits;
    _Float16 number;
  } half = {bits};
  return (float)half.number;
}
inline void f16_of_float(float value, unsigned short& bits) {
  union {
    _Float16 number;
    unsigned short bits;
  } half = {(_Float16)value};
  bits = half.bits;
}
inline void bf16_of_float(float value, unsigned short& bits) {
  const unsigned wide = __float_as_uint(value);
  const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
  bits = nan ? 0x7fff : (unsigned short)((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}
inline unsigned f16x2_of_floats(float first, float second) {
  unsigned short low, high;
  f16_of_float(first, low), f16_of_float(second, high);
  return low | (unsigned)high << 16;
}
inline void bf16x2_of_floats(float first, float second, unsigned& both) {
  unsigned short low, high;
  bf16_of_float(first, low), bf16_of_float(second, high);
  both = low | (unsigned)high << 16;
}
inline float round_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return value;
  return __uint_as_float((bits + 0x1000u) & 0xffffe000u);
}
