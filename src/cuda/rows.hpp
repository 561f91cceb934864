// How a row of the CUDA table is made: one function for each kind of row. kernels.cpp, which is the table, calls them.
#pragma once

#include "core/cpu_features.hpp"
#include "cuda/arithmetic.hpp"
#include "cuda/attention/backward/sm75/variant.hpp"
#include "cuda/attention/backward/sm80/variant.hpp"
#include "cuda/attention/backward/sm80/variant_f32.hpp"
#include "cuda/attention/backward/sm90a/variant.hpp"
#include "cuda/attention/backward/steps.hpp"
#include "cuda/attention/decode/sm80/variant.hpp"
#include "cuda/attention/decode/sm90a/variant.hpp"
#include "cuda/attention/few_queries/sm90a/variant.hpp"
#include "cuda/attention/forward/sm75/variant.hpp"
#include "cuda/attention/forward/sm80/variant.hpp"
#include "cuda/attention/forward/sm90a/scored.hpp"
#include "cuda/attention/forward/sm90a/sparse.hpp"
#include "cuda/attention/forward/sm90a/variant.hpp"
#include "cuda/attention/generic.hpp"
#include "cuda/attention/mla/mla.hpp"
#include "cuda/attention/mla/sm80/variant.hpp"
#include "cuda/attention/mla/sm90a/variant.hpp"
#include "cuda/attention/widened/variant.hpp"
#include "cuda/costs.hpp"
#include "cuda/linear/few_rows/sm90a/plan.hpp"
#include "cuda/linear/fp8/generic/linear_fp8.hpp"
#include "cuda/linear/fp8/sm90a/linear_fp8.hpp"
#include "cuda/linear/generic/linear.hpp"
#include "cuda/linear/gradient.hpp"
#include "cuda/linear/tiles/sm75/linear.hpp"
#include "cuda/linear/tiles/sm80/linear.hpp"
#include "cuda/linear/tiles/sm90a/linear.hpp"
#include "cuda/linear/quantized/few_rows/sm80/few_rows.hpp"
#include "cuda/linear/quantized/generic/quantized_linear.hpp"
#include "cuda/row_costs.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda_rows {

namespace arithmetic = cuda::arithmetic;
namespace rates = cuda::rates;

/// The compute capabilities that a row serves.
struct Devices {
  int least, most;
};
inline constexpr int kNewest = 999;             // what comes next runs from PTX
inline constexpr Devices kEvery{75, kNewest};   // from the T4 on; mma.sync m16n8k8 for the rows of sm75
inline constexpr Devices kAmpere{80, kNewest};  // mma.sync m16n8k16
inline constexpr Devices kHopper{90, 90};       // wgmma and TMA

template <class Params, std::size_t N>
constexpr KernelTable<Params> table(const KernelEntry<Params> (&rows)[N]) {
  return {rows, N};
}

template <class Params>
constexpr KernelEntry<Params> row(const char* name, Devices devices, const char* arithmetic,
                                  typename RowFunctions<Params>::Supports supports,
                                  typename RowFunctions<Params>::Cost cost_us,
                                  typename RowFunctions<Params>::MakePlan plan,
                                  typename RowFunctions<Params>::Launch launch) {
  return {name, DeviceType::kCuda, devices.least, devices.most, kCpuAny, arithmetic, supports, cost_us, plan, launch};
}

/// A kernel that needs no plan, or one of its workspace alone.
template <class Params, typename RowFunctions<Params>::PlainLaunch kLaunch,
          typename RowFunctions<Params>::WorkspaceBytes kBytes = nullptr>
constexpr KernelEntry<Params> plain(const char* name, Devices devices, const char* arithmetic,
                                    typename RowFunctions<Params>::Supports supports,
                                    typename RowFunctions<Params>::Cost cost_us) {
  typename RowFunctions<Params>::MakePlan plan = nullptr;
  if constexpr (kBytes != nullptr) plan = plan_workspace<Params, kBytes>;
  return row<Params>(name, devices, arithmetic, supports, cost_us, plan, launch_plain<Params, kLaunch>);
}

/// A kernel that the invariant mode cuts in another way: its plan says whether the call is in the mode.
template <class Params, void (*kLaunch)(const Params&, bool, void*, Stream)>
void launch_by_mode(const Params& params, const Plan& plan, void* workspace, Stream stream) {
  kLaunch(params, plan.as<bool>(), workspace, stream);
}
template <class Params>
std::size_t no_workspace(const Params&, bool) {
  return 0;
}
template <class Params, std::size_t (*kBytes)(const Params&, bool)>
Plan plan_mode(const Params& params, const DeviceFacts& facts) {
  return Plan::of(facts.invariant, kBytes(params, facts.invariant));
}
template <class Params, void (*kLaunch)(const Params&, bool, void*, Stream),
          std::size_t (*kBytes)(const Params&, bool) = no_workspace<Params>>
constexpr KernelEntry<Params> by_mode(const char* name, Devices devices, const char* arithmetic,
                                      typename RowFunctions<Params>::Supports supports,
                                      typename RowFunctions<Params>::Cost cost_us) {
  return row<Params>(name, devices, arithmetic, supports, cost_us, plan_mode<Params, kBytes>,
                     launch_by_mode<Params, kLaunch>);
}

// The functions below say which calls a row serves in the invariant mode. A call belongs to the first row of the table
// whose function says yes (KernelEntry).

/// Copies leave by the copy engine, whose rows are 16 bytes: dims are whole vectors of 16-bit elements.
constexpr bool is_eights(std::int64_t a, std::int64_t b) { return a % 8 == 0 && b % 8 == 0; }

template <DType kDtype, int kQkDim, int kVDim>
bool has_head_dims(const AttentionParams& p) {
  return p.dtype == kDtype && cuda::HeadDims{kQkDim, kVDim}.hold(p.head_dim, p.head_dim_v);
}
template <DType kDtype, int kQkDim, int kVDim>
bool is_plain_attention(const AttentionParams& p) {
  return has_head_dims<kDtype, kQkDim, kVDim>(p) && is_eights(p.head_dim, p.head_dim_v) && !p.bias.data &&
         !p.mask.is_given() && !p.alibi_slopes;
}
template <DType kDtype, int kQkDim, int kVDim>
bool has_gradient_head_dims(const AttentionBackwardParams& p) {
  return has_head_dims<kDtype, kQkDim, kVDim>(p.forward);
}
template <DType kDtype, int kQkDim, int kVDim>
bool is_plain_gradient(const AttentionBackwardParams& p) {
  return is_plain_attention<kDtype, kQkDim, kVDim>(p.forward) && !p.grad_bias;
}
template <DType kDtype, class Params>
bool is_of(const Params& p) {
  return p.dtype == kDtype;
}
template <DType kDtype, class Params>
bool has_features_of_eights(const Params& p) {
  return p.dtype == kDtype && p.rows > 0 && p.in_features > 0 && p.out_features > 0 &&
         is_eights(p.in_features, p.out_features);
}
/// Rows of norms and softmax that a block holds, and that begin at multiples of 16 bytes where they follow each other.
inline bool is_whole_vectors(DType dtype, std::int64_t columns) { return cuda::row_bytes(dtype, columns) % 16 == 0; }
inline bool is_held(const NormParams& p) {
  return cuda::is_held_row(p.dtype, p.features) && is_whole_vectors(p.dtype, p.features);
}
template <class SoftmaxOrItsGradient>
bool is_held(const SoftmaxOrItsGradient& p) {
  return cuda::is_held_row(p.dtype, p.columns) && is_whole_vectors(p.dtype, p.columns);
}

/// Whether rows of a norm's gradient are whole vectors of 16 bytes, in a form that every GPU has a kernel for.
inline bool is_in_vectors(const NormBackwardParams& p) {
  return p.rows > 0 && is_whole_vectors(p.dtype, p.features) && (p.kind == NormKind::kLayerNorm || !p.grad_bias);
}
inline bool is_held(const NormBackwardParams& p) {
  return is_in_vectors(p) && cuda::row_bytes(p.dtype, p.features) <= cuda::kMostHeldByNormBwd;
}

/// The instance for {kQkDim, kVDim} of a kernel that is built for several pairs of head dims: larger ones leave a call
/// to smaller ones, which take whatever they take.
template <const auto& kBuilt, int kQkDim, int kVDim, class Params>
constexpr KernelEntry<Params> of_head_dims(KernelEntry<Params> entry) {
  entry.left_to_another = cuda::is_for_smaller_head_dims<Params, kBuilt, kQkDim, kVDim>;
  return entry;
}

/// The generic kernel of an op that is bound by memory. How it adds follows from the length of what it adds alone.
template <class Params, typename RowFunctions<Params>::PlainLaunch kLaunch,
          typename RowFunctions<Params>::WorkspaceBytes kBytes = nullptr>
constexpr KernelEntry<Params> generic(const char* name, typename RowFunctions<Params>::Supports supports) {
  return invariant(plain<Params, kLaunch, kBytes>(name, kEvery, arithmetic::kGeneric, supports,
                                                  cuda::cost_us<Params, rates::kRowsGeneric>));
}

inline std::int64_t turing_pitch(const AttentionParams& f) { return cuda::sm75::BackwardWorkspace(f).pitch; }
inline std::int64_t dense_pitch(const AttentionParams& f) { return f.seq_q; }

// Rows of attention's instances.
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_forward(const char* name) {
  return of_head_dims<cuda::kHopperForwardHeadDims, kQkDim, kVDim>(invariant(
      row<AttentionParams>(name, kHopper, arithmetic::of_head_dims<arithmetic::kTiledSm90a, kQkDim, kVDim>,
                           cuda::sm90a::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                           cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardSm90a>,
                                                      cuda::kHopperForwardHeadDims, kQkDim, kVDim>,
                           cuda::sm90a::attention_fwd_plan<kQkDim, kVDim>,
                           cuda::sm90a::launch_attention_fwd<kDtype, kQkDim, kVDim>),
      is_plain_attention<kDtype, kQkDim, kVDim>));
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> hopper_forward_wide(const char* name) {
  return of_head_dims<cuda::kHopperForwardHeadDims, kDim, kDim>(
      invariant(plain<AttentionParams, cuda::sm90a::attention_fwd_wide<kDtype>>(
                    name, kHopper, arithmetic::of_head_dims<arithmetic::kTiledSm90a, kDim, kDim>,
                    cuda::sm90a::attention_fwd_supports<kDtype, kDim, kDim>,
                    cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardSm90a>,
                                               cuda::kHopperForwardHeadDims, kDim, kDim>),
                is_plain_attention<kDtype, kDim, kDim>));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_forward_scored(const char* name) {
  return of_head_dims<cuda::kHopperScoredHeadDims, kQkDim, kVDim>(
      plain<AttentionParams, cuda::sm90a::attention_fwd_scored<kDtype, kQkDim, kVDim>>(
          name, kHopper, arithmetic::of_head_dims<arithmetic::kTiledScoredSm90a, kQkDim, kVDim>,
          cuda::sm90a::attention_fwd_scored_supports<kDtype, kQkDim, kVDim>,
          cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardScoredSm90a>,
                                     cuda::kHopperScoredHeadDims, kQkDim, kVDim>));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_forward_sparse(const char* name) {
  return of_head_dims<cuda::kHopperScoredHeadDims, kQkDim, kVDim>(
      plain<AttentionParams, cuda::sm90a::attention_fwd_sparse<kDtype, kQkDim, kVDim>,
            cuda::sm90a::attention_fwd_sparse_workspace>(
          name, kHopper, arithmetic::of_head_dims<arithmetic::kTiledSparseSm90a, kQkDim, kVDim>,
          cuda::sm90a::attention_fwd_sparse_supports<kDtype, kQkDim, kVDim>,
          cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardScoredSm90a>,
                                     cuda::kHopperScoredHeadDims, kQkDim, kVDim>));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> ampere_forward(const char* name) {
  return of_head_dims<cuda::kTiledHeadDims, kQkDim, kVDim>(
      invariant(plain<AttentionParams, cuda::sm80::attention_fwd<kDtype, kQkDim, kVDim>>(
                    name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledSm80, kQkDim, kVDim>,
                    cuda::sm80::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                    cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardSm80>,
                                               cuda::kTiledHeadDims, kQkDim, kVDim>),
                has_head_dims<kDtype, kQkDim, kVDim>));
}
/// Its order of keys is that of its own tiles: in the invariant mode a call belongs to the row above.
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> ampere_forward_short(const char* name) {
  return of_head_dims<cuda::kShortHeadDims, kQkDim,
                      kVDim>(plain<AttentionParams, cuda::sm80::attention_fwd_short<kDtype, kQkDim, kVDim>>(
      name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledShortSm80, kQkDim, kVDim>,
      cuda::sm80::attention_fwd_supports<kDtype, kQkDim, kVDim>,
      cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_short_cost_us, cuda::kShortHeadDims, kQkDim, kVDim>));
}
/// For the head dims that no other forward kernel of 8.0 holds.
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> ampere_forward_wide(const char* name) {
  return of_head_dims<cuda::kWideHeadDims, kDim, kDim>(
      invariant(plain<AttentionParams, cuda::sm80::attention_fwd_wide<kDtype, kDim>>(
                    name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledSm80, kDim, kDim>,
                    cuda::sm80::attention_fwd_supports<kDtype, kDim, kDim>,
                    cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardSm80>,
                                               cuda::kWideHeadDims, kDim, kDim>),
                has_head_dims<kDtype, kDim, kDim>));
}
/// Eight rows share a scale there, so a row's bits depend on its neighbours: the invariant mode does without it.
template <int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> ampere_forward_f32(const char* name) {
  return of_head_dims<cuda::kTiledHeadDims, kQkDim, kVDim>(
      plain<AttentionParams, cuda::sm80::attention_fwd_f32<kQkDim, kVDim>>(
          name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledSm80F32, kQkDim, kVDim>,
          cuda::sm80::attention_fwd_supports<DType::kFloat32, kQkDim, kVDim>,
          cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardSm80>,
                                     cuda::kTiledHeadDims, kQkDim, kVDim>));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> turing_forward(const char* name) {
  return of_head_dims<cuda::kTiledHeadDims, kQkDim, kVDim>(
      invariant(plain<AttentionParams, cuda::sm75::attention_fwd<kDtype, kQkDim, kVDim>>(
                    name, kEvery, arithmetic::of_head_dims<arithmetic::kTiledSm75, kQkDim, kVDim>,
                    cuda::sm75::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                    cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<rates::kForwardSm75>,
                                               cuda::kTiledHeadDims, kQkDim, kVDim>),
                has_head_dims<kDtype, kQkDim, kVDim>));
}
using cuda::sm80::DecodeMerge;
inline constexpr DecodeMerge kApart = DecodeMerge::kApart, kWithin = DecodeMerge::kWithin;
template <DecodeMerge kMerge, int kQkDim, int kVDim>
constexpr const char* split_sm80() {
  return kMerge == DecodeMerge::kApart ? arithmetic::of_head_dims<arithmetic::kSplitApartSm80, kQkDim, kVDim>
                                       : arithmetic::of_head_dims<arithmetic::kSplitWithinSm80, kQkDim, kVDim>;
}
template <DType kDtype, int kQkDim, DecodeMerge kMerge, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> ampere_decode(const char* name) {
  return of_head_dims<cuda::kDecodeHeadDims, kQkDim, kVDim>(row<AttentionParams>(
      name, kAmpere, split_sm80<kMerge, kQkDim, kVDim>(),
      cuda::sm80::attention_decode_supports<kDtype, kQkDim, kVDim, kMerge>,
      cuda::cost_us_of_head_dims<AttentionParams, cuda::sm80::attention_decode_cost_us<kMerge>, cuda::kDecodeHeadDims,
                                 kQkDim, kVDim>,
      cuda::sm80::plan_attention_decode<kQkDim, kVDim, kMerge>, cuda::sm80::attention_decode<kDtype, kQkDim, kVDim>));
}
template <DType kDtype, int kQkDim, DecodeMerge kMerge, int kBits = 8, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> narrow_decode(const char* name) {
  using Row = cuda::sm80::NarrowDecode<kBits, kDtype, kQkDim, kVDim, kMerge>;
  return of_head_dims<cuda::kDecodeQuantizedHeadDims, kQkDim, kVDim>(row<AttentionParams>(
      name, kAmpere, split_sm80<kMerge, kQkDim, kVDim>(), Row::supports,
      cuda::cost_us_of_head_dims<AttentionParams, cuda::sm80::attention_decode_cost_us<kMerge, kBits>,
                                 cuda::kDecodeQuantizedHeadDims, kQkDim, kVDim>,
      cuda::sm80::plan_attention_decode<kQkDim, kVDim, kMerge, kBits>, Row::launch));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_decode_group(const char* name) {
  return row<AttentionParams>(name, kHopper, arithmetic::kSplitGroupSm90a,
                              cuda::sm90a::decode_group_supports<kDtype, kQkDim, kVDim>,
                              cuda::sm90a::decode_group_cost_us, cuda::sm90a::plan_decode_group<kDtype, kQkDim, kVDim>,
                              cuda::sm90a::decode_group<kDtype, kQkDim, kVDim>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_decode_clusters(const char* name) {
  return row<AttentionParams>(name, kHopper, arithmetic::kSplitClustersSm90a,
                              cuda::sm90a::decode_clusters_supports<kDtype, kQkDim, kVDim>,
                              cuda::sm90a::decode_clusters_cost_us, cuda::sm90a::plan_decode_clusters,
                              cuda::sm90a::decode_clusters<kDtype, kQkDim, kVDim>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_few_queries(const char* name) {
  return of_head_dims<cuda::kFewQueriesHeadDims, kQkDim, kVDim>(row<AttentionParams>(
      name, kHopper, arithmetic::of_head_dims<arithmetic::kSplitRowsSm90a, kQkDim, kVDim>,
      cuda::sm90a::few_queries_supports<kDtype, kQkDim, kVDim>,
      cuda::cost_us_of_head_dims<AttentionParams, cuda::sm90a::few_queries_cost_us, cuda::kFewQueriesHeadDims, kQkDim,
                                 kVDim>,
      cuda::sm90a::plan_attention_few_queries, cuda::sm90a::attention_few_queries<kDtype, kQkDim, kVDim>));
}
/// Many queries over 8-bit pages: they are widened for a kernel that reads pages of the queries' dtype.
template <DType kDtype, int kQkDim, int kVDim, const cuda::Rates& kRates, Verdict (*kSupports)(const AttentionParams&),
          void (*kLaunch)(const AttentionParams&, void*, Stream)>
constexpr KernelEntry<AttentionParams> widened(const char* name, Devices devices, const char* arithmetic) {
  return of_head_dims<cuda::kDecodeQuantizedHeadDims, kQkDim, kVDim>(row<AttentionParams>(
      name, devices, arithmetic, cuda::attention_widened_supports<kDtype, kSupports>,
      cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_widened_cost_us<cuda::attention_cost_us<kRates>>,
                                 cuda::kDecodeQuantizedHeadDims, kQkDim, kVDim>,
      cuda::plan_attention_widened, cuda::attention_widened<kLaunch>));
}
template <DType kDtype, int kQkDim, int kVDim>
void hopper_forward_in_order(const AttentionParams& p, void* workspace, Stream stream) {
  cuda::sm90a::attention_fwd<kDtype, kQkDim, kVDim>(p, false, workspace, stream);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> hopper_widened(const char* name) {
  return widened<kDtype, kQkDim, kVDim, rates::kForwardSm90a,
                 cuda::sm90a::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                 hopper_forward_in_order<kDtype, kQkDim, kVDim>>(
      name, kHopper, arithmetic::of_head_dims<arithmetic::kWidenedSm90a, kQkDim, kVDim>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> ampere_widened(const char* name) {
  return widened<kDtype, kQkDim, kVDim, rates::kForwardSm80, cuda::sm80::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                 cuda::sm80::attention_fwd<kDtype, kQkDim, kVDim>>(
      name, kAmpere, arithmetic::of_head_dims<arithmetic::kWidenedSm80, kQkDim, kVDim>);
}
template <int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> ampere_widened_f32(const char* name) {
  return widened<DType::kFloat32, kQkDim, kVDim, rates::kForwardSm80,
                 cuda::sm80::attention_fwd_supports<DType::kFloat32, kQkDim, kVDim>,
                 cuda::sm80::attention_fwd_f32<kQkDim, kVDim>>(
      name, kAmpere, arithmetic::of_head_dims<arithmetic::kWidenedSm80F32, kQkDim, kVDim>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionParams> turing_widened(const char* name) {
  return widened<kDtype, kQkDim, kVDim, rates::kForwardSm75, cuda::sm75::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                 cuda::sm75::attention_fwd<kDtype, kQkDim, kVDim>>(
      name, kEvery, arithmetic::of_head_dims<arithmetic::kWidenedSm75, kQkDim, kVDim>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionBackwardParams> hopper_backward(const char* name) {
  return of_head_dims<cuda::kHopperBackwardHeadDims, kQkDim, kVDim>(
      invariant(plain<AttentionBackwardParams,
                      cuda::with_repair<cuda::sm90a::BackwardWorkspace, kQkDim, kVDim,
                                        cuda::sm90a::attention_bwd<kDtype, kQkDim, kVDim>>,
                      cuda::with_large_rows<cuda::sm90a::attention_bwd_workspace<kQkDim, kVDim>>>(
                    name, kHopper, arithmetic::of_head_dims<arithmetic::kTiledSm90a, kQkDim, kVDim>,
                    cuda::sm90a::attention_bwd_supports<kDtype, kQkDim, kVDim>,
                    cuda::cost_us_of_head_dims<AttentionBackwardParams,
                                               cuda::cost_us<AttentionBackwardParams, rates::kBackwardSm90a>,
                                               cuda::kHopperBackwardHeadDims, kQkDim, kVDim>),
                is_plain_gradient<kDtype, kQkDim, kVDim>));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionBackwardParams> ampere_backward(const char* name) {
  return of_head_dims<cuda::kTiledHeadDims, kQkDim, kVDim>(
      invariant(plain<AttentionBackwardParams,
                      cuda::with_repair<cuda::sm80::BackwardWorkspace, kQkDim, kVDim,
                                        cuda::sm80::attention_bwd<kDtype, kQkDim, kVDim>>,
                      cuda::with_large_rows<cuda::sm80::attention_bwd_workspace<kQkDim, kVDim>>>(
                    name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledSm80, kQkDim, kVDim>,
                    cuda::sm80::attention_bwd_supports<kDtype, kQkDim, kVDim>,
                    cuda::cost_us_of_head_dims<AttentionBackwardParams,
                                               cuda::cost_us<AttentionBackwardParams, rates::kBackwardSm80>,
                                               cuda::kTiledHeadDims, kQkDim, kVDim>),
                has_gradient_head_dims<kDtype, kQkDim, kVDim>));
}
/// For the head dims that no other backward kernel holds, of calls without score modifiers.
template <DType kDtype, int kDim>
bool is_unmodified_gradient(const AttentionBackwardParams& p) {
  return has_gradient_head_dims<kDtype, kDim, kDim>(p) && !p.forward.has_score_modifier();
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionBackwardParams> ampere_backward_wide(const char* name) {
  return of_head_dims<cuda::kWideHeadDims, kDim, kDim>(
      invariant(plain<AttentionBackwardParams,
                      cuda::with_repair<cuda::sm80::WideBackwardWorkspace, kDim, kDim,
                                        cuda::sm80::attention_bwd_wide<kDtype, kDim>>,
                      cuda::with_large_rows<cuda::sm80::attention_bwd_wide_workspace<kDim>>>(
                    name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledSm80, kDim, kDim>,
                    cuda::sm80::attention_bwd_wide_supports<kDtype, kDim>,
                    cuda::cost_us_of_head_dims<AttentionBackwardParams,
                                               cuda::cost_us<AttentionBackwardParams, rates::kBackwardSm80>,
                                               cuda::kWideHeadDims, kDim, kDim>),
                is_unmodified_gradient<kDtype, kDim>));
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionBackwardParams> turing_backward(const char* name) {
  return of_head_dims<cuda::kNarrowHeadDims, kQkDim, kVDim>(
      invariant(plain<AttentionBackwardParams,
                      cuda::after_sinks<cuda::sm75::attention_bwd_workspace<kQkDim, kVDim>, turing_pitch,
                                        cuda::sm75::attention_bwd<kDtype, kQkDim, kVDim>>,
                      cuda::with_large_rows<cuda::sm75::attention_bwd_workspace<kQkDim, kVDim>>>(
                    name, kEvery, arithmetic::of_head_dims<arithmetic::kTiledSm75, kQkDim, kVDim>,
                    cuda::sm75::attention_bwd_supports<kDtype, kQkDim, kVDim>,
                    cuda::cost_us_of_head_dims<AttentionBackwardParams,
                                               cuda::cost_us<AttentionBackwardParams, rates::kBackwardSm75>,
                                               cuda::kNarrowHeadDims, kQkDim, kVDim>),
                has_gradient_head_dims<kDtype, kQkDim, kVDim>));
}
template <int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<AttentionBackwardParams> ampere_backward_f32(const char* name) {
  return of_head_dims<cuda::kNarrowHeadDims, kQkDim, kVDim>(
      invariant(plain<AttentionBackwardParams,
                      cuda::after_sinks<cuda::sm80::attention_bwd_f32_workspace, dense_pitch,
                                        cuda::sm80::attention_bwd_f32<kQkDim, kVDim>>,
                      cuda::with_large_rows<cuda::sm80::attention_bwd_f32_workspace>>(
                    name, kAmpere, arithmetic::of_head_dims<arithmetic::kTiledSm80F32, kQkDim, kVDim>,
                    cuda::sm80::attention_bwd_f32_supports<kQkDim, kVDim>,
                    cuda::cost_us_of_head_dims<AttentionBackwardParams,
                                               cuda::cost_us<AttentionBackwardParams, rates::kBackwardSm80>,
                                               cuda::kNarrowHeadDims, kQkDim, kVDim>),
                has_gradient_head_dims<DType::kFloat32, kQkDim, kVDim>));
}

/// linear of few rows by one of three kernels, whose plan says which.
template <class Kernel, DType kDtype>
constexpr KernelEntry<LinearParams> hopper_few_rows(const char* name, const char* arithmetic) {
  return row<LinearParams>(name, kHopper, arithmetic, cuda::sm90a::linear_few_rows_supports<Kernel, kDtype>,
                           cuda::sm90a::linear_few_rows_cost_us<Kernel>, cuda::sm90a::plan_linear_few_rows<Kernel>,
                           cuda::sm90a::linear_few_rows<Kernel>);
}

/// attention_mla_decode on wgmma.
inline float hopper_mla_cost_us(const MlaDecodeParams& p, const DeviceFacts& facts) {
  const float us = cuda::cost_us<MlaDecodeParams, rates::kMlaSm90a>(p, facts);
  constexpr double kBehind = cuda::kOutsideItsRange * rates::kMlaSm90a / rates::kMlaSm80;
  return cuda::sm90a::has_mla_rows(p.attention, p.format.is_narrow()) ? us : static_cast<float>(kBehind * us);
}
template <DType kDtype, bool kNarrow = false>
constexpr KernelEntry<MlaDecodeParams> hopper_mla(const char* name) {
  return row<MlaDecodeParams>(name, kHopper, arithmetic::kSplitTilesSm90a,
                              cuda::sm90a::mla_decode_supports<kDtype, kNarrow>, hopper_mla_cost_us,
                              cuda::sm90a::plan_of_mla_decode, cuda::sm90a::mla_decode<kDtype, kNarrow>);
}
/// attention_mla_decode on mma.sync of 8.0. A GPU of little shared memory leaves tiles that it can't hold to others.
template <bool kNarrow>
float ampere_mla_cost_us(const MlaDecodeParams& p, const DeviceFacts& facts) {
  constexpr float kNever = 1e6f;
  const float us = cuda::cost_us<MlaDecodeParams, rates::kMlaSm80>(p, facts);
  return cuda::sm80::mla_decode_fits<kNarrow>(p, facts) ? us : kNever * us;
}
template <DType kDtype, bool kNarrow = false>
constexpr KernelEntry<MlaDecodeParams> ampere_mla(const char* name) {
  return row<MlaDecodeParams>(name, kAmpere, arithmetic::kSplitApartSm80,
                              cuda::sm80::mla_decode_supports<kDtype, kNarrow>, ampere_mla_cost_us<kNarrow>,
                              cuda::sm80::plan_of_mla_decode<kNarrow>, cuda::sm80::mla_decode<kDtype, kNarrow>);
}

/// quantized_linear, cut by a plan.
inline Plan plan_quantized_few_rows(const QuantizedLinearParams& p, const DeviceFacts& facts) {
  return Plan::of(cuda::sm80::plan_quantized_few_rows(p, facts.num_sms,
                                                      static_cast<std::size_t>(facts.max_shared_bytes_per_block)));
}
template <DType kDtype>
constexpr KernelEntry<QuantizedLinearParams> quantized_few_rows(const char* name) {
  return row<QuantizedLinearParams>(name, kAmpere, arithmetic::kQuantizedSm80,
                                    cuda::sm80::quantized_few_rows_supports<kDtype>,
                                    cuda::linear_cost_us<rates::kQuantizedFewRowsSm80, QuantizedLinearParams>,
                                    plan_quantized_few_rows, cuda::sm80::quantized_few_rows<kDtype>);
}

/// linear of many rows, by one way to deal out k and tiles.
inline constexpr const char* kOrderOfWork[] = {arithmetic::kWholeKSm90a, arithmetic::kClusterSm90a,
                                               arithmetic::kSplitKSm90a, arithmetic::kWholeKSm90a};
template <cuda::sm90a::GemmWork kWork, DType kDtype>
constexpr KernelEntry<LinearParams> hopper_large(const char* name) {
  const auto entry = row<LinearParams>(name, kHopper, kOrderOfWork[static_cast<int>(kWork)],
                                       cuda::sm90a::linear_supports<kWork, kDtype>, cuda::sm90a::linear_cost_us<kWork>,
                                       cuda::sm90a::plan_linear<kWork>, cuda::sm90a::linear);
  const bool whole_k = kOrderOfWork[static_cast<int>(kWork)] == arithmetic::kWholeKSm90a;
  return whole_k ? invariant(entry, has_features_of_eights<kDtype, LinearParams>) : entry;
}
template <DType kDtype>
constexpr KernelEntry<LinearBackwardParams> hopper_gradient(const char* name) {
  return invariant(
      row<LinearBackwardParams>(name, kHopper, arithmetic::kTilesSm90a, cuda::sm90a::linear_bwd_supports<kDtype>,
                                cuda::cost_us<LinearBackwardParams, rates::kGradientSm90a>,
                                cuda::sm90a::plan_linear_bwd, cuda::sm90a::linear_bwd),
      has_features_of_eights<kDtype, LinearBackwardParams>);
}

/// linear's gradient by an arch's products.
template <void (*kProducts)(const LinearBackwardParams&, bool, void*, Stream),
          std::size_t (*kBytes)(const LinearBackwardParams&, bool), int kRate, DType kDtype>
constexpr KernelEntry<LinearBackwardParams> linear_gradient(const char* name, Devices devices, const char* arithmetic,
                                                            Verdict (*supports)(const LinearBackwardParams&)) {
  return invariant(
      by_mode<LinearBackwardParams, cuda::after_gradient<kProducts>, cuda::with_gradient_workspace<kBytes>>(
          name, devices, arithmetic, supports, cuda::cost_us<LinearBackwardParams, kRate>),
      is_of<kDtype, LinearBackwardParams>);
}

/// linear and its gradient on mma.sync of 8.0.
template <DType kDtype>
constexpr KernelEntry<LinearParams> ampere_tiles(const char* name, const char* arithmetic) {
  return invariant(
      by_mode<LinearParams, cuda::sm80::linear, cuda::sm80::linear_workspace>(
          name, kAmpere, arithmetic, cuda::sm80::linear_supports<kDtype>, cuda::linear_cost_us<rates::kLinearSm80>),
      is_of<kDtype, LinearParams>);
}
template <DType kDtype>
constexpr KernelEntry<LinearBackwardParams> ampere_gradient(const char* name, const char* arithmetic) {
  return linear_gradient<cuda::sm80::linear_bwd, cuda::sm80::linear_bwd_workspace, rates::kGradientSm80, kDtype>(
      name, kAmpere, arithmetic, cuda::sm80::linear_bwd_supports<kDtype>);
}

/// Rows that a block holds, and so reads once, or that it reads twice.
template <class Params, int kReads, typename RowFunctions<Params>::PlainLaunch kLaunch,
          typename RowFunctions<Params>::WorkspaceBytes kBytes = nullptr>
constexpr KernelEntry<Params> read_rows(const char* name, typename RowFunctions<Params>::Supports supports) {
  constexpr auto kCost =
      kReads == 1 ? cuda::cost_us<Params, rates::kRowsGeneric> : cuda::cost_us<Params, rates::kRowsTwice>;
  const auto entry = plain<Params, kLaunch, kBytes>(
      name, kEvery, kReads == 1 ? arithmetic::kHeldRow : arithmetic::kWalkedRow, supports, kCost);
  return kReads == 1 ? invariant(entry, is_held) : invariant(entry, is_in_vectors);
}

/// The same with a plan. In the invariant mode those that a block can hold are held, cut for many rows, and others are
/// walked where they `walk_alike`.
template <class Params, int kReads>
constexpr KernelEntry<Params> planned_rows(const char* name, typename RowFunctions<Params>::Supports supports,
                                           typename RowFunctions<Params>::MakePlan plan,
                                           typename RowFunctions<Params>::Launch launch,
                                           typename RowFunctions<Params>::InvariantFor walk_alike = nullptr) {
  constexpr auto kCost =
      kReads == 1 ? cuda::cost_us<Params, rates::kRowsGeneric> : cuda::cost_us<Params, rates::kRowsTwice>;
  const auto entry = row<Params>(name, kEvery, kReads == 1 ? arithmetic::kHeldRow : arithmetic::kWalkedRow, supports,
                                 kCost, plan, launch);
  return kReads == 1 ? invariant(entry, is_held) : invariant(entry, walk_alike);
}

/// Rows that the blocks of a cluster share; `which` of them in the invariant mode, null: none.
template <class Params>
constexpr KernelEntry<Params> in_clusters(const char* name, typename RowFunctions<Params>::Supports supports,
                                          typename RowFunctions<Params>::MakePlan plan,
                                          typename RowFunctions<Params>::Launch launch,
                                          typename RowFunctions<Params>::InvariantFor which = nullptr) {
  return invariant(
      row<Params>(name, kHopper, arithmetic::kClusterOfARow, supports, cuda::clusters_cost_us<Params>, plan, launch),
      which);
}

}  // namespace flashkernel::cuda_rows
