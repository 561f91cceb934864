// Looks for the first entry of a page table that leads out of the pool: the checked mode of paged attention. One block;
// a warp takes a sequence at a time. Asked for the answer on the host, it waits for it: that is what the mode is for.
#include "cuda/kv/kv.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"
#include "flashkernel/error.hpp"

namespace flashkernel::cuda {
namespace {

constexpr int kWarps = 32;

__global__ void __launch_bounds__(kWarp* kWarps) find_kernel(const FindBadPageParams p, std::int64_t* fault) {
  __shared__ std::int64_t found[kWarps][3];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  std::int64_t sequence = -1, at = -1, value = -1;
  for (std::int64_t b = warp; b < p.batch && sequence < 0; b += kWarps) {
    const std::int64_t length = p.seq_lens[b];
    if (length < 0 || length > p.max_pages * p.page_size) {
      sequence = b, value = length;
      break;
    }
    const std::int64_t used = (length + p.page_size - 1) / p.page_size;
    for (std::int64_t base = p.first_slot(b, length); base < used && sequence < 0; base += kWarp) {
      const std::int64_t slot = base + lane;
      const std::int64_t page = slot < used ? p.block_table[b * p.stride_block_table + slot] : 0;
      const unsigned bad = __ballot_sync(kFullMask, slot < used && (page < 0 || page >= p.num_pages));
      if (bad == 0) continue;
      const int first = __ffs(static_cast<int>(bad)) - 1;
      sequence = b, at = base + first, value = __shfl_sync(kFullMask, page, first);
    }
  }
  if (lane == 0) found[warp][0] = sequence, found[warp][1] = at, found[warp][2] = value;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int least = -1;
  for (int w = 0; w < kWarps; ++w)
    if (found[w][0] >= 0 && (least < 0 || found[w][0] < found[least][0])) least = w;
  for (int i = 0; i < 3; ++i) fault[i] = least < 0 ? -1 : found[least][i];
}

}  // namespace

Verdict find_bad_page_supports(const FindBadPageParams&) { return Verdict::ok(); }
std::size_t find_bad_page_workspace(const FindBadPageParams& p) { return p.fault ? 0 : 3 * sizeof(std::int64_t); }

void find_bad_page(const FindBadPageParams& p, void* workspace, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  auto* const fault = p.fault ? p.fault : static_cast<std::int64_t*>(workspace);
  if (p.host_fault) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    if (status != cudaStreamCaptureStatusNone)
      throw Unsupported(
          "check_block_table: the stream is being captured, but the check waits for its answer; check before the "
          "capture, or use find_bad_page");
  }
  launch("find_bad_page", find_kernel, {1, kWarp * kWarps, 0, native(stream)}, p, fault);
  if (!p.host_fault) return;
  cuda_check(cudaMemcpyAsync(p.host_fault, fault, 3 * sizeof(std::int64_t), cudaMemcpyDeviceToHost, native(stream)),
             "cudaMemcpyAsync");
  cuda_check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
}

}  // namespace flashkernel::cuda
