// Instances of the Hopper kernels with a head dim of values that is not that of queries and keys.
#include "cuda/attention/backward/sm90a/kernel.cuh"
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template <>
struct ForwardTiles<192, 128> {
  struct Only : ForwardTile<192, 128> {  // 48 + 2 x 30 + 2 x 20 + 32 KB
    static constexpr int kConsumers = 2, kBlockN = 80, kQSlots = 1, kOutSlots = 2;
  };
  using Modified = Only;
  using Invariant = Only;
  template <class F>
  static void choose(const AttentionParams&, F&& launch_with) {
    launch_with(Only{});
  }
};

template void attention_fwd<DType::kFloat16, 192, 128>(const AttentionParams&, bool, void*, Stream);
template void attention_bwd<DType::kFloat16, 128, 64>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
