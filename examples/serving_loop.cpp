// A serving loop over a paged cache: requests come in when their pages are free, run side by side in one batch, and
// give their pages back. The model is a toy of one layer. docs/tutorials/paged_serving_cpp.md explains it; runs on the
// CPU.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <random>
#include <vector>

#include "flashkernel/flashkernel.hpp"

namespace fk = flashkernel;

namespace {

// [pool]
constexpr std::int64_t kVocab = 64, kHeads = 4, kDim = 16, kWidth = kHeads * kDim, kPage = 16;

fk::KvPagePoolOptions pool_options() {
  fk::KvPagePoolOptions options;
  options.num_pages = 12;
  options.page_size = kPage;
  options.heads_kv = kHeads;
  options.head_dim = kDim;
  options.dtype = fk::DType::kFloat32;
  return options;
}
// [pool]

std::vector<float> random_values(std::mt19937& random, std::int64_t count, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

struct Model {
  std::vector<float> embedding, w_qkv, head;  // [vocab, width], [3 * width, width], [vocab, width]
};

fk::TensorView floats(std::vector<float>& data, std::int64_t rows, std::int64_t columns) {
  return {data.data(), fk::DType::kFloat32, {rows, columns}};
}

// [request]
struct Request {
  std::vector<std::int64_t> prompt;
  std::int64_t max_new = 0;
  fk::SequenceId sequence;          // while it runs
  std::vector<std::int64_t> fresh;  // tokens that are not in the cache yet
  std::vector<std::int64_t> text;   // the answer

  std::int64_t pages() const { return (static_cast<std::int64_t>(prompt.size()) + max_new + kPage - 1) / kPage; }
};
// [request]

// [step]
// Appends what is fresh of each request to the cache, and gives each its next token.
void step(Model& model, fk::KvCache& cache, std::vector<Request*>& running) {
  std::vector<std::int32_t> begins = {0};
  std::vector<std::int64_t> slots;
  std::vector<float> x;
  std::vector<fk::SequenceId> ids;
  std::int64_t longest = 0, max_pages = 0;
  for (Request* request : running) {
    const auto count = static_cast<std::int64_t>(request->fresh.size());
    slots.resize(slots.size() + request->fresh.size());
    cache.append(request->sequence, count, slots.data() + begins.back());  // takes pages as needed
    for (const std::int64_t token : request->fresh)
      x.insert(x.end(), &model.embedding[static_cast<std::size_t>(token * kWidth)],
               &model.embedding[static_cast<std::size_t>(token * kWidth)] + kWidth);
    begins.push_back(begins.back() + static_cast<std::int32_t>(count));
    ids.push_back(request->sequence);
    longest = std::max(longest, count);
    max_pages = std::max(max_pages, cache.num_pages(request->sequence));
  }
  const std::int64_t rows = begins.back(), batch = static_cast<std::int64_t>(running.size());

  std::vector<float> qkv(static_cast<std::size_t>(rows * 3 * kWidth)), out(static_cast<std::size_t>(rows * kWidth));
  fk::linear(floats(x, rows, kWidth), floats(model.w_qkv, 3 * kWidth, kWidth), {}, floats(qkv, rows, 3 * kWidth), {});
  const auto part = [&](std::int64_t i) {  // q, k or v of each row: [rows, heads, dim], read where it lies
    return fk::TensorView(qkv.data() + i * kWidth, fk::DType::kFloat32, {rows, kHeads, kDim}, {3 * kWidth, kDim, 1});
  };
  const fk::KvPagePool& pool = cache.pool();
  fk::kv_append(part(1), part(2), pool.k_pages(), pool.v_pages(), {slots.data(), fk::DType::kInt64, {rows}});

  std::vector<std::int32_t> table(static_cast<std::size_t>(batch * max_pages)), lengths(ids.size());
  cache.block_table(ids.data(), batch, max_pages, table.data(), lengths.data());
  fk::AttentionOptions options;
  options.causal = true;
  fk::attention_paged(part(0), pool.k_pages(), pool.v_pages(), {table.data(), fk::DType::kInt32, {batch, max_pages}},
                      {lengths.data(), fk::DType::kInt32, {batch}}, {begins.data(), fk::DType::kInt32, {batch + 1}},
                      longest, {out.data(), fk::DType::kFloat32, {rows, kHeads, kDim}}, {}, options);

  for (std::int64_t i = 0; i < batch; ++i) {
    std::vector<float> hidden(static_cast<std::size_t>(kWidth)), logits(static_cast<std::size_t>(kVocab));
    const auto last = static_cast<std::size_t>((begins[static_cast<std::size_t>(i) + 1] - 1) * kWidth);
    for (std::size_t c = 0; c < hidden.size(); ++c) hidden[c] = x[last + c] + out[last + c];
    fk::linear(floats(hidden, 1, kWidth), floats(model.head, kVocab, kWidth), {}, floats(logits, 1, kVocab), {});
    const std::int64_t token = std::max_element(logits.begin(), logits.end()) - logits.begin();
    running[static_cast<std::size_t>(i)]->text.push_back(token);
    running[static_cast<std::size_t>(i)]->fresh = {token};
  }
}
// [step]

// [serve]
void serve(Model& model, fk::KvCache& cache, std::vector<Request>& requests) {
  std::deque<Request*> waiting;
  for (Request& request : requests) waiting.push_back(&request);
  std::vector<Request*> running;
  std::int64_t promised = 0;
  while (!waiting.empty() || !running.empty()) {
    while (!waiting.empty() && promised + waiting.front()->pages() <= cache.pool().options().num_pages) {
      Request* request = waiting.front();
      waiting.pop_front();
      promised += request->pages();
      request->sequence = cache.create();
      request->fresh = request->prompt;
      running.push_back(request);
    }
    step(model, cache, running);
    const auto ended = std::stable_partition(running.begin(), running.end(), [](const Request* request) {
      return static_cast<std::int64_t>(request->text.size()) < request->max_new;
    });
    for (auto it = ended; it != running.end(); ++it) {
      promised -= (*it)->pages();
      cache.free((*it)->sequence);  // its pages are free at once
    }
    running.erase(ended, running.end());
  }
}
// [serve]

}  // namespace

int main() {
  std::mt19937 random(2024);
  Model model{random_values(random, kVocab * kWidth, 1.0f), random_values(random, 3 * kWidth * kWidth, 0.125f),
              random_values(random, kVocab * kWidth, 1.0f)};
  fk::KvPagePool pool(pool_options());
  fk::KvCache cache(pool);

  std::vector<Request> requests(8);
  std::uniform_int_distribution<std::int64_t> any_token(0, kVocab - 1);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt.resize(5 + 7 * i);
    for (std::int64_t& token : requests[i].prompt) token = any_token(random);
    requests[i].max_new = static_cast<std::int64_t>(4 + 3 * i);
  }
  std::vector<Request> alone = requests;
  serve(model, cache, requests);

  int wrong = 0;
  for (std::size_t i = 0; i < alone.size(); ++i) {  // the batch changed no answer
    std::vector<Request> one = {alone[i]};
    serve(model, cache, one);
    wrong += one[0].text != requests[i].text;
  }
  std::printf("%zu requests, %d answers differ from those given alone, %lld of %lld pages free\n", requests.size(),
              wrong, static_cast<long long>(pool.num_free()), static_cast<long long>(pool.options().num_pages));
  return wrong == 0 && pool.num_free() == pool.options().num_pages ? 0 : 1;
}
