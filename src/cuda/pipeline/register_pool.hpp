// How many registers setmaxnreg can share out among the warpgroups of a block that has a multiprocessor to itself.
#pragma once

namespace flashkernel::cuda {

/// The registers of one thread from each warpgroup, together. All threads start with the same number of registers, a
/// multiple of 8, and no thread can get the rest: 5 warpgroups have 480 together, not 65536 / 128 = 512. A kernel that
/// asks for more waits forever.
constexpr int registers_a_row(int threads) { return threads / 128 * (65536 / threads / 8 * 8); }

}  // namespace flashkernel::cuda
