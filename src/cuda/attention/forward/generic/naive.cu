// The first of a row of ever faster kernels: attention as its formula says. All scores are stored in device memory,
// then each row is normalised and multiplied with V. Memory grows with seq_q * seq_k. The kernel is here to be read,
// and for others to be compared with.
#include "cuda/attention/generic.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/attention/score.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per score; the grid's x covers keys, y queries, z (batch, head).
template <class T>
__global__ void __launch_bounds__(kThreads) scores_kernel(const AttentionParams p, float* scores) {
  const std::int64_t b = blockIdx.z / p.heads_q, h = blockIdx.z % p.heads_q;
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x, i = blockIdx.y;
  const ScoreContext at(p, b, h);
  if (i >= at.q_len || j < p.first_key(at.b, i, at.q_len, at.k_len) || j >= p.last_key(i, at.q_len, at.k_len)) return;
  const T* q = static_cast<const T*>(p.q) + p.q_offset(b, h, i);
  const T* k = static_cast<const T*>(p.k) + p.k_offset(b, h * p.heads_kv / p.heads_q, j);
  float dot = 0.0f;
  for (std::int64_t d = 0; d < p.head_dim; ++d) dot = fmaf(to_float(q[d]), to_float(k[d]), dot);
  scores[(blockIdx.z * p.seq_q + i) * p.seq_k + j] = modified_score(p, at, i, j, dot);
}

// One block per query: softmax over its scores, then one thread per output element.
template <class T>
__global__ void __launch_bounds__(kThreads) output_kernel(const AttentionParams p, float* scores) {
  __shared__ float scratch[kThreads / kWarp];
  const std::int64_t b = blockIdx.y / p.heads_q, h = blockIdx.y % p.heads_q, i = blockIdx.x;
  const ScoreContext at(p, b, h);
  if (i >= at.q_len) return;
  const std::int64_t first = p.first_key(at.b, i, at.q_len, at.k_len), last = p.last_key(i, at.q_len, at.k_len);
  float* row = scores + (blockIdx.y * p.seq_q + i) * p.seq_k;

  SoftmaxState state;
  for (std::int64_t j = first + threadIdx.x; j < last; j += kThreads) state.maximum = fmaxf(state.maximum, row[j]);
  state.maximum = block_reduce<kThreads>(state.maximum, scratch, Max{});
  for (std::int64_t j = first + threadIdx.x; j < last; j += kThreads) {
    if (row[j] == -INFINITY) continue;  // hidden by a bias: its value is not read below
    row[j] = expf(row[j] - SoftmaxState::shift(state.maximum));
    state.sum += row[j];
  }
  state.sum = block_reduce<kThreads>(state.sum, scratch, Sum{});  // its barriers also publish the row
  float lse;
  const float factor = state.finish(p.sinks, h, &lse);
  if (threadIdx.x == 0 && p.lse) p.lse[p.lse_offset(b, h, i)] = lse;
  __syncthreads();

  const T* v = static_cast<const T*>(p.v);
  T* out = static_cast<T*>(p.out) + p.out_offset(b, h, i);
  for (std::int64_t d = threadIdx.x; d < p.head_dim_v; d += kThreads) {
    float sum = 0.0f;
    for (std::int64_t j = first; j < last; ++j)
      if (row[j] != -INFINITY) sum = fmaf(row[j], to_float(v[p.v_offset(b, h * p.heads_kv / p.heads_q, j) + d]), sum);
    out[d] = from_float<T>(factor == 0.0f ? 0.0f : sum * factor);
  }
}

}  // namespace

Verdict attention_fwd_naive_supports(const AttentionParams& p) {
  if (p.quantization) return "it takes no pages of 8 or 4 bits";
  if (p.batch * p.heads_q > 65535) return "batch * heads_q is over 65535";
  if (p.seq_q > 65535) return "seq_q is over 65535: its table of scores would not fit";
  return Verdict::ok();
}

std::size_t attention_fwd_naive_workspace(const AttentionParams& p) {
  return sizeof(float) * static_cast<std::size_t>(p.batch * p.heads_q * p.seq_q * p.seq_k);
}

void attention_fwd_naive(const AttentionParams& p, void* workspace, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  auto* scores = static_cast<float*>(workspace);
  const auto pairs = static_cast<unsigned>(p.batch * p.heads_q);
  const auto queries = static_cast<unsigned>(p.seq_q);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.seq_k > 0) {
      launch("attention_fwd naive: scores", scores_kernel<T>,
             {dim3(static_cast<unsigned>(ceil_div(p.seq_k, kThreads)), queries, pairs), kThreads, 0, native(stream)}, p,
             scores);
    }
    launch("attention_fwd naive: output", output_kernel<T>, {dim3(queries, pairs), kThreads, 0, native(stream)}, p,
           scores);
  });
}

}  // namespace flashkernel::cuda
