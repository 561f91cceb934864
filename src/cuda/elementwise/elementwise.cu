// add, SwiGLU and its gradient over strided tensors of up to kMaxDims merged dims. Contiguous operands (one dim of
// stride 1 after merging) go 16 bytes a lane, one vector of each tensor a thread and no loop: the blocks that run at a
// time lie side by side in memory, and a finished one makes room for the next loads at once. So do rows that are
// contiguous in all tensors and begin at multiples of 16 bytes, such as the halves of a gate and up projection.
// Anything else goes one element a lane.
#include "cuda/elementwise/elementwise.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/activation.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kVectorThreads = 128;  // of a block without a loop: small, so that an SM is refilled in small steps
constexpr int kThreads = 256;        // of the others
constexpr int kBlocksPerSm = 16;

// Offsets of element `index` in `kTensors` tensors that share a shape.
template <int kTensors>
struct Layout {
  int ndim;
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kTensors][kMaxDims];

  __device__ void offsets(std::int64_t index, std::int64_t (&out)[kTensors]) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) out[t] = 0;
#pragma unroll 1  // the division, by a number that is not known, is long
    for (int d = ndim - 1; d >= 0; --d) {
      const std::int64_t rest = index / shape[d], coordinate = index - rest * shape[d];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) out[t] += coordinate * strides[t][d];
      index = rest;
    }
  }
};

/// By the special-function unit where T has 16 bits: its error, 1e-6, is far below their rounding.
template <class T>
__device__ inline float sigmoid(float x) {
  return sizeof(T) == 2 ? sigmoid_fast(x) : 1.0f / (1.0f + expf(-x));
}

// An operation maps kInputs numbers to kOutputs numbers, of tensors of T.
struct AddOp {
  static constexpr int kInputs = 2, kOutputs = 1;
  template <class T>
  __device__ static void apply(const float (&in)[2], float (&out)[1]) {
    out[0] = in[0] + in[1];
  }
};
struct SwigluOp {  // gate, up -> silu(gate) * up
  static constexpr int kInputs = 2, kOutputs = 1;
  template <class T>
  __device__ static void apply(const float (&in)[2], float (&out)[1]) {
    out[0] = in[0] * sigmoid<T>(in[0]) * in[1];
  }
};
struct SwigluBackwardOp {  // grad_out, gate, up -> grad_gate, grad_up
  static constexpr int kInputs = 3, kOutputs = 2;
  template <class T>
  __device__ static void apply(const float (&in)[3], float (&out)[2]) {
    const float s = sigmoid<T>(in[1]);
    const float bell = s * (1.0f - s);  // 0 far out, where gate may be infinite
    out[0] = in[0] * in[2] * (bell == 0.0f ? s : fmaf(in[1], bell, s));
    out[1] = in[0] * (in[1] * s);
  }
};

template <class Op>
struct Tensors {
  const void* in[Op::kInputs];
  void* out[Op::kOutputs];  // null: not wanted
};

/// One vector of each tensor, at that element of it.
template <class T, class Op>
__device__ inline void apply_vector(const Tensors<Op>& tensors,
                                    const std::int64_t (&offset)[Op::kInputs + Op::kOutputs]) {
  constexpr int N = kVectorElements<T>;
  Packed<T, N> in[Op::kInputs];
  float out[Op::kOutputs][N];
#pragma unroll
  for (int t = 0; t < Op::kInputs; ++t) in[t] = load_vector<N>(static_cast<const T*>(tensors.in[t]) + offset[t]);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float a[Op::kInputs], b[Op::kOutputs];
#pragma unroll
    for (int t = 0; t < Op::kInputs; ++t) a[t] = to_float(in[t].values[i]);
    Op::template apply<T>(a, b);
#pragma unroll
    for (int t = 0; t < Op::kOutputs; ++t) out[t][i] = b[t];
  }
#pragma unroll
  for (int t = 0; t < Op::kOutputs; ++t)
    if (tensors.out[t]) store_floats(static_cast<T*>(tensors.out[t]) + offset[Op::kInputs + t], out[t]);
}

template <class T, class Op>
__global__ void __launch_bounds__(kVectorThreads) contiguous_kernel(const Tensors<Op> tensors, std::int64_t vectors) {
  take_turn();
  const std::int64_t v = static_cast<std::int64_t>(blockIdx.x) * kVectorThreads + threadIdx.x;
  if (v >= vectors) return;
  std::int64_t offset[Op::kInputs + Op::kOutputs];
#pragma unroll
  for (std::int64_t& place : offset) place = v * kVectorElements<T>;
  apply_vector<T>(tensors, offset);
}

/// `layout` of the dims but the last, which is `row_vectors` vectors long.
template <class T, class Op>
__global__ void __launch_bounds__(kVectorThreads)
    rows_kernel(const Tensors<Op> tensors, const Layout<Op::kInputs + Op::kOutputs> layout, std::uint32_t row_vectors,
                std::uint32_t vectors) {
  take_turn();
  const std::uint32_t v = blockIdx.x * kVectorThreads + threadIdx.x;
  if (v >= vectors) return;
  const std::uint32_t row = v / row_vectors, place = (v - row * row_vectors) * kVectorElements<T>;
  std::int64_t offset[Op::kInputs + Op::kOutputs];
  if (layout.ndim == 1) {  // no division
#pragma unroll
    for (int t = 0; t < Op::kInputs + Op::kOutputs; ++t) offset[t] = row * layout.strides[t][0];
  } else {
    layout.offsets(row, offset);
  }
#pragma unroll
  for (std::int64_t& to : offset) to += place;
  apply_vector<T>(tensors, offset);
}

template <class T, class Op>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const Tensors<Op> tensors, const Layout<Op::kInputs + Op::kOutputs> layout, std::int64_t count) {
  take_turn();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < count; e += step) {
    std::int64_t offset[Op::kInputs + Op::kOutputs];
    layout.offsets(e, offset);
    float in[Op::kInputs], out[Op::kOutputs];
#pragma unroll
    for (int t = 0; t < Op::kInputs; ++t) in[t] = to_float(static_cast<const T*>(tensors.in[t])[offset[t]]);
    Op::template apply<T>(in, out);
#pragma unroll
    for (int t = 0; t < Op::kOutputs; ++t)
      if (tensors.out[t]) static_cast<T*>(tensors.out[t])[offset[Op::kInputs + t]] = from_float<T>(out[t]);
  }
}

/// Whether rows of the last dim are whole vectors in every tensor, so many that threads can count them.
template <class Op>
bool in_row_vectors(std::size_t element_bytes, int ndim, const std::int64_t* shape, const Tensors<Op>& tensors,
                    const std::int64_t* const (&strides)[Op::kInputs + Op::kOutputs], std::int64_t count) {
  const std::int64_t elements = 16 / static_cast<std::int64_t>(element_bytes);
  if (ndim < 2 || shape[ndim - 1] % elements != 0 || count / elements >= 0x7fffffff) return false;
  for (int t = 0; t < Op::kInputs + Op::kOutputs; ++t) {
    const void* data = t < Op::kInputs ? tensors.in[t] : tensors.out[t - Op::kInputs];
    if (!data) continue;
    if (strides[t][ndim - 1] != 1 || !is_aligned(data, 16)) return false;
    for (int d = 0; d < ndim - 1; ++d)
      if (strides[t][d] % elements != 0) return false;
  }
  return true;
}

/// `strides` in the order inputs, outputs.
template <class Op>
void run(DType dtype, Device device, int ndim, const std::int64_t* shape, const Tensors<Op>& tensors,
         const std::int64_t* const (&strides)[Op::kInputs + Op::kOutputs], Stream stream, const char* name) {
  constexpr int kTensors = Op::kInputs + Op::kOutputs;
  std::int64_t count = 1;
  for (int d = 0; d < ndim; ++d) count *= shape[d];
  if (count == 0) return;
  const CudaDeviceGuard guard(device.index);
  bool contiguous = ndim <= 1;
  for (int t = 0; contiguous && t < kTensors; ++t) {
    const void* data = t < Op::kInputs ? tensors.in[t] : tensors.out[t - Op::kInputs];
    if (data) contiguous = (ndim == 0 || shape[0] == 1 || strides[t][0] == 1) && is_aligned(data, 16);
  }
  visit_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    std::int64_t done = 0;
    if (contiguous && count >= N) {
      const std::int64_t vectors = std::min(count / N, std::int64_t{kVectorThreads} * 0x7fffffff);
      launch(name, contiguous_kernel<T, Op>,
             {static_cast<unsigned>(ceil_div(vectors, kVectorThreads)), kVectorThreads, 0, native(stream), true},
             tensors, vectors);
      done = vectors * N;
    }
    if (done == count) return;
    Layout<kTensors> layout{};
    Tensors<Op> rest = tensors;
    layout.ndim = ndim;
    for (int d = 0; d < ndim; ++d) layout.shape[d] = shape[d];
    for (int t = 0; t < kTensors; ++t)
      for (int d = 0; d < ndim; ++d) layout.strides[t][d] = strides[t][d];
    if (in_row_vectors(sizeof(T), ndim, shape, tensors, strides, count)) {
      layout.ndim = ndim - 1;
      const auto vectors = static_cast<std::uint32_t>(count / N);
      launch(name, rows_kernel<T, Op>,
             {static_cast<unsigned>(ceil_div(vectors, kVectorThreads)), kVectorThreads, 0, native(stream), true},
             tensors, layout, static_cast<std::uint32_t>(shape[ndim - 1] / N), vectors);
      return;
    }
    for (int t = 0; t < Op::kInputs; ++t) rest.in[t] = static_cast<const T*>(tensors.in[t]) + done;
    for (int t = 0; t < Op::kOutputs; ++t)
      if (tensors.out[t]) rest.out[t] = static_cast<T*>(tensors.out[t]) + done;
    if (done > 0) layout.shape[0] = count - done;
    launch(name, strided_kernel<T, Op>,
           {grid_size(ceil_div(count - done, kThreads), device.index, kBlocksPerSm), kThreads, 0, native(stream), true},
           rest, layout, count - done);
  });
}

}  // namespace

Verdict add_supports(const AddParams&) { return Verdict::ok(); }
void add(const AddParams& p, void*, Stream stream) {
  run<AddOp>(p.dtype, p.device, p.ndim, p.shape, {{p.a, p.b}, {p.out}}, {p.stride_a, p.stride_b, p.stride_out}, stream,
             "add");
}

Verdict swiglu_supports(const SwigluParams&) { return Verdict::ok(); }
void swiglu(const SwigluParams& p, void*, Stream stream) {
  run<SwigluOp>(p.dtype, p.device, p.ndim, p.shape, {{p.gate, p.up}, {p.out}},
                {p.stride_gate, p.stride_up, p.stride_out}, stream, "swiglu");
}

Verdict swiglu_bwd_supports(const SwigluBackwardParams&) { return Verdict::ok(); }
void swiglu_bwd(const SwigluBackwardParams& p, void*, Stream stream) {
  run<SwigluBackwardOp>(p.dtype, p.device, p.ndim, p.shape, {{p.grad_out, p.gate, p.up}, {p.grad_gate, p.grad_up}},
                        {p.stride_grad_out, p.stride_gate, p.stride_up, p.stride_grad_gate, p.stride_grad_up}, stream,
                        "swiglu_bwd");
}

}  // namespace flashkernel::cuda
