// decode_step: the ops of a layer one after another, each as its formula says it, in double; what goes from one to the
// next is rounded to the dtype.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

/// Elements of the workspace: a row's results, one behind the other.
struct Rows {
  std::int64_t residual, normed, qkv, attended, gate_up, inner, sum, count;
  explicit Rows(const DecodeStepParams& p) {
    std::int64_t at = 0;
    const auto take = [&](std::int64_t columns) { return at += p.rows * columns, at - p.rows * columns; };
    residual = take(p.hidden), normed = take(p.hidden);
    qkv = take((p.heads_q + 2 * p.heads_kv) * p.head_dim), attended = take(p.heads_q * p.head_dim);
    gate_up = take(2 * p.inner), inner = take(p.inner), sum = take(p.hidden);
    count = at;
  }
};

template <class T>
class Step {
 public:
  Step(const DecodeStepParams& p, void* workspace) : p_(p), at_(p), data_(static_cast<T*>(workspace)) {}

  void run() {
    for (std::int64_t row = 0; row < p_.rows; ++row)
      for (std::int64_t i = 0; i < p_.hidden; ++i)
        data_[at_.residual + row * p_.hidden + i] =
            static_cast<const T*>(p_.embedding)[p_.tokens[row] * p_.stride_embedding_row + i];
    const std::int64_t width = p_.heads_q * p_.head_dim;
    for (std::int64_t layer = 0; layer < p_.layers; ++layer) {
      norm(2 * layer);
      multiply(p_.qkv, layer, at_.normed, p_.hidden, at_.qkv, (p_.heads_q + 2 * p_.heads_kv) * p_.head_dim);
      for (std::int64_t row = 0; row < p_.rows; ++row) turn_and_append(layer, row);
      auto heads = [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t i = begin; i < end; ++i) attend(layer, i / p_.heads_q, i % p_.heads_q);
      };
      parallel_for(p_.rows * p_.heads_q, 1, heads);
      multiply(p_.out, layer, at_.attended, width, at_.sum, p_.hidden);
      add();
      norm(2 * layer + 1);
      multiply(p_.gate_up, layer, at_.normed, p_.hidden, at_.gate_up, 2 * p_.inner);
      for (std::int64_t row = 0; row < p_.rows; ++row)
        for (std::int64_t i = 0; i < p_.inner; ++i) {
          const double gate = load<T>(data_, at_.gate_up + row * 2 * p_.inner + i);
          const double up = load<T>(data_, at_.gate_up + row * 2 * p_.inner + p_.inner + i);
          store<T>(data_, at_.inner + row * p_.inner + i, gate / (1 + std::exp(-gate)) * up);
        }
      multiply(p_.down, layer, at_.inner, p_.inner, at_.sum, p_.hidden);
      add();
    }
    norm(2 * p_.layers);
    product(p_.head, 0, at_.normed, p_.hidden, static_cast<T*>(p_.logits), p_.stride_logits_row, p_.outputs);
  }

 private:
  void product(const LayerMatrices& matrix, std::int64_t layer, std::int64_t x, std::int64_t columns, T* out,
               std::int64_t stride_out, std::int64_t rows) {
    auto some = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t o = begin; o < end; ++o)
        for (std::int64_t row = 0; row < p_.rows; ++row) {
          double sum = 0;
          for (std::int64_t i = 0; i < columns; ++i)
            sum += load<T>(data_, x + row * columns + i) *
                   load<T>(matrix.data, layer * matrix.stride_layer + o * matrix.stride_row + i);
          store<T>(out, row * stride_out + o, sum);
        }
    };
    parallel_for(rows, grain_for(columns * p_.rows), some);
  }
  void multiply(const LayerMatrices& matrix, std::int64_t layer, std::int64_t x, std::int64_t columns, std::int64_t out,
                std::int64_t rows) {
    product(matrix, layer, x, columns, data_ + out, rows, rows);
  }
  void add() {
    for (std::int64_t i = 0; i < p_.rows * p_.hidden; ++i)
      store<T>(data_, at_.residual + i, load<T>(data_, at_.residual + i) + load<T>(data_, at_.sum + i));
  }
  void norm(std::int64_t which) {
    for (std::int64_t row = 0; row < p_.rows; ++row) {
      double squares = 0;
      for (std::int64_t i = 0; i < p_.hidden; ++i) {
        const double x = load<T>(data_, at_.residual + row * p_.hidden + i);
        squares += x * x;
      }
      const double factor = 1 / std::sqrt(squares / static_cast<double>(p_.hidden) + static_cast<double>(p_.eps));
      for (std::int64_t i = 0; i < p_.hidden; ++i)
        store<T>(data_, at_.normed + row * p_.hidden + i,
                 load<T>(data_, at_.residual + row * p_.hidden + i) * factor *
                     load<T>(p_.norms, which * p_.stride_norms_row + i));
    }
  }
  void turn_and_append(std::int64_t layer, std::int64_t row) {
    const std::int64_t heads = p_.heads_q + 2 * p_.heads_kv, half = p_.head_dim / 2;
    T* const qkv = data_ + at_.qkv + row * heads * p_.head_dim;
    for (std::int64_t head = 0; head < p_.heads_q + p_.heads_kv; ++head)
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(p_.positions[row]) * static_cast<double>(p_.inv_freq[i]);
        const std::int64_t first = head * p_.head_dim + i;
        const double a = load<T>(qkv, first), b = load<T>(qkv, first + half);
        store<T>(qkv, first, a * std::cos(angle) - b * std::sin(angle));
        store<T>(qkv, first + half, b * std::cos(angle) + a * std::sin(angle));
      }
    const std::int64_t slot = p_.slots[row];
    if (slot < 0) return;
    const std::int64_t page = slot / p_.page_size, offset = slot % p_.page_size;
    for (std::int64_t head = 0; head < p_.heads_kv; ++head) {
      const T* const k = qkv + (p_.heads_q + head) * p_.head_dim;
      const T* const v = k + p_.heads_kv * p_.head_dim;
      std::copy_n(k, p_.head_dim, k_row(layer, page, offset, head));
      std::copy_n(v, p_.head_dim, v_row(layer, page, offset, head));
    }
  }
  T* k_row(std::int64_t layer, std::int64_t page, std::int64_t offset, std::int64_t head) const {
    return static_cast<T*>(p_.k_pages) + layer * p_.stride_k_layer + page * p_.stride_k_page +
           offset * p_.stride_k_slot + head * p_.stride_k_head;
  }
  T* v_row(std::int64_t layer, std::int64_t page, std::int64_t offset, std::int64_t head) const {
    return static_cast<T*>(p_.v_pages) + layer * p_.stride_v_layer + page * p_.stride_v_page +
           offset * p_.stride_v_slot + head * p_.stride_v_head;
  }
  void attend(std::int64_t layer, std::int64_t row, std::int64_t head) {
    const std::int64_t length = p_.seq_lens[row], kv_head = head / (p_.heads_q / p_.heads_kv);
    const T* const q = data_ + at_.qkv + (row * (p_.heads_q + 2 * p_.heads_kv) + head) * p_.head_dim;
    std::vector<double> weights(static_cast<std::size_t>(length)), sums(static_cast<std::size_t>(p_.head_dim), 0.0);
    const auto page = [&](std::int64_t key) {
      return p_.block_table[row * p_.stride_block_table + key / p_.page_size];
    };
    double most = -INFINITY, total = 0;
    for (std::int64_t key = 0; key < length; ++key) {
      const T* const k = k_row(layer, page(key), key % p_.page_size, kv_head);
      double score = 0;
      for (std::int64_t i = 0; i < p_.head_dim; ++i) score += load<T>(q, i) * load<T>(k, i);
      weights[static_cast<std::size_t>(key)] = score * static_cast<double>(p_.scale);
      most = std::max(most, weights[static_cast<std::size_t>(key)]);
    }
    for (std::int64_t key = 0; key < length; ++key) {
      const double weight = std::exp(weights[static_cast<std::size_t>(key)] - most);
      const T* const v = v_row(layer, page(key), key % p_.page_size, kv_head);
      total += weight;
      for (std::int64_t i = 0; i < p_.head_dim; ++i) sums[static_cast<std::size_t>(i)] += weight * load<T>(v, i);
    }
    for (std::int64_t i = 0; i < p_.head_dim; ++i)
      store<T>(data_, at_.attended + (row * p_.heads_q + head) * p_.head_dim + i,
               length > 0 ? sums[static_cast<std::size_t>(i)] / total : 0.0);
  }

  const DecodeStepParams& p_;
  const Rows at_;
  T* const data_;
};

}  // namespace

std::size_t decode_step_workspace(const DecodeStepParams& p) {
  return static_cast<std::size_t>(Rows(p).count) * dtype_bytes(p.dtype);
}

void decode_step(const DecodeStepParams& p, void* workspace, Stream) {
  visit_floating(p.dtype, [&](auto zero) { Step<decltype(zero)>(p, workspace).run(); });
}

}  // namespace flashkernel::cpu_scalar
