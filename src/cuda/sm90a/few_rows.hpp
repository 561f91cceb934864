// The decode product of few_rows.cuh: what it is given, and how it is cut.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/sm90a/gemm.hpp"

namespace flashkernel::cuda::sm90a {

struct FewRowsProblem {
  GemmOperand weight, x;  // [features, k], [rows, k]
  std::int64_t rows = 0, features = 0, k = 0;
  LinearEpilogue epilogue;
};

/// How a product is cut: `splits` blocks (1, 2, 4 or 8) share 64 features by splitting k. `stream`: a long one, weights
/// along in and k a multiple of 64, of whole k with up to 16 rows or more than 32, or of two parts in blocks of one a
/// multiprocessor with up to 16 rows: shapes of their own.
struct FewRowsPlan {
  int splits = 1, blocks_per_sm = 2;
  bool stream = false;
};
FewRowsPlan plan_few_rows(const FewRowsProblem& problem, int num_sms);

template <class T>
void few_rows(const FewRowsProblem& problem, const FewRowsPlan& plan, cudaStream_t stream);

/// What the kernels without tensor maps are given of it.
struct FewRowsPlainArguments {
  const void *x, *weight;
  std::int64_t stride_x, stride_weight;
  LinearEpilogue epilogue;
  int rows, features, k;
  explicit FewRowsPlainArguments(const FewRowsProblem& p)
      : x(p.x.data),
        weight(p.weight.data),
        stride_x(p.x.stride),
        stride_weight(p.weight.stride),
        epilogue(p.epilogue),
        rows(static_cast<int>(p.rows)),
        features(static_cast<int>(p.features)),
        k(static_cast<int>(p.k)) {}
};
inline constexpr int kFewRowsChunk = 32;  // of k: what they give a warp at a time

/// few_rows_direct.cuh: 8 `tiles` features a block, whose 8 warps have k in registers, `chunks` of 32 each at most (or
/// 16 warps half as many). No tiles: the other kernel serves.
struct FewRowsDirectPlan {
  int tiles = 0, chunks = 0;
};
inline constexpr int kDirectMostRows = 8;
FewRowsDirectPlan plan_few_rows_direct(const FewRowsProblem& problem, int num_sms);

template <class T>
void few_rows_direct(const FewRowsProblem& problem, const FewRowsDirectPlan& plan, cudaStream_t stream);

/// Whether few_rows_stream.cuh serves: up to 16 rows whose k fits the registers, weights along in.
bool streams_few_rows(const FewRowsProblem& problem, int num_sms);

template <class T>
void few_rows_stream(const FewRowsProblem& problem, int num_sms, cudaStream_t stream);

}  // namespace flashkernel::cuda::sm90a
