#pragma once

inline void named_barrier_sync(int name, int threads) { emulator::threads_sync(name, threads); }
