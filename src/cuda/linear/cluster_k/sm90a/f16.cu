// kernel.cuh for __half.
#include "cuda/host/clusters.hpp"
#include "cuda/linear/cluster_k/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void gemm_in_clusters<__half>(const char*, const GemmProblem&, GemmVariant, cudaStream_t);

int gemm_clusters_at_once(int parts, int device) {  // every one of these kernels takes a whole multiprocessor
  int count = 0;
  with_cluster_parts(parts, [&](auto number) {
    using Shape = ClusterShape<96, decltype(number)::value>;
    count = clusters_at_once("linear: clusters at once",
                             reinterpret_cast<const void*>(gemm_cluster_kernel<__half, Shape, true, true>), parts,
                             Shape::kThreads, Shape::kSharedBytes, device);
  });
  return count;
}

}  // namespace flashkernel::cuda::sm90a
