// quantized_linear for a few rows (decode): bound by reading the weights, once, at the speed of memory. The warps of a
// block split k; each copies chunks of 256 k of its rows of the weight into shared memory, as they are, several chunks
// ahead, and waits for none but its own. The elements become 16-bit integers in registers, which both types hold
// exactly, and go into mma.sync as the left operand (16 features), up to 32 rows of x as the right one (8 rows each). A
// block of 32 elements has a sum of its own, which is multiplied by the block's scale in fp32: no weight is ever
// rounded. Offsets (zeros, q4_1) are multiplied by the sum of the block's x, which a product with ones gives. Partial
// sums of the warps meet in shared memory, in the order of the warps.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/linear/epilogue.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/linear/quantized/few_rows/sm80/few_rows.hpp"
#include "cuda/linear/quantized/few_rows/sm80/unpack.cuh"

namespace flashkernel::cuda::sm80 {

struct QuantizedFewRowsProblem {
  const void* x = nullptr;
  const std::uint8_t* weight = nullptr;
  TypedPointer scales, zeros;
  std::int64_t stride_x = 0, stride_weight = 0;
  int rows = 0, features = 0, k = 0;
  int stride_groups = 0;  // of a feature's scales to the next one's, and of its zeros
  int group_shift = 0;    // of a block's number: its group's
  LinearEpilogue epilogue;
};

/// An element's bits, so that what it is made into waits for it, not the load.
__device__ inline std::uint32_t bits_of(const TypedPointer& from, std::int64_t i) {
  return from.dtype == DType::kFloat32 ? static_cast<const std::uint32_t*>(from.data)[i]
                                       : static_cast<const std::uint16_t*>(from.data)[i];
}
__device__ inline float number_of(std::uint32_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    case DType::kBFloat16: return __uint_as_float(bits << 16);
    default: return __uint_as_float(bits);
  }
}

__device__ inline float half_at(const unsigned char* from) {
  return __half2float(*reinterpret_cast<const __half*>(from));
}

/// The words [word, word + kCount) of what follows the head of block kBlock in a chunk's row; blocks of 18 and 34 bytes
/// begin at every other multiple of 2.
template <WeightFormat kFormat, int kBlock, int kCount>
__device__ inline void block_words(std::uint32_t (&words)[kCount], const unsigned char* row, int word) {
  constexpr int kAt = kBlock * quantized::block_bytes(kFormat) + quantized::head_bytes(kFormat);
  const auto* const from = reinterpret_cast<const std::uint32_t*>(row + kAt / 4 * 4) + word;
  if constexpr (kAt % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = from[i];
  } else {
    std::uint32_t before = from[0];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t after = from[i + 1];
      words[i] = __byte_perm(before, after, 0x5432);
      before = after;
    }
  }
}

/// The scales (or zeros) of a lane's features for a chunk, of formats whose blocks have none: lane 4 g + c
/// has those of blocks 2 c and 2 c + 1 of features g and g + 8 of each fragment.
template <int kFrags>
struct GroupNumbers {
  std::uint32_t bits[kFrags][2][2];

  __device__ void load(const TypedPointer& from, const int (&row)[kFrags][2], int block, int blocks, int group_shift) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int f = 0; f < kFrags; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          bits[f][half][e] = block + e < blocks ? bits_of(from, row[f][half] + ((block + e) >> group_shift)) : 0;
  }
  /// The numbers that another one has as bits.
  __device__ void take(const GroupNumbers& from, DType dtype) {
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) bits[f][half][e] = __float_as_uint(number_of(from.bits[f][half][e], dtype));
  }
  template <int kBlock>
  __device__ float of(int f, int half, int lane, int pair) const {
    return __uint_as_float(__shfl_sync(0xffffffffu, bits[f][half][kBlock % 2], lane / 4 * 4 + kBlock / 2 + pair));
  }
};

template <class T, WeightFormat kFormat, int kTokens8>
__global__ void __launch_bounds__(32 * quantized_most_warps(kTokens8), 3)
    quantized_few_rows_kernel(const __grid_constant__ QuantizedFewRowsProblem p) {
  using Row = QuantizedRow<kFormat>;
  constexpr bool kInt8 = quantized::is_int8(kFormat), kGguf = quantized::is_gguf(kFormat);
  constexpr int kFrags = quantized_frags(kTokens8), kStages = quantized_stages(kFormat, kTokens8);
  constexpr int kFeatures = 16 * kFrags, kRows = 8 * kTokens8;
  constexpr int kStageBytes = kFeatures * Row::kPitch;
  constexpr int kEights = Row::kBytes / 128, kRest = Row::kBytes / 16 % 8;  // vectors of a row
  constexpr int kRestOfRow = kRest > 0 ? kRest : 1;
  extern __shared__ __align__(16) unsigned char shared[];

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, group = lane / 4, quarter = lane % 4;
  const int first = static_cast<int>(blockIdx.x) * kFeatures, first_row = static_cast<int>(blockIdx.y) * kRows;
  const int rows = min(kRows, p.rows - first_row);
  const int num_blocks = p.k / static_cast<int>(quantized::kBlock);
  const int num_chunks = (p.k + kQuantizedChunk - 1) / kQuantizedChunk;
  unsigned char* const ring = shared + warp * kStages * kStageBytes;
  const std::uint32_t ring_address = ptx::shared_address(ring);

  // Copies: eight lanes a row of four, then what is left of a row's vectors. Features beyond the last one repeat it,
  // rows too: their sums are not stored.
  const std::uint8_t* const weight = p.weight + first * p.stride_weight;
  const auto offset_of = [&](int feature) {
    return static_cast<std::uint32_t>(min(feature, p.features - 1 - first)) *
           static_cast<std::uint32_t>(p.stride_weight);
  };
  std::uint32_t offset[kFeatures / 4];
#pragma unroll
  for (int j = 0; j < kFeatures / 4; ++j) offset[j] = offset_of(4 * j + lane / 8) + lane % 8 * 16;
  constexpr int kRestCopies = (kFeatures * kRest + 31) / 32;
  std::uint32_t rest[kRestCopies > 0 ? kRestCopies : 1] = {};
#pragma unroll
  for (int j = 0; j < kRestCopies; ++j) {
    const int at = 32 * j + lane;
    rest[j] = offset_of(min(at / kRestOfRow, kFeatures - 1)) + kEights * 128 + at % kRestOfRow * 16;
  }
  const int row_bytes = num_blocks * Row::kBlockBytes;
  const auto each_copy = [&](auto&& copy) {  // f(bytes from the chunk's begin in its row, offset, place in the stage)
#pragma unroll
    for (int j = 0; j < kFeatures / 4; ++j)
#pragma unroll
      for (int m = 0; m < kEights; ++m)
        copy(lane % 8 * 16 + 128 * m, offset[j] + 128 * m, (4 * j + lane / 8) * Row::kPitch + lane % 8 * 16 + 128 * m);
    if constexpr (kRest > 0) {
#pragma unroll
      for (int j = 0; j < kRestCopies; ++j) {
        const int at = 32 * j + lane, begin = kEights * 128 + at % kRestOfRow * 16;
        if (kFeatures * kRest % 32 == 0 || at < kFeatures * kRest)
          copy(begin, rest[j], at / kRestOfRow * Row::kPitch + begin);
      }
    }
  };

  int group_row[kFrags][2] = {};
  if constexpr (!kGguf) {
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        group_row[f][half] = min(first + 16 * f + 8 * half + group, p.features - 1) * p.stride_groups;
  }
  const T* x[kTokens8];
#pragma unroll
  for (int j = 0; j < kTokens8; ++j) {
    x[j] = static_cast<const T*>(p.x) + (first_row + min(8 * j + group, rows - 1)) * p.stride_x +
           (kInt8 ? 8 : 4) * quarter;
    ptx::settle(x[j]);
  }

  // Hints change no value, so the kernels before may still be writing what they name.
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    const int begin = (warp + s * warps) * Row::kBytes;
    each_copy([&](int at, std::uint32_t from, int) {
      if (begin + at < row_bytes) ptx::prefetch_l2(weight + begin + from);
    });
  }
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  // Scales and zeros of a chunk come into registers while the chunk before is multiplied, and into L2 with its copies.
  GroupNumbers<kFrags> scales, zeros;
  const auto load_groups = [&](int chunk) {
    const int block = chunk * kQuantizedChunkBlocks + 2 * quarter;
    scales.load(p.scales, group_row, block, num_blocks, p.group_shift);
    if (p.zeros) zeros.load(p.zeros, group_row, block, num_blocks, p.group_shift);
  };
  const auto issue = [&](int s, int chunk) {
    if (chunk < num_chunks) {
      const int begin = chunk * Row::kBytes;
      const auto copy_all = [&](auto&& bytes_of) {
        each_copy([&](int at, std::uint32_t from, int to) {
          ptx::cp_async_16(ring_address + s * kStageBytes + to, weight + begin + from, bytes_of(at));
        });
      };
      if (begin + Row::kBytes <= row_bytes)
        copy_all([](int) { return 16; });
      else  // zeros beyond the row's end
        copy_all([&](int at) { return max(0, min(16, row_bytes - begin - at)); });
      if constexpr (!kGguf) {
        const int block = chunk * kQuantizedChunkBlocks;
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {  // half of the quarter's lanes ask for a feature each
          const auto ask = [&](const TypedPointer& from) {
            ptx::prefetch_l2(static_cast<const char*>(from.data) +
                             static_cast<std::int64_t>((quarter == 0 ? group_row[f][0] : group_row[f][1]) +
                                                       (block >> p.group_shift)) *
                                 (from.dtype == DType::kFloat32 ? 4 : 2));
          };
          if (quarter < 2) ask(p.scales);
          if (quarter < 2 && p.zeros) ask(p.zeros);
        }
      }
    }
    ptx::cp_async_commit();
  };

  float sum[kFrags][kTokens8][4] = {};
  /// A lane's x of one block: of 4 bits, k 4 c .. + 3 and 16 + 4 c .. + 3; of 8 bits, k 8 c .. + 7.
  const auto load_x = [&](int j, int k) {
    if constexpr (kInt8) return __ldg(reinterpret_cast<const uint4*>(x[j] + k));
    const uint2 low = __ldg(reinterpret_cast<const uint2*>(x[j] + k));
    const uint2 high = __ldg(reinterpret_cast<const uint2*>(x[j] + k + 16));
    return make_uint4(low.x, low.y, high.x, high.y);
  };
  /// Block kBlock of the pairs of blocks from `pair` on.
  const auto multiply_block = [&](auto block, int pair, const unsigned char* stage, const GroupNumbers<kFrags>& scale,
                                  const GroupNumbers<kFrags>& zero, const uint4(&v)[kTokens8]) {
    constexpr int kBlock = decltype(block)::value;
    const bool has_offset = kFormat == WeightFormat::kQ4_1 || (!kGguf && p.zeros);
    float of_x[kTokens8][2] = {};
    if (has_offset) {
      constexpr std::uint32_t kOne = kOnes<T>;
      const std::uint32_t ones[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
      for (int j = 0; j < kTokens8; ++j) {
        float d[4];
        ptx::mma_m16n8k16_from<T>(d, ones, v[j].x, v[j].y, 0.0f, 0.0f);
        ptx::mma_m16n8k16<T>(d, ones, v[j].z, v[j].w);
        of_x[j][0] = d[0], of_x[j][1] = d[1];
      }
    }
#pragma unroll
    for (int f = 0; f < kFrags; ++f) {
      std::uint32_t first16[4], second16[4];
      float factor[2], offset_by[2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned char* const row =
            stage + (16 * f + 8 * half + group) * Row::kPitch + pair * (2 * Row::kBlockBytes);
        if constexpr (kInt8) {
          std::uint32_t words[2], low[2], high[2];
          block_words<kFormat, kBlock>(words, row, 2 * quarter);
          unpack_bytes<T>(words[0], low);
          unpack_bytes<T>(words[1], high);
          first16[half] = low[0], first16[2 + half] = low[1], second16[half] = high[0], second16[2 + half] = high[1];
        } else {
          std::uint32_t words[1], low[2], high[2];
          block_words<kFormat, kBlock>(words, row, quarter);
          unpack_nibbles<T>(words[0], low, high);
          first16[half] = low[0], first16[2 + half] = low[1], second16[half] = high[0], second16[2 + half] = high[1];
        }
        if constexpr (kGguf) {
          factor[half] = half_at(row + kBlock * Row::kBlockBytes);
          if constexpr (kFormat == WeightFormat::kQ4_1)  // d q + m where q - 8 is what was multiplied
            offset_by[half] = fmaf(8.0f, factor[half], half_at(row + kBlock * Row::kBlockBytes + 2));
        } else {
          factor[half] = scale.template of<kBlock>(f, half, lane, pair);
          if (p.zeros)
            offset_by[half] =
                factor[half] * (quantized::plain_zero(kFormat) - zero.template of<kBlock>(f, half, lane, pair));
        }
      }
#pragma unroll
      for (int j = 0; j < kTokens8; ++j) {
        float d[4];
        ptx::mma_m16n8k16_from<T>(d, first16, v[j].x, v[j].y, 0.0f, 0.0f);
        ptx::mma_m16n8k16<T>(d, second16, v[j].z, v[j].w);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[f][j][e] = fmaf(d[e], factor[e / 2], sum[f][j][e]);
        if (has_offset) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[f][j][e] = fmaf(of_x[j][e % 2], offset_by[e / 2], sum[f][j][e]);
        }
      }
    }
  };
  /// f(std::integral_constant<int, block>{}) of the blocks of a chunk
  const auto each_block = [](auto&& f) {
    f(std::integral_constant<int, 0>{}), f(std::integral_constant<int, 1>{}), f(std::integral_constant<int, 2>{}),
        f(std::integral_constant<int, 3>{}), f(std::integral_constant<int, 4>{}), f(std::integral_constant<int, 5>{}),
        f(std::integral_constant<int, 6>{}), f(std::integral_constant<int, 7>{});
  };

#pragma unroll
  for (int s = 0; s < kStages; ++s) issue(s, warp + s * warps);
  if constexpr (!kGguf) load_groups(warp);
#pragma unroll 1
  for (int chunk = warp, s = 0; chunk < num_chunks; chunk += warps) {
    const int k = chunk * kQuantizedChunk;
    const int left = num_blocks - chunk * kQuantizedChunkBlocks;
    constexpr int kOfX = kTokens8 == 1 ? 4 : 1;  // blocks whose x is under way
    uint4 v[kOfX][kTokens8];
    const auto load_x_of = [&](int place, int b) {
#pragma unroll
      for (int j = 0; j < kTokens8; ++j) v[place][j] = load_x(j, k + 32 * b);
    };
    if (left >= kQuantizedChunkBlocks) {
#pragma unroll
      for (int b = 0; b < kOfX; ++b) load_x_of(b, b);
    }
    GroupNumbers<kFrags> scale, zero;
    if constexpr (!kGguf) {
      scale.take(scales, p.scales.dtype);
      if (p.zeros) zero.take(zeros, p.zeros.dtype);
      load_groups(chunk + warps);
    }
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    if (left >= kQuantizedChunkBlocks) {
      each_block([&](auto block) {
        constexpr int kBlock = decltype(block)::value;
        multiply_block(block, 0, ring + s * kStageBytes, scale, zero, v[kBlock % kOfX]);
        if constexpr (kBlock + kOfX < kQuantizedChunkBlocks) load_x_of(kBlock % kOfX, kBlock + kOfX);
      });
    } else {
#pragma unroll 1
      for (int b = 0; b < left; b += 2) {
        load_x_of(0, b);
        multiply_block(std::integral_constant<int, 0>{}, b / 2, ring + s * kStageBytes, scale, zero, v[0]);
        if (b + 1 == left) break;
        load_x_of(0, b + 1);
        multiply_block(std::integral_constant<int, 1>{}, b / 2, ring + s * kStageBytes, scale, zero, v[0]);
      }
    }
    __syncwarp();
    issue(s, chunk + kStages * warps);
    s = s + 1 == kStages ? 0 : s + 1;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  constexpr int kPitch = kFeatures + 4;
  float* const partial = reinterpret_cast<float*>(shared);  // [warps][kRows][kPitch]
  static_assert(kRows * kPitch * sizeof(float) <= kStages * kStageBytes);
#pragma unroll
  for (int f = 0; f < kFrags; ++f)
#pragma unroll
    for (int j = 0; j < kTokens8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        partial[(warp * kRows + 8 * j + 2 * quarter + e % 2) * kPitch + 16 * f + 8 * (e / 2) + group] = sum[f][j][e];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows * kFeatures; i += static_cast<int>(blockDim.x)) {
    const int row = i / kFeatures, feature = i % kFeatures;
    if (first + feature >= p.features) continue;
    float total = bias_of(p.epilogue.bias, first + feature, p.features);
    for (int from = 0; from < warps; ++from) total += partial[(from * kRows + row) * kPitch + feature];
    finish_element<T>(p.epilogue, first_row + row, first + feature, total);
  }
}

template <DType kDtype>
void quantized_few_rows(const QuantizedLinearParams& p, const Plan& plan, void*, Stream stream) {
  using T = Element<kDtype>;
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  QuantizedFewRowsProblem problem;
  problem.x = p.x;
  problem.weight = p.weight;
  problem.scales = p.scales;
  problem.zeros = p.zeros;
  problem.stride_x = p.stride_x_row;
  problem.stride_weight = p.stride_weight_row;
  problem.rows = static_cast<int>(p.rows);
  problem.features = static_cast<int>(p.out_features);
  problem.k = static_cast<int>(p.in_features);
  problem.stride_groups = static_cast<int>(p.stride_scales_row);
  if (p.group == p.in_features) {
    problem.group_shift = 31;
  } else {
    while (quantized::kBlock << problem.group_shift < p.group) ++problem.group_shift;
  }
  problem.epilogue = plain_epilogue<T>(p.out, p.stride_out_row);
  problem.epilogue.bias = p.bias;
  problem.epilogue.activation = p.activation;

  const auto& cut = plan.as<QuantizedFewRowsPlan>();
  const auto run = [&](auto format, auto tokens8) {
    constexpr WeightFormat kFormat = decltype(format)::value;
    constexpr int kTokens8 = decltype(tokens8)::value;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, 16 * quantized_frags(kTokens8))),
                    static_cast<unsigned>(ceil_div(p.rows, 8 * kTokens8)));
    LaunchShape shape{grid, 32 * static_cast<unsigned>(cut.warps),
                      static_cast<std::size_t>(cut.warps) * quantized_warp_bytes(kFormat, kTokens8), native(stream)};
    shape.early = true;
    launch("quantized_linear: few rows", quantized_few_rows_kernel<T, kFormat, kTokens8>, shape, problem);
  };
  const auto with_tokens = [&](auto format) {
    if (cut.tokens8 == 1) return run(format, std::integral_constant<int, 1>{});
    if (cut.tokens8 == 2) return run(format, std::integral_constant<int, 2>{});
    run(format, std::integral_constant<int, 4>{});
  };
  switch (p.format) {
    case WeightFormat::kInt4: return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kInt4>{});
    case WeightFormat::kInt8: return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kInt8>{});
    case WeightFormat::kQ4_0: return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kQ4_0>{});
    case WeightFormat::kQ4_1: return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kQ4_1>{});
    case WeightFormat::kQ8_0: return with_tokens(std::integral_constant<WeightFormat, WeightFormat::kQ8_0>{});
  }
}

}  // namespace flashkernel::cuda::sm80
