// linear for few rows (decode): what its kernels are given. Which one serves is in plan.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/linear/few_rows/sm90a/plan.hpp"
#include "cuda/linear/tiles/sm90a/gemm.hpp"

namespace flashkernel::cuda::sm90a {

struct FewRowsProblem {
  GemmOperand weight, x;  // [features, k], [rows, k]
  std::int64_t rows = 0, features = 0, k = 0;
  LinearEpilogue epilogue;
};

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

/// The kernel of each plan.
template <class T>
void few_rows(const FewRowsProblem& problem, const FewRowsDirectPlan& plan, cudaStream_t stream);
template <class T>
void few_rows(const FewRowsProblem& problem, const FewRowsStreamPlan& plan, cudaStream_t stream);
template <class T>
void few_rows(const FewRowsProblem& problem, const FewRowsBlocksPlan& plan, cudaStream_t stream);
template <class T>
void few_rows(const FewRowsProblem& problem, const FewRowsInOrderPlan& plan, cudaStream_t stream);
template <class T>
void few_rows(const FewRowsProblem& problem, const FewRowsBlocksInOrderPlan& plan, cudaStream_t stream);

}  // namespace flashkernel::cuda::sm90a
