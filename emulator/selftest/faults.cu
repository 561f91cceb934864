// Planted mistakes: each must be caught, and its corrected twin must pass in every order of threads.
#include <cmath>

#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "selftest/selftest.hpp"

namespace selftest {
namespace {

namespace ptx = flashkernel::cuda::ptx;

template <bool kBarrier>
__global__ void neighbour_kernel(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = values[(threadIdx.x + 32) % 64];
}

TEST(Emulator, AMissingBarrierShows) {
  int wrong = 0;
  for (const char* name : kOrders) {
    const Order order(name);
    DeviceVector<int> out(64);
    ASSERT_EQ(launch(1, 64, 0, neighbour_kernel<true>, out.data()), "");
    for (int t = 0; t < 64; ++t) EXPECT_EQ(out.values()[static_cast<std::size_t>(t)], (t + 32) % 64);
    ASSERT_EQ(launch(1, 64, 0, neighbour_kernel<false>, out.data()), "");
    for (int t = 0; t < 64; ++t) wrong += out.values()[static_cast<std::size_t>(t)] != (t + 32) % 64;
  }
  EXPECT_GE(wrong, 4 * 32);  // in every order one warp reads before the other has written
}

__global__ void next_lane_kernel(int* out, bool sync) {
  __shared__ int values[32];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (sync) __syncwarp();
  out[threadIdx.x] = values[(threadIdx.x + 1) % 32];
}

TEST(Emulator, AMissingSyncwarpShows) {
  DeviceVector<int> out(32);
  ASSERT_EQ(launch(1, 32, 0, next_lane_kernel, out.data(), true), "");
  for (int t = 0; t < 32; ++t) EXPECT_EQ(out.values()[static_cast<std::size_t>(t)], (t + 1) % 32);
  ASSERT_EQ(launch(1, 32, 0, next_lane_kernel, out.data(), false), "");
  EXPECT_EQ(out.values()[0], -1);  // poison
}

// The first block stores, the others add to that.
template <bool kWait>
__global__ void first_stores_kernel(float* sum, int* counter) {
  if (blockIdx.x == 0) {
    __syncthreads();  // others run meanwhile
    sum[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(counter, 1);
    return;
  }
  while (kWait && ptx::load_acquire(counter) < 1) {
  }
  ptx::reduce_add(sum + threadIdx.x, 1.0f);
}

TEST(Emulator, ABlockThatDoesNotWaitForAnotherShowsWhereTheyRunSideBySide) {
  for (const int blocks : {1, 3, 8, 100}) {
    const Resident resident(blocks);
    int wrong = 0;
    for (const char* name : kOrders) {
      const Order order(name);
      const DeviceVector<float> sum(64);
      const DeviceVector<int> counters({0, 0});
      ASSERT_EQ(launch(8, 64, 0, first_stores_kernel<true>, sum.data(), counters.data()), "");
      for (const float x : sum.values()) EXPECT_EQ(x, 8.0f);
      ASSERT_EQ(launch(8, 64, 0, first_stores_kernel<false>, sum.data(), counters.data() + 1), "");
      for (const float x : sum.values()) wrong += x != 8.0f;
    }
    EXPECT_EQ(wrong > 0, blocks > 1);
  }
}

template <bool kCommit, bool kWait>
__global__ void copy_kernel(const float* in, float* out) {
  __shared__ __align__(16) float tile[128];
  ptx::cp_async_16(ptx::shared_address(tile + 4 * threadIdx.x), in + 4 * threadIdx.x, 16);
  if (kCommit) ptx::cp_async_commit();
  if (kWait) ptx::cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[32 * i + threadIdx.x] = tile[32 * i + threadIdx.x];
}

TEST(Emulator, ACopyThatNobodyWaitedForIsNotThere) {
  const DeviceVector<float> in(std::vector<float>(128, 2.0f)), out(128);
  const float* const from = in.data();
  ASSERT_EQ(launch(1, 32, 0, copy_kernel<true, true>, from, out.data()), "");
  for (const float x : out.values()) EXPECT_EQ(x, 2.0f);
  ASSERT_EQ(launch(1, 32, 0, copy_kernel<true, false>, from, out.data()), "");
  for (const float x : out.values()) EXPECT_TRUE(std::isnan(x));
  ASSERT_EQ(launch(1, 32, 0, copy_kernel<false, true>, from, out.data()), "");
  for (const float x : out.values()) EXPECT_TRUE(std::isnan(x)) << "waited for what was never committed";
}

__global__ void two_barriers_kernel() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

TEST(Emulator, ADivergentBarrierIsRefused) {
  for (const char* name : kOrders) {
    const Order order(name);
    expect_mentions(launch(1, 64, 0, two_barriers_kernel), "divergent barrier");
  }
}

__global__ void half_leave_kernel() {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

TEST(Emulator, ABarrierThatSomeNeverReachIsADeadlock) {
  const std::string text = launch(3, 64, 0, half_leave_kernel);
  expect_mentions(text, "deadlock in block (0, 0, 0)");
  expect_mentions(text, "32 of 64 threads wait at __syncthreads in");
  expect_mentions(text, "faults.cu:");
  expect_mentions(text, "32 of 64 threads left the kernel (threads 32-63)");
}

__global__ void divergent_warp_kernel(int* out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  else
    out[threadIdx.x] = __any_sync(0xffffffffu, 1);
}

TEST(Emulator, DivergentCollectivesAreRefused) {
  const DeviceVector<int> out(32);
  expect_mentions(launch(1, 32, 0, divergent_warp_kernel, out.data()), "divergent warp");
}

__global__ void foreign_lane_kernel(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);
}

TEST(Emulator, AShuffleFromALaneThatDoesNotTakePartIsRefused) {
  const DeviceVector<int> out(32);
  expect_mentions(launch(1, 32, 0, foreign_lane_kernel, out.data()), "does not take part");
}

__global__ void write_global_kernel(float* out, long long index) { out[index] = 1.0f; }
__global__ void write_shared_kernel(int index) {
  extern __shared__ __align__(16) unsigned char bytes[];
  reinterpret_cast<float*>(bytes)[index] = 1.0f;
}

// AddressSanitizer ends the program; without it the access ends the launch.
TEST(Emulator, AccessesOutOfBoundsAreCaught) {
  const DeviceVector<float> out(1024);
#ifdef __SANITIZE_ADDRESS__
  EXPECT_DEATH(launch(1, 1, 0, write_global_kernel, out.data(), 1024LL), "use-after-poison|AddressSanitizer");
  EXPECT_DEATH(launch(1, 1, 4096, write_shared_kernel, 1024), "use-after-poison|AddressSanitizer");
#else
  expect_mentions(launch(1, 1, 0, write_global_kernel, out.data(), 1024LL),
                  "4096 bytes after the begin of an allocation of 4096 bytes");
  expect_mentions(launch(1, 1, 4096, write_shared_kernel, 1024 + 4), "of 4096 bytes of dynamic shared memory");
#endif
  EXPECT_EQ(launch(1, 1, 0, write_global_kernel, out.data(), 1023LL), "");
  EXPECT_EQ(launch(1, 1, 4096, write_shared_kernel, 1023), "");
}

__global__ void read_fresh_kernel(float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ float fixed;
  out[0] = *reinterpret_cast<float*>(bytes);
  out[1] = fixed;
  fixed = *reinterpret_cast<float*>(bytes) = 1.0f;
}

TEST(Emulator, MemoryIsPoisonUntilWritten) {
  const DeviceVector<float> out(3);
  for (int again = 0; again < 2; ++again) {  // another block's values do not stay
    ASSERT_EQ(launch(2, 1, 64, read_fresh_kernel, out.data()), "");
    for (const float x : out.values()) EXPECT_TRUE(std::isnan(x));
  }
}

TEST(Emulator, LaunchesThatTheDeviceRefuses) {
  expect_mentions(launch(1, 1025, 0, half_leave_kernel), "cudaErrorInvalidConfiguration");
  expect_mentions(launch(dim3(1, 65536), 1, 0, half_leave_kernel), "cudaErrorInvalidConfiguration");
  EXPECT_EQ(cudaFuncSetAttribute(half_leave_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 * 1024),
            cudaErrorInvalidValue);
  cudaLaunchConfig_t config{};
  config.dynamicSmemBytes = 49 * 1024;  // not asked for
  EXPECT_EQ(cudaLaunchKernelEx(&config, half_leave_kernel), cudaErrorInvalidValue);
  cudaGetLastError();
}

__global__ void mbarrier_kernel(int arrivals, bool initialise) {
  __shared__ __align__(8) unsigned long long barrier;
  const std::uint32_t address = ptx::shared_address(&barrier);
  if (threadIdx.x == 0 && initialise) ptx::mbarrier_init(address, 64);
  __syncthreads();
  for (unsigned phase = 0; phase < 5; ++phase) {
    if (static_cast<int>(threadIdx.x) < arrivals) ptx::mbarrier_arrive(address);
    ptx::mbarrier_wait(address, phase % 2);
  }
}

TEST(Emulator, MbarriersCountTheirArrivals) {
  for (const char* name : kOrders) {
    const Order order(name);
    EXPECT_EQ(launch(1, 64, 0, mbarrier_kernel, 64, true), "");
    expect_mentions(launch(1, 64, 0, mbarrier_kernel, 63, true), "64 of 64 threads wait at mbarrier.try_wait");
    expect_mentions(launch(1, 64, 0, mbarrier_kernel, 64, false), "not initialised");
  }
}

__global__ void announce_kernel(std::uint32_t bytes, bool wait) {
  __shared__ __align__(8) unsigned long long barrier;
  __shared__ float place;
  const std::uint32_t own = ptx::cluster_rank(), address = ptx::map_shared(ptx::shared_address(&barrier), own);
  if (threadIdx.x == 0) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
  __syncthreads();
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(ptx::shared_address(&barrier), bytes);
  if (threadIdx.x == 1) ptx::store_async(ptx::map_shared(ptx::shared_address(&place), own), 1.0f, address);
  if (wait) ptx::mbarrier_wait(ptx::shared_address(&barrier), 0);
}

TEST(Emulator, BytesThatWereAnnouncedMustCome) {
  for (const char* name : kOrders) {
    const Order order(name);
    EXPECT_EQ(launch_in_clusters(2, 2, 32, 0, announce_kernel, 4u, true), "");
    expect_mentions(launch_in_clusters(2, 2, 32, 0, announce_kernel, 4u, false), "announced and have not come");
    expect_mentions(launch_in_clusters(2, 2, 32, 0, announce_kernel, 8u, false), "announced and have not come");
    expect_mentions(launch_in_clusters(2, 2, 32, 0, announce_kernel, 0u, false), "copies are under way");
  }
}

// Two warps hand turns to each other; with `both_wait` nobody gives the first turn.
__global__ void turns_kernel(int* out, bool both_wait) {
  __shared__ int turns[8];
  const unsigned warp = threadIdx.x / 32;
  if (warp == 1 && !both_wait) ptx::barrier_arrive(1, 64);
  for (int round = 0; round < 4; ++round) {
    ptx::barrier_sync(1 + warp, 64);
    if (threadIdx.x % 32 == 0) turns[2 * round + static_cast<int>(warp)] = static_cast<int>(warp);
    if (round < 3 || warp == 0) ptx::barrier_arrive(2 - warp, 64);
  }
  __syncthreads();
  if (threadIdx.x < 8) out[threadIdx.x] = turns[threadIdx.x];
}

TEST(Emulator, NamedBarriersPassTurns) {
  for (const char* name : kOrders) {
    const Order order(name);
    const DeviceVector<int> out(8);
    ASSERT_EQ(launch(1, 64, 0, turns_kernel, out.data(), false), "");
    for (int i = 0; i < 8; ++i) EXPECT_EQ(out.values()[static_cast<std::size_t>(i)], i % 2);
    expect_mentions(launch(1, 64, 0, turns_kernel, out.data(), true), "wait at a named barrier");
  }
}

}  // namespace
}  // namespace selftest
