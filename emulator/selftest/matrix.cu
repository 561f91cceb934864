// The matrix instructions and the copy engine against plain loops. Fragments are filled by the layouts that
// src/cuda/ptx documents, written out here a second time.
#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "selftest/selftest.hpp"

namespace selftest {
namespace {

namespace ptx = flashkernel::cuda::ptx;

// Small integers: every product and sum is exact in every dtype.
float value(int seed, int i) { return static_cast<float>((i * 7919 + seed * 104729) % 1009 % 17 - 8); }

template <class T>
std::vector<T> values(int seed, int count) {
  std::vector<T> all;
  for (int i = 0; i < count; ++i) all.push_back(T(value(seed, i)));
  return all;
}

// c[m, n] = sum over k of a[m, k] b[n, k]
template <class T>
std::vector<float> product(const std::vector<T>& a, const std::vector<T>& b, int rows, int columns, int depth) {
  std::vector<float> c(static_cast<std::size_t>(rows * columns), 0.0f);
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n)
      for (int k = 0; k < depth; ++k)
        c[static_cast<std::size_t>(m * columns + n)] += static_cast<float>(a[static_cast<std::size_t>(m * depth + k)]) *
                                                        static_cast<float>(b[static_cast<std::size_t>(n * depth + k)]);
  return c;
}

template <class T>
std::uint32_t two(const T* at) {
  std::uint32_t bits;
  std::memcpy(&bits, at, 4);
  return bits;
}

template <class T, int kDepth>
__global__ void mma_kernel(const T* a, const T* b, float* c) {
  const int lane = static_cast<int>(threadIdx.x), row = lane / 4, pair = 2 * (lane % 4);
  float d[4] = {};
  if constexpr (kDepth == 16) {
    const std::uint32_t fragment[] = {two(a + row * 16 + pair), two(a + (row + 8) * 16 + pair),
                                      two(a + row * 16 + pair + 8), two(a + (row + 8) * 16 + pair + 8)};
    ptx::mma_m16n8k16<T>(d, fragment, two(b + row * 16 + pair), two(b + row * 16 + pair + 8));
  } else if constexpr (sizeof(T) == 2) {
    ptx::mma_m16n8k8(d, two(a + row * 8 + pair), two(a + (row + 8) * 8 + pair), two(b + row * 8 + pair));
  } else {
    const auto bits = [](const T* at) { return __float_as_uint(*at); };
    const int column = lane % 4;
    const std::uint32_t fragment[] = {bits(a + row * 8 + column), bits(a + (row + 8) * 8 + column),
                                      bits(a + row * 8 + column + 4), bits(a + (row + 8) * 8 + column + 4)};
    ptx::mma_m16n8k8_tf32(d, fragment, bits(b + row * 8 + column), bits(b + row * 8 + column + 4));
  }
  for (int e = 0; e < 4; ++e) c[(row + 8 * (e / 2)) * 8 + pair + e % 2] = d[e];
}

template <class T, int kDepth>
void test_mma() {
  const auto a = values<T>(1, 16 * kDepth), b = values<T>(2, 8 * kDepth);
  const DeviceVector<T> on_a(a), on_b(b);
  const DeviceVector<float> c(16 * 8);
  ASSERT_EQ(launch(1, 32, 0, mma_kernel<T, kDepth>, static_cast<const T*>(on_a.data()),
                   static_cast<const T*>(on_b.data()), c.data()),
            "");
  EXPECT_EQ(c.values(), product(a, b, 16, 8, kDepth));
}

TEST(EmulatorMatrix, Mma) {
  test_mma<__half, 16>();
  test_mma<__nv_bfloat16, 16>();
  test_mma<__half, 8>();
  test_mma<float, 8>();
}

// Four 8 x 8 matrices through ldmatrix and back through stmatrix.
template <bool kTransposed>
__global__ void matrices_kernel(const std::uint16_t* in, std::uint16_t* registers, std::uint16_t* out) {
  __shared__ __align__(16) std::uint16_t tile[4][8][8], back[4][8][8];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) (&tile[0][0][0])[i] = in[i];
  __syncwarp();
  std::uint32_t r[4];
  const std::uint32_t from = ptx::shared_address(tile[lane / 8][lane % 8]),
                      to = ptx::shared_address(back[lane / 8][lane % 8]);
  if (kTransposed) {
    ptx::ldmatrix_x4_trans(r, from);
    ptx::stmatrix_x4_trans(to, r[0], r[1], r[2], r[3]);
  } else {
    ptx::ldmatrix_x4(r, from);
    ptx::stmatrix_x4(to, r[0], r[1], r[2], r[3]);
  }
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int e = 0; e < 2; ++e) registers[matrix * 64 + lane * 2 + e] = static_cast<std::uint16_t>(r[matrix] >> 16 * e);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) out[i] = (&back[0][0][0])[i];
}

TEST(EmulatorMatrix, LdmatrixAndStmatrix) {
  std::vector<std::uint16_t> in(256);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint16_t>(i);
  const DeviceVector<std::uint16_t> on(in), registers(256), out(256);
  const auto* data = static_cast<const std::uint16_t*>(on.data());
  ASSERT_EQ(launch(1, 32, 0, matrices_kernel<false>, data, registers.data(), out.data()), "");
  EXPECT_EQ(out.values(), in);
  EXPECT_EQ(registers.values(), in);  // lane l holds row l / 4, columns 2 (l % 4) + {0, 1}: row-major order
  ASSERT_EQ(launch(1, 32, 0, matrices_kernel<true>, data, registers.data(), out.data()), "");
  EXPECT_EQ(out.values(), in);
  for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(registers.values()[i], i / 64 * 64 + i % 8 * 8 + i / 8 % 8);
}

// A tensor map of a row-major matrix.
template <class T>
CUtensorMap map_of(const T* data, int rows, int columns, int box_rows, int box_columns, int swizzle_bytes) {
  CUtensorMap map;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns) * sizeof(T)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  EXPECT_EQ(cuTensorMapEncodeTiled(&map,
                                   sizeof(T) == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                   2, const_cast<T*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                   : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                   : swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                         : CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            CUDA_SUCCESS);
  return map;
}

// c = a b for a tile of 64 x kN x 64. An operand that is "transposed" lies in memory as [k, m] or [k, n].
template <class T, int kN, bool kTransA, bool kTransB, bool kFromRegisters>
__global__ void wgmma_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                             const T* a, float* c, bool wait_for_data, bool touch) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barrier;
  const std::uint32_t full = ptx::shared_address(&barrier);
  const std::uint32_t tile_a = ptx::shared_address(tiles), tile_b = tile_a + 64 * 128;
  if (threadIdx.x == 0) ptx::mbarrier_init(full, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full, (64 + kN) * 128);
    ptx::tma_load(tile_a, &map_a, full, ptx::l2_evict_first(), 0, 0);
    for (int n = 0; n < (kTransB ? kN : 64); n += 64)  // lines of 64 elements
      ptx::tma_load(tile_b + n / 64 * 8192, &map_b, full, ptx::l2_evict_last(), n, 0);
  }
  if (wait_for_data) ptx::mbarrier_wait(full, 0);
  float d[kN / 2];
  for (float& x : d) x = 100.0f;  // the first product overwrites
  ptx::wgmma_fence();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int k = 0; k < 64; k += 16) {
    const std::uint64_t of_b = kTransB ? ptx::matrix_descriptor(tile_b + k * 128, 8192, 1024)
                                       : ptx::matrix_descriptor(tile_b + k * 2, 0, 1024);
    if constexpr (kFromRegisters) {
      std::uint32_t r[4];
      for (int i = 0; i < 4; ++i)
        r[i] = two(a + (16 * warp + lane / 4 + 8 * (i % 2)) * 64 + k + 8 * (i / 2) + 2 * (lane % 4));
      ptx::wgmma_rs<T, kTransB>(d, r, of_b, k > 0);
    } else {
      const std::uint64_t of_a = kTransA ? ptx::matrix_descriptor(tile_a + k * 128, 8192, 1024)
                                         : ptx::matrix_descriptor(tile_a + k * 2, 0, 1024);
      ptx::wgmma_ss<T, kTransA, kTransB>(d, of_a, of_b, k > 0);
    }
  }
  ptx::wgmma_commit();
  if (touch) {
    ptx::wgmma_fence();
    ptx::wgmma_ss<T>(d, ptx::matrix_descriptor(tile_a, 0, 1024), ptx::matrix_descriptor(tile_b, 0, 1024), true);
  }
  ptx::wgmma_wait<0>();
  for (int column = 0; column < kN / 8; ++column)
    for (int i = 0; i < 4; ++i)
      c[(16 * warp + lane / 4 + 8 * (i / 2)) * kN + 8 * column + 2 * (lane % 4) + i % 2] = d[4 * column + i];
}

template <class T>
std::vector<T> transposed(const std::vector<T>& x, int rows, int columns) {
  std::vector<T> y(x.size());
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j)
      y[static_cast<std::size_t>(j * rows + i)] = x[static_cast<std::size_t>(i * columns + j)];
  return y;
}

template <class T, int kN, bool kTransA, bool kTransB, bool kFromRegisters = false>
void test_wgmma() {
  const auto a = values<T>(3, 64 * 64), b = values<T>(4, kN * 64);  // [m, k], [n, k]
  const DeviceVector<T> on_a(kTransA ? transposed(a, 64, 64) : a), on_b(kTransB ? transposed(b, kN, 64) : b);
  const DeviceVector<float> c(64 * kN);
  const CUtensorMap map_a = map_of(on_a.data(), 64, 64, 64, 64, 128);
  const CUtensorMap map_b =
      kTransB ? map_of(on_b.data(), 64, kN, 64, 64, 128) : map_of(on_b.data(), kN, 64, kN, 64, 128);
  const auto kernel = wgmma_kernel<T, kN, kTransA, kTransB, kFromRegisters>;
  const std::size_t bytes = 64 * 128 + kN * 128;
  for (const char* name : kOrders) {
    const Order order(name);
    ASSERT_EQ(launch(1, 128, bytes, kernel, map_a, map_b, static_cast<const T*>(on_a.data()), c.data(), true, false),
              "");
    EXPECT_EQ(c.values(), product(a, b, 64, kN, 64));
  }
  const std::string text =
      launch(1, 128, bytes, kernel, map_a, map_b, static_cast<const T*>(on_a.data()), c.data(), false, false);
  expect_mentions(text, "announced and have not come");
  EXPECT_TRUE(std::isnan(c.values()[0])) << "the tile was there without a wait";
}

TEST(EmulatorMatrix, WgmmaOnTilesThatTmaBrings) {
  test_wgmma<__half, 64, false, false>();
  test_wgmma<__nv_bfloat16, 128, false, false>();
  test_wgmma<__half, 192, false, true>();
  test_wgmma<__nv_bfloat16, 256, true, true>();
  test_wgmma<__half, 24, true, false>();
  test_wgmma<__half, 128, false, true, true>();
  test_wgmma<__nv_bfloat16, 80, false, false, true>();
}

// Bytes of the 8-bit formats and what they stand for, written out here a second time.
struct Format8 {
  int exponent_bits, bias;
  float of(std::uint8_t bits) const {
    const int mantissa_bits = 7 - exponent_bits, exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double magnitude = exponent ? std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), exponent - bias)
                                      : std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return static_cast<float>(bits & 0x80 ? -magnitude : magnitude);
  }
};
template <class T>
constexpr Format8 kFormat8 = std::is_same_v<T, ptx::E4m3> ? Format8{4, 7} : Format8{5, 15};

// Both signs, exponents of 1/4 to 2 and some subnormals. Sums are made in the same order on both sides.
template <class T>
std::vector<std::uint8_t> bytes8(int seed, int count) {
  std::vector<std::uint8_t> all;
  const int bits = 7 - kFormat8<T>.exponent_bits;
  for (int i = 0; i < count; ++i) {
    const int draw = (i * 7919 + seed * 104729) % 1009;
    const int exponent = draw % 97 == 0 ? 0 : kFormat8<T>.bias - 2 + draw / 16 % 4;
    all.push_back(static_cast<std::uint8_t>((draw & 1) << 7 | exponent << bits | (draw >> 1 & ((1 << bits) - 1))));
  }
  return all;
}

// c = a b for 64 x kN x 128 of 8-bit numbers, one line of 128 bytes each row.
template <class A, class B, int kN, bool kFromRegisters>
__global__ void wgmma_fp8_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                                 const std::uint8_t* a, float* c) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barrier;
  const std::uint32_t full = ptx::shared_address(&barrier);
  const std::uint32_t tile_a = ptx::shared_address(tiles), tile_b = tile_a + 64 * 128;
  if (threadIdx.x == 0) ptx::mbarrier_init(full, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full, (64 + kN) * 128);
    ptx::tma_load(tile_a, &map_a, full, ptx::l2_evict_first(), 0, 0);
    ptx::tma_load(tile_b, &map_b, full, ptx::l2_evict_last(), 0, 0);
  }
  ptx::mbarrier_wait(full, 0);
  float d[kN / 2];
  ptx::wgmma_fence();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int k = 0; k < 128; k += 32) {
    const std::uint64_t of_b = ptx::matrix_descriptor(tile_b + k, 0, 1024);
    if constexpr (kFromRegisters) {
      std::uint32_t r[4];
      for (int i = 0; i < 4; ++i)
        std::memcpy(&r[i], a + (16 * warp + lane / 4 + 8 * (i % 2)) * 128 + k + 16 * (i / 2) + 4 * (lane % 4), 4);
      ptx::wgmma_fp8_rs<A, B>(d, r, of_b, k > 0);
    } else {
      ptx::wgmma_fp8_ss<A, B>(d, ptx::matrix_descriptor(tile_a + k, 0, 1024), of_b, k > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int column = 0; column < kN / 8; ++column)
    for (int i = 0; i < 4; ++i)
      c[(16 * warp + lane / 4 + 8 * (i / 2)) * kN + 8 * column + 2 * (lane % 4) + i % 2] = d[4 * column + i];
}

template <class A, class B, int kN, bool kFromRegisters>
void test_wgmma_fp8() {
  const auto a = bytes8<A>(3, 64 * 128), b = bytes8<B>(4, kN * 128);
  std::vector<float> wide_a, wide_b;
  for (const std::uint8_t bits : a) wide_a.push_back(kFormat8<A>.of(bits));
  for (const std::uint8_t bits : b) wide_b.push_back(kFormat8<B>.of(bits));
  const DeviceVector<std::uint8_t> on_a(a), on_b(b);
  const DeviceVector<float> c(64 * kN);
  const CUtensorMap map_a = map_of(on_a.data(), 64, 128, 64, 128, 128);
  const CUtensorMap map_b = map_of(on_b.data(), kN, 128, kN, 128, 128);
  const auto kernel = wgmma_fp8_kernel<A, B, kN, kFromRegisters>;
  for (const char* name : kOrders) {
    const Order order(name);
    ASSERT_EQ(
        launch(1, 128, (64 + kN) * 128, kernel, map_a, map_b, static_cast<const std::uint8_t*>(on_a.data()), c.data()),
        "");
    EXPECT_EQ(c.values(), product(wide_a, wide_b, 64, kN, 128));
  }
}

TEST(EmulatorMatrix, WgmmaOfEightBits) {
  test_wgmma_fp8<ptx::E4m3, ptx::E4m3, 128, false>();
  test_wgmma_fp8<ptx::E4m3, ptx::E4m3, 24, true>();
  test_wgmma_fp8<ptx::E5m2, ptx::E4m3, 64, true>();
  test_wgmma_fp8<ptx::E4m3, ptx::E5m2, 256, false>();
}

__global__ void early_write_kernel(bool write) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  for (int i = static_cast<int>(threadIdx.x); i < 128 * 64; i += 128) reinterpret_cast<__half*>(tiles)[i] = 1.0f;
  __syncthreads();
  const std::uint32_t tile = ptx::shared_address(tiles);
  const std::uint64_t a = ptx::matrix_descriptor(tile, 0, 1024), b = ptx::matrix_descriptor(tile + 8192, 0, 1024);
  float d[32] = {};
  ptx::wgmma_fence();
  ptx::wgmma_ss<__half>(d, a, b, true);
  ptx::wgmma_commit();
  if (write) d[7] *= 0.5f, d[7] += 1.0f;
  ptx::wgmma_wait<0>();
}

TEST(EmulatorMatrix, AccumulatorsBelongToWgmmaUntilTheWait) {
  EXPECT_EQ(launch(1, 128, 16384, early_write_kernel, false), "");
  expect_mentions(launch(1, 128, 16384, early_write_kernel, true), "accumulators were written");
}

// Two tiles of ones and twos go through one slot; warp 0's wait alone says that it may be filled again.
__global__ void slot_kernel(float* c, bool wait) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) unsigned long long barriers[2];
  const std::uint32_t full = ptx::shared_address(&barriers[0]), empty = ptx::shared_address(&barriers[1]);
  if (threadIdx.x == 0) ptx::mbarrier_init(full, 32), ptx::mbarrier_init(empty, 1);
  __syncthreads();
  if (threadIdx.x >= 128) {
    for (unsigned round = 0; round < 2; ++round) {
      if (round > 0) ptx::mbarrier_wait(empty, 0);
      for (int i = static_cast<int>(threadIdx.x) - 128; i < 128 * 64; i += 32)
        reinterpret_cast<__half*>(tiles)[i] = round + 1.0f;
      ptx::mbarrier_arrive(full);
    }
    return;
  }
  const std::uint32_t tile = ptx::shared_address(tiles);
  const std::uint64_t a = ptx::matrix_descriptor(tile, 0, 1024), b = ptx::matrix_descriptor(tile + 8192, 0, 1024);
  float d[32];
  for (unsigned round = 0; round < 2; ++round) {
    ptx::mbarrier_wait(full, round);
    ptx::wgmma_fence();
    ptx::wgmma_ss<__half>(d, a, b, round > 0);
    ptx::wgmma_commit();
    if (wait || round > 0) ptx::wgmma_wait<0>();
    if (threadIdx.x == 0 && round == 0) ptx::mbarrier_arrive(empty);
  }
  if (threadIdx.x % 32 == 0) c[threadIdx.x / 32] = d[0];
}

TEST(EmulatorMatrix, ABatchOfWgmmaIsTheWarpgroups) {
  for (const char* name : kOrders) {
    const Order order(name);
    const DeviceVector<float> c(4);
    ASSERT_EQ(launch(1, 160, 16384, slot_kernel, c.data(), true), "");
    EXPECT_EQ(c.values(), std::vector<float>(4, 16 * (1 + 4)));
    ASSERT_EQ(launch(1, 160, 16384, slot_kernel, c.data(), false), "");
    EXPECT_NE(c.values(), std::vector<float>(4, 16 * (1 + 4))) << "the slot was filled again before it was read";
  }
}

__global__ void three_of_four_kernel(int warps) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  const std::uint32_t tile = ptx::shared_address(tiles);
  float d[32];
  if (static_cast<int>(threadIdx.x) / 32 >= warps) return;
  ptx::wgmma_fence();
  ptx::wgmma_ss<__half>(d, ptx::matrix_descriptor(tile, 0, 1024), ptx::matrix_descriptor(tile + 8192, 0, 1024), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

TEST(EmulatorMatrix, WgmmaNeedsFourWarps) {
  EXPECT_EQ(launch(1, 128, 16384, three_of_four_kernel, 4), "");
  expect_mentions(launch(1, 128, 16384, three_of_four_kernel, 3), "for the warpgroup's other warps");
  expect_mentions(launch(1, 96, 16384, three_of_four_kernel, 3), "no four warps");
}

// A box that hangs out of a 10 x 24 matrix on both sides, moved into another matrix of that shape.
__global__ void boxes_kernel(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out,
                             float* seen, int column, int row, bool wait) {
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ __align__(8) unsigned long long barrier;
  const std::uint32_t full = ptx::shared_address(&barrier), box = ptx::shared_address(tile);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_arrive_expect(full, 8 * 64);
    ptx::tma_load(box, &in, full, ptx::l2_evict_first(), column, row);
    ptx::mbarrier_wait(full, 0);
    for (int i = 0; i < 8 * 16; ++i) {  // 64-byte swizzle: chunk ^= line of 128 bytes, modulo 4
      const int chunk = i % 16 / 4 ^ i * 4 / 128 % 4;
      seen[i] = reinterpret_cast<const float*>(tile)[i / 16 * 16 + chunk * 4 + i % 4];
    }
    ptx::tma_store(&out, box, column, row);
    ptx::bulk_commit();
    if (wait) ptx::bulk_wait_read<0>();
  }
}

TEST(EmulatorMatrix, BoxesThatHangOut) {
  const auto in = values<float>(5, 10 * 24);
  for (const auto& [column, row] : {std::pair{-4, -3}, {16, 5}, {4, 1}, {-16, 0}}) {
    const DeviceVector<float> from(in), to(std::vector<float>(in.size(), 1000.0f)), seen(8 * 16);
    const CUtensorMap map_in = map_of(from.data(), 10, 24, 8, 16, 64), map_out = map_of(to.data(), 10, 24, 8, 16, 64);
    ASSERT_EQ(launch(1, 32, 8 * 64, boxes_kernel, map_in, map_out, seen.data(), column, row, true), "");
    std::vector<float> expected(in.size(), 1000.0f);
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 16; ++j) {
        const int r = row + i, c = column + j;
        const bool inside = r >= 0 && r < 10 && c >= 0 && c < 24;
        const auto at = static_cast<std::size_t>(inside ? r * 24 + c : 0);
        EXPECT_EQ(seen.values()[static_cast<std::size_t>(i * 16 + j)], inside ? in[at] : 0.0f);
        if (inside) expected[at] = in[at];
      }
    EXPECT_EQ(to.values(), expected);
    expect_mentions(launch(1, 32, 8 * 64, boxes_kernel, map_in, map_out, seen.data(), column, row, false),
                    "without waiting for its bulk stores");
  }
}

// Block 0 brings a tile for both blocks of a cluster; each answers at the other's barrier.
__global__ void cluster_kernel(const __grid_constant__ CUtensorMap in, float* out) {
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ __align__(8) unsigned long long barriers[2];
  const std::uint32_t full = ptx::shared_address(&barriers[0]), other = ptx::shared_address(&barriers[1]);
  const std::uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(other, 32);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(full, 8 * 64);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0 && rank == 0)
    ptx::tma_load_multicast(ptx::shared_address(tile), &in, full, 3, ptx::l2_evict_last(), 0, 0);
  ptx::mbarrier_wait(full, 0);
  for (int i = static_cast<int>(threadIdx.x); i < 128; i += 32)
    out[blockIdx.x * 128 + static_cast<unsigned>(i)] = reinterpret_cast<const float*>(tile)[i];
  ptx::mbarrier_arrive_cluster(ptx::map_shared(other, 1 - rank));
  ptx::mbarrier_wait(other, 0);
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

TEST(EmulatorMatrix, ClustersShareAMulticast) {
  const auto in = values<float>(6, 8 * 16);
  for (const int run : {0, 1, 2, 3, 4, 5, 6, 7}) {
    const Order order(kOrders[run % 4]);
    const Resident resident(1 + run / 4);  // clusters: the two one after the other, or side by side
    const DeviceVector<float> from(in), out(4 * 128);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = 4;
    config.blockDim = 32;
    config.dynamicSmemBytes = 8 * 64;
    config.attrs = &attribute;
    config.numAttrs = 1;
    ASSERT_EQ(cudaLaunchKernelEx(&config, cluster_kernel, map_of(from.data(), 8, 16, 8, 16, 0), out.data()),
              cudaSuccess)
        << cudaGetErrorString(cudaErrorLaunchFailure);
    for (std::size_t i = 0; i < 4 * 128; ++i) EXPECT_EQ(out.values()[i], in[i % 128]);
  }
}

// Each block stores a number in the next one of its cluster, which waits for the 4 bytes.
__global__ void async_store_kernel(float* out, unsigned blocks) {
  __shared__ __align__(16) float value;
  __shared__ __align__(8) unsigned long long barrier;
  const std::uint32_t bar = ptx::shared_address(&barrier), next = (ptx::cluster_rank() + 1) % blocks;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(bar, 4);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0)
    ptx::store_async(ptx::map_shared(ptx::shared_address(&value), next), static_cast<float>(blockIdx.x),
                     ptx::map_shared(bar, next));
  ptx::mbarrier_wait(bar, 0);
  if (threadIdx.x == 0) out[blockIdx.x] = value;
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// On an H200 st.async in a launch without clusters is an illegal instruction, though the block's own memory is asked
// for.
TEST(EmulatorMatrix, AnAsynchronousStoreNeedsACluster) {
  DeviceVector<float> out(2);
  ASSERT_EQ(launch_in_clusters(2, 2, 32, 0, async_store_kernel, out.data(), 2u), "");
  EXPECT_EQ(out.values(), (std::vector<float>{1.0f, 0.0f}));
  expect_mentions(launch(1, 32, 0, async_store_kernel, out.data(), 1u), "st.async");
  expect_mentions(launch_in_clusters(1, 1, 32, 0, async_store_kernel, out.data(), 1u), "st.async");
}

}  // namespace
}  // namespace selftest
