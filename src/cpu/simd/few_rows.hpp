// What the kernels of attention do with a sequence of few query rows a kv head.
#pragma once

#include "flashkernel/types.hpp"

namespace flashkernel::cpu {

/// Keys and values stream through registers, or are packed into panels as those of many rows are.
enum class FewRows : std::uint8_t { kStream, kPack };

}  // namespace flashkernel::cpu
