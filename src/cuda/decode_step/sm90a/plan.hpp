// The plan of a decode step: a block a multiprocessor. Its lists are checked first, once for each geometry, since a
// list with a mistake is a hang. Host code, for the table of kernels.
#pragma once

#include <memory>
#include <string>
#include <tuple>

#include "core/fork_safe.hpp"
#include "cuda/decode_step/check_list.hpp"
#include "cuda/decode_step/sm90a/variant.hpp"
#include "flashkernel/error.hpp"

namespace flashkernel::cuda::decode_step {

/// InvalidArgument for lists that must not run.
inline Plan plan(const DecodeStepParams& p, const DeviceFacts& facts) {
  const Geometry g = geometry_of(p, facts.num_sms);
  using Key = std::tuple<int, int, int, int, int, int, int, int, int, int>;
  static MadeOncePerKey<Key, const std::string> known;
  const Key key{g.rows,     g.layers, g.hidden,  g.heads_q, g.heads_kv,
                g.head_dim, g.inner,  g.outputs, g.blocks,  facts.max_shared_bytes_per_block};
  const std::string& why = known.get(key, [&] {
    const char* const found = check_lists(g, lists_of(g), static_cast<std::size_t>(facts.max_shared_bytes_per_block));
    return std::make_unique<const std::string>(found ? found : "");
  });
  if (!why.empty()) throw InvalidArgument("decode_step: its lists can't be run: " + why);
  return Plan::of(g.blocks, workspace_of(g).bytes);
}

}  // namespace flashkernel::cuda::decode_step
