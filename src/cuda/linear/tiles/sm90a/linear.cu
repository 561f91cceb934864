// linear and its gradient by the kernels of gemm.hpp: which calls they take, what these cost, and their launches.
#include "cuda/linear/tiles/sm90a/linear.hpp"

#include <memory>
#include <type_traits>
#include <variant>

#include "core/cuda_devices.hpp"
#include "core/fork_safe.hpp"
#include "cuda/costs.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/pipeline/tensor_map.hpp"
#include "cuda/linear/few_rows/sm90a/few_rows.hpp"
#include "cuda/linear/gradient.hpp"
#include "cuda/linear/tiles/sm90a/gemm.hpp"

namespace flashkernel::cuda::sm90a {

namespace {

std::unique_ptr<const GemmDevice> ask_device(int index) {
  const CudaDeviceGuard guard(index);
  auto device = std::make_unique<GemmDevice>();
  device->num_sms = cuda_device_properties(index).num_sms;
  for (const int parts : kClusterParts)
    device->clusters[static_cast<std::size_t>(parts)] = gemm_clusters_at_once(parts, index);
  return device;
}

/// What plans ask of a device. Asked once: clusters take the driver microseconds.
GemmDevice gemm_device(const DeviceFacts& facts) {
  if (facts.clusters) return {facts.num_sms, *facts.clusters};
  constexpr int kUsual = 16;  // devices that are found without a lock
  static MadeOnce<const GemmDevice> usual[kUsual];
  static MadeOncePerKey<int, const GemmDevice> others;
  const auto ask = [&] { return ask_device(facts.index); };
  return facts.index < kUsual ? usual[facts.index].get(ask) : others.get(facts.index, ask);
}

GemmExtent extent_of(const GemmProblem& p, DType dtype) {
  return {p.m, p.n, p.k, p.a.k_major, p.b.k_major, bulk_bias(p.epilogue, dtype)};
}

/// The rows of one call, and then its plan, ask for the same offers: the last answer of each thread is kept.
const GemmOffers& offers_for(const GemmExtent& extent, const DeviceFacts& facts) {
  struct Answer {
    GemmExtent extent;  // of no call at first
    int device, num_sms;
    const ClusterCounts* clusters;
    GemmOffers offers;
  };
  static thread_local Answer last;
  const GemmExtent& e = last.extent;
  const bool known = e.m == extent.m && e.n == extent.n && e.k == extent.k && e.k_major_a == extent.k_major_a &&
                     e.k_major_b == extent.k_major_b && e.bulk_bias == extent.bulk_bias && last.device == facts.index &&
                     last.num_sms == facts.num_sms && last.clusters == facts.clusters;
  if (!known) last = {extent, facts.index, facts.num_sms, facts.clusters, offer_gemm(extent, gemm_device(facts))};
  return last.offers;
}

constexpr std::int64_t kMostElements = std::int64_t{1} << 30;  // coordinates are 32-bit

/// A matrix of `rows` x `columns`, neighbours along the columns.
bool fits(DType dtype, const void* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  TensorMapSpec spec;
  spec.data = data;
  spec.dtype = dtype;
  spec.rank = 2;
  spec.dims[0] = {columns, 1, 64};
  spec.dims[1] = {rows, stride, 64};
  return fits_tensor_map(spec);
}

bool fits_either(DType dtype, const void* data, std::int64_t out, std::int64_t in, std::int64_t stride_out,
                 std::int64_t stride_in) {
  return stride_in == 1 ? fits(dtype, data, out, in, stride_out) : fits(dtype, data, in, out, stride_in);
}

const char* const kUnaligned = "a tensor's data or rows are not at multiples of 16 bytes";
const char* const kTails = "in_features or out_features is not a multiple of 8";  // results leave 8 at a time

/// What both forward kernels ask for.
Verdict check_forward(const LinearParams& p, DType dtype) {
  if (p.dtype != dtype) return "it is built for another dtype";
  if (p.rows > kMostElements || p.in_features > kMostElements || p.out_features > kMostElements)
    return "a dim is over 2^30";
  if (p.in_features == 0) return "in_features is 0";
  if (p.rows == 0 || p.out_features == 0) return Verdict::ok();
  if (!fits(dtype, p.x, p.rows, p.in_features, p.stride_x_row) ||
      !fits_either(dtype, p.weight, p.out_features, p.in_features, p.stride_weight_out, p.stride_weight_in) ||
      !fits(dtype, p.out, p.rows, p.out_features, p.stride_out_row) ||
      (p.preactivation && !fits(dtype, p.preactivation, p.rows, p.out_features, p.stride_preactivation_row)))
    return kUnaligned;
  return Verdict::ok();
}

}  // namespace

template <GemmWork kWork>
Verdict linear_supports(const LinearParams& p, DType dtype) {
  if (p.out_features % 8 != 0) return kTails;
  constexpr bool kCutsK = kWork == GemmWork::kCluster || kWork == GemmWork::kSplitK;
  if (kCutsK && p.in_features <= kGemmTileK) return "in_features is one k-tile, 64 or less: no two parts of it";
  return check_forward(p, dtype);
}

namespace {

/// The product, as far as the plan goes; the rest of the epilogue depends on the type.
GemmProblem product_of_forward(const LinearParams& p) {
  GemmProblem problem;
  problem.m = p.rows;
  problem.n = p.out_features;
  problem.k = p.in_features;
  problem.a = {p.x, p.stride_x_row, true};
  const bool along_in = p.stride_weight_in == 1;
  problem.b = {p.weight, along_in ? p.stride_weight_out : p.stride_weight_in, along_in};
  problem.epilogue.bias = p.bias;  // the plan asks for it
  return problem;
}

std::size_t parts_bytes(const GemmProblem& problem, const GemmPlan& plan) {
  if (plan.parts == 1 || in_clusters(plan.variant)) return 0;
  return sizeof(float) * static_cast<std::size_t>(plan.parts * problem.m * problem.n);
}

/// f(a T): of a call in fp16 or bf16.
template <class F>
void visit_halves(DType dtype, F&& f) {
  if (dtype == DType::kFloat16)
    f(__half{});
  else
    f(__nv_bfloat16{});
}

}  // namespace

template <GemmWork kWork>
float linear_cost_us(const LinearParams& p, const DeviceFacts& facts) {
  const double us = linear_us(p, rates::kLinearSm90a);
  if (p.rows == 0 || p.out_features == 0) return static_cast<float>(us);
  const GemmOffers& offers = offers_for(extent_of(product_of_forward(p), p.dtype), facts);
  if (offers.best == kWork) return static_cast<float>(us);
  const GemmOffer& offer = offers.of(kWork);
  if (offer.us == gemm_plan::kNever) return static_cast<float>(kOutsideItsRange * us);
  return static_cast<float>(us + offer.us - offers.of(offers.best).us);
}

template <GemmWork kWork>
Plan plan_linear(const LinearParams& p, const DeviceFacts& facts) {
  if (p.rows == 0 || p.out_features == 0) return Plan::of(GemmPlan());
  const GemmProblem problem = product_of_forward(p);
  const GemmPlan plan = offers_for(extent_of(problem, p.dtype), facts).of(kWork).plan;
  return Plan::of(plan, parts_bytes(problem, plan));
}

#define FK_INSTANCE(kWork)                                                       \
  template Verdict linear_supports<kWork>(const LinearParams&, DType);           \
  template float linear_cost_us<kWork>(const LinearParams&, const DeviceFacts&); \
  template Plan plan_linear<kWork>(const LinearParams&, const DeviceFacts&);
FK_INSTANCE(GemmWork::kCooperative)
FK_INSTANCE(GemmWork::kCluster)
FK_INSTANCE(GemmWork::kSplitK)
FK_INSTANCE(GemmWork::kPingPong)
#undef FK_INSTANCE

void linear(const LinearParams& p, const Plan& planned, void* workspace, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const GemmPlan& plan = planned.as<GemmPlan>();
  GemmProblem problem = product_of_forward(p);
  problem.parts = plan.parts;
  problem.partial = static_cast<float*>(workspace);
  visit_halves(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    problem.epilogue = linear_epilogue<T>(p);
    gemm<T>("linear", problem, plan.variant, cuda_device_properties(p.device.index).num_sms, native(stream));
  });
}

namespace {

FewRowsExtent extent_of(const LinearParams& p) {
  return {p.rows, p.out_features, p.in_features, p.stride_weight_in == 1};
}

}  // namespace

template <class Kernel>
Verdict linear_few_rows_supports(const LinearParams& p, DType dtype) {
  if (p.rows > kFewRows) return "it takes at most 64 rows";
  if (const Verdict verdict = check_forward(p, dtype); !verdict) return verdict;
  if (std::is_same_v<Kernel, FewRowsDirectPlan> && !few_rows_plan::takes_direct(extent_of(p)))
    return "it takes at most 8 rows, and weights along in_features, a multiple of 32 up to 4096";
  if (std::is_same_v<Kernel, FewRowsStreamPlan> && !few_rows_plan::takes_stream(extent_of(p)))
    return "it takes weights along in_features: a multiple of 32 from 1280 to 16384 of at most 4 rows, a multiple of "
           "1024 up to 8192 of at most 8";
  if (std::is_same_v<Kernel, FewRowsInOrderPlan> && !few_rows_plan::takes_in_order(extent_of(p)))
    return "it takes weights along in_features, a multiple of 64";
  if (std::is_same_v<Kernel, FewRowsBlocksInOrderPlan> && !extent_of(p).k_major)
    return "it takes weights along in_features";
  return Verdict::ok();
}

template <class Kernel>
float linear_few_rows_cost_us(const LinearParams& p, const DeviceFacts& facts) {
  const double us = linear_us(p, rates::kLinearFewRowsSm90a);
  bool best = false;
  if constexpr (std::is_same_v<Kernel, FewRowsInOrderPlan> || std::is_same_v<Kernel, FewRowsBlocksInOrderPlan>)
    // Outside of the invariant mode the other kernels have the calls: their ranges were measured without these.
    best = facts.invariant && std::holds_alternative<Kernel>(plan_few_rows_in_order(extent_of(p), facts.num_sms));
  else
    best = std::holds_alternative<Kernel>(plan_few_rows(extent_of(p), gemm_device(facts)));
  return static_cast<float>(best ? us : kOutsideItsRange * us);
}

template <class Kernel>
Plan plan_linear_few_rows(const LinearParams& p, const DeviceFacts& facts) {
  return Plan::of(plan_few_rows_by<Kernel>(extent_of(p), gemm_device(facts)));
}

template <class Kernel>
void linear_few_rows(const LinearParams& p, const Plan& plan, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  FewRowsProblem problem;
  problem.rows = p.rows;
  problem.features = p.out_features;
  problem.k = p.in_features;
  problem.x = {p.x, p.stride_x_row, true};
  const bool along_in = p.stride_weight_in == 1;
  problem.weight = {p.weight, along_in ? p.stride_weight_out : p.stride_weight_in, along_in};
  visit_halves(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    problem.epilogue = linear_epilogue<T>(p);
    few_rows<T>(problem, plan.as<Kernel>(), native(stream));
  });
}

#define FK_INSTANCE(Kernel)                                                                \
  template Verdict linear_few_rows_supports<Kernel>(const LinearParams&, DType);           \
  template float linear_few_rows_cost_us<Kernel>(const LinearParams&, const DeviceFacts&); \
  template Plan plan_linear_few_rows<Kernel>(const LinearParams&, const DeviceFacts&);     \
  template void linear_few_rows<Kernel>(const LinearParams&, const Plan&, void*, Stream);
FK_INSTANCE(FewRowsDirectPlan)
FK_INSTANCE(FewRowsStreamPlan)
FK_INSTANCE(FewRowsBlocksPlan)
FK_INSTANCE(FewRowsInOrderPlan)
FK_INSTANCE(FewRowsBlocksInOrderPlan)
#undef FK_INSTANCE

Verdict linear_bwd_supports(const LinearBackwardParams& p, DType dtype) {
  if (p.dtype != dtype) return "it is built for another dtype";
  if (p.rows > kMostElements || p.in_features > kMostElements || p.out_features > kMostElements)
    return "a dim is over 2^30";
  if (p.rows == 0 || p.in_features == 0 || p.out_features == 0) return "a matrix is empty";
  if (p.in_features % 8 != 0 || p.out_features % 8 != 0) return kTails;
  const bool g_given = p.activation == Activation::kNone;  // else it lies in the workspace
  if ((g_given && !fits(dtype, p.grad_out, p.rows, p.out_features, p.stride_grad_out_row)) ||
      (p.grad_x &&
       (!fits(dtype, p.grad_x, p.rows, p.in_features, p.stride_grad_x_row) ||
        !fits_either(dtype, p.weight, p.out_features, p.in_features, p.stride_weight_out, p.stride_weight_in))) ||
      (p.grad_weight && (!fits(dtype, p.x, p.rows, p.in_features, p.stride_x_row) ||
                         !fits_either(dtype, p.grad_weight, p.out_features, p.in_features, p.stride_grad_weight_out,
                                      p.stride_grad_weight_in))))
    return kUnaligned;
  return Verdict::ok();
}

namespace {

/// The two products, as far as their shapes and layouts go; the epilogues depend on the type.
GemmProblem product_of_grad_x(const LinearBackwardParams& p) {
  GemmProblem problem;
  problem.m = p.rows;
  problem.n = p.in_features;
  problem.k = p.out_features;
  problem.a = {p.grad_out, p.stride_grad_out_row, true};
  const bool along_out = p.stride_weight_in != 1;  // W [out, in] is B [in, out]
  problem.b = {p.weight, along_out ? p.stride_weight_in : p.stride_weight_out, along_out};
  return problem;
}

GemmProblem product_of_grad_weight(const LinearBackwardParams& p) {
  GemmProblem problem;
  // Rows of the result run along the dim that is contiguous in memory.
  const bool along_in = p.stride_grad_weight_in == 1;
  problem.m = along_in ? p.out_features : p.in_features;
  problem.n = along_in ? p.in_features : p.out_features;
  problem.k = p.rows;
  problem.a = {p.grad_out, p.stride_grad_out_row, false};
  problem.b = {p.x, p.stride_x_row, false};
  if (!along_in) std::swap(problem.a, problem.b);
  return problem;
}

/// A plan for each of the two products that a call asks for.
struct GradientPlan {
  GemmPlan grad_x, grad_weight;
};

}  // namespace

Plan plan_linear_bwd(const LinearBackwardParams& p, const DeviceFacts& facts) {
  GradientPlan plan;
  std::size_t bytes = 0;  // the products run one after the other
  const auto add = [&](const GemmProblem& product, bool whole_k) {
    const GemmExtent extent = extent_of(product, p.dtype);
    const GemmPlan of_product =
        whole_k ? plan_gemm_of_whole_k(extent, gemm_device(facts)) : plan_gemm(extent, gemm_device(facts));
    bytes = std::max(bytes, parts_bytes(product, of_product));
    return of_product;
  };
  if (p.grad_x) plan.grad_x = add(product_of_grad_x(p), facts.invariant);
  if (p.grad_weight) plan.grad_weight = add(product_of_grad_weight(p), false);  // a sum over all rows
  return Plan::of(plan, linear_gradient_workspace(p) + bytes);
}

void linear_bwd(const LinearBackwardParams& given, const Plan& planned, void* workspace, Stream stream) {
  const GradientPlan& plans = planned.as<GradientPlan>();
  const LinearBackwardParams p = linear_gradient(given, workspace, stream);
  auto* const partial = reinterpret_cast<float*>(static_cast<char*>(workspace) + linear_gradient_workspace(given));
  const CudaDeviceGuard guard(p.device.index);
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  visit_halves(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto multiply = [&](const char* name, GemmProblem problem, const GemmPlan& plan, void* to,
                              std::int64_t stride) {
      problem.epilogue = plain_epilogue<T>(to, stride);
      problem.parts = plan.parts;
      problem.partial = partial;
      gemm<T>(name, problem, plan.variant, num_sms, native(stream));
    };
    if (p.grad_x) multiply("linear_bwd: grad_x", product_of_grad_x(p), plans.grad_x, p.grad_x, p.stride_grad_x_row);
    if (p.grad_weight)
      multiply("linear_bwd: grad_weight", product_of_grad_weight(p), plans.grad_weight, p.grad_weight,
               p.stride_grad_weight_in == 1 ? p.stride_grad_weight_out : p.stride_grad_weight_in);
  });
}

}  // namespace flashkernel::cuda::sm90a
