// NVTX for the emulated GPU: says on stderr what a profiler would show. The library calls it with FLASHKERNEL_NVTX=1 only.
#pragma once

#include <cstdio>

inline int nvtxRangePushA(const char* name) { return std::fprintf(stderr, "nvtx push %s\n", name); }
inline int nvtxRangePop() { return std::fprintf(stderr, "nvtx pop\n"); }
