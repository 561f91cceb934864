// fused_linear for __half and __nv_bfloat16, by the kernel of few_rows.cuh. Its tail has gate, activation and residual.
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/fused/sm80/few_rows.cuh"

namespace flashkernel::cuda::sm80 {
namespace {

template <class T>
struct PlainTail {
  const T* residual;
  T* out;
  std::int64_t stride_residual, stride_out;
  int outputs;
  Activation activation;
  bool gated;

  __device__ bool is_paired() const { return gated; }
  __device__ int output(int tile, int column) const { return (gated ? 4 : 8) * tile + column; }
  /// Rows beyond the last one repeat it: their sums are not stored.
  __device__ std::int64_t weight_row(int tile, int group) const {
    if (!gated) return min(8 * tile + group, outputs - 1);
    return min(4 * tile + group % 4, outputs - 1) + (group < 4 ? 0 : outputs);
  }

  /// Of one output: what is added to its sums.
  struct Rest {
    float bias, bias_up, residual;
    __device__ void fetch(const FusedFewRowsArguments& p, const PlainTail& tail, int tile, int row, int column) {
      const int output = tail.output(tile, column);
      if (output >= tail.outputs) return;
      bias = bias_of(p.bias, output, tail.outputs);
      bias_up = tail.gated ? bias_of(p.bias, tail.outputs + output, 2 * tail.outputs) : 0.0f;
      residual = tail.residual ? to_float(tail.residual[row * tail.stride_residual + output]) : 0.0f;
    }
    __device__ void finish(const FusedFewRowsArguments&, const PlainTail& tail, int tile, int row, int column,
                           float value, float up) const {
      const int output = tail.output(tile, column);
      if (output >= tail.outputs) return;
      value += bias;
      with_activation(tail.activation,
                      [&](auto activation) { value = activate_for<decltype(activation)::value, T>(value); });
      if (tail.gated) value *= up + bias_up;
      tail.out[row * tail.stride_out + output] = from_float<T>(value + residual);
    }
  };
};

template <class T>
void run(const FusedLinearParams& p, const FusedFewRowsPlan& plan, cudaStream_t stream) {
  PlainTail<T> tail;
  tail.residual = static_cast<const T*>(p.residual), tail.out = static_cast<T*>(p.out);
  tail.stride_residual = p.stride_residual_row, tail.stride_out = p.stride_out_row;
  tail.outputs = static_cast<int>(p.out_features);
  tail.activation = p.activation, tail.gated = p.gated;
  launch_fused_few_rows<T>("fused_linear: few rows", p, plan, static_cast<int>(fused_tiles(p)), tail, stream);
}

}  // namespace

void fused_few_rows(const FusedLinearParams& p, const Plan& plan, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.dtype == DType::kFloat16)
    run<__half>(p, plan.as<FusedFewRowsPlan>(), native(stream));
  else
    run<__nv_bfloat16>(p, plan.as<FusedFewRowsPlan>(), native(stream));
}

}  // namespace flashkernel::cuda::sm80
