// One-token decode over a paged cache: two sequences that share a prompt, appended to token by token, and the last
// step's attention checked against attention written out by hand. Build: see examples/CMakeLists.txt; runs on the CPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "flashkernel/flashkernel.hpp"

namespace fk = flashkernel;

namespace {

constexpr std::int64_t kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64;
constexpr std::int64_t kPromptTokens = 40, kNewTokens = 25;

struct Sequence {
  fk::SequenceId id;
  std::vector<float> keys, values;  // the same tokens kept by hand: [tokens, heads_kv, head_dim]
};

std::vector<float> random_values(std::mt19937& random, std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// Appends `tokens` random tokens to the cache and to the copy kept by hand.
void append(fk::KvCache& cache, Sequence& sequence, std::int64_t tokens, std::mt19937& random) {
  std::vector<float> k = random_values(random, tokens * kHeadsKv * kHeadDim);
  std::vector<float> v = random_values(random, tokens * kHeadsKv * kHeadDim);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
  cache.append(sequence.id, tokens, slots.data());
  fk::kv_append({k.data(), fk::DType::kFloat32, {tokens, kHeadsKv, kHeadDim}},
                {v.data(), fk::DType::kFloat32, {tokens, kHeadsKv, kHeadDim}}, cache.pool().k_pages(),
                cache.pool().v_pages(), {slots.data(), fk::DType::kInt64, {tokens}});
  sequence.keys.insert(sequence.keys.end(), k.begin(), k.end());
  sequence.values.insert(sequence.values.end(), v.begin(), v.end());
}

// softmax(q K^T / sqrt(d)) V of one head in double precision.
void attention_by_hand(const float* q, const Sequence& sequence, std::int64_t head, double* out) {
  const std::int64_t kv_head = head * kHeadsKv / kHeadsQ;
  const std::int64_t tokens = static_cast<std::int64_t>(sequence.keys.size()) / (kHeadsKv * kHeadDim);
  std::vector<double> scores(static_cast<std::size_t>(tokens));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* k = &sequence.keys[static_cast<std::size_t>((t * kHeadsKv + kv_head) * kHeadDim)];
    double dot = 0;
    for (std::int64_t d = 0; d < kHeadDim; ++d) dot += static_cast<double>(q[d]) * k[d];
    scores[static_cast<std::size_t>(t)] = dot / std::sqrt(static_cast<double>(kHeadDim));
  }
  const double maximum = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  std::fill(out, out + kHeadDim, 0.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double weight = std::exp(scores[static_cast<std::size_t>(t)] - maximum);
    const float* v = &sequence.values[static_cast<std::size_t>((t * kHeadsKv + kv_head) * kHeadDim)];
    sum += weight;
    for (std::int64_t d = 0; d < kHeadDim; ++d) out[d] += weight * v[d];
  }
  for (std::int64_t d = 0; d < kHeadDim; ++d) out[d] /= sum;
}

}  // namespace

int main() {
  std::mt19937 random(2024);
  fk::KvPagePoolOptions options;
  options.num_pages = 32;
  options.page_size = 16;
  options.heads_kv = kHeadsKv;
  options.head_dim = kHeadDim;
  options.dtype = fk::DType::kFloat32;
  fk::KvPagePool pool(options);
  fk::KvCache cache(pool);

  Sequence first{cache.create(), {}, {}};
  append(cache, first, kPromptTokens, random);
  Sequence second = first;
  second.id = cache.fork(first.id);  // shares every page of the prompt until one of the two writes
  for (std::int64_t step = 0; step < kNewTokens; ++step) {
    append(cache, first, 1, random);
    append(cache, second, 1, random);
  }
  const fk::KvCacheStats stats = cache.stats();
  std::printf("%s CPU features: %s; %lld of %lld pages used, %lld shared, %llu copied on write\n",
              FLASHKERNEL_VERSION_STRING, fk::cpu_features().c_str(), static_cast<long long>(stats.num_pages_used),
              static_cast<long long>(options.num_pages), static_cast<long long>(stats.num_pages_shared),
              static_cast<unsigned long long>(stats.num_copies_on_write));

  const fk::SequenceId ids[] = {first.id, second.id};
  const std::int64_t max_pages = std::max(cache.num_pages(first.id), cache.num_pages(second.id));
  std::vector<std::int32_t> table(static_cast<std::size_t>(2 * max_pages)), lengths(2);
  cache.block_table(ids, 2, max_pages, table.data(), lengths.data());

  std::vector<float> q = random_values(random, 2 * kHeadsQ * kHeadDim), out(q.size());
  const fk::TensorView q_view(q.data(), fk::DType::kFloat32, {2, kHeadsQ, 1, kHeadDim});
  const fk::TensorView out_view(out.data(), fk::DType::kFloat32, {2, kHeadsQ, 1, kHeadDim});
  const fk::TensorView table_view(table.data(), fk::DType::kInt32, {2, max_pages});
  const fk::TensorView lengths_view(lengths.data(), fk::DType::kInt32, {2});
  fk::attention_paged(q_view, pool.k_pages(), pool.v_pages(), table_view, lengths_view, {}, 1, out_view, {});

  double largest = 0, expected[kHeadDim];
  const Sequence* sequences[] = {&first, &second};
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = 0; h < kHeadsQ; ++h) {
      const std::size_t row = static_cast<std::size_t>((b * kHeadsQ + h) * kHeadDim);
      attention_by_hand(&q[row], *sequences[b], h, expected);
      for (std::int64_t d = 0; d < kHeadDim; ++d)
        largest = std::max(largest, std::abs(expected[d] - out[row + static_cast<std::size_t>(d)]));
    }
  std::printf("largest difference to attention in double precision: %.2e\n", largest);
  cache.free(first.id);
  cache.free(second.id);
  return largest <= 1e-5 && pool.num_free() == options.num_pages ? 0 : 1;
}
