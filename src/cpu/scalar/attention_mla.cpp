// attention_mla_decode, one query at a time, and latent_append, one row at a time: the oracle of the ops' kernels.
// Called through src/cpu/kernels.cpp. The weights of hidden keys are not 0 but absent: what a query does not see may
// hold NaN.
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

// A row of q, one of the cache, and what its softmax and its result need.
struct RowMemory {
  std::vector<double> q, row, scores, sums;
};

// The first `count` columns of the row at `offset`; 8-bit ones are rounded to T as any kernel rounds them.
template <class T>
void read_row(const MlaDecodeParams& params, const void* data, std::int64_t offset, std::int64_t count,
              std::vector<double>& to) {
  to.clear();
  const LatentFormat& format = params.format;
  const auto* const bytes = static_cast<const std::uint8_t*>(data) + offset;
  for (std::int64_t d = 0; d < count; ++d) {
    if (!format.is_narrow()) {
      to.push_back(load<T>(data, offset + d));
      continue;
    }
    const float number = d < format.narrow_columns() ? to_float(Float8E4M3{bytes[d]}) * format.scale_of(bytes, d)
                                                     : to_float(BFloat16{format.bits_of(bytes, d)});
    to.push_back(static_cast<double>(to_float(from_float<T>(number))));
  }
}

template <class T>
void attend_row(const MlaDecodeParams& params, std::int64_t b, std::int64_t h, std::int64_t i, RowMemory& memory) {
  const AttentionParams& p = params.attention;
  const std::int64_t keys = p.last_key(i, p.seq_q, p.k_length(b));
  memory.q.clear();
  for (std::int64_t d = 0; d < p.head_dim; ++d) memory.q.push_back(load<T>(p.q, p.q_offset(b, h, i) + d));
  memory.scores.clear();
  double max = kNone;
  for (std::int64_t j = 0; j < keys; ++j) {
    read_row<T>(params, p.k, p.k_offset(b, 0, j), p.head_dim, memory.row);
    double dot = 0;
    for (std::size_t d = 0; d < memory.row.size(); ++d) dot += memory.q[d] * memory.row[d];
    memory.scores.push_back(dot * double{p.scale});
    max = std::max(max, memory.scores.back());
  }
  memory.sums.assign(static_cast<std::size_t>(p.head_dim_v), 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < keys; ++j) {
    const double score = memory.scores[static_cast<std::size_t>(j)];
    if (score == kNone) continue;
    const double weight = std::exp(score - max);
    read_row<T>(params, p.v, p.v_offset(b, 0, j), p.head_dim_v, memory.row);
    sum += weight;
    for (std::size_t d = 0; d < memory.row.size(); ++d) memory.sums[d] += weight * memory.row[d];
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
      visit_floating(p.dtype_q, [&](auto zero) { attend_row<decltype(zero)>(params, b, h, i, memory); });
    }
  };
  parallel_for(p.batch * p.heads_q * p.seq_q, 1, task);
}

void latent_append(const LatentAppendParams& p, void*, Stream) {
  const LatentFormat& format = p.format;
  const bool grouped = format.kind == LatentKind::kGroups;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t slot = p.slots[token];
        if (slot < 0) continue;
        std::uint8_t* const row = p.pages + slot / p.page_size * p.stride_page + slot % p.page_size * p.stride_slot;
        const T* const latent = static_cast<const T*>(p.latent) + token * p.stride_latent;
        const T* const key = static_cast<const T*>(p.key) + token * p.stride_key;
        for (std::int64_t first = 0; first < format.rank; first += kLatentGroup) {
          const std::int64_t last = std::min(format.rank, first + kLatentGroup);
          float scale = format.scale.value();
          if (grouped) {
            float largest = 0;
            for (std::int64_t d = first; d < last; ++d)
              if (const float size = std::fabs(to_float(latent[d])); size > largest) largest = size;  // no NaN
            scale = latent_scale_of(largest);
            reinterpret_cast<float*>(row + format.rank)[first / kLatentGroup] = scale;
          }
          for (std::int64_t d = first; d < last; ++d) row[d] = from_float<Float8E4M3>(to_float(latent[d]) / scale).bits;
        }
        auto* const turned = reinterpret_cast<BFloat16*>(row + LatentFormat::bytes(format.rank, 0));
        for (std::int64_t d = 0; d < p.turned; ++d) {
          if (grouped)
            turned[d] = std::isnan(to_float(key[d])) ? BFloat16{kLatentNan} : from_float<BFloat16>(to_float(key[d]));
          else
            row[format.rank + d] = from_float<Float8E4M3>(to_float(key[d]) / format.scale.value()).bits;
        }
      }
    };
    parallel_for(p.tokens, grain_for(format.columns), task);
  });
}

}  // namespace flashkernel::cpu_scalar
