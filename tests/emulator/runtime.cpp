// Executes a grid on the CPU: one block after another, each thread of a block a fiber.
//
// A fiber runs until its next barrier or its end, then the next one runs, in an order that the caller picks; when none
// can run, complete barriers open. Nothing runs in parallel, so a run repeats exactly, and what depends on the order is a
// race. Buffers and dynamic shared memory end at pages that nobody may touch; a signal there, as any other fault, leaves
// the grid by a jump and becomes a message, in which `@0x12` is an address in the kernel's library, for addr2line.
//
// A fiber that polls (an mbarrier) waits as at any other barrier, so that waiting for ever is found at once. What a thread
// starts and does not wait for (copies, products of tensor cores) is done when it waits: nobody can rely on it before.

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
#include <memory>
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
constexpr unsigned kNames = 32;  // of threads_sync
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

enum class State : unsigned char { ready, at_syncwarp, at_syncthreads, at_threads_sync, at_barrier_wait, exited };
constexpr const char* kStates[] = {"", "__syncwarp", "__syncthreads", "threads_sync", "barrier_wait"};

/// Asynchronous work, and the group it belongs to: how many were committed before.
struct Task {
  void (*run)(const void*);
  unsigned group;
  alignas(16) unsigned char work[64];
};
struct Tasks {
  std::deque<Task> waiting;
  unsigned committed = 0;
};

/// A thread. Fibers are kept for later launches, because making a stack costs more than running a small kernel.
struct Fiber {
  uint3 index = {};
  State* state = nullptr;
  const void* site = nullptr;  // of the barrier it waits at
  unsigned mask = 0;           // of the __syncwarp it waits at
  unsigned name = 0, threads = 0;                // of threads_sync
  const emulator::Barrier* barrier = nullptr;    // of barrier_wait
  unsigned parity = 0;
  Tasks tasks[3];              // of each emulator::Async
  bool born = false;           // a context starts it (slow: a system call); jumps resume it
  ucontext_t birth = {};
  jmp_buf resume;
  Guarded stack{"the thread's stack", kStack, 16};
};

/// What TMA has been told and has not done: it does so when the barrier's phase ends.
struct BulkCopy {
  const emulator::Barrier* barrier;
  void* to;
  const void* from;
  std::size_t bytes;
};
std::vector<BulkCopy> bulk_copies;
std::vector<std::unique_ptr<std::max_align_t[]>> scratches;  // of the grid

std::deque<Fiber> fibers;    // of the threads of a block, by their linear index; those beyond the block idle
State states[1024];          // theirs: side by side, as all are looked through at every barrier
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

void wait(State state, const void* site) {
  *current->state = state, current->site = site;
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
    for (unsigned t = 0; t < size; ++t) {
      fibers[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
      fibers[t].state = &states[t];
    }
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
    for (unsigned t = 0; t < size; ++t) {
      states[t] = State::ready;
      for (Tasks& tasks : fibers[t].tasks) tasks.waiting.clear(), tasks.committed = 0;
    }
    bulk_copies.clear();
    scratches.clear();
    // Where threads are shuffled, in every other block a warp runs as far as barriers allow before the next one does.
    const bool one_warp = order >= 0 && random() % 2;
    if (one_warp) {
      std::vector<unsigned> ranks((size + 31) / 32);
      std::iota(ranks.begin(), ranks.end(), 0);
      std::shuffle(ranks.begin(), ranks.end(), random);
      const auto before = [&](unsigned a, unsigned b) { return ranks[a / 32] < ranks[b / 32]; };
      std::stable_sort(threads.begin(), threads.end(), before);
    }
    do {
      if (order >= 0 && !one_warp) std::shuffle(threads.begin(), threads.end(), random);
      unsigned first = size;  // a thread of the warp that runs
      for (const unsigned t : threads) {
        if (states[t] != State::ready || (one_warp && first < size && t / 32 != first / 32)) continue;
        first = t;
        resume(t);
      }
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
      for (const Tasks& tasks : current->tasks)
        if (!tasks.waiting.empty()) fail(nullptr, "ended without waiting for its copies or products");
      wait(State::exited, nullptr);
    }
  }

  /// Whether `fibers[t]`, at __syncwarp, may pass: all that it waits for, but for those that have exited, wait there too.
  bool warp_complete(unsigned t) const {
    const unsigned first = t / 32 * 32, last = std::min(size, first + 32);
    for (unsigned i = first; i < last; ++i) {
      if (states[i] == State::exited || !(fibers[t].mask >> (i - first) & 1)) continue;
      if (states[i] != State::at_syncwarp || fibers[i].mask != fibers[t].mask) return false;
    }
    return true;
  }

  /// Lets fibers pass their barriers. Returns whether any is left to run; fails where all that are left wait for ever.
  bool open_barriers() {
    opened.clear();
    unsigned left = 0, ready = 0, at_syncthreads = 0, named[kNames] = {};  // threads
    for (unsigned t = 0; t < size; ++t) {
      ready += states[t] == State::ready;
      left += states[t] != State::exited;
      at_syncthreads += states[t] == State::at_syncthreads;
      if (states[t] == State::at_threads_sync) ++named[fibers[t].name];
    }
    unsigned warp = size, mask = 0;  // of the last that waits at __syncwarp: what it waits for is what its neighbours do
    bool complete = false;
    for (unsigned t = 0; t < size; ++t) {
      if (states[t] == State::exited || states[t] == State::ready) continue;
      const Fiber& fiber = fibers[t];
      if (states[t] == State::at_syncwarp && (t / 32 != warp || fiber.mask != mask))
        warp = t / 32, mask = fiber.mask, complete = warp_complete(t);
      if (states[t] == State::at_syncthreads ? at_syncthreads == left
          : states[t] == State::at_syncwarp ? complete
          : states[t] == State::at_threads_sync ? named[fiber.name] == fiber.threads
          : fiber.barrier->parity != fiber.parity)
        opened.push_back(t);
    }
    if (left > ready && ready + opened.size() == 0) report_deadlock();
    for (const unsigned t : opened) states[t] = State::ready;
    return left > 0;
  }

  [[noreturn]] void report_deadlock() const {
    std::map<std::pair<const void*, State>, std::pair<unsigned, unsigned>> sites;  // -> threads, the first of them
    for (unsigned t = 0; t < size; ++t)
      if (states[t] != State::exited) {
        auto& [threads, first] = sites[{fibers[t].site, states[t]}];
        if (threads++ == 0) first = t;
      }
    static std::string text;  // outlives the jump
    text = "deadlock:";
    for (const auto& [site, seen] : sites) {
      char line[128];
      std::snprintf(line, sizeof line, "%s %u of %u threads (the first: %u) wait for ever in %s at @0x%x",
                    text.back() == ':' ? "" : ",", seen.first, size, seen.second,
                    kStates[int(site.second)],
                    offset_of(static_cast<const char*>(site.first) - 1));
      text += line;
    }
    fail(nullptr, "%s", text.c_str());
  }

  /// Whether an instruction is one of the kernel's library.
  bool is_in_kernel(const void* site) const {
    Dl_info library, place;
    return dladdr(&kernel, &library) && dladdr(site, &place) && library.dli_fbase == place.dli_fbase;
  }

  /// The memory whose guard `address` hits, if any.
  const Guarded* owner(const char* address) const {
    if (shared.owns(address)) return &shared;
    if (current && current->stack.owns(address)) return &current->stack;
    for (const Guarded& buffer : buffers)
      if (buffer.owns(address)) return &buffer;
    return nullptr;
  }

  /// Static shared memory begins at 0, dynamic behind, at a multiple of the most that kernels align it to; guards and all.
  std::size_t shared_address(const void* pointer) const {
    const auto address = static_cast<const char*>(pointer), first = static_cast<const char*>(static_shared.iov_base);
    if (address >= first && address < first + static_shared.iov_len) return address - first;
    if (!shared.owns(address)) fail(__builtin_return_address(0), "%p lies not in shared memory", pointer);
    return address - shared.data + dynamic_address();
  }
  char* shared_pointer(std::size_t address) const {
    if (address < static_shared.iov_len) return static_cast<char*>(static_shared.iov_base) + address;
    return shared.data + (address - dynamic_address());
  }
  std::size_t dynamic_address() const { return (static_shared.iov_len + 1023) / 1024 * 1024; }

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
  if (!running->is_in_kernel(site)) site = nullptr;  // a fault of the runtime, at an address that the kernel gave
  access = registers.gregs[REG_ERR] & 2 ? "write" : "read";
#endif
  if (signal == SIGVTALRM) fail(current ? site : nullptr, "still running when the time was up");
  if (signal == SIGILL || signal == SIGTRAP) fail(site, "a fault that -fsanitize finds");
  const auto address = static_cast<const char*>(info->si_addr);
  if (const Guarded* memory = running->owner(address))
    fail(site, "illegal %s at byte %td of %s (%zu bytes)", access, address - memory->data, memory->name.c_str(),
         memory->bytes);
  fail(site, "illegal %s at address %p, which belongs to no argument", access, info->si_addr);
}

}  // namespace

void __syncthreads() { wait(State::at_syncthreads, __builtin_return_address(0)); }
void __syncwarp(unsigned mask) {
  if (!(mask >> emulator::lane() & 1))
    fail(__builtin_return_address(0), "the lane is not in its own mask 0x%08x", mask);
  current->mask = mask;
  wait(State::at_syncwarp, __builtin_return_address(0));
}
void __trap() { fail(__builtin_return_address(0), "__trap"); }

std::size_t __cvta_generic_to_shared(const void* pointer) { return running->shared_address(pointer); }
void* __cvta_shared_to_generic(std::size_t address) { return running->shared_pointer(address); }

void emulator::barrier_init(Barrier* barrier, int arrivals) {
  barrier->arrivals = barrier->missing = arrivals, barrier->parity = 0;
}
void emulator::barrier_arrive(Barrier* barrier) {
  if (barrier->arrivals - 1 >= 1 << 20) fail(__builtin_return_address(0), "the barrier was not initialised");
  if (--barrier->missing > 0) return;
  for (const auto& [target, to, from, bytes] : bulk_copies)
    if (target == barrier) std::memcpy(to, from, bytes);
  std::erase_if(bulk_copies, [=](const BulkCopy& copy) { return copy.barrier == barrier; });
  barrier->missing = barrier->arrivals, barrier->parity ^= 1;
}
void emulator::bulk_copy(Barrier* barrier, void* to, const void* from, std::size_t bytes) {
  if (bytes % 16 || std::uintptr_t(to) % 16 || std::uintptr_t(from) % 16)
    fail(__builtin_return_address(0), "TMA takes multiples of 16 bytes");
  std::memset(to, 0xFF, bytes);
  bulk_copies.push_back({barrier, to, from, bytes});
}
void emulator::bulk_store(void* to, const void* from, std::size_t bytes) {
  if (bytes % 16 || std::uintptr_t(to) % 16 || std::uintptr_t(from) % 16)
    fail(__builtin_return_address(0), "TMA takes multiples of 16 bytes");
  later(Async::stores, [=] { std::memcpy(to, from, bytes); });
}
void* emulator::scratch(std::size_t bytes) {
  scratches.emplace_back(new std::max_align_t[bytes / sizeof(std::max_align_t) + 1]);
  return scratches.back().get();
}
void emulator::barrier_wait(const Barrier* barrier, unsigned parity) {
  if (barrier->parity != parity) return;
  current->barrier = barrier, current->parity = parity;
  ::wait(State::at_barrier_wait, __builtin_return_address(0));
}
void emulator::threads_sync(unsigned name, unsigned threads) {
  if (name >= kNames) fail(__builtin_return_address(0), "there is no barrier %u", name);
  current->name = name, current->threads = threads;
  ::wait(State::at_threads_sync, __builtin_return_address(0));
}

void emulator::commit(Async queue) { ++current->tasks[int(queue)].committed; }
void emulator::wait(Async queue, int pending) {
  auto& [waiting, committed] = current->tasks[int(queue)];
  while (!waiting.empty() && int(committed - waiting.front().group) > pending) {
    waiting.front().run(waiting.front().work);
    waiting.pop_front();
  }
}
void emulator::later(Async queue, void (*run)(const void*), const void* work, std::size_t bytes) {
  auto& [waiting, committed] = current->tasks[int(queue)];
  if (bytes > sizeof waiting.front().work) fail(__builtin_return_address(0), "more work than a Task holds");
  std::memcpy(waiting.emplace_back(Task{run, committed, {}}).work, work, bytes);
}

// What a build that explains faults calls where -fsanitize finds one; ours, so that no sanitizer library is needed.
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

  constexpr int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGVTALRM};
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
