#pragma once

#include <cstdint>

namespace flashkernel::cuda {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace flashkernel::cuda
