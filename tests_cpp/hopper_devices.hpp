// The devices of the tests of plans for sm90a.
#pragma once

#include "cuda/linear/tiles/sm90a/plan.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr GemmDevice kH200{132, {0, 132, 66, 39, 30, 22, 17, 0, 15}};
inline constexpr GemmDevice kSmallDevice{16, {0, 16, 8, 5, 3, 2, 2, 0, 1}};
inline constexpr GemmDevice kWithoutClusters{132, {}};
/// The emulated one (emulator/): two clusters of any size.
inline constexpr GemmDevice kEmulatedDevice{4, {0, 2, 2, 2, 2, 2, 2, 0, 2}};

}  // namespace flashkernel::cuda::sm90a
