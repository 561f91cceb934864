// How a call of a norm or of softmax is cut into blocks: what the plans of their rows hold. Host code.
#pragma once

#include <cstdint>

#include "core/device_facts.hpp"

namespace flashkernel::cuda {

/// Rows that a block, or a warp of one, takes whole.
template <class Params>
struct BlockRows {
  void (*kernel)(Params) = nullptr;  // an instance: its threads, vectors a thread and options
  int threads = 0, rows = 0;         // threads of a row, rows of a block
};

/// How many rows a plan cuts rows for: those of the call, but in the invariant mode always many, since the order of a
/// row's sums follows from how it is cut.
inline std::int64_t rows_planned_for(std::int64_t rows, const DeviceFacts& facts) {
  return facts.invariant ? std::int64_t{1} << 30 : rows;
}

/// Rows that the blocks of a cluster share.
struct ClusterRows {
  std::int64_t clusters = 0;
  int blocks = 0, share = 0;  // blocks of a cluster, columns of a block
};

}  // namespace flashkernel::cuda
