// memory_resource.hpp: the conformance suite over the host's resources, then what is particular to each.
#include "flashkernel/memory_resource.hpp"

#include <set>

#include "failing_resource.hpp"
#include "flashkernel/error.hpp"
#include "resource_conformance.hpp"

namespace flashkernel::testing {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::unique_ptr<ResourceUnderTest> make_host(std::size_t limit_bytes) {
  auto made = std::make_unique<ResourceUnderTest>();
  made->resource = std::make_shared<HostResource>(limit_bytes);
  return made;
}

std::unique_ptr<ResourceUnderTest> make_caching(std::size_t host_limit_bytes, std::size_t limit_bytes) {
  auto made = std::make_unique<ResourceUnderTest>();
  made->below.push_back(std::make_shared<HostResource>(host_limit_bytes));
  made->below.push_back(std::make_shared<FailingResource>(*made->below.back()));  // checks what comes back to it
  made->resource = std::make_shared<CachingResource>(*made->below.back(), limit_bytes);
  return made;
}

INSTANTIATE_TEST_SUITE_P(
    Resources, ResourceConformance,
    ::testing::Values(ResourceCase{"Host", [] { return make_host(0); }},
                      ResourceCase{"HostLimited", [] { return make_host(kMiB); }, kMiB},
                      ResourceCase{"Caching", [] { return make_caching(0, 0); }},
                      ResourceCase{"CachingLimited", [] { return make_caching(0, 3 * kMiB); }, 3 * kMiB},
                      ResourceCase{"CachingOverLimited", [] { return make_caching(5 * kMiB, 0); }, 5 * kMiB},
                      ResourceCase{"CachingOverCaching",
                                   [] {
                                     auto made = make_caching(0, 30 * kMiB);
                                     made->below.push_back(made->resource);
                                     made->resource = std::make_shared<CachingResource>(*made->below.back());
                                     return made;
                                   },
                                   30 * kMiB}),
    case_name);

TEST(HostResource, LimitIsExact) {
  HostResource resource(1000);
  void* first = resource.allocate(600);
  try {
    resource.allocate(401);
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.requested_bytes, 401u);
    EXPECT_EQ(error.free_bytes, 400u);
    EXPECT_EQ(error.peak_bytes, 600u);
    EXPECT_STREQ(error.what(),
                 "HostResource: out of memory; requested 401 bytes, free 400 of limit_bytes=1000, peak 600");
  }
  void* second = resource.allocate(400);
  resource.deallocate(first, 600);
  resource.deallocate(second, 400);
  EXPECT_EQ(resource.stats().peak_allocated_bytes, 1000u);
}

TEST(CachingResource, ServesFromTheCache) {
  HostResource host;
  CachingResource resource(host);
  for (int i = 0; i < 1000; ++i) {
    void* small = resource.allocate(1000);
    void* large = resource.allocate(5 * kMiB);
    resource.deallocate(small, 1000);
    resource.deallocate(large, 5 * kMiB);
  }
  EXPECT_EQ(resource.stats().num_upstream_allocations, 2u);
  EXPECT_EQ(resource.stats().num_allocations, 2000u);
  EXPECT_EQ(host.stats().num_allocations, 2u);
  EXPECT_EQ(resource.trim(), host.stats().peak_allocated_bytes);
  EXPECT_EQ(host.stats().allocated_bytes, 0u);
  EXPECT_EQ(resource.trim(), 0u);
}

TEST(CachingResource, NeighboursCoalesce) {
  HostResource host;
  CachingResource resource(host, 2 * kMiB);  // one small segment
  std::vector<void*> pieces;
  for (int i = 0; i < 8; ++i) pieces.push_back(resource.allocate(kMiB / 4));
  EXPECT_THROW(resource.allocate(1), OutOfMemory);
  for (const std::size_t order : {1, 3, 2, 0, 7, 5, 6, 4}) resource.deallocate(pieces[order], kMiB / 4);
  resource.deallocate(resource.allocate(kMiB), kMiB);
  EXPECT_EQ(resource.stats().num_upstream_allocations, 1u);
}

TEST(CachingResource, TrimsAndTriesAgain) {
  HostResource host(8 * kMiB);
  CachingResource resource(host);
  void* kept = resource.allocate(1);
  resource.deallocate(resource.allocate(4 * kMiB), 4 * kMiB);
  void* larger = resource.allocate(5 * kMiB);  // fits only once the 4 MiB have gone back
  resource.deallocate(larger, 5 * kMiB);
  resource.deallocate(kept, 1);
  EXPECT_EQ(resource.stats().num_upstream_allocations, 3u);
}

TEST(CachingResource, SmallRequestsUseWhatIsLeftOfLargeSegments) {
  HostResource host;
  CachingResource resource(host, 8 * kMiB);
  resource.deallocate(resource.allocate(8 * kMiB), 8 * kMiB);
  void* large = resource.allocate(3 * kMiB);
  void* small = resource.allocate(100);
  resource.deallocate(small, 100);
  resource.deallocate(large, 3 * kMiB);
  EXPECT_EQ(resource.stats().num_upstream_allocations, 1u);
}

TEST(CachingResource, InvalidFreesAreIgnoredAndCounted) {
  HostResource host;
  CachingResource resource(host);
  auto* data = static_cast<unsigned char*>(resource.allocate(1024));
  unsigned char elsewhere = 0;
  resource.deallocate(&elsewhere, 1);    // never given out
  resource.deallocate(data + 256, 768);  // inside a block
  EXPECT_EQ(resource.stats().num_invalid_frees, 2u);
  EXPECT_EQ(resource.stats().allocated_bytes, 1024u);
  resource.deallocate(data, 1);  // the wrong size: the cache knows better
  EXPECT_EQ(resource.stats().allocated_bytes, 0u);
  resource.deallocate(data, 1024);  // twice
  EXPECT_EQ(resource.stats().num_invalid_frees, 3u);
  EXPECT_EQ(resource.stats().num_deallocations, 1u);
  void* first = resource.allocate(1024);
  void* second = resource.allocate(1024);
  EXPECT_NE(first, second);
  resource.deallocate(first, 1024);
  resource.deallocate(second, 1024);
}

TEST(CachingResource, MemoryInUseOutlivesTheCache) {
  HostResource host;
  FailingResource upstream(host);
  unsigned char* data = nullptr;
  {
    CachingResource resource(upstream);
    data = static_cast<unsigned char*>(resource.allocate(64));
    resource.deallocate(resource.allocate(4 * kMiB), 4 * kMiB);
  }
  data[63] = 1;  // still there
  EXPECT_EQ(upstream.num_given(), 1u);
  upstream.release_all();
}

// A workload that takes, splits, gives back and takes again, with upstream failing at every one of its calls in turn.
TEST(CachingResource, UpstreamFailsAtEveryCall) {
  HostResource host;
  FailingResource upstream(host);
  for (const std::size_t num_failures : {std::size_t{1}, std::size_t{2}, FailingResource::kNever}) {
    std::size_t num_throws = 0;
    for (std::size_t fail_at = 0;; ++fail_at) {
      upstream.fail_at(fail_at, num_failures);
      {
        CachingResource resource(upstream);
        std::vector<std::pair<void*, std::size_t>> pieces;
        std::size_t allocated_bytes = 0;
        for (const std::size_t bytes : {std::size_t{100}, kMiB, 2 * kMiB, 11 * kMiB, 3 * kMiB, kMiB + 1, std::size_t{0},
                                        30 * kMiB, 500 * kMiB / 1000, 12 * kMiB}) {
          try {
            pieces.emplace_back(resource.allocate(bytes), bytes);
            allocated_bytes += bytes;
          } catch (const OutOfMemory& error) {
            ++num_throws;
            EXPECT_EQ(error.requested_bytes, bytes);
          }
          EXPECT_EQ(resource.stats().allocated_bytes, allocated_bytes);
          EXPECT_EQ(resource.stats().num_allocations, pieces.size() + resource.stats().num_deallocations);
          if (pieces.size() % 3 == 2) {
            resource.deallocate(pieces.front().first, pieces.front().second);
            allocated_bytes -= pieces.front().second;
            pieces.front() = pieces.back();
            pieces.pop_back();
          }
        }
        for (const auto& [pointer, bytes] : pieces) resource.deallocate(pointer, bytes);
      }
      EXPECT_EQ(upstream.num_given(), 0u);
      EXPECT_EQ(upstream.num_mismatches(), 0u);
      EXPECT_EQ(host.stats().allocated_bytes, 0u);
      if (upstream.num_calls() <= fail_at) break;  // beyond its last call
    }
    if (num_failures == 1) {
      EXPECT_EQ(num_throws, 0u) << "one failure is answered by asking for less, or by trimming";
    } else if (num_failures == FailingResource::kNever) {
      EXPECT_GT(num_throws, 0u);
    }
  }
}

TEST(DefaultResource, OnePerDevice) {
  MemoryResource& resource = default_resource(Device::cpu());
  EXPECT_EQ(&resource, &default_resource(Device::cpu()));
  EXPECT_TRUE(resource.device().is_cpu());
  void* data = resource.allocate(100);
  resource.deallocate(data, 100);
  EXPECT_THROW(default_resource(Device{DeviceType::kCpu, 1}), InvalidArgument);
  EXPECT_THROW(default_resource(Device::cuda(-1)), InvalidArgument);
  if (num_cuda_devices() == 0) {
    EXPECT_THROW(default_resource(Device::cuda(0)), Error);
  }
}

}  // namespace
}  // namespace flashkernel::testing
