// Planted races: each must be named with both its lines, and its corrected twin must pass, in every order of threads.
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

/// `wrong` as the kernel's last argument must give a race whose text has `parts`, false must give nothing.
template <class... Params, class... Arguments>
void expect_race(unsigned threads, const std::vector<const char*>& parts, void (*kernel)(Params...),
                 Arguments... arguments) {
  for (const char* name : kOrders) {
    const Order order(name);
    EXPECT_EQ(launch(1, threads, 0, kernel, arguments..., false), "") << name;
    const std::string text = launch(1, threads, 0, kernel, arguments..., true);
    expect_mentions(text, "race on byte");
    for (const char* part : parts) expect_mentions(text, part);
  }
}

__global__ void neighbour_kernel(int* out, bool wrong) {
  __shared__ int values[64];
  values[threadIdx.x] = 1;
  if (!wrong) __syncthreads();
  out[threadIdx.x] = values[63 - threadIdx.x];
}

TEST(EmulatorRace, AMissingBarrier) {
  const DeviceVector<int> out(64);
  expect_race(
      64, {"writes it at emulator/racetest/races.cu:", "reads it at emulator/racetest/races.cu:", "no barrier orders"},
      neighbour_kernel, out.data());
}

// Even where each thread's value is not disturbed in this order of threads.
__global__ void reuse_kernel(int* out, bool wrong) {
  __shared__ int values[64];
  int sum = 0;
  for (int round = 0; round < 3; ++round) {
    values[threadIdx.x] = round;
    __syncthreads();
    sum += values[63 - threadIdx.x];
    if (!wrong) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

TEST(EmulatorRace, AWriteOverWhatOthersStillRead) {
  const DeviceVector<int> out(64);
  expect_race(64, {"writes it", "reads it"}, reuse_kernel, out.data());
}

__global__ void lanes_kernel(int* out, bool wrong) {
  __shared__ int values[32];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (wrong)
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 0, 0);  // meets, but orders no memory
  else
    __syncwarp();
  out[threadIdx.x] = values[31 - threadIdx.x];
}

TEST(EmulatorRace, AMissingSyncwarp) {
  const DeviceVector<int> out(32);
  expect_race(32, {"no barrier orders"}, lanes_kernel, out.data());
}

__global__ void matrix_kernel(std::uint32_t* out, bool wrong) {
  __shared__ __align__(16) std::uint16_t tile[256];
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) tile[i] = 0;
  if (!wrong) __syncwarp();
  std::uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::shared_address(tile + 8 * threadIdx.x));
  out[threadIdx.x] = r[0];
}

TEST(EmulatorRace, LdmatrixReads) {
  const DeviceVector<std::uint32_t> out(32);
  expect_race(32, {"reads it at emulator/racetest/races.cu:", "writes it at emulator/racetest/races.cu:"},
              matrix_kernel, out.data());
}

// Two threads write the halves of a word, all add to another; that is no race.
__global__ void halves_kernel(int* out, bool wrong) {
  __shared__ std::uint16_t halves[64];
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  halves[threadIdx.x] = 1;
  if (wrong && threadIdx.x == 40) sum = 7;
  atomicAdd(&sum, 1);
  __syncthreads();
  out[threadIdx.x] = sum + halves[0];
}

TEST(EmulatorRace, HalvesAndAtomicsAreNoRace) {
  const DeviceVector<int> out(64);
  expect_race(64, {"no barrier orders"}, halves_kernel, out.data());
}

// Both warps write zeros past an end and read them after their own barrier; or one of them writes something else.
__global__ void zeros_kernel(int* out, bool wrong) {
  __shared__ int values[32];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  values[lane] = wrong && warp == 1 && lane == 7 ? 1 : 0;
  __syncwarp();
  out[threadIdx.x] = values[31 - lane];
}

TEST(EmulatorRace, WritingTheSameIsNoRace) {
  const DeviceVector<int> out(64);
  expect_race(64, {"writes it at"}, zeros_kernel, out.data());
}

enum class Copy { kRight, kNotWaited, kNotCommitted, kNoBarrier, kOneWaitsForOthers, kSlotInUse };

__global__ void copy_kernel(const float* in, float* out, Copy mistake) {
  __shared__ __align__(16) float tile[256];
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    ptx::cp_async_16(ptx::shared_address(tile + 4 * threadIdx.x), in + 4 * threadIdx.x, 16);
    if (mistake != Copy::kNotCommitted) ptx::cp_async_commit();
    if (mistake == Copy::kOneWaitsForOthers) {
      if (threadIdx.x == 0) ptx::cp_async_wait<0>();
    } else if (mistake != Copy::kNotWaited) {
      ptx::cp_async_wait<0>();
    }
    if (mistake != Copy::kNoBarrier) __syncthreads();
    sum += tile[255 - threadIdx.x];
    if (mistake != Copy::kSlotInUse) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

TEST(EmulatorRace, AsynchronousCopies) {
  const DeviceVector<float> in(std::vector<float>(256, 2.0f)), out(64);
  for (const char* name : kOrders) {
    const Order order(name);
    const auto run = [&](Copy mistake) {
      return launch(1, 64, 0, copy_kernel, static_cast<const float*>(in.data()), out.data(), mistake);
    };
    ASSERT_EQ(run(Copy::kRight), "");
    for (const float x : out.values()) EXPECT_EQ(x, 4.0f);
    expect_mentions(run(Copy::kNotWaited), "copies to it (cp.async, under way) at");
    expect_mentions(run(Copy::kNotCommitted), "copies to it (cp.async, under way) at");
    expect_mentions(run(Copy::kOneWaitsForOthers), "copies to it (cp.async, under way) at");
    expect_mentions(run(Copy::kNoBarrier), "race on byte");
    expect_mentions(run(Copy::kSlotInUse), "no barrier orders the two");
  }
}

// One warp fetches through the bulk engine into a ring of two slots, the other reads: barriers `full` and `empty`.
__global__ void ring_kernel(const float* in, float* out, bool wrong) {
  __shared__ __align__(128) float slots[2][32];
  __shared__ __align__(8) unsigned long long full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty[s]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < 6; ++i) {
      const std::uint32_t s = i % 2, to = ptx::shared_address(&full[s]);
      if (i >= 2) ptx::mbarrier_wait(ptx::shared_address(&empty[s]), i / 2 % 2 ^ 1);
      ptx::mbarrier_arrive_expect(to, 128);
      ptx::bulk_load(ptx::shared_address(slots[s]), in + 32 * i, 128, to);
    }
  } else if (threadIdx.x >= 32) {
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 6; ++i) {
      const std::uint32_t s = i % 2, release = ptx::shared_address(&empty[s]);
      ptx::mbarrier_wait(ptx::shared_address(&full[s]), i / 2 % 2);
      if (wrong && lane == 0) ptx::mbarrier_arrive(release);
      out[32 * i + lane] = slots[s][lane];
      __syncwarp();
      if (!wrong && lane == 0) ptx::mbarrier_arrive(release);
    }
  }
}

TEST(EmulatorRace, ASlotThatIsReleasedTooEarly) {
  const DeviceVector<float> in(std::vector<float>(192, 1.0f)), out(192);
  expect_race(64, {"the engine"}, ring_kernel, static_cast<const float*>(in.data()), out.data());
}

__global__ void init_kernel(bool wrong) {
  __shared__ __align__(8) unsigned long long barrier;
  const std::uint32_t address = ptx::shared_address(&barrier);
  if (threadIdx.x == 0) ptx::mbarrier_init(address, 1);
  if (wrong && threadIdx.x == 0) ptx::mbarrier_arrive(address);
  if (!wrong) __syncthreads();
  if (!wrong && threadIdx.x == 0) ptx::mbarrier_arrive(address);
  if (threadIdx.x == 32) ptx::mbarrier_wait(address, 0);
}

TEST(EmulatorRace, AnMbarrierThatOthersDoNotKnowYet) {
  const Order order("forward");  // in the others it is not initialised when it is waited for
  EXPECT_EQ(launch(1, 64, 0, init_kernel, false), "");
  expect_mentions(launch(1, 64, 0, init_kernel, true), "race on byte");
}

// Named barriers: warp 0 writes and arrives, warp 1 waits and reads.
__global__ void named_kernel(int* out, bool wrong) {
  __shared__ int values[32];
  if (threadIdx.x < 32) {
    if (wrong) ptx::barrier_arrive(1, 64);
    values[threadIdx.x] = 1;
    if (!wrong) ptx::barrier_arrive(1, 64);
  } else {
    ptx::barrier_sync(1, 64);
    out[threadIdx.x] = values[63 - threadIdx.x];
  }
}

TEST(EmulatorRace, NamedBarriers) {
  const DeviceVector<int> out(64);
  expect_race(64, {"no barrier orders"}, named_kernel, out.data());
}

enum class Product { kRight, kNoFence, kFenceTooLate, kNoBarrier, kWrittenUnderWay };

// 64 x 16 by 16 x 8 by a warpgroup, operands as core matrices of 8 x 8 without a swizzle, written by all threads.
__global__ void product_kernel(float* out, Product mistake) {
  extern __shared__ __align__(128) std::uint16_t operands[];  // A: 64 x 16, then B: 8 x 16
  for (int i = static_cast<int>(threadIdx.x); i < 72 * 16; i += 128) operands[i] = 0;
  if (mistake != Product::kNoFence && mistake != Product::kFenceTooLate) ptx::fence_proxy_async_shared();
  if (mistake != Product::kNoBarrier) __syncthreads();
  const std::uint32_t a = ptx::shared_address(operands), b = a + 64 * 16 * 2;
  float d[4] = {};
  ptx::wgmma_fence();
  ptx::wgmma_ss<__half>(d, ptx::matrix_descriptor(a, 128, 256, ptx::Swizzle::kNone),
                        ptx::matrix_descriptor(b, 128, 256, ptx::Swizzle::kNone), false);
  ptx::wgmma_commit();
  if (mistake == Product::kFenceTooLate) ptx::fence_proxy_async_shared();
  if (mistake != Product::kWrittenUnderWay) ptx::wgmma_wait<0>();
  __syncthreads();
  operands[threadIdx.x] = 1;
  if (mistake == Product::kWrittenUnderWay) ptx::wgmma_wait<0>();
  out[threadIdx.x] = d[0];
}

TEST(EmulatorRace, MatrixInstructionsReadThroughTheirOwnProxy) {
  const DeviceVector<float> out(128);
  for (const char* name : kOrders) {
    const Order order(name);
    const auto run = [&](Product mistake) { return launch(1, 128, 72 * 16 * 2, product_kernel, out.data(), mistake); };
    EXPECT_EQ(run(Product::kRight), "");
    expect_mentions(run(Product::kNoFence), "without a fence.proxy.async between them");
    expect_mentions(run(Product::kFenceTooLate), "without a fence.proxy.async between them");
    expect_mentions(run(Product::kNoBarrier), "no barrier orders the two");
    expect_mentions(run(Product::kWrittenUnderWay), "the engine reads it at");
  }
}

enum class Store { kRight, kNoFence, kNotWaited };

__global__ void store_kernel(float* out, Store mistake) {
  __shared__ __align__(128) float tile[32];
  for (int round = 0; round < 2; ++round) {
    tile[threadIdx.x] = 1.0f + static_cast<float>(round);
    if (mistake != Store::kNoFence) ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x == 0) {
      ptx::bulk_store(out + 32 * round, ptx::shared_address(tile), 128);
      ptx::bulk_commit();
      if (mistake != Store::kNotWaited) ptx::bulk_wait_read<0>();
    }
    __syncwarp();
  }
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}

TEST(EmulatorRace, BulkStores) {
  const DeviceVector<float> out(64);
  for (const char* name : kOrders) {
    const Order order(name);
    EXPECT_EQ(launch(1, 32, 0, store_kernel, out.data(), Store::kRight), "");
    expect_mentions(launch(1, 32, 0, store_kernel, out.data(), Store::kNoFence), "without a fence.proxy.async");
    expect_mentions(launch(1, 32, 0, store_kernel, out.data(), Store::kNotWaited), "the engine reads it at");
  }
}

}  // namespace
}  // namespace selftest
