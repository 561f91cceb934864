// attention_mla_decode, one query at a time: the oracle of the op's kernels. Called through src/cpu/kernels.cpp.
// The weights of hidden keys are not 0 but absent: what a query does not see may hold NaN.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

// A row of q, and what its softmax and its result need.
struct RowMemory {
  std::vector<double> q, scores, sums;
};

template <class T>
void attend_row(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i, RowMemory& memory) {
  const std::int64_t keys = p.last_key(i, p.seq_q, p.k_length(b));
  memory.q.clear();
  for (std::int64_t d = 0; d < p.head_dim; ++d) memory.q.push_back(load<T>(p.q, p.q_offset(b, h, i) + d));
  memory.scores.clear();
  double max = kNone;
  for (std::int64_t j = 0; j < keys; ++j) {
    const std::int64_t row = p.k_offset(b, 0, j);
    double dot = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) dot += memory.q[static_cast<std::size_t>(d)] * load<T>(p.k, row + d);
    memory.scores.push_back(dot * double{p.scale});
    max = std::max(max, memory.scores.back());
  }
  memory.sums.assign(static_cast<std::size_t>(p.head_dim_v), 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < keys; ++j) {
    const double score = memory.scores[static_cast<std::size_t>(j)];
    if (score == kNone) continue;
    const double weight = std::exp(score - max);
    const std::int64_t row = p.v_offset(b, 0, j);
    sum += weight;
    for (std::int64_t d = 0; d < p.head_dim_v; ++d)
      memory.sums[static_cast<std::size_t>(d)] += weight * load<T>(p.v, row + d);
  }
  const std::int64_t to = p.out_offset(b, h, i);
  for (std::int64_t d = 0; d < p.head_dim_v; ++d)
    store<T>(p.out, to + d, sum == 0 ? 0 : memory.sums[static_cast<std::size_t>(d)] / sum);
  if (p.lse) p.lse[p.lse_offset(b, h, i)] = static_cast<float>(sum == 0 ? kNone : max + std::log(sum));
}

}  // namespace

void attention_mla_decode(const MlaDecodeParams& params, void*, Stream) {
  const AttentionParams& p = params.attention;
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    RowMemory memory;
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t i = row % p.seq_q, h = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
      visit_floating(p.dtype, [&](auto zero) { attend_row<decltype(zero)>(p, b, h, i, memory); });
    }
  };
  parallel_for(p.batch * p.heads_q * p.seq_q, 1, task);
}

}  // namespace flashkernel::cpu_scalar
