// A grid of calls on simulated GPUs, made of shapes and a fixed sequence of pseudo-random numbers: what the choice of a
// kernel is looked at on. Nothing of it runs: pointers are addresses that nobody reads.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ops/op_list.hpp"

namespace flashkernel::choices {

/// The same numbers on every machine.
class Sequence {
 public:
  explicit Sequence(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  bool once_in(std::uint32_t n) { return next() % n == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[next() % values.size()];
  }

 private:
  std::uint64_t state_;
};

inline void* address(std::uintptr_t offset = 0) { return reinterpret_cast<void*>(std::uintptr_t{1} << 20 | offset); }

/// Contiguous, or pages of `page_size` where that is not 0.
inline void lay_out(AttentionParams& p, std::int64_t page_size) {
  p.device = Device::cuda(0);
  p.head_dim_v = p.head_dim_v ? p.head_dim_v : p.head_dim;
  p.q = p.k = p.v = address();
  p.out = address();
  p.stride_q_token = p.heads_q * p.head_dim, p.stride_q_head = p.head_dim;
  p.stride_q_batch = p.seq_q * p.stride_q_token;
  p.stride_out_token = p.heads_q * p.head_dim_v, p.stride_out_head = p.head_dim_v;
  p.stride_out_batch = p.seq_q * p.stride_out_token;
  p.stride_k_token = p.heads_kv * p.head_dim, p.stride_k_head = p.head_dim;
  p.stride_v_token = p.heads_kv * p.head_dim_v, p.stride_v_head = p.head_dim_v;
  const std::int64_t tokens = page_size ? page_size : p.seq_k;
  p.stride_k_batch = tokens * p.stride_k_token, p.stride_v_batch = tokens * p.stride_v_token;
  if (!page_size) return;
  p.block_table = static_cast<const std::int32_t*>(address());
  p.page_size = page_size;
  p.max_pages = p.stride_block_table = (p.seq_k + page_size - 1) / page_size;
  p.num_pages = p.batch * p.max_pages;
  p.seq_lens.data = address();
}

/// Decode's shapes around its thresholds.
template <class F>
void each_decode(F&& f) {
  struct Heads {
    std::int64_t q, kv;
  };
  for (const std::int64_t dim : {64, 128})
    for (const Heads heads : {Heads{32, 8},
                              {32, 1},
                              {32, 32},
                              {8, 1},
                              {8, 8},
                              {28, 4},
                              {64, 8},
                              {72, 8},
                              {12, 12},
                              {40, 1},
                              {11, 1},
                              {16, 1},
                              {24, 2},
                              {64, 2}})
      for (const std::int64_t batch : {1, 2, 3, 4, 8, 9, 12, 16, 24, 32, 34, 64, 128, 256, 265})
        for (const std::int64_t keys : {1, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32784, 65536, 262144}) {
          AttentionParams p;
          p.dtype = p.dtype_q = DType::kBFloat16;
          p.batch = batch, p.heads_q = heads.q, p.heads_kv = heads.kv;
          p.seq_q = 1, p.seq_k = keys, p.head_dim = dim;
          lay_out(p, keys >= 16 && batch % 2 == 0 ? 16 : 0);
          f(p);
        }
}

template <class F>
void each_attention(int count, F&& f) {
  Sequence s(1);
  for (int i = 0; i < count; ++i) {
    AttentionParams p;
    p.dtype = p.dtype_q = s.one_of({DType::kFloat16, DType::kBFloat16, DType::kFloat32});
    p.heads_kv = s.one_of<std::int64_t>({1, 2, 4, 8, 12});
    p.heads_q = p.heads_kv * s.one_of<std::int64_t>({1, 1, 2, 4, 5, 8, 16, 40});
    p.batch = s.one_of<std::int64_t>({1, 1, 2, 4, 16, 64});
    p.seq_q = s.one_of<std::int64_t>({1, 1, 1, 2, 5, 17, 128, 1000, 4096});
    p.seq_k = s.one_of<std::int64_t>({0, 1, 16, 128, 1000, 1024, 8192});
    p.head_dim = s.one_of<std::int64_t>({16, 32, 64, 64, 80, 96, 128, 128, 128, 192, 256, 320});
    if (s.once_in(8)) p.head_dim_v = s.one_of<std::int64_t>({32, 64, 128, 512});
    const std::int64_t page = s.once_in(3) ? s.one_of<std::int64_t>({8, 16, 24, 48, 64, 256}) : 0;
    if (page && s.once_in(4)) {
      p.dtype = s.one_of({DType::kInt8, DType::kFloat8E4M3});
      if (p.dtype_q == DType::kFloat32 && s.once_in(2)) p.dtype_q = DType::kFloat16;
      p.quantization.present = true;
      p.quantization.per_token = s.once_in(2);
      p.quantization.k.data = p.quantization.v.data = static_cast<float*>(address());
    }
    lay_out(p, page);
    if (!page && s.once_in(5)) {
      p.cu_seqlens_q.data = p.cu_seqlens_k.data = address();
      p.total_q = p.batch * p.seq_q, p.total_k = p.batch * p.seq_k;
    }
    if (s.once_in(6)) p.window_left = 64;
    if (s.once_in(2)) p.window_right = 0, p.causal = true;
    if (s.once_in(8)) p.softcap = 30;
    if (s.once_in(8)) p.alibi_slopes = static_cast<const float*>(address());
    if (s.once_in(8)) p.bias.data = address();
    if (s.once_in(8)) p.k = address(2);
    if (s.once_in(10)) p.stride_q_head += 1;
    f(p);
  }
}

template <class F>
void each_attention_backward(int count, F&& f) {
  each_attention(count, [&](const AttentionParams& forward) {
    if (forward.quantization) return;
    AttentionBackwardParams p;
    p.forward = forward;
    p.grad_out = address();
    p.stride_grad_out_batch = forward.stride_out_batch, p.stride_grad_out_head = forward.stride_out_head;
    p.stride_grad_out_token = forward.stride_out_token;
    p.grad_q = p.grad_k = p.grad_v = address();
    p.stride_grad_q_batch = forward.stride_q_batch, p.stride_grad_q_head = forward.stride_q_head;
    p.stride_grad_q_token = forward.stride_q_token;
    p.stride_grad_k_batch = forward.stride_k_batch, p.stride_grad_k_head = forward.stride_k_head;
    p.stride_grad_k_token = forward.stride_k_token;
    p.stride_grad_v_batch = forward.stride_v_batch, p.stride_grad_v_head = forward.stride_v_head;
    p.stride_grad_v_token = forward.stride_v_token;
    if (forward.bias.data && forward.seq_q % 2 == 0) p.grad_bias = address();
    f(p);
  });
}

template <class F>
void each_linear(F&& f) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32})
    for (const std::int64_t rows : {0, 1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 512, 1024, 2048, 8192})
      for (const std::int64_t in : {1, 8, 100, 256, 768, 1024, 1280, 2048, 4096, 4104, 8192, 16384})
        for (const std::int64_t out : {1, 8, 100, 256, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 28672, 151936})
          for (const int kind : {0, 1, 2}) {  // weights along in, along out, rows that are not aligned
            LinearParams p;
            p.dtype = dtype;
            p.device = Device::cuda(0);
            p.rows = rows, p.in_features = in, p.out_features = out;
            p.x = p.weight = address();
            p.out = address();
            p.stride_x_row = in + (kind == 2 ? 1 : 0), p.stride_out_row = out;
            p.stride_weight_out = kind == 1 ? 1 : in, p.stride_weight_in = kind == 1 ? out : 1;
            if (rows % 2) p.bias.data = address(rows % 3 == 0 ? 2 : 0), p.bias.dtype = dtype;
            f(p);
          }
}

template <class F>
void each_linear_backward(F&& f) {
  each_linear([&](const LinearParams& forward) {
    LinearBackwardParams p;
    p.dtype = forward.dtype;
    p.device = forward.device;
    p.rows = forward.rows, p.in_features = forward.in_features, p.out_features = forward.out_features;
    p.grad_out = p.x = p.weight = address();
    p.grad_x = address();
    p.grad_weight = address();
    p.stride_grad_out_row = forward.stride_out_row, p.stride_x_row = forward.stride_x_row;
    p.stride_weight_out = p.stride_grad_weight_out = forward.stride_weight_out;
    p.stride_weight_in = p.stride_grad_weight_in = forward.stride_weight_in;
    p.stride_grad_x_row = forward.in_features;
    f(p);
  });
}

/// Rows of norms and softmax: up to lengths that clusters hold, and past them.
template <class F>
void each_rows(F&& f) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32})
    for (const std::int64_t rows : {0, 1, 3, 64, 4096})
      for (const std::int64_t columns :
           {8,     100,   512,   513,   768,   1024,  2048,   4096,   5120,   8192,   16384,  24576,
            32760, 32768, 32776, 49152, 65536, 98304, 131072, 131080, 200000, 262144, 262152, 524288})
        for (const int kind : {0, 1, 2, 3}) f(dtype, rows, columns, kind);
}
template <class F>
void each_norm(F&& f) {
  each_rows([&](DType dtype, std::int64_t rows, std::int64_t columns, int kind) {
    NormParams p;
    p.dtype = dtype;
    p.device = Device::cuda(0);
    p.kind = kind % 2 ? NormKind::kLayerNorm : NormKind::kRmsNorm;
    p.rows = rows, p.features = columns;
    p.x = address();
    p.out = address();
    p.weight.data = address(), p.weight.dtype = rows == 3 ? DType::kFloat32 : dtype;
    if (kind % 2) p.bias = p.weight;
    if (kind >= 2) p.residual = address(), p.residual_out = address();
    p.stride_x_row = p.stride_out_row = p.stride_residual_row = p.stride_residual_out_row = columns;
    f(p);
  });
}
template <class F>
void each_norm_backward(F&& f) {
  each_rows([&](DType dtype, std::int64_t rows, std::int64_t columns, int kind) {
    NormBackwardParams p;
    p.dtype = dtype;
    p.device = Device::cuda(0);
    p.kind = kind % 2 ? NormKind::kLayerNorm : NormKind::kRmsNorm;
    p.rows = rows, p.features = columns;
    p.grad_out = p.h = address();
    p.grad_x = address();
    p.weight.data = address(), p.weight.dtype = rows == 3 ? DType::kFloat32 : dtype;
    if (kind >= 2) p.grad_residual_out = address();
    p.stride_grad_out_row = p.stride_h_row = p.stride_grad_x_row = p.stride_grad_residual_out_row = columns;
    f(p);
  });
}
template <class F>
void each_softmax(F&& f) {
  each_rows([&](DType dtype, std::int64_t rows, std::int64_t columns, int kind) {
    SoftmaxParams p;
    p.dtype = dtype;
    p.device = Device::cuda(0);
    p.ndim = 1;
    p.shape[0] = p.rows = rows;
    p.columns = columns;
    p.log = kind % 2;
    p.x = address();
    p.out = address();
    p.stride_x[0] = p.stride_out[0] = columns + (kind >= 2 ? 4 : 0);
    f(p);
  });
}
template <class F>
void each_softmax_backward(F&& f) {
  each_softmax([&](const SoftmaxParams& forward) {
    SoftmaxBackwardParams p;
    p.dtype = forward.dtype;
    p.device = forward.device;
    p.ndim = 1;
    p.shape[0] = p.rows = forward.rows;
    p.columns = forward.columns;
    p.log = forward.log;
    p.grad_out = p.out = address();
    p.grad_x = address();
    p.stride_grad_out[0] = p.stride_out[0] = p.stride_grad_x[0] = forward.stride_x[0];
    f(p);
  });
}

}  // namespace flashkernel::choices
