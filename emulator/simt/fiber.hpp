// Switching between the stacks of a block's threads: a few instructions on x86-64, ucontext elsewhere.
#pragma once

#include <cstddef>

namespace simt {

inline constexpr std::size_t kStackBytes =
#ifdef __SANITIZE_ADDRESS__
    512 * 1024;
#else
    128 * 1024;
#endif

/// Memory for a stack with an unreadable page below it; kept for the process.
unsigned char* new_stack();

/// Makes a stack ready to start at `entry`; returns its stack pointer.
void* prepare_stack(unsigned char* stack, void (*entry)());

/// Leaves the current stack, keeping its stack pointer in *from, and goes on with another one.
extern "C" void simt_switch(void** from, void* to);

}  // namespace simt
