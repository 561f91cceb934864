// What gemm.cuh and linear/cluster_k/sm90a/kernel.cuh launch their kernels with: a product's arguments for a shape of
// tiles, and which of the operands' layouts its kernel is made for.
#pragma once

#include <type_traits>

#include "cuda/ptx/tma.cuh"
#include "cuda/linear/tiles/sm90a/gemm.hpp"
#include "cuda/linear/tiles/sm90a/shape.cuh"
#include "cuda/linear/tiles/sm90a/operand_map.hpp"

namespace flashkernel::cuda::sm90a {

/// What a kernel of this shape is launched with for the product.
template <class T, class Shape>
GemmArguments gemm_arguments(const char* name, const GemmProblem& p) {
  GemmArguments arguments{};
  // What lies in shared memory past the last row becomes sums that nobody stores.
  arguments.rows_a = p.a.k_major ? static_cast<int>(std::min<std::int64_t>(p.m, Shape::kTileM)) : Shape::kTileM;
  arguments.a = operand_map<T>(name, p.a, p.m, p.k, arguments.rows_a, Shape::kTileK);
  if constexpr (Shape::kNeighbours)
    arguments.b = make_tensor_map(name, interleaved_rows<T>(p.b, p.n, p.k, Shape::kGroups));
  else
    arguments.b = operand_map<T>(name, p.b, p.n, p.k, Shape::kTileN, Shape::kTileK);
  if constexpr (Shape::kRest > 0) arguments.b_rest = operand_map<T>(name, p.b, p.n, p.k, Shape::kRest, Shape::kTileK);
  arguments.epilogue = p.epilogue;
  arguments.m = static_cast<int>(p.m);
  arguments.n = static_cast<int>(p.n);
  arguments.parts = Shape::kCluster > 1 ? Shape::kCluster : Shape::kParts ? p.parts : 1;
  arguments.partial = Shape::kParts && p.parts > 1 ? p.partial : nullptr;
  const std::int64_t k_tiles = ceil_div(p.k, Shape::kTileK);
  arguments.num_k = static_cast<int>(Shape::kCluster > 1 ? k_tiles : ceil_div(k_tiles, arguments.parts));
  arguments.tiles_m = static_cast<int>(ceil_div(p.m, Shape::kTileM));
  arguments.tiles_n = static_cast<int>(ceil_div(p.n, Shape::kTileN));
  // As many rows in each group as can be: a short last one would read all of B for itself.
  arguments.group_rows =
      static_cast<int>(ceil_div(arguments.tiles_m, ceil_div(arguments.tiles_m, Shape::kMostGroupRows)));
  // B is read once where all rows of tiles are one group: it must not push the rest out of an L2 cache that it fills.
  const bool passes = arguments.tiles_m <= arguments.group_rows && p.n * p.k * 2 > gemm_plan::kHalfOfL2;
  arguments.policy_b = passes ? ptx::kL2EvictFirst : ptx::kL2EvictLast;
  arguments.tiles = arguments.tiles_m * arguments.tiles_n * arguments.parts;
  return arguments;
}

/// launch(whether A is k-major, whether B is), as constants; where the shape has k-major kernels alone, these.
template <class Shape, class Launch>
void with_layouts(const GemmProblem& p, Launch launch) {
  if (p.a.k_major && p.b.k_major) {
    launch(std::true_type{}, std::true_type{});
  } else if constexpr (Shape::kAnyLayout) {
    if (p.a.k_major)
      launch(std::true_type{}, std::false_type{});
    else
      launch(std::false_type{}, std::false_type{});
  }
}

}  // namespace flashkernel::cuda::sm90a
