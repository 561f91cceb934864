// Front doors of linear_fp8 and quantize_fp8_blocks: leading dims become rows, or runs of rows that lie one stride
// apart; an x of more bits becomes 8 bits in workspace first.
#include "flashkernel/linear_fp8.hpp"

#include "ops/check.hpp"
#include "ops/linear_fp8_params.hpp"
#include "ops/merge_dims.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

bool is_one_number(const TensorView& scale) { return scale.ndim == 0 || (scale.ndim == 1 && scale.shape[0] == 1); }

/// x_scale with a dim for each of x's, strides of 0 along what one scale is for.
TensorView scales_of_rows(const Checker& check, const TensorView& scale, const TensorView& x) {
  check.dtype("x_scale", scale, DType::kFloat32);
  TensorView wide = scale;
  wide.ndim = x.ndim;
  for (int d = 0; d < x.ndim; ++d) wide.shape[d] = x.shape[d];
  const std::int64_t blocks = fp8::blocks_of(x.shape[x.ndim - 1]);
  wide.shape[x.ndim - 1] = blocks;
  if (is_one_number(scale) && !(x.ndim == 1 && blocks == 1)) {
    for (int d = 0; d < x.ndim; ++d) wide.strides[d] = 0;
    return wide;
  }
  check.ndim("x_scale", scale, x.ndim, x.ndim);
  for (int d = 0; d < x.ndim - 1; ++d)
    check.extent("x_scale", scale, d, x.shape[d], ("x.shape[" + std::to_string(d) + "]").c_str());
  const std::int64_t count = scale.shape[x.ndim - 1];
  if (count != blocks && count != 1)
    check.fail("x_scale has last dim " + std::to_string(count) + " but x has last dim " +
               std::to_string(x.shape[x.ndim - 1]) + "; one scale for 128 neighbours (" + std::to_string(blocks) +
               ") or one a row (1) is needed");
  if (count == 1) wide.strides[x.ndim - 1] = 0;
  return wide;
}

void take_weight_scale(const Checker& check, const TensorView& scale, LinearFp8Params& params) {
  check.dtype("weight_scale", scale, DType::kFloat32);
  params.weight_scale = static_cast<const float*>(scale.data);
  params.out_per_scale = 1;
  if (is_one_number(scale)) return;
  check.ndim("weight_scale", scale, 1, 2);
  const std::int64_t blocks = fp8::blocks_of(params.in_features), out_blocks = fp8::blocks_of(params.out_features);
  const std::int64_t down = scale.shape[0], along = scale.ndim == 2 ? scale.shape[1] : 1;
  const bool in_blocks = scale.ndim == 2 && down == out_blocks && along == blocks;
  if (!in_blocks && (down != params.out_features || (along != blocks && along != 1)))
    check.fail("weight_scale is " + std::to_string(down) + " x " + std::to_string(along) + " but weight is " +
               std::to_string(params.out_features) + " x " + std::to_string(params.in_features) +
               "; one scale for a block of 128 x 128 (" + std::to_string(out_blocks) + " x " + std::to_string(blocks) +
               "), for 128 neighbours of a row (" + std::to_string(params.out_features) + " x " +
               std::to_string(blocks) + "), for a row (" + std::to_string(params.out_features) +
               " x 1), or one number is needed");
  if (in_blocks) params.out_per_scale = fp8::kBlock;
  params.stride_weight_scale_out = scale.strides[0];
  if (scale.ndim == 2 && along == blocks) params.stride_weight_scale_block = scale.strides[1];
}

void dispatch_rows(const TensorView& x, const TensorView& x_scale, const TensorView& out, LinearFp8Params& params,
                   const ExecutionContext& context) {
  params.stride_x_scale_block = x_scale.strides[x.ndim - 1];
  const TensorView* const views[] = {&out, &x, &x_scale};
  const auto dims = merge_leading_dims<3>(views, 1, DimOrder::kByStride);
  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[3], const std::int64_t(&offset)[3]) {
                         params.rows = rows;
                         params.out = element_at(out, offset[0]);
                         params.x = static_cast<const std::uint8_t*>(element_at(x, offset[1]));
                         params.x_scale = static_cast<const float*>(element_at(x_scale, offset[2]));
                         params.stride_out_row = stride[0];
                         params.stride_x_row = stride[1];
                         params.stride_x_scale_row = stride[2];
                         dispatch(params, params.device, context);
                       });
}

void dispatch_quantize(const TensorView& x, const TensorView& out, const TensorView& scales,
                       const ExecutionContext& context) {
  QuantizeFp8Params params;
  params.dtype = x.dtype;
  params.device = x.device;
  params.features = x.shape[x.ndim - 1];
  params.stride_scales_block = scales.strides[x.ndim - 1];
  const TensorView* const views[] = {&x, &out, &scales};
  const auto dims = merge_leading_dims<3>(views, 1, DimOrder::kByStride);
  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[3], const std::int64_t(&offset)[3]) {
                         params.rows = rows;
                         params.x = element_at(x, offset[0]);
                         params.out = static_cast<std::uint8_t*>(element_at(out, offset[1]));
                         params.scales = static_cast<float*>(element_at(scales, offset[2]));
                         params.stride_x_row = stride[0];
                         params.stride_out_row = stride[1];
                         params.stride_scales_row = stride[2];
                         dispatch(params, params.device, context);
                       });
}

/// `like`, row-major in other memory: rows of `columns` elements that begin `pitch` elements apart.
TensorView rows_like(const TensorView& like, void* data, DType dtype, std::int64_t columns, std::int64_t pitch) {
  TensorView view = like;
  view.data = data;
  view.dtype = dtype;
  view.shape[like.ndim - 1] = columns;
  view.strides[like.ndim - 1] = 1;
  std::int64_t stride = pitch;
  for (int d = like.ndim - 2; d >= 0; --d) {
    view.strides[d] = stride;
    stride *= like.shape[d];
  }
  return view;
}

/// x in 8 bits, in workspace, and then the product.
void run_of_wider(const TensorView& x, const TensorView& out, LinearFp8Params& params,
                  const ExecutionContext& context) {
  constexpr std::int64_t kAlignment = 128;  // bytes: rows for the copy engine
  const std::int64_t columns = params.in_features, blocks = fp8::blocks_of(columns);
  const std::int64_t pitch = (columns + kAlignment - 1) / kAlignment * kAlignment;
  const std::int64_t rows = columns > 0 ? x.numel() / columns : 0;
  const auto bytes = static_cast<std::size_t>(rows * (pitch + blocks * 4));
  const Workspace workspace(context.explain ? 0 : bytes, x.device, context);
  auto* const data = static_cast<unsigned char*>(workspace.data());
  const TensorView narrow = rows_like(x, data, DType::kFloat8E4M3, columns, pitch);
  const TensorView scales = rows_like(x, data ? data + rows * pitch : nullptr, DType::kFloat32, blocks, blocks);
  if (!context.explain && bytes > 0) dispatch_quantize(x, narrow, scales, context);
  dispatch_rows(narrow, scales, out, params, context);
  if (context.explain) context.explain->workspace_bytes += bytes;
}

}  // namespace

void linear_fp8(const TensorView& x, const TensorView& weight, const TensorView& x_scale,
                const TensorView& weight_scale, const TensorView& bias, const TensorView& out, Activation activation,
                const ExecutionContext& context) {
  const Checker check("linear_fp8", x.device);
  if (activation > Activation::kSilu)
    check.fail("activation=" + std::to_string(static_cast<int>(activation)) +
               "; needs kNone, kGeluTanh, kGelu or kSilu");
  const bool narrow = x.dtype == DType::kFloat8E4M3;
  if (narrow)
    check.tensor("x", x);
  else
    check.floating("x", x);
  check.ndim("x", x, 1, kMaxDims);
  check.last_dim_contiguous("x", x);
  check.dtype("weight", weight, DType::kFloat8E4M3);
  check.ndim("weight", weight, 2, 2);
  check.last_dim_contiguous("weight", weight);
  LinearFp8Params params;
  params.dtype = out.dtype;
  params.device = x.device;
  params.in_features = x.shape[x.ndim - 1];
  params.out_features = weight.shape[0];
  params.activation = activation;
  check.extent("weight", weight, 1, params.in_features, "x's last dim");
  params.weight = static_cast<const std::uint8_t*>(weight.data);
  params.stride_weight_row = weight.strides[0];
  take_weight_scale(check, weight_scale, params);

  check.floating("out", out);
  check.ndim("out", out, x.ndim, x.ndim);
  for (int d = 0; d < x.ndim - 1; ++d)
    check.extent("out", out, d, x.shape[d], ("x.shape[" + std::to_string(d) + "]").c_str());
  check.extent("out", out, out.ndim - 1, params.out_features, "weight.shape[0]");
  check.last_dim_contiguous("out", out);
  check.writable("out", out);
  params.bias = check.optional_vector("bias", bias, params.out_features, out.dtype);
  check.apart("out", out,
              {{"x", x}, {"x_scale", x_scale}, {"weight", weight}, {"weight_scale", weight_scale}, {"bias", bias}});
  if (narrow && !x_scale.defined()) check.fail("x_scale is absent; x in float8_e4m3fn needs one");
  if (!narrow && x_scale.defined())
    check.fail(std::string("x_scale beside x in ") + dtype_name(x.dtype) +
               "; x in float8_e4m3fn has one, x of more bits gets its own");
  const TensorView scales = narrow ? scales_of_rows(check, x_scale, x) : TensorView();
  if (out.numel() == 0 && !context.explain) return;
  if (narrow)
    dispatch_rows(x, scales, out, params, context);
  else
    run_of_wider(x, out, params, context);
}

void quantize_fp8_blocks(const TensorView& x, const TensorView& out, const TensorView& scales,
                         const ExecutionContext& context) {
  const Checker check("quantize_fp8_blocks", x.device);
  check.floating("x", x);
  check.ndim("x", x, 1, kMaxDims);
  check.last_dim_contiguous("x", x);
  check.dtype("out", out, DType::kFloat8E4M3);
  check.same_shape("out", out, "x", x);
  check.last_dim_contiguous("out", out);
  check.writable("out", out);
  check.no_overlap("out", out, "x", x);
  check.dtype("scales", scales, DType::kFloat32);
  check.ndim("scales", scales, x.ndim, x.ndim);
  for (int d = 0; d < x.ndim - 1; ++d)
    check.extent("scales", scales, d, x.shape[d], ("x.shape[" + std::to_string(d) + "]").c_str());
  check.extent("scales", scales, x.ndim - 1, fp8::blocks_of(x.shape[x.ndim - 1]), "the blocks of 128 in x's last dim");
  check.writable("scales", scales);
  check.apart("scales", scales, {{"x", x}, {"out", out}});
  if (x.numel() == 0 && !context.explain) return;
  dispatch_quantize(x, out, scales, context);
}

}  // namespace flashkernel
