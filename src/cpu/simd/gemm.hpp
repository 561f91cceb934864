// The blocked matrix product behind linear and its gradients: C[m, n] = sum_k A[m, k] B[n, k], with an epilogue per
// tile. Included by <isa>/linear.cpp. `Micro` packs operands and multiplies one tile: VecMicro (fp32 FMA,
// simd/gemm_vec.hpp) or AmxMicro (amx/gemm_amx.hpp). Goto and van de Geijn, 2008, with tasks over C: a worker packs the
// blocks it needs itself, which repeats 1/256 of the work and needs neither a barrier nor a shared buffer. Invariant:
// one task owns an output and adds its k in one fixed order, so results do not depend on the number of threads.
#pragma once

#include "cpu/simd/gemm_plan.hpp"
#include "cpu/simd/vec_math.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cpu {
namespace {

/// A matrix with its long dim ("outer": m or n) and k; one of the strides is 1.
template <class T>
struct Operand {
  const T* data;
  std::int64_t stride_outer, stride_k;
  inline const T* at(std::int64_t outer, std::int64_t k) const { return data + outer * stride_outer + k * stride_k; }
};

/// out = activation(C + bias), and C + bias itself where asked.
template <class T>
struct Epilogue {
  T* out;
  T* preactivation;                               // may be null
  std::int64_t stride_out, stride_preactivation;  // of rows (m); n is contiguous
  const void* bias;                               // [n]; may be null
  DType bias_dtype;
  Activation activation;

  /// Rows [m, m + rows) and columns [n, n + columns) from fp32 sums, rows `pitch` apart.
  inline void tile(const float* sums, std::int64_t pitch, std::int64_t m, std::int64_t rows, std::int64_t n,
                   std::int64_t columns) const {
    switch (activation) {
      case Activation::kNone: return tile_as<Activation::kNone>(sums, pitch, m, rows, n, columns);
      case Activation::kGeluTanh: return tile_as<Activation::kGeluTanh>(sums, pitch, m, rows, n, columns);
      case Activation::kGelu: return tile_as<Activation::kGelu>(sums, pitch, m, rows, n, columns);
      case Activation::kSilu: return tile_as<Activation::kSilu>(sums, pitch, m, rows, n, columns);
    }
  }

  template <Activation kActivation>
  inline void tile_as(const float* sums, std::int64_t pitch, std::int64_t m, std::int64_t rows, std::int64_t n,
                      std::int64_t columns) const {
    for (std::int64_t c = 0; c < columns; c += Simd::kWidth) {
      const std::int64_t left = columns - c;
      Reg shift = Simd::zero();
      if (bias) {
        const char* const from = static_cast<const char*>(bias) + n * (bias_dtype == DType::kFloat32 ? 4 : 2);
        shift = MixedVector{from, bias_dtype}.at(c, columns);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        Reg v = load_columns(sums + r * pitch + c, 0, left);
        if (bias) v = Simd::add(v, shift);  // not with 0: -0 stays -0
        if (preactivation) save_columns(preactivation + (m + r) * stride_preactivation + n + c, 0, left, v);
        save_columns(out + (m + r) * stride_out + n + c, 0, left, vec_activation(kActivation, v));
      }
    }
  }
};

/// That of a call of linear.
template <class T>
inline Epilogue<T> epilogue_of(const LinearParams& p) {
  return {static_cast<T*>(p.out),
          static_cast<T*>(p.preactivation),
          p.stride_out_row,
          p.stride_preactivation_row,
          p.bias.data,
          p.bias.dtype,
          p.activation};
}

/// A worker's scratch and what its packed blocks hold, so that neighbouring tasks do not pack them again.
struct GemmScratch {
  char* a;
  char* b;
  float* c;
  std::int64_t* held;  // held[0]: first row in a, held[1]: first column in b; -1: nothing
};

template <class Micro, class T, class B, class Out>
inline void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const Operand<T>& a, const B& b,
                 const Epilogue<Out>& epilogue, void* workspace) {
  constexpr GemmBlocks kB = Micro::kBlocks;
  constexpr std::int64_t kBytes = gemm_worker_bytes(kB);
  if (m <= 0 || n <= 0) return;
  const int workers = num_workers();
  // Even chunks of k and even blocks of m; narrower blocks of n where there are too few tasks for the threads.
  const std::int64_t chunks = imax<std::int64_t>(1, ceil_div(k, kB.kc));
  const std::int64_t chunk = imax<std::int64_t>(32, round_up(ceil_div(k, chunks), 32));
  const std::int64_t mc = imin(kB.mc, round_up(ceil_div(m, ceil_div(m, kB.mc)), kB.mr));
  const std::int64_t m_blocks = ceil_div(m, mc);
  std::int64_t nc = kB.nc;
  while (nc > kB.nr && m_blocks * ceil_div(n, nc) < 2 * workers) nc = round_up(nc / 2, kB.nr);
  const std::int64_t n_blocks = ceil_div(n, nc);

  char* const base = static_cast<char*>(workspace);
  const auto scratch = [&](int worker) {
    char* const from = base + worker * kBytes;
    return GemmScratch{from + 64, from + 64 + gemm_scratch_a(kB),
                       reinterpret_cast<float*>(from + 64 + gemm_scratch_a(kB) + gemm_scratch_b(kB)),
                       reinterpret_cast<std::int64_t*>(from)};
  };
  for (int w = 0; w < workers; ++w) scratch(w).held[0] = scratch(w).held[1] = -1;

  auto run = [&](std::int64_t begin, std::int64_t end, int worker) {
    const GemmScratch s = scratch(worker);
    typename Micro::Session session;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t m0 = task / n_blocks * mc, n0 = task % n_blocks * nc;
      const std::int64_t rows = imin(mc, m - m0), columns = imin(nc, n - n0);
      const std::int64_t row_tiles = ceil_div(rows, kB.mr), column_tiles = ceil_div(columns, kB.nr);
      for (std::int64_t step = 0; step < chunks; ++step) {
        const std::int64_t k0 = step * chunk, length = imax<std::int64_t>(0, imin(chunk, k - k0));
        const std::int64_t padded = round_up(length, kB.k_unit);
        if (chunks > 1 || s.held[0] != m0) Micro::pack_a(a, m0, rows, k0, length, s.a);
        if (chunks > 1 || s.held[1] != n0) Micro::pack_b(b, n0, columns, k0, length, s.b);
        s.held[0] = chunks > 1 ? -1 : m0;
        s.held[1] = chunks > 1 ? -1 : n0;
        std::int64_t from = 0;
        do {  // at least once: an empty k still owes the epilogue
          const std::int64_t to = imin(padded, from + kB.sub);
          const bool first = step == 0 && from == 0, last = step + 1 == chunks && to == padded;
          for (std::int64_t j = 0; j < column_tiles; ++j) {
            for (std::int64_t i = 0; i < row_tiles; ++i) {
              // A single pass over k sends every tile through the same few lines of L1.
              float* const tile = s.c + (first && last ? 0 : (j * row_tiles + i) * kB.mr * kB.nr);
              const std::int64_t tile_rows = imin(kB.mr, rows - i * kB.mr),
                                 tile_columns = imin(kB.nr, columns - j * kB.nr);
              Micro::tile(tile_rows, padded, from, to, s.a, i, s.b, j, tile, first);
              if (!last) continue;
              if (Micro::kSplits) Micro::repair(a, b, m0 + i * kB.mr, n0 + j * kB.nr, tile_rows, tile_columns, k, tile);
              epilogue.tile(tile, kB.nr, m0 + i * kB.mr, tile_rows, n0 + j * kB.nr, tile_columns);
            }
          }
          from = to;
        } while (from < padded);
      }
    }
  };
  parallel_for(m_blocks * n_blocks, 1, run);
}

}  // namespace
}  // namespace flashkernel::cpu
