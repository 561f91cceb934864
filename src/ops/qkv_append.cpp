// Front door of qkv_append: checks the product and where its heads go.
#include "flashkernel/qkv_append.hpp"

#include "ops/check.hpp"
#include "ops/fused_linear_check.hpp"
#include "ops/kv_append_check.hpp"
#include "ops/qkv_append_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

void check_q_out(const Checker& check, const TensorView& q_out, const TensorView& x, const TensorView& k_pages) {
  check.dtype("q_out", q_out, x.dtype);
  check.ndim("q_out", q_out, 3, 3);
  check.extent("q_out", q_out, 0, x.shape[0], "x.shape[0]");
  check.extent("q_out", q_out, 2, k_pages.shape[3], "k_pages.shape[3]");
  check.last_dim_contiguous("q_out", q_out);
  check.writable("q_out", q_out);
  if (q_out.shape[1] > 1 && q_out.strides[1] != q_out.shape[2])
    check.fail("q_out.strides[1]=" + std::to_string(q_out.strides[1]) + "; heads must be contiguous, " +
               std::to_string(q_out.shape[2]) + " elements apart");
}

/// `heads` heads of the product from one on, [tokens, heads, head_dim].
TensorView heads_of(const FusedLinearParams& product, std::int64_t first, std::int64_t heads, std::int64_t head_dim) {
  char* const data = static_cast<char*>(product.out) + first * head_dim * dtype_bytes(product.dtype);
  return TensorView(data, product.dtype, {product.rows, heads, head_dim}, {product.stride_out_row, head_dim, 1},
                    product.device);
}

}  // namespace

void qkv_append(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& norm_weight,
                const TensorView& norm_bias, const TensorView& k_pages, const TensorView& v_pages,
                const TensorView& slots, const std::optional<KvAppendRope>& rope, const TensorView& q_out, bool centred,
                float eps, bool constant_weights, const ExecutionContext& context) {
  const Checker check("qkv_append", x.device);
  QkvAppendParams params;
  FusedLinearParams& linear = params.linear;
  linear.constant = constant_weights;
  take_product(check, x, weight, bias, 2, linear);
  take_norm(check, norm_weight, norm_bias, centred, eps, linear);
  check.dtype("k_pages", k_pages, x.dtype);
  check.ndim("k_pages", k_pages, 4, 4);
  check.ndim("v_pages", v_pages, 4, 4);
  check.extent("v_pages", v_pages, 3, k_pages.shape[3], "k_pages.shape[3]");
  check_q_out(check, q_out, x, k_pages);
  const std::int64_t heads_q = q_out.shape[1], heads_kv = k_pages.shape[2], head_dim = k_pages.shape[3];
  check.extent("weight", weight, 0, (heads_q + 2 * heads_kv) * head_dim, "the heads of q_out and of both pages");
  if (rope && (rope->q.defined() || rope->q_out.defined()))
    check.fail("rope.q is given; the queries are those that the op computes, and go to q_out");
  linear.rows = x.shape[0];
  linear.x = x.data;
  linear.stride_x_row = x.strides[0];
  params.heads_q = heads_q;
  params.q_out = q_out.data;
  params.stride_q_out_token = q_out.strides[0];
  params.stride_q_out_head = q_out.strides[1];
  const NamedView inputs[] = {
      {"x", x},        {"weight", weight}, {"bias", bias}, {"norm_weight", norm_weight}, {"norm_bias", norm_bias},
      {"slots", slots}};
  for (const auto& [name, view] :
       {NamedView{"q_out", q_out}, NamedView{"k_pages", k_pages}, NamedView{"v_pages", v_pages}})
    for (const NamedView& input : inputs) check.no_overlap(name, view, input.name, input.view);
  check.no_overlap("q_out", q_out, "k_pages", k_pages);
  check.no_overlap("q_out", q_out, "v_pages", v_pages);

  // The product, for kernels that need it: what is explained has none.
  const auto bytes =
      static_cast<std::size_t>(linear.rows * linear.out_features) * static_cast<std::size_t>(dtype_bytes(x.dtype));
  const Workspace product(context.explain ? 0 : bytes, x.device, context);
  linear.out = context.explain ? weight.data : product.data();
  linear.stride_out_row = linear.out_features;
  IndexCopies copies(check.device());
  std::optional<KvAppendRope> turned = rope;
  if (turned) {
    turned->q = heads_of(linear, 0, heads_q, head_dim);
    turned->q_out = q_out;
  }
  params.append = check_kv_append(check, heads_of(linear, heads_q, heads_kv, head_dim),
                                  heads_of(linear, heads_q + heads_kv, heads_kv, head_dim), k_pages, v_pages, {}, slots,
                                  turned, copies);
  if (linear.rows == 0 && !context.explain) return;
  dispatch(params, x.device, context);
}

}  // namespace flashkernel
