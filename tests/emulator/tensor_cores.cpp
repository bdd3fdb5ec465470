// A thread's part of the matrix instructions, and TMA's boxes. Kernels are compiled with checks and almost no
// optimisation; this, where most of their time would go, with all of it.

#include "cuda_shim.h"
#include "core/swizzle.cuh"

namespace {

using emulator::Line;
using emulator::Operand;

struct TF32 { unsigned bits; };
struct Half { _Float16 value; };
struct BFloat16 { unsigned short bits; };

// TF32 is float32 without its last 13 bits.
float widened(TF32 operand) { return __uint_as_float(operand.bits & 0xffffe000u); }
float widened(Half operand) { return operand.value; }
float widened(BFloat16 operand) { return __uint_as_float(unsigned(operand.bits) << 16); }

template <class T> constexpr int depth = sizeof(Line) / sizeof(T);

/// A line's operands in float32, side by side.
template <class T> struct Wide {
  alignas(64) float values[depth<T>];

  explicit Wide(const Line& line) {
    T operands[depth<T>];
    std::memcpy(operands, line.bytes, sizeof operands);
    for (int k = 0; k < depth<T>; ++k) values[k] = widened(operands[k]);
  }
};

template <int COUNT> float sum_of(const float* values) {
  if constexpr (COUNT == 1) return values[0];
  else {
    float sums[COUNT / 2];
    for (int k = 0; k < COUNT / 2; ++k) sums[k] = values[k] + values[k + COUNT / 2];
    return sum_of<COUNT / 2>(sums);
  }
}
template <class T> float dot(const Wide<T>& a, const Wide<T>& b) {
  float products[depth<T>];
  for (int k = 0; k < depth<T>; ++k) products[k] = a.values[k] * b.values[k];
  return sum_of<depth<T>>(products);
}

template <class T>
void multiply_add(float* sums, int count, bool add, const Line (&rows)[2], const emulator::Matrix& columns) {
  const Wide<T> row[2] = {Wide<T>(rows[0]), Wide<T>(rows[1])};
  const int first = threadIdx.x % 4 * 2;
  for (int i = 0; i < count; i += 4)
    for (int j = i; j < i + 2; ++j) {
      const Wide<T> column(columns.line(i / 4 * 8 + first + j % 2));
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[j + 2 * half];
        sum = (add ? sum : 0) + dot(row[half], column);
      }
    }
}

template <class T> void multiply_add_of_warp(float* c, unsigned lane) {
  const auto words = [](unsigned lane) { return reinterpret_cast<const unsigned*>(emulator::warp_slots[lane].bytes); };
  Line rows[2], columns[2];
  for (int i = 0; i < 2; ++i)
    for (int word = 0; word < 8; ++word) {
      rows[i].words[word] = words(lane / 4 * 4 + word % 4)[i + word / 4 * 2];
      columns[i].words[word] = words((lane % 4 * 2 + i) * 4 + word % 4)[4 + word / 4];
    }
  for (int i = 0; i < 4; ++i) c[i] += dot(Wide<T>(rows[i / 2]), Wide<T>(columns[i % 2]));
}

}  // namespace

emulator::Line emulator::Matrix::line(int row) const {
  const unsigned start = (unsigned(descriptor) & 0x3fff) << 4;
  const unsigned lbo = (unsigned(descriptor >> 16) & 0x3fff) << 4, sbo = (unsigned(descriptor >> 32) & 0x3fff) << 4;
  const int pitch = descriptor >> 62 == 0 ? 16 : 256 >> (descriptor >> 62);
  const int bytes = operand == Operand::tf32 ? 4 : 2;
  const auto place = [&](int along, int across) {
    const unsigned address = start + across / 8 * sbo + across % 8 * pitch + along / pitch * lbo + along % pitch;
    return __cvta_shared_to_generic(swizzled(address, pitch));
  };
  Line line;
  if (transposed)
    for (int k = 0; k < int(sizeof line) / bytes; ++k)
      std::memcpy(line.bytes + k * bytes, place(row * bytes, k), bytes);
  else
    for (int k = 0; k < int(sizeof line); k += 16) std::memcpy(line.bytes + k, place(k, row), 16);
  return line;
}

void emulator::wgmma(float* sums, int count, bool add, const Line (&rows)[2], const Matrix& columns) {
  switch (columns.operand) {
    case Operand::tf32: return multiply_add<TF32>(sums, count, add, rows, columns);
    case Operand::float16: return multiply_add<Half>(sums, count, add, rows, columns);
    case Operand::bfloat16: return multiply_add<BFloat16>(sums, count, add, rows, columns);
  }
}

void emulator::mma_of_slots(float* c, Operand operand) {
  switch (operand) {
    case Operand::tf32: return multiply_add_of_warp<TF32>(c, lane());
    case Operand::float16: return multiply_add_of_warp<Half>(c, lane());
    case Operand::bfloat16: return multiply_add_of_warp<BFloat16>(c, lane());
  }
}

void emulator::gather_box(unsigned char* box, unsigned to, const TensorMap& map, const void* tensor,
                          const int (&place)[5], unsigned element, unsigned bytes) {
  int at[5] = {};
  for (unsigned offset = 0; offset < bytes;) {
    bool inside = true;
    const char* row = static_cast<const char*>(tensor);
    for (int i = 1; i < 5; ++i) {
      const int index = place[i] + at[i] * map.steps[i];
      inside = inside && index >= 0 && index < map.sizes[i];
      if (inside) row += index * map.strides[i - 1];
    }
    for (int i = 0; i < map.box[0] && offset < bytes; ++i, offset += element) {
      const int index = place[0] + i * map.steps[0];
      unsigned char* const target = box + swizzled(to + offset, map.swizzle) - to;
      if (inside && index >= 0 && index < map.sizes[0])
        std::memcpy(target, row + (long long)index * element, element);
      else
        std::memset(target, 0, element);
    }
    for (int i = 1; i < 5 && ++at[i] == map.box[i]; ++i) at[i] = 0;
  }
}
