// How many registers the warpgroups of a block that has a multiprocessor to itself can share by setmaxnreg.
#pragma once

namespace flashkernel::cuda {

/// A row of threads is one of each warpgroup. All start with the same share of 65536 / 128, a multiple of 8, and what
/// that leaves over nobody gets: 5 warpgroups share 480, not 512. A kernel that asks for more waits for ever.
constexpr int registers_a_row(int threads) { return threads / 128 * (65536 / threads / 8 * 8); }

}  // namespace flashkernel::cuda
