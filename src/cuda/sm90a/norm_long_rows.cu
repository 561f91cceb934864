// LayerNorm and RMSNorm forward of long rows on 9.0, with an optional fused residual add: a cluster walks its rows and
// holds each in registers, the next ones on their way into shared memory (long_rows.cuh). Every byte is read once and
// written once. Weights (and biases where there is no residual) lie in shared memory from the first row on. Called
// through the table of kernels.cpp. Invariant: the order of all additions follows from the shape.
#include "cuda/sm90a/norm_long_rows.hpp"

#include "cuda/sm90a/long_rows.cuh"
#include "cuda/tile/norm_row.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

namespace lr = long_rows;

/// Three slots of shared memory hold what comes and what stays: the ring's stages of x (and residual), weights, biases.
enum class Pieces { kRow, kRowAndBias, kRowAndResidual };

constexpr int kSlots = 3, kWeightSlot = 2, kBiasSlot = 1, kResidualSlot = 1;

template <Pieces kPieces>
struct Ring {
  static constexpr bool kResidual = kPieces == Pieces::kRowAndResidual, kHoldsBias = kPieces == Pieces::kRowAndBias;
  static constexpr int kStages = kPieces == Pieces::kRow ? 2 : 1;
};

template <class T, Pieces kPieces>
__global__ void __launch_bounds__(lr::kThreads, 1) norm_kernel(const NormParams p, int num_blocks) {
  using R = Ring<kPieces>;
  constexpr int N = kVectorElements<T>, kHeld = lr::kHeld;
  using Word = lr::Word<T>;
  __shared__ lr::Exchange::Shared exchange_shared;
  const auto slot = [](int i) { return lr::slot_of(i); };
  const lr::Part<T> part(p.features, num_blocks);
  const lr::Walk walk(num_blocks);
  const auto fetch = [&](std::int64_t row, int stage) {
    if (row < p.rows) {
      slot(stage).copy(static_cast<const T*>(p.x) + row * p.stride_x_row, part);
      if constexpr (R::kResidual)
        slot(kResidualSlot).copy(static_cast<const T*>(p.residual) + row * p.stride_residual_row, part);
    }
    ptx::cp_async_commit();
  };
  const auto fetch_constant = [&](int to, const TypedPointer& from, float missing) {
    if (from) return slot(to).copy(static_cast<const T*>(from.data), part);
    float values[N];
#pragma unroll
    for (float& value : values) value = missing;
    Word word;
    word.set(values);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) *reinterpret_cast<uint4*>(slot(to).vector(j)) = word.word;
  };
  fetch_constant(kWeightSlot, p.weight, 1.0f);
  if constexpr (R::kHoldsBias) fetch_constant(kBiasSlot, p.bias, 0.0f);
#pragma unroll
  for (int stage = 0; stage < R::kStages; ++stage) fetch(walk.first + stage * walk.step, stage);

  lr::Exchange exchange(exchange_shared, num_blocks);
  const bool centred = p.kind == NormKind::kLayerNorm;
  const float inverse_features = 1.0f / static_cast<float>(p.features);
  const float inverse_count = part.count > 0 ? 1.0f / static_cast<float>(part.count) : 0.0f;
  const auto block_count = static_cast<float>(part.count_of(static_cast<int>(threadIdx.x) % kWarp));  // of block `lane`
  int stage = 0;
  for (std::int64_t row = walk.first; row < p.rows; row += walk.step) {
    ptx::cp_async_wait<R::kStages - 1>();
    Word h[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) h[j] = slot(stage).template read<T>(j);
    if constexpr (R::kResidual) {
      T* const residual_out =
          p.residual_out ? static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row : nullptr;
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        float values[N], addend[N];
        h[j].floats(values);
        slot(kResidualSlot).template read<T>(j).floats(addend);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] += addend[i];
        h[j].set(values);  // rounded, as residual_out holds it and backward sees it
      }
      fetch(row + walk.step, 0);
      if (residual_out) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j)
          if (part.holds(j)) *reinterpret_cast<uint4*>(residual_out + part.column(j)) = h[j].word;
      }
    } else {
      fetch(row + R::kStages * walk.step, stage);
      if constexpr (R::kStages > 1) stage ^= 1;
    }

    // Places past the row's end hold zeros: they add nothing to a sum, but are no part of a centred one.
    float part_mean = 0.0f;
    if (centred) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        float values[N];
        h[j].floats(values);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += values[i];
      }
      part_mean = exchange.block(sum, Sum{}) * inverse_count;
    }
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      float values[N];
      h[j].floats(values);
      const float shift = part.holds(j) ? part_mean : 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) squares += (values[i] - shift) * (values[i] - shift);
    }
    squares = exchange.block(squares, Sum{});
    const float2 of_block = exchange.all({part_mean, squares}, {0.0f, 0.0f});
    float mean = 0.0f, variance = of_block.y;
    if (centred) {  // squares about a part's mean become squares about the row's
      mean = warp_reduce(of_block.x * block_count, Sum{}) * inverse_features;
      variance += (of_block.x - mean) * (of_block.x - mean) * block_count;
    }
    variance = warp_reduce(variance, Sum{}) * inverse_features;
    const float rstd = rsqrtf(variance + p.eps);
    if (threadIdx.x == 0 && part.first == 0) {
      if (p.mean && centred) p.mean[row] = mean;
      if (p.rstd) p.rstd[row] = rstd;
    }
    T* const out = static_cast<T*>(p.out) + row * p.stride_out_row;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (!part.holds(j)) continue;
      float values[N], weight[N], bias[N] = {};
      h[j].floats(values);
      slot(kWeightSlot).template read<T>(j).floats(weight);
      if constexpr (R::kHoldsBias) {
        slot(kBiasSlot).template read<T>(j).floats(bias);
      } else if (R::kResidual && p.bias) {
        Word{*reinterpret_cast<const uint4*>(static_cast<const T*>(p.bias.data) + part.column(j))}.floats(bias);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = fmaf((values[i] - mean) * rstd, weight[i], bias[i]);
      Word result;
      result.set(values);
      *reinterpret_cast<uint4*>(out + part.column(j)) = result.word;
    }
  }
  ptx::cp_async_wait<0>();
  exchange.finish();
}

template <class T>
void launch_norm(const NormParams& p, Stream stream) {
  const auto run = [&](auto kernel) {
    lr::launch_rows("norm: long rows", kernel, kSlots, p.rows, p.features / kVectorElements<T>, p.device.index, stream,
                    p);
  };
  if (p.residual) return run(norm_kernel<T, Pieces::kRowAndResidual>);
  if (p.bias) return run(norm_kernel<T, Pieces::kRowAndBias>);
  run(norm_kernel<T, Pieces::kRow>);
}

}  // namespace

Verdict norm_long_rows_supports(const NormParams& p) {
  const Verdict rows = lr::serves(p.dtype, p.features, norm_rows_are_vectors(p));
  if (!rows) return rows;
  const auto fits = [&](const TypedPointer& weight) { return !weight || weight.dtype == p.dtype; };
  if (!fits(p.weight) || !fits(p.bias)) return Verdict("needs weights of the rows' dtype");
  return Verdict::ok();
}

void norm_long_rows(const NormParams& p, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) { launch_norm<decltype(zero)>(p, stream); });
}

}  // namespace flashkernel::cuda::sm90a
