// Executes a grid on the CPU: one block after another, each thread of a block a fiber.
//
// A fiber runs until its next barrier or its end, then the next one runs, in an order that the caller picks; when none
// can run, complete barriers open. Nothing runs in parallel, so a run repeats exactly, and what depends on the order is a
// race. Buffers and dynamic shared memory end at pages that nobody may touch; a signal there, as any other fault, leaves
// the grid by a jump and becomes a message, in which `@0x12` is an address in the kernel's library, for addr2line.

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <ucontext.h>

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_shim.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
emulator::Slot* emulator::warp_slots;
void* emulator::dynamic_shared;

namespace {

constexpr std::size_t kPage = 4096, kGuard = 4 << 20, kStack = 256 << 10;
constexpr int kReversed = -2;  // an order, as is -1, forward; others are seeds

/// Memory between two guards. Its end is at the upper guard, less the slack that `alignment` asks for. What is
/// accessible beside the data is filled with 0xFF, a NaN to those who read it and a canary for those who write.
class Guarded {
 public:
  Guarded(std::string name, std::size_t bytes, std::size_t alignment, std::uintptr_t like = 0)
      : name(std::move(name)), bytes(bytes), usable((bytes + alignment + kPage - 1) / kPage * kPage) {
    map = static_cast<char*>(mmap(nullptr, usable + 2 * kGuard, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (map == MAP_FAILED || mprotect(begin(), usable, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    data = end() - bytes;
    data -= (reinterpret_cast<std::uintptr_t>(data) - like) % alignment;
  }
  ~Guarded() { munmap(map, usable + 2 * kGuard); }
  Guarded(const Guarded&) = delete;

  void poison() { std::memset(begin(), 0xFF, usable); }
  bool intact() const {
    const auto whole = [](char byte) { return byte == char(0xFF); };
    return std::all_of(begin(), data, whole) && std::all_of(data + bytes, end(), whole);
  }
  bool owns(const char* address) const { return address >= map && address < end() + kGuard; }

  const std::string name;
  const std::size_t bytes;
  char* data;

 private:
  char* begin() const { return map + kGuard; }
  char* end() const { return begin() + usable; }
  const std::size_t usable;
  char* map;
};

enum class State { ready, at_syncwarp, at_syncthreads, exited };

/// A thread. Fibers are kept for later launches, because making a stack costs more than running a small kernel.
struct Fiber {
  uint3 index = {};
  State state = State::ready;
  unsigned mask = 0;           // of the __syncwarp it waits at
  const void* site = nullptr;  // of the barrier it waits at
  bool born = false;           // a context starts it (slow: a system call); jumps resume it
  ucontext_t birth = {};
  jmp_buf resume;
  Guarded stack{"the thread's stack", kStack, 16};
};

std::deque<Fiber> fibers;    // of the threads of a block, by their linear index; those beyond the block idle
const struct Grid* running;
Fiber* current;              // the running fiber; null in the scheduler
jmp_buf scheduler;           // where a fiber that waits jumps to
sigjmp_buf escape;           // where a fault jumps to
pthread_t launcher;          // the thread these belong to
char message[4096];

unsigned offset_of(const void* address) {
  Dl_info info;
  return dladdr(address, &info) ? static_cast<const char*>(address) - static_cast<char*>(info.dli_fbase) : 0;
}

/// The static shared variables: this thread's thread-local memory of the library that holds the kernel.
iovec static_shared_of(const emulator::Program& kernel) {
  Dl_info library;
  kernel.touch();
  dladdr(&kernel, &library);
  std::pair<void*, iovec> search = {library.dli_fbase, {}};
  dl_iterate_phdr([](dl_phdr_info* info, std::size_t, void* data) {
    auto& [base, found] = *static_cast<std::pair<void*, iovec>*>(data);
    if (reinterpret_cast<void*>(info->dlpi_addr) != base) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i)
      if (info->dlpi_phdr[i].p_type == PT_TLS) found = {info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz};
    return 1;
  }, &search);
  return search.second;
}

/// Ends the launch with an error. `site`: the return address where it happened, if one instruction is to blame.
[[noreturn]] void fail(const void* site, const char* format, ...) {
  int n = std::snprintf(message, sizeof message, "block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
  const auto left = [&] { return sizeof message - n; };
  if (current) n += std::snprintf(message + n, left(), ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y, threadIdx.z);
  if (site) n += std::snprintf(message + n, left(), ", @0x%x", offset_of(static_cast<const char*>(site) - 1));
  n += std::snprintf(message + n, left(), ": ");
  va_list values;
  va_start(values, format);
  std::vsnprintf(message + n, left(), format, values);
  va_end(values);
  siglongjmp(escape, 1);
}

void wait(State state, unsigned mask, const void* site) {
  current->state = state, current->mask = mask, current->site = site;
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

struct Argument {
  void* value;
  std::int64_t bytes;  // a buffer of so many bytes at `value`; or -1: passed by value, found there
};

struct Grid {
  Grid(const emulator::Program& kernel, unsigned shared_bytes, int order, const Argument* list, int count)
      : kernel(kernel), size(blockDim.x * blockDim.y * blockDim.z), order(order), random(order), threads(size),
        blocks(std::size_t(gridDim.x) * gridDim.y * gridDim.z), slots((size + 31) / 32 * 32),
        static_shared(static_shared_of(kernel)), shared("dynamic shared memory", shared_bytes, 128) {
    for (auto* list : {&threads, &blocks}) {
      std::iota(list->begin(), list->end(), 0);
      if (order == kReversed) std::reverse(list->begin(), list->end());
      if (order >= 0) std::shuffle(list->begin(), list->end(), random);
    }
    while (fibers.size() < size) fibers.emplace_back();
    for (unsigned t = 0; t < size; ++t)
      fibers[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    for (int i = 0; i < count; ++i) {
      arguments.push_back(list[i].value);
      if (list[i].bytes < 0) continue;
      const auto address = reinterpret_cast<std::uintptr_t>(list[i].value);
      buffers.emplace_back("argument " + std::to_string(i), list[i].bytes, 32, address).poison();
      pointers.push_back(buffers.back().data);
      arguments.back() = &pointers.back();
      std::memcpy(pointers.back(), list[i].value, list[i].bytes);
    }
  }

  void run() {
    for (const unsigned b : blocks) {
      blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
      run_block();
    }
  }

  void run_block() {
    shared.poison();
    std::memset(static_shared.iov_base, 0xFF, static_shared.iov_len);
    std::memset(static_cast<void*>(slots.data()), 0xFF, slots.size() * sizeof slots[0]);
    for (unsigned t = 0; t < size; ++t) fibers[t].state = State::ready;
    do {
      if (order >= 0) std::shuffle(threads.begin(), threads.end(), random);
      for (const unsigned t : threads)
        if (fibers[t].state == State::ready) resume(t);
    } while (open_barriers());
    const auto check = [](const Guarded& memory) {
      if (!memory.intact()) fail(nullptr, "wrote beside %s (%zu bytes)", memory.name.c_str(), memory.bytes);
    };
    check(shared);
    std::for_each(buffers.begin(), buffers.end(), check);
  }

  void resume(unsigned t) {
    current = &fibers[t];
    threadIdx = current->index;
    emulator::warp_slots = &slots[t / 32 * 32];
    if (_setjmp(scheduler) == 0) {
      if (current->born) _longjmp(current->resume, 1);
      current->born = true;
      getcontext(&current->birth);
      current->birth.uc_stack.ss_sp = current->stack.data;
      current->birth.uc_stack.ss_size = kStack;
      makecontext(&current->birth, live, 0);
      setcontext(&current->birth);
    }
    current = nullptr;
  }

  static void live() {
    for (;;) {  // once for each block
      running->kernel.run(const_cast<void**>(running->arguments.data()));
      std::memset(&emulator::warp_slots[emulator::lane()], 0xFF, sizeof(emulator::Slot));
      wait(State::exited, 0, nullptr);
    }
  }

  /// Whether `fibers[t]` may pass its barrier: all that it waits for, but for those that have exited, wait there too.
  bool complete(unsigned t) const {
    const bool warp = fibers[t].state == State::at_syncwarp;
    const unsigned first = warp ? t / 32 * 32 : 0, last = warp ? std::min(size, first + 32) : size;
    for (unsigned i = first; i < last; ++i) {
      if (fibers[i].state == State::exited || (warp && !(fibers[t].mask >> (i - first) & 1))) continue;
      if (fibers[i].state != fibers[t].state || (warp && fibers[i].mask != fibers[t].mask)) return false;
    }
    return true;
  }

  /// Lets fibers pass their barriers. Returns whether any is left to run; fails where all that are left wait for ever.
  bool open_barriers() {
    opened.clear();
    bool waiting = false;
    for (unsigned t = 0, block = 2; t < size; ++t) {  // block: is __syncthreads complete? 2: not yet asked
      if (fibers[t].state == State::exited) continue;
      waiting = true;
      const bool threads = fibers[t].state == State::at_syncthreads;
      if (threads && block == 2) block = complete(t);
      if (threads ? block : complete(t)) opened.push_back(t);
    }
    if (waiting && opened.empty()) report_deadlock();
    for (const unsigned t : opened) fibers[t].state = State::ready;
    return waiting;
  }

  [[noreturn]] void report_deadlock() const {
    std::map<std::pair<const void*, State>, std::pair<unsigned, unsigned>> sites;  // -> threads, the first of them
    for (unsigned t = 0; t < size; ++t)
      if (fibers[t].state != State::exited) {
        auto& [threads, first] = sites[{fibers[t].site, fibers[t].state}];
        if (threads++ == 0) first = t;
      }
    static std::string text;  // outlives the jump
    text = "deadlock:";
    for (const auto& [site, seen] : sites) {
      char line[128];
      std::snprintf(line, sizeof line, "%s %u of %u threads (the first: %u) wait for ever in %s at @0x%x",
                    text.back() == ':' ? "" : ",", seen.first, size, seen.second,
                    site.second == State::at_syncwarp ? "__syncwarp" : "__syncthreads",
                    offset_of(static_cast<const char*>(site.first) - 1));
      text += line;
    }
    fail(nullptr, "%s", text.c_str());
  }

  /// The memory whose guard `address` hits, if any.
  const Guarded* owner(const char* address) const {
    if (shared.owns(address)) return &shared;
    if (current && current->stack.owns(address)) return &current->stack;
    for (const Guarded& buffer : buffers)
      if (buffer.owns(address)) return &buffer;
    return nullptr;
  }

  const emulator::Program& kernel;
  const unsigned size;  // threads of a block
  const int order;
  std::mt19937 random;
  std::vector<unsigned> threads, blocks, opened;
  std::vector<emulator::Slot> slots;
  const iovec static_shared;
  Guarded shared;
  std::deque<Guarded> buffers;
  std::deque<void*> pointers;
  std::vector<void*> arguments;
};

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!pthread_equal(pthread_self(), launcher)) return void(pthread_kill(launcher, signal));
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  const char* site = nullptr;
  const char* access = "access";
#ifdef __x86_64__
  site = reinterpret_cast<const char*>(registers.gregs[REG_RIP]) + 1;
  access = registers.gregs[REG_ERR] & 2 ? "write" : "read";
#endif
  if (signal == SIGVTALRM) fail(current ? site : nullptr, "still running when the time was up");
  const auto address = static_cast<const char*>(info->si_addr);
  if (const Guarded* memory = running->owner(address))
    fail(site, "illegal %s at byte %td of %s (%zu bytes)", access, address - memory->data, memory->name.c_str(),
         memory->bytes);
  fail(site, "illegal %s at address %p, which belongs to no argument", access, info->si_addr);
}

}  // namespace

void __syncthreads() { wait(State::at_syncthreads, 0, __builtin_return_address(0)); }
void __syncwarp(unsigned mask) {
  if (!(mask >> emulator::lane() & 1))
    fail(__builtin_return_address(0), "the lane is not in its own mask 0x%08x", mask);
  wait(State::at_syncwarp, mask, __builtin_return_address(0));
}
void __trap() { fail(__builtin_return_address(0), "__trap"); }

// What the compiler calls where -fsanitize finds a fault; ours, so that no sanitizer library is needed.
#define ON_FAULT(name, text) \
  extern "C" void __ubsan_handle_##name##_abort() { fail(__builtin_return_address(0), text); }
ON_FAULT(type_mismatch_v1, "misaligned address")
ON_FAULT(out_of_bounds, "array index out of bounds")
ON_FAULT(shift_out_of_bounds, "shift by a negative number or by more than the type's bits")
ON_FAULT(divrem_overflow, "division by zero, or its result overflows")
ON_FAULT(add_overflow, "signed integer overflow in +")
ON_FAULT(sub_overflow, "signed integer overflow in -")
ON_FAULT(mul_overflow, "signed integer overflow in *")
ON_FAULT(negate_overflow, "signed integer overflow in -")

/// Runs the grid and copies every buffer back. Returns null, or what went wrong (then buffers are left as they were).
extern "C" const char* emulator_launch(const emulator::Program* kernel, const dim3* grid, const dim3* block,
                                       unsigned shared_bytes, int order, const Argument* list, int count,
                                       long seconds) {
  gridDim = *grid, blockDim = *block;
  Grid state(*kernel, shared_bytes, order, list, count);
  running = &state;
  launcher = pthread_self();
  emulator::dynamic_shared = state.shared.data;

  constexpr int signals[] = {SIGSEGV, SIGBUS, SIGVTALRM};
  struct sigaction action = {}, before[std::size(signals)];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;  // the fiber's own stack may be what overflowed
  static char handler_stack[1 << 16];
  const stack_t stack = {handler_stack, 0, sizeof handler_stack};
  stack_t stack_before;
  const itimerval limit = {{0, 0}, {seconds, 0}}, no_limit = {};

  sigaltstack(&stack, &stack_before);
  for (std::size_t i = 0; i < std::size(signals); ++i) sigaction(signals[i], &action, &before[i]);
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  const bool failed = sigsetjmp(escape, 1);
  if (!failed) state.run();
  setitimer(ITIMER_VIRTUAL, &no_limit, nullptr);
  for (std::size_t i = 0; i < std::size(signals); ++i) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  current = nullptr;
  for (Fiber& fiber : fibers) fiber.born &= !failed;  // after a fault they may have stopped anywhere
  std::fflush(stdout);

  for (int i = 0, b = 0; !failed && i < count; ++i)
    if (list[i].bytes >= 0) std::memcpy(list[i].value, state.buffers[b++].data, list[i].bytes);
  return failed ? message : nullptr;
}
