// linear for a few rows (decode): bound by reading the weights, once, at the speed of memory. The weights are the left
// operand of mma.sync (16 features), up to 16 rows of x the right one (8 rows each). Both go from global memory
// straight into fragments, 16 bytes a lane: within 32 values of k, lane l takes 8 (l%4) .. + 7 of its row, and as both
// operands agree on that order the sum is the same. Warps of a block share features or split k; partial sums meet in
// shared memory, in the order of the warps.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/matrix.cuh"
#include "cuda/linear/tiles/sm80/linear.hpp"
#include "cuda/linear/epilogue.cuh"

namespace flashkernel::cuda::sm80 {

inline constexpr int kFewRowsWarps = 8;
inline constexpr int kFewRowsChunk = 64;  // of k: whole lines of 128 bytes of the weights

struct FewRowsProblem {
  const void* x = nullptr;
  const void* weight = nullptr;
  std::int64_t stride_x = 0, stride_weight = 0;  // rows of the stored weight: features, or k when it lies along out
  int rows = 0, features = 0, k = 0;
  int warps_across = 1;  // warps of a block side by side on features; the others split k
  LinearEpilogue epilogue;
};

/// What one lane holds of 64 k x 16 kFrags features. Along in: register 4 c + r of half h of fragment f are k
/// 32 c + 8 (l%4) + 2 r + {0, 1} of feature 16 f + 8 h + l/4. Along out: 2 kFrags neighbouring features from
/// 2 kFrags (l/4) of k 32 c + 8 (l%4) + e, so that fragment f's rows l/4 and l/4 + 8 are features 2 f and 2 f + 1 of
/// them.
template <class T, bool kAlongIn, int kFrags>
struct Weights {
  std::uint32_t word[kAlongIn ? kFrags * 2 : 16][kAlongIn ? 8 : kFrags];

  __device__ static int feature(int frag, int half, int group) {
    return kAlongIn ? 16 * frag + 8 * half + group : 2 * kFrags * group + 2 * frag + half;
  }

  /// `from`: the lane's own corner of the chunk (see kernel), `left`: values of k from the lane's first one to the end.
  __device__ void load(const T* from, std::int64_t stride, const int (&row)[kAlongIn ? kFrags * 2 : 1], int left) {
    if constexpr (kAlongIn) {
#pragma unroll
      for (int r = 0; r < kFrags * 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (32 * c < left) v = __ldcs(reinterpret_cast<const uint4*>(from + row[r] * stride + 32 * c));
          word[r][4 * c] = v.x, word[r][4 * c + 1] = v.y, word[r][4 * c + 2] = v.z, word[r][4 * c + 3] = v.w;
        }
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const T* at = from + (32 * c + e) * stride;
          const bool inside = 32 * c < left;  // k is a multiple of 8
          if constexpr (kFrags == 2) {
            uint2 v = make_uint2(0, 0);
            if (inside) v = __ldcs(reinterpret_cast<const uint2*>(at));
            word[8 * c + e][0] = v.x, word[8 * c + e][1] = v.y;
          } else {
            word[8 * c + e][0] = inside ? __ldcs(reinterpret_cast<const unsigned*>(at)) : 0;
          }
        }
    }
  }

  /// The left operand of fragment f for the 16 values of k of registers 4 c + 2 part + {0, 1}.
  __device__ void fragment(std::uint32_t (&a)[4], int f, int c, int part) const {
    if constexpr (kAlongIn) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = word[2 * f + e % 2][4 * c + 2 * part + e / 2];
    } else {
      constexpr unsigned kLow = 0x5410, kHigh = 0x7632;  // the low, the high halves of two words
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int first = 8 * c + 4 * part + e / 2 * 2;
        a[e] = __byte_perm(word[first][f], word[first + 1][f], e % 2 == 0 ? kLow : kHigh);
      }
    }
  }
};

template <class T, bool kAlongIn, int kTokens8, int kFrags>
__global__ void __launch_bounds__(32 * kFewRowsWarps, 2) linear_few_rows_kernel(const FewRowsProblem p) {
  using W = Weights<T, kAlongIn, kFrags>;
  constexpr int kFeatures = 16 * kFrags, kRows = 8 * kTokens8;
  constexpr int kAhead = kFrags == 1 ? 3 : 2;  // chunks under way: 4 to 8 KB a warp
  extern __shared__ float partial[];           // [warps that split k][features of the block][kRows + 1]

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int warps_down = kFewRowsWarps / p.warps_across;
  const int across = warp % p.warps_across, down = warp / p.warps_across;
  const int block_first = static_cast<int>(blockIdx.x) * p.warps_across * kFeatures;
  const int first = block_first + across * kFeatures;

  // Features beyond the last one repeat it, rows beyond the last one repeat it: their sums are not stored.
  const T* weight = static_cast<const T*>(p.weight);
  int row[kAlongIn ? kFrags * 2 : 1] = {};
  if constexpr (kAlongIn) {
#pragma unroll
    for (int r = 0; r < kFrags * 2; ++r) row[r] = min(first + 8 * r + group, p.features - 1);
    weight += 8 * quarter;
  } else {
    weight += 8 * quarter * p.stride_weight + min(first + 2 * kFrags * group, p.features - 2 * kFrags);
  }
  const T* x[kTokens8];
#pragma unroll
  for (int j = 0; j < kTokens8; ++j)
    x[j] = static_cast<const T*>(p.x) + min(8 * j + group, p.rows - 1) * p.stride_x + 8 * quarter;

  // Each thread finishes one feature; its bias is fetched while the first weights are under way.
  const int features_of_block = p.warps_across * kFeatures;  // divides the number of threads
  const int feature_of_thread = static_cast<int>(threadIdx.x) % features_of_block;

  const auto load = [&](W& w, int chunk) {
    const int k = chunk * kFewRowsChunk;
    w.load(weight + (kAlongIn ? k : k * p.stride_weight), p.stride_weight, row, p.k - k - 8 * quarter);
  };
  float sum[kFrags][kTokens8][4] = {};
  W w[kAhead];
#pragma unroll
  for (int ahead = 0; ahead < kAhead; ++ahead) load(w[ahead], down + ahead * warps_down);
  const float bias = bias_of(p.epilogue.bias, block_first + feature_of_thread, p.features);
  const int num_chunks = (p.k + kFewRowsChunk - 1) / kFewRowsChunk;
#pragma unroll 1
  for (int base = down; base < num_chunks; base += kAhead * warps_down) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int chunk = base + ahead * warps_down, k = chunk * kFewRowsChunk, left = p.k - k - 8 * quarter;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint4 v[kTokens8];
#pragma unroll
        for (int j = 0; j < kTokens8; ++j) {
          v[j] = make_uint4(0, 0, 0, 0);
          if (32 * c < left) v[j] = __ldg(reinterpret_cast<const uint4*>(x[j] + k + 32 * c));
        }
#pragma unroll
        for (int f = 0; f < kFrags; ++f)
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            std::uint32_t a[4];
            w[ahead].fragment(a, f, c, part);
#pragma unroll
            for (int j = 0; j < kTokens8; ++j)
              ptx::mma_m16n8k16<T>(sum[f][j], a, part ? v[j].z : v[j].x, part ? v[j].w : v[j].y);
          }
      }
      load(w[ahead], chunk + kAhead * warps_down);
    }
  }

#pragma unroll
  for (int f = 0; f < kFrags; ++f)
#pragma unroll
    for (int j = 0; j < kTokens8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int feature = across * kFeatures + W::feature(f, e / 2, group);
        partial[(down * features_of_block + feature) * (kRows + 1) + 8 * j + 2 * quarter + e % 2] = sum[f][j][e];
      }
  __syncthreads();
  if (block_first + feature_of_thread >= p.features) return;
  const int stride = 32 * kFewRowsWarps / features_of_block;
  for (int token = static_cast<int>(threadIdx.x) / features_of_block; token < p.rows; token += stride) {
    float total = bias;
    for (int d = 0; d < warps_down; ++d)
      total += partial[(d * features_of_block + feature_of_thread) * (kRows + 1) + token];
    finish_element<T>(p.epilogue, token, block_first + feature_of_thread, total);
  }
}

/// Blocks of 16 to 128 features: as large as still gives nearly every multiprocessor one, since a block reads all of x.
template <class T, bool kAlongIn>
void launch_few_rows(FewRowsProblem p, int num_sms, cudaStream_t stream) {
  const auto run = [&](auto tokens8, auto frags) {
    constexpr int kTokens8 = decltype(tokens8)::value, kFrags = decltype(frags)::value;
    const int features = 16 * kFrags * p.warps_across;
    const std::size_t bytes =
        sizeof(float) * static_cast<std::size_t>(kFewRowsWarps / p.warps_across) * features * (8 * kTokens8 + 1);
    launch("linear: few rows", linear_few_rows_kernel<T, kAlongIn, kTokens8, kFrags>,
           {static_cast<unsigned>(ceil_div(p.features, features)), 32 * kFewRowsWarps, bytes, stream}, p);
  };
  const auto with_tokens = [&](auto frags) {
    if (p.rows <= 8) return run(std::integral_constant<int, 1>{}, frags);
    run(std::integral_constant<int, 2>{}, frags);
  };
  const auto enough = [&](int features) { return ceil_div(p.features, features) * 10 >= num_sms * 9; };
  p.warps_across = enough(128) && p.rows > 8 ? 4 : enough(64) && p.rows > 8 ? 2 : 1;
  if (enough(32))
    with_tokens(std::integral_constant<int, 2>{});
  else
    with_tokens(std::integral_constant<int, 1>{});
}

template <class T>
void linear_few_rows_instance(const LinearParams& p, cudaStream_t stream) {
  FewRowsProblem problem;
  const bool along_in = p.stride_weight_in == 1;
  problem.x = p.x;
  problem.weight = p.weight;
  problem.stride_x = p.stride_x_row;
  problem.stride_weight = along_in ? p.stride_weight_out : p.stride_weight_in;
  problem.rows = static_cast<int>(p.rows);
  problem.features = static_cast<int>(p.out_features);
  problem.k = static_cast<int>(p.in_features);
  problem.epilogue = linear_epilogue<T>(p);
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  if (along_in)
    launch_few_rows<T, true>(problem, num_sms, stream);
  else
    launch_few_rows<T, false>(problem, num_sms, stream);
}

}  // namespace flashkernel::cuda::sm80
