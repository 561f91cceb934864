// Front door of quantized_linear: folds leading dims into rows, or runs once per run of rows that lie one stride apart.
#include "flashkernel/quantized_linear.hpp"

#include "ops/check.hpp"
#include "ops/merge_dims.hpp"
#include "ops/quantized_linear_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

const char* name_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt4: return "int4";
    case WeightFormat::kInt8: return "int8";
    case WeightFormat::kQ4_0: return "q4_0";
    case WeightFormat::kQ4_1: return "q4_1";
    case WeightFormat::kQ8_0: return "q8_0";
  }
  return "";
}

/// Scales or zeros of a format that holds none in its blocks.
TypedPointer groups_of(const Checker& check, const char* name, const TensorView& view, std::int64_t out_features) {
  check.floating(name, view);
  check.ndim(name, view, 2, 2);
  check.extent(name, view, 0, out_features, "weight.shape[0]");
  check.last_dim_contiguous(name, view);
  return {view.data, view.dtype};
}

void take_groups(const Checker& check, const TensorView& scales, const TensorView& zeros,
                 QuantizedLinearParams& params) {
  const std::string format = name_of(params.format);
  if (quantized::is_gguf(params.format)) {
    if (scales.defined() || zeros.defined())
      check.fail(std::string(scales.defined() ? "scales" : "zeros") + " beside format=" + format +
                 ", whose blocks hold their own; none is needed");
    return;
  }
  if (!scales.defined()) check.fail("scales is absent; format=" + format + " needs one for each group");
  params.scales = groups_of(check, "scales", scales, params.out_features);
  params.stride_scales_row = scales.strides[0];
  const std::int64_t in = params.in_features, groups = scales.shape[1];
  const bool whole = params.format == WeightFormat::kInt8 && groups == 1;
  if (in > 0 && (groups < 1 || in % groups != 0 || (in / groups % quantized::kBlock != 0 && !whole)))
    check.fail("scales.shape[1]=" + std::to_string(groups) + " groups of in_features=" + std::to_string(in) +
               "; equal groups of a multiple of 32 elements are needed" +
               (params.format == WeightFormat::kInt8 ? ", or one for the whole row" : ""));
  params.group = in > 0 ? in / groups : quantized::kBlock;
  if (!zeros.defined()) return;
  params.zeros = groups_of(check, "zeros", zeros, params.out_features);
  check.dtype("zeros", zeros, scales.dtype);
  check.extent("zeros", zeros, 1, groups, "scales.shape[1]");
  params.stride_zeros_row = zeros.strides[0];
}

/// A weight whose 16 rows lie side by side.
void take_tiles(const Checker& check, const TensorView& weight, const QuantizedLinearParams& params) {
  if (!quantized::is_gguf(params.format))
    check.fail("weight of 3 dims with format=" + std::string(name_of(params.format)) +
               "; tiles of 16 rows are made of q4_0, q4_1 and q8_0 alone, other formats need 2 dims");
  const std::int64_t blocks = params.in_features / quantized::kBlock;
  check.extent("weight", weight, 1, blocks, "the blocks of 32 elements in x's last dim");
  check.extent("weight", weight, 2, quantized::kTileRows * quantized::block_bytes(params.format),
               "the bytes of 16 blocks in this format");
  if (blocks > 1 && weight.strides[1] != weight.shape[2])
    check.fail("weight.strides[1]=" + std::to_string(weight.strides[1]) +
               "; tiles of one group of rows must follow each other, " + std::to_string(weight.shape[2]) +
               " bytes apart");
}

}  // namespace

void quantized_linear(const TensorView& x, const TensorView& weight, const TensorView& scales, const TensorView& zeros,
                      const TensorView& bias, const TensorView& out, WeightFormat format, Activation activation,
                      const ExecutionContext& context) {
  const Checker check("quantized_linear", x.device);
  QuantizedLinearParams params;
  if (format > WeightFormat::kQ8_0)
    check.fail("format=" + std::to_string(static_cast<int>(format)) + "; needs kInt4, kInt8, kQ4_0, kQ4_1 or kQ8_0");
  if (activation > Activation::kSilu)
    check.fail("activation=" + std::to_string(static_cast<int>(activation)) +
               "; needs kNone, kGeluTanh, kGelu or kSilu");
  check.floating("x", x);
  check.ndim("x", x, 1, kMaxDims);
  check.last_dim_contiguous("x", x);
  check.dtype("weight", weight, format == WeightFormat::kInt8 ? DType::kInt8 : DType::kUInt8);
  check.ndim("weight", weight, 2, 3);
  check.last_dim_contiguous("weight", weight);
  params.dtype = x.dtype;
  params.device = x.device;
  params.format = format;
  params.in_features = x.shape[x.ndim - 1];
  params.tiles = weight.ndim == 3;
  params.out_features = weight.shape[0] * (params.tiles ? quantized::kTileRows : 1);
  params.activation = activation;
  if (format != WeightFormat::kInt8 && params.in_features % quantized::kBlock != 0)
    check.fail("x has last dim " + std::to_string(params.in_features) + " with format=" + name_of(format) +
               "; a multiple of 32 is needed");
  if (params.tiles) {
    take_tiles(check, weight, params);
  } else {
    check.extent("weight", weight, 1, quantized::row_bytes(format, params.in_features),
                 "the bytes of a row of x's last dim in this format");
  }
  params.weight = static_cast<const std::uint8_t*>(weight.data);
  params.stride_weight_row = weight.strides[0];
  take_groups(check, scales, zeros, params);
  params.bias = check.optional_vector("bias", bias, params.out_features, x.dtype);

  check.dtype("out", out, x.dtype);
  check.ndim("out", out, x.ndim, x.ndim);
  for (int d = 0; d < x.ndim - 1; ++d)
    check.extent("out", out, d, x.shape[d], ("x.shape[" + std::to_string(d) + "]").c_str());
  check.extent("out", out, out.ndim - 1, params.out_features,
               params.tiles ? "16 * weight.shape[0]" : "weight.shape[0]");
  check.last_dim_contiguous("out", out);
  check.writable("out", out);
  check.apart("out", out, {{"x", x}, {"weight", weight}, {"scales", scales}, {"zeros", zeros}, {"bias", bias}});
  if (out.numel() == 0 && !context.explain) return;

  const TensorView* const views[] = {&out, &x};
  const auto dims = merge_leading_dims<2>(views, 1, DimOrder::kByStride);
  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[2], const std::int64_t(&offset)[2]) {
                         params.rows = rows;
                         params.out = element_at(out, offset[0]);
                         params.x = element_at(x, offset[1]);
                         params.stride_out_row = stride[0];
                         params.stride_x_row = stride[1];
                         dispatch(params, params.device, context);
                       });
}

}  // namespace flashkernel
