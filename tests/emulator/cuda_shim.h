// The vocabulary of CUDA C++ for a host compiler: included before a kernel's source, which then compiles unchanged.
// What wraps PTX has a twin in ptx/. `__CUDA_ARCH__` is undefined here. runtime.cpp defines what is only declared here.
#pragma once

#include <cstddef>
// No kernel calls C++17's special functions, but g++ instantiates them for each: a fifth of its time for a small one.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <math.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// Static shared variables are all that is thread-local, so the runtime can find and poison them; fibers share them.
// (Dynamic shared memory, `extern __shared__ T name[];`, is rewritten by __init__.py to `emulator::dynamic_shared`.)
#define __shared__ static thread_local

#define EMULATE_VECTOR(T, name)                                                 \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                            \
  struct name##3 { T x, y, z; };                                                \
  struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                    \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }            \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATE_VECTOR(signed char, char)
EMULATE_VECTOR(unsigned char, uchar)
EMULATE_VECTOR(short, short)
EMULATE_VECTOR(unsigned short, ushort)
EMULATE_VECTOR(int, int)
EMULATE_VECTOR(unsigned, uint)
EMULATE_VECTOR(long long, longlong)
EMULATE_VECTOR(unsigned long long, ulonglong)
EMULATE_VECTOR(float, float)
EMULATE_VECTOR(double, double)
struct dim3 { unsigned x = 1, y = 1, z = 1; };

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

inline float __fdividef(float dividend, float divisor) { return dividend / divisor; }

void __syncthreads();
void __syncwarp(unsigned mask = ~0u);
[[noreturn]] void __trap();
inline void __threadfence() {}
template <class T> inline T atomicAdd(T* at, T value) { return std::exchange(*at, T(*at + value)); }
template <class T> inline T atomicMax(T* at, T value) { return std::exchange(*at, value > *at ? value : *at); }
template <class T> inline T atomicMin(T* at, T value) { return std::exchange(*at, value < *at ? value : *at); }
inline void __threadfence_block() {}
// Addresses of inline PTX: static shared memory begins at 0, dynamic behind it.
std::size_t __cvta_generic_to_shared(const void* pointer);
void* __cvta_shared_to_generic(std::size_t address);

namespace emulator {
struct alignas(16) Slot { unsigned char bytes[32]; };
extern Slot* warp_slots;      // one for each lane of the running thread's warp
extern void* dynamic_shared;  // the first byte of dynamic shared memory

inline unsigned lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % warpSize; }

template <class T> struct Lanes { T of[warpSize]; };

/// The `value` of every lane in `mask`, for each of them; all-ones bytes for other lanes and those that have exited.
/// Warp-wide operations build on it: a shuffle picks one lane, the host branch of an `mma` needs all of them.
template <class T> [[gnu::always_inline]] inline Lanes<T> all_lanes(unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(Slot) && std::is_trivially_copyable_v<T>);
  Lanes<T> lanes;
  std::memset(static_cast<void*>(&lanes), 0xFF, sizeof lanes);
  std::memcpy(warp_slots[lane()].bytes, &value, sizeof(T));
  __syncwarp(mask);
  for (int i = 0; i < warpSize; ++i)
    if (mask >> i & 1) std::memcpy(&lanes.of[i], warp_slots[i].bytes, sizeof(T));
  __syncwarp(mask);
  return lanes;
}

/// Lane `source` where it lies in this lane's segment of `width` lanes, otherwise this lane's own value.
template <class T> [[gnu::always_inline]] inline T shuffle(unsigned mask, T value, int source, int width) {
  const Lanes<T> lanes = all_lanes(mask, value);
  return lanes.of[source >= 0 && source / width == int(lane()) / width ? source : int(lane())];
}

/// An mbarrier. A phase ends with the last of its arrivals; those who wait for a phase name its parity.
struct Barrier { unsigned arrivals, missing : 31, parity : 1; };
void barrier_init(Barrier* barrier, int arrivals);
void barrier_arrive(Barrier* barrier);
void barrier_wait(const Barrier* barrier, unsigned parity);
/// A tensor map as the host twin of TMA reads it.
struct alignas(64) TensorMap {
  long long strides[4];  // in bytes, of all dimensions but the first
  int sizes[5], box[5];
  int swizzle;   // bytes within which chunks change places
  int tf32;      // whether float32 is rounded on its way
  int steps[5];  // from one element that is brought to the next
  unsigned char unused[28];
};
/// Gathers a box, swizzled as it will lie at the shared address `to`; zeros come from outside of the tensor.
void gather_box(unsigned char* box, unsigned to, const TensorMap& map, const void* tensor, const int (&place)[5],
                unsigned element, unsigned bytes);
void* scratch(std::size_t bytes);  // aligned memory that lives as long as its block
void bulk_copy(Barrier* barrier, void* to, const void* from, std::size_t bytes);  // comes with the phase's end
void bulk_store(void* to, const void* from, std::size_t bytes);  // goes when the thread waits for its stores
void threads_sync(unsigned name, unsigned threads);  // a named barrier; unlike PTX, names go up to 31

/// 32 bytes along k, of one row of A or one column of B: the depth of a matrix instruction.
union alignas(32) Line { unsigned char bytes[32]; unsigned words[8]; };
enum class Operand : unsigned char { tf32, float16, bfloat16 };
/// Rows of A, or columns of B, in shared memory.
struct Matrix {
  unsigned long long descriptor;
  Operand operand;
  bool transposed;
  Line line(int row) const;
};
/// Adds to the running thread's accumulators of wgmma. `rows` are rows `lane / 4` and `lane / 4 + 8` of its warp.
void wgmma(float* sums, int count, bool add, const Line (&rows)[2], const Matrix& columns);
/// Adds to the running thread's accumulators of mma. The warp's slots hold its operands: of each lane, four words of A,
/// then two of B.
void mma_of_slots(float* sums, Operand operand);

/// Asynchronous work of a thread is done as late as it may be: when the thread waits for the group it belongs to.
enum class Async { copies, products, stores };
void commit(Async queue);
void wait(Async queue, int pending);  // for all committed groups but the latest `pending`
void later(Async queue, void (*run)(const void*), const void* work, std::size_t bytes);
template <class Work> inline void later(Async queue, const Work& work) {
  static_assert(std::is_trivially_copyable_v<Work>);
  later(queue, [](const void* work) { (*static_cast<const Work*>(work))(); }, &work, sizeof work);
}

/// Copies when the thread waits for its copies; until then the target is undefined: all-ones bytes.
template <class T> inline void copy_later(T* to, const T& value) {
  std::memset(static_cast<void*>(to), 0xFF, sizeof *to);
  later(Async::copies, [=] { *to = value; });
}
}  // namespace emulator

#define EMULATE_SHUFFLE(name, source)                                                                              \
  template <class T> [[gnu::always_inline]] inline T name(unsigned mask, T value, int by, int width = warpSize) {  \
    const int lane = emulator::lane(), first = lane - lane % width;                                                \
    return emulator::shuffle(mask, value, source, width);                                                          \
  }
EMULATE_SHUFFLE(__shfl_sync, first + by % width)
EMULATE_SHUFFLE(__shfl_xor_sync, lane ^ by)
EMULATE_SHUFFLE(__shfl_down_sync, lane + by)
EMULATE_SHUFFLE(__shfl_up_sync, lane - by < first ? -1 : lane - by)
[[gnu::always_inline]] inline int __all_sync(unsigned mask, int value) {  // lanes that have exited count as true
  const auto lanes = emulator::all_lanes(mask, value);
  return std::none_of(lanes.of, lanes.of + warpSize, [](int each) { return each == 0; });
}
[[gnu::always_inline]] inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  const auto lanes = emulator::all_lanes(mask, value);
  return std::accumulate(lanes.of, lanes.of + warpSize, 0u, std::bit_or<>());
}
[[gnu::always_inline]] inline unsigned __ballot_sync(unsigned mask, int value) {
  return __reduce_or_sync(mask, value != 0 ? 1u << emulator::lane() : 0);
}

// Mixed argument types are allowed, which CUDA allows for some pairs only; of a NaN and a number CUDA takes the number.
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) != T(a) || T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) != T(a) || T(a) < T(b) ? T(b) : T(a);
}

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
template <class T> void __stcg(T* address, T value) { *address = value; }
template <class T> void __stcs(T* address, T value) { *address = value; }

template <class To, class From> inline To emulated_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline int __float_as_int(float value) { return emulated_bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return emulated_bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return emulated_bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return emulated_bit_cast<float>(bits); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = a | (unsigned long long)b << 32;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// ---- what the runtime and Python know of a kernel; __init__.py appends `emulated = Emulated<&kernel>::program` ------

namespace emulator {
struct Parameter { char kind; unsigned size; };  // kind: p(ointer), f(loat), i(nteger), u(nsigned), s(truct), \0 (end)

struct Program {
  void (*run)(void** arguments);  // one thread; argument i lies at arguments[i]
  void (*touch)();                // makes the static shared memory exist, which only then has an address
  const Parameter* parameters;
};

namespace {  // each library has its own, though their kernels may share a name
template <auto kernel> struct Emulated;
template <class... P, void (*kernel)(P...)> struct Emulated<kernel> {
  template <class T> static constexpr Parameter describe() {
    return {std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : !std::is_integral_v<T> ? 's'
            : std::is_signed_v<T> ? 'i' : 'u', sizeof(T)};
  }
  template <std::size_t... I> static void call(void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
  }
  static void run(void** arguments) { call(arguments, std::index_sequence_for<P...>()); }
  static void touch() { static thread_local volatile char first = 0; first = 1; }
  static constexpr Parameter parameters[] = {describe<P>()..., {'\0', 0}};
  static constexpr Program program = {run, touch, parameters};
};
}  // namespace
}  // namespace emulator
