// LayerNorm and RMSNorm forward of long rows on 9.0, with an optional fused residual add: a cluster holds a row in
// registers (pipeline/long_rows.cuh). Every byte is read once and written once. Weights and biases come from L2 after
// the sums, or lie in shared memory from the start. Called through the table of kernels.cpp. Invariant: the order of
// all additions follows from the shape.
#include "cuda/norm/sm90a/norm_long_rows.hpp"

#include "cuda/pipeline/long_rows.cuh"
#include "cuda/norm/moments.cuh"
#include "cuda/norm/norm.hpp"
#include "cuda/norm/norm_row.cuh"
#include "cuda/pipeline/turn.cuh"

namespace flashkernel::cuda::sm90a {
namespace {

namespace lr = long_rows;

enum class Place { kL2, kShared };

/// A block's part of a row in shared memory. Each thread fills and reads the places of its own vectors alone, so that
/// nobody waits for anybody.
template <class T, class S>
class Slot {
 public:
  __device__ explicit Slot(unsigned char* bytes) : bytes_(bytes) {}
  __device__ Words<T>& operator[](int j) const {
    return reinterpret_cast<Words<T>*>(bytes_)[j * S::kThreads + static_cast<int>(threadIdx.x)];
  }
  /// Starts the copy of the block's columns of `row`. It is under way until this thread waits for its copies.
  __device__ void fetch(const T* row, const typename S::template Held<T>& shape) const {
#pragma unroll
    for (int j = 0; j < S::kVectors; ++j)
      ptx::cp_async_16(ptx::shared_address(&(*this)[j]), row + shape.first(j), shape.holds(j) ? 16 : 0);
  }

 private:
  unsigned char* bytes_;
};

/// Weights or biases, in a slot of shared memory or from L2.
template <class T, class S, Place kPlace>
class Constant {
  using Held = typename S::template Held<T>;

 public:
  static constexpr bool kShared = kPlace == Place::kShared;
  static constexpr int kBytes = kShared ? S::kBytes : 0;

  /// `missing`: the words of a constant that is not given.
  __device__ Constant(const TypedPointer& from, int first, std::uint32_t missing, unsigned char* slot)
      : data_(from ? static_cast<const T*>(from.data) + first : nullptr), slot_(slot), missing_(missing) {}
  __device__ void fetch(const Held& shape) const {
    if constexpr (kShared) {
      if (data_) return slot_.fetch(data_, shape);
#pragma unroll
      for (int j = 0; j < S::kVectors; ++j) slot_[j] = none();
    }
  }
  __device__ Words<T> read(const Held& shape, int j) const {
    if constexpr (kShared) return slot_[j];
    Words<T> words = none();
    if (data_ && shape.holds(j)) words = *reinterpret_cast<const Words<T>*>(data_ + shape.first(j));
    return words;
  }

 private:
  __device__ Words<T> none() const { return {{missing_, missing_, missing_, missing_}}; }
  const T* data_;
  Slot<T, S> slot_;
  std::uint32_t missing_;
};

/// What is added to a row: in registers or, where another row follows, in a slot, into which that one's is copied
/// meanwhile.
template <class T, class S>
class Addend {
  using Held = typename S::template Held<T>;

 public:
  static constexpr int kBytes = S::kWalks ? S::kBytes : 0;

  __device__ Addend(int columns, unsigned char* slot) : held_(columns), slot_(slot) {}
  __device__ void fetch(const T* row) {
    if constexpr (S::kWalks)
      slot_.fetch(row, held_);
    else
      held_.load(row);
  }
  __device__ void floats(int j, float (&values)[Held::N]) {
    if constexpr (S::kWalks)
      slot_[j].floats(values);
    else
      held_.floats(j, values);
  }

 private:
  Held held_;
  Slot<T, S> slot_;
};

/// LayerNorm's message of a warp: the mean of its part, squares about that mean, elements; RMSNorm's: squares.
template <bool kLayerNorm>
using Message = std::conditional_t<kLayerNorm, float4, float>;

/// The moments of the elements that this warp holds. Zeros past the row's end are left out of squares about a mean.
template <bool kLayerNorm, class S, class Held>
__device__ inline Message<kLayerNorm> part_of_warp(Held& row, int columns) {
  constexpr int N = Held::N;
  float mean = 0.0f, elements = 0.0f;
  if constexpr (kLayerNorm) {
    int vectors = 0;
#pragma unroll
    for (int j = 0; j < S::kVectors; ++j)
      vectors += min(max(columns / N - j * S::kThreads - static_cast<int>(threadIdx.x) / kWarp * kWarp, 0), kWarp);
    elements = static_cast<float>(vectors * N);
    float sums[2] = {};  // side by side: each addition waits for the one before it
    row.each([&](int, const float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i % 2] += values[i];
    });
    mean = warp_reduce(sums[0] + sums[1], Sum{}) / fmaxf(elements, 1.0f);
  }
  float sums[2] = {};
#pragma unroll
  for (int j = 0; j < S::kVectors; ++j) {
    float values[N];
    row.floats_again(j, values);
    const float centre = row.holds(j) ? mean : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float apart = kLayerNorm ? values[i] - centre : values[i];
      sums[i % 2] = fmaf(apart, apart, sums[i % 2]);
    }
  }
  const float squares = warp_reduce(sums[0] + sums[1], Sum{});
  if constexpr (kLayerNorm) return make_float4(mean, squares, elements, 0.0f);
  if constexpr (!kLayerNorm) return squares;
}

/// The moments of the row, of all warps' messages (tile/moments.cuh).
template <bool kLayerNorm, class E>
__device__ inline Moments join(const E& exchange, float inverse_columns) {
  Moments m;
  if constexpr (kLayerNorm) {
    exchange.each([&](const float4& part) { m.mean = fmaf(part.x, part.z * inverse_columns, m.mean); });
    m.mean = warp_reduce(m.mean, Sum{});
    exchange.each([&](const float4& part) {  // squares about a part's mean become squares about the row's
      m.squares += fmaf((part.x - m.mean) * (part.x - m.mean), part.z, part.y);
    });
  } else {
    exchange.each([&](float squares) { m.squares += squares; });
  }
  m.squares = warp_reduce(m.squares, Sum{});
  return m;
}

template <class T, class S, bool kLayerNorm, bool kResidual, Place kPlace>
struct Slots {
  using Weight = Constant<T, S, kPlace>;
  using Bias = Constant<T, S, kLayerNorm ? kPlace : Place::kL2>;
  static constexpr int kAddend = Weight::kBytes + Bias::kBytes;
  static constexpr int kBytes = kAddend + (kResidual ? Addend<T, S>::kBytes : 0);
};

template <class T, class S, bool kLayerNorm, bool kResidual, Place kPlace>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    norm_kernel(const NormParams p, int num_blocks, int share) {
  using K = Slots<T, S, kLayerNorm, kResidual, kPlace>;
  using Held = typename S::template Held<T>;
  using Mail = lr::Exchange<Message<kLayerNorm>, S>;
  constexpr int N = Held::N;
  extern __shared__ __align__(16) unsigned char slots[];
  __shared__ typename Mail::Shared mail;
  take_turn();
  const lr::Part part(p.features, share);
  const auto x = [&](std::int64_t row) { return static_cast<const T*>(p.x) + row * p.stride_x_row + part.first; };
  const auto residual = [&](std::int64_t row) {
    return static_cast<const T*>(p.residual) + row * p.stride_residual_row + part.first;
  };
  const typename K::Weight weight(p.weight, part.first, kOnes<T>, slots);
  const typename K::Bias bias(p.bias, part.first, 0, slots + K::Weight::kBytes);

  std::int64_t row = lr::number_of_cluster(num_blocks);
  const std::int64_t step = gridDim.x / static_cast<unsigned>(num_blocks);
  Held h(part.count);
  Addend<T, S> addend(part.count, slots + K::kAddend);
  h.load(x(row));
  if constexpr (kResidual) addend.fetch(residual(row));
  weight.fetch(h);
  if constexpr (kLayerNorm) bias.fetch(h);
  ptx::cp_async_commit();

  Mail exchange(mail, num_blocks);
  const float inverse_columns = 1.0f / static_cast<float>(p.features);
  for (;; row += step) {
    const bool more = S::kWalks && row + step < p.rows;
    if constexpr (kResidual) {
      if constexpr (S::kWalks) ptx::cp_async_wait<0>();
      // Rounded to T as residual_out holds it, so that backward sees what forward normalised.
      h.change([&](int j, float(&values)[N]) {
        float second[N];
        addend.floats(j, second);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] += second[i];
      });
      if (more) {
        addend.fetch(residual(row + step));
        ptx::cp_async_commit();
      }
      if (p.residual_out) h.store(static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row + part.first);
    }
    exchange.all(part_of_warp<kLayerNorm, S>(h, part.count));
    const Moments m = join<kLayerNorm>(exchange, inverse_columns);
    if (more) exchange.next();
    const float rstd = rsqrtf(m.squares * inverse_columns + p.eps);
    if (threadIdx.x == 0 && part.first == 0) {
      if (kLayerNorm && p.mean) p.mean[row] = m.mean;
      if (p.rstd) p.rstd[row] = rstd;
    }

    T* const out = static_cast<T*>(p.out) + row * p.stride_out_row + part.first;
    const T* const next = x(row + step);
    if constexpr (!kResidual || !S::kWalks) ptx::cp_async_wait<0>();  // else they came with the first addend
#pragma unroll
    for (int j = 0; j < S::kVectors; ++j) {
      float values[N], w[N], b[N] = {};
      h.floats(j, values);
      weight.read(h, j).floats(w);
      if constexpr (kLayerNorm) bias.read(h, j).floats(b);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        w[i] += p.weight_offset;
        values[i] = kLayerNorm ? fmaf((values[i] - m.mean) * rstd, w[i], b[i]) : values[i] * rstd * w[i];
      }
      h.store(out, j, values);
      if constexpr (S::kWalks) h.load_next(next, j, more);
    }
    if (!more) break;
  }
}

template <class T, class S, bool kLayerNorm, bool kResidual, Place kPlace>
auto kernel() {
  return lr::kernel_of<S, T>(norm_kernel<T, S, kLayerNorm, kResidual, kPlace>,
                             Slots<T, S, kLayerNorm, kResidual, kPlace>::kBytes, "norm: long rows");
}

// What an H200 and an H100 found fastest (lab/notebooks/cuda_memory_bound.md). With a residual a thread holds half as
// much of a row, so that twice as many threads have both. Weights that are read once for two rows are a quarter less
// out of L2, with biases a third; LayerNorm's of the longest rows are read once for all rows of a cluster.
using Residual = lr::Shape<512, 4, 1024>;
using WalkingResidual = lr::Shape<512, 4, 1024, lr::kAll>;
using Pairs = lr::Shape<256, 8, 1024, 2>;
using ShortPairs = lr::Shape<256, 4, 1280, 2>;
using Walking = lr::Shape<256, 8, 768, lr::kAll>;

/// f(the kernel that takes these rows).
template <class F>
void with_kernel(const NormParams& p, F f) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t vectors = p.features / kVectorElements<T>;
    const bool longest = lr::blocks_of_cluster(vectors) > 8;
    if (p.kind == NormKind::kRmsNorm) {
      if (p.residual) return f(kernel<T, Residual, false, true, Place::kShared>());
      return f(kernel<T, Pairs, false, false, Place::kShared>());
    }
    if (p.residual && longest) return f(kernel<T, WalkingResidual, true, true, Place::kShared>());
    if (p.residual) return f(kernel<T, Residual, true, true, Place::kShared>());
    if (longest) return f(kernel<T, Walking, true, false, Place::kShared>());
    if (lr::blocks_of_cluster<ShortPairs>(vectors) <= 8) return f(kernel<T, ShortPairs, true, false, Place::kShared>());
    f(kernel<T, lr::Long, true, false, Place::kL2>());
  });
}

}  // namespace

Verdict norm_long_rows_supports(const NormParams& p) {
  if (p.is_quantized()) return kWrites8Bits;
  Verdict verdict = lr::serves(p.dtype, p.features, norm_rows_are_vectors(p));
  if (!verdict) return verdict;
  const auto fits = [&](const TypedPointer& weight) { return !weight || weight.dtype == p.dtype; };
  if (!fits(p.weight) || !fits(p.bias)) return Verdict("needs weights of the rows' dtype");
  with_kernel(p, [&](const auto& kernel) { verdict = lr::cluster_fits(kernel, p.features, p.device.index); });
  return verdict;
}

Plan plan_norm_long_rows(const NormParams& p, const DeviceFacts&) {
  const CudaDeviceGuard guard(p.device.index);
  ClusterRows plan;
  with_kernel(p, [&](const auto& kernel) { plan = lr::plan_rows(kernel, p.features, p.rows, p.device.index); });
  return Plan::of(plan);
}

void norm_long_rows(const NormParams& p, const Plan& plan, void*, Stream stream) {
  if (p.rows == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  with_kernel(p, [&](const auto& kernel) { lr::launch_rows(kernel, plan.as<ClusterRows>(), p, stream); });
}

}  // namespace flashkernel::cuda::sm90a
