// The front door of pack_mask: a boolean mask to the bits that attention reads.
// Called by users and by the bindings. Invariant: an error leaves out untouched.
#include "flashkernel/attention.hpp"
#include "ops/check.hpp"
#include "ops/mask_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {

void pack_mask(const TensorView& mask, const TensorView& out, const ExecutionContext& context) {
  const Checker check("pack_mask", mask.device);
  check.dtype("mask", mask, DType::kUInt8);
  check.ndim("mask", mask, 1, 4);
  check.dtype("out", out, DType::kInt32);
  check.ndim("out", out, mask.ndim, mask.ndim);
  const int last = mask.ndim - 1;
  for (int d = 0; d < last; ++d)
    check.extent("out", out, d, mask.shape[d], ("mask.shape[" + std::to_string(d) + "]").c_str());
  check.extent("out", out, last, (mask.shape[last] + 31) / 32, "the words of 32 keys of a row");
  check.last_dim_contiguous("out", out);
  check.writable("out", out);
  check.no_overlap("out", out, "mask", mask);

  PackMaskParams p;
  p.device = mask.device;
  p.columns = mask.shape[last];
  p.stride_mask_column = mask.strides[last];
  p.mask = static_cast<const std::uint8_t*>(mask.data);
  p.out = static_cast<std::uint32_t*>(out.data);
  for (int d = 0; d < last; ++d) {
    const int to = 3 - last + d;
    p.shape[to] = mask.shape[d];
    p.stride_mask[to] = mask.strides[d];
    p.stride_out[to] = out.strides[d];
  }
  if (out.numel() == 0 && !context.explain) return;
  dispatch(p, p.device, context);
}

}  // namespace flashkernel
