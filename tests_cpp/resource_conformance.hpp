// What every MemoryResource must do. A test file instantiates the suite for its resources:
//   INSTANTIATE_TEST_SUITE_P(Host, ResourceConformance, ::testing::Values(ResourceCase{"plain", [] { ... }}), ...)
// Memory is touched only where the device is the host.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {

/// A resource with whatever it stands on.
struct ResourceUnderTest {
  std::vector<std::shared_ptr<MemoryResource>> below;
  std::shared_ptr<MemoryResource> resource;
  ~ResourceUnderTest() {
    resource.reset();
    while (!below.empty()) below.pop_back();
  }
};

struct ResourceCase {
  std::string name;
  std::function<std::unique_ptr<ResourceUnderTest>()> make;
  std::size_t limit_bytes = 0;  // it can serve no more than this; 0: no limit

  friend std::ostream& operator<<(std::ostream& out, const ResourceCase& c) { return out << c.name; }
};

class ResourceConformance : public ::testing::TestWithParam<ResourceCase> {
 protected:
  struct Piece {
    unsigned char* data;
    std::size_t bytes;
    std::size_t alignment;
    unsigned char pattern;
  };

  ResourceConformance() : under_test_(GetParam().make()), resource_(*under_test_->resource) {}

  bool on_host() const { return resource_.device().is_cpu(); }

  Piece allocate(std::size_t bytes, std::size_t alignment, unsigned char pattern, Stream stream = {}) {
    auto* data = static_cast<unsigned char*>(resource_.allocate(bytes, alignment, stream));
    if (on_host()) std::memset(data, pattern, bytes);
    return {data, bytes, alignment, pattern};
  }

  bool intact(const Piece& piece) const {
    if (!on_host()) return true;
    for (std::size_t i = 0; i < piece.bytes; ++i) {
      if (piece.data[i] != piece.pattern) return false;
    }
    return true;
  }

  void deallocate(const Piece& piece, Stream stream = {}) {
    resource_.deallocate(piece.data, piece.bytes, piece.alignment, stream);
  }

  std::unique_ptr<ResourceUnderTest> under_test_;
  MemoryResource& resource_;
};

TEST_P(ResourceConformance, AnyPowerOfTwoAlignment) {
  for (std::size_t alignment = 1; alignment <= 65536; alignment *= 2) {
    std::vector<Piece> pieces;
    for (const std::size_t bytes : {1, 7, 255, 256, 257, 4096, 30000}) {
      pieces.push_back(allocate(bytes, alignment, static_cast<unsigned char>(bytes)));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(pieces.back().data) % alignment, 0u) << alignment;
    }
    for (const Piece& piece : pieces) {
      EXPECT_TRUE(intact(piece));
      deallocate(piece);
    }
  }
  EXPECT_EQ(resource_.stats().allocated_bytes, 0u);
}

TEST_P(ResourceConformance, OtherAlignmentsAreRefused) {
  for (const std::size_t alignment : {0, 3, 12, 255, 257}) {
    EXPECT_THROW(resource_.allocate(64, alignment, Stream{}), InvalidArgument) << alignment;
  }
  EXPECT_EQ(resource_.stats().num_allocations, 0u);
}

TEST_P(ResourceConformance, ZeroBytesHaveAPointer) {
  void* first = resource_.allocate(0);
  void* second = resource_.allocate(0);
  EXPECT_NE(first, nullptr);
  EXPECT_NE(second, nullptr);
  EXPECT_NE(first, second);
  EXPECT_EQ(resource_.stats().allocated_bytes, 0u);
  EXPECT_EQ(resource_.stats().num_allocations, 2u);
  resource_.deallocate(first, 0);
  resource_.deallocate(second, 0);
  EXPECT_EQ(resource_.stats().num_deallocations, 2u);
}

TEST_P(ResourceConformance, NullMayBeGivenBack) {
  resource_.deallocate(nullptr, 0);
  resource_.deallocate(nullptr, 128);
  EXPECT_EQ(resource_.stats().num_deallocations, 0u);
  EXPECT_EQ(resource_.stats().num_invalid_frees, 0u);
}

TEST_P(ResourceConformance, SizesThatNoMemoryHolds) {
  const std::size_t largest = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes : {largest, largest - 255, largest / 2 + 1, largest / 2, largest / 2 - 1}) {
    try {
      resource_.allocate(bytes);
      ADD_FAILURE() << bytes << " bytes were allocated";
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.requested_bytes, bytes);
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(resource_.stats().num_allocations, 0u);
  deallocate(allocate(64, 64, 1));
}

TEST_P(ResourceConformance, ExhaustionLeavesEverythingAsItWas) {
  if (GetParam().limit_bytes == 0) GTEST_SKIP() << "no limit";
  for (const std::size_t bytes : {std::size_t{1000}, std::size_t{100000}, GetParam().limit_bytes / 2}) {
    std::vector<Piece> pieces;
    bool exhausted = false;
    while (!exhausted) {
      ASSERT_LE(pieces.size() * bytes, GetParam().limit_bytes);
      const MemoryStats before = resource_.stats();
      try {
        pieces.push_back(allocate(bytes, 256, static_cast<unsigned char>(pieces.size())));
      } catch (const OutOfMemory& error) {
        exhausted = true;
        const MemoryStats after = resource_.stats();
        EXPECT_EQ(error.requested_bytes, bytes);
        EXPECT_EQ(error.peak_bytes, after.peak_allocated_bytes);
        EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
        EXPECT_EQ(after.allocated_bytes, before.allocated_bytes);
        EXPECT_EQ(after.num_allocations, before.num_allocations);
        EXPECT_EQ(after.peak_allocated_bytes, before.peak_allocated_bytes);
      }
    }
    ASSERT_FALSE(pieces.empty());
    for (const Piece& piece : pieces) EXPECT_TRUE(intact(piece));
    for (const Piece& piece : pieces) deallocate(piece);
    deallocate(allocate(pieces.size() * bytes, 256, 7));  // as much as there was, now in one piece
  }
  EXPECT_EQ(resource_.stats().allocated_bytes, 0u);
}

TEST_P(ResourceConformance, RandomStepsAgainstAModel) {
  const std::uint64_t seed = seed_or(20240611);
  SCOPED_TRACE(replay(seed));
  Random random(seed);
  std::map<unsigned char*, Piece> pieces;  // by address
  std::size_t allocated_bytes = 0, peak_bytes = 0;
  std::uint64_t num_allocations = 0, num_deallocations = 0;
  const int steps = num_steps(20000);
  for (int step = 0; step < steps; ++step) {
    const bool grow = random.below(100) < (step / 1000 % 2 == 0 ? 60u : 40u);
    if (grow || pieces.empty()) {
      const std::size_t bytes = random.log_uniform(random.one_in(50) ? 21 : 14);
      const std::size_t alignment = std::size_t{1} << random.below(random.one_in(10) ? 17 : 9);
      try {
        const Piece piece = allocate(bytes, alignment, static_cast<unsigned char>(random.below(256)));
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(piece.data) % alignment, 0u);
        const auto [place, is_new] = pieces.emplace(piece.data, piece);
        ASSERT_TRUE(is_new) << "given out twice";
        if (place != pieces.begin()) {
          const Piece& before = std::prev(place)->second;
          ASSERT_LE(before.data + before.bytes, piece.data) << "overlap";
        }
        if (std::next(place) != pieces.end()) {
          ASSERT_LE(piece.data + piece.bytes, std::next(place)->second.data) << "overlap";
        }
        allocated_bytes += bytes;
        peak_bytes = std::max(peak_bytes, allocated_bytes);
        ++num_allocations;
      } catch (const OutOfMemory& error) {
        ASSERT_EQ(error.requested_bytes, bytes);
      }
    } else {
      auto place = pieces.begin();
      std::advance(place, static_cast<std::ptrdiff_t>(random.below(std::min<std::size_t>(pieces.size(), 64))));
      ASSERT_TRUE(intact(place->second)) << "someone else wrote here";
      deallocate(place->second);
      allocated_bytes -= place->second.bytes;
      ++num_deallocations;
      pieces.erase(place);
    }
    if (random.one_in(2000)) resource_.trim();
    const MemoryStats stats = resource_.stats();
    ASSERT_EQ(stats.allocated_bytes, allocated_bytes);
    ASSERT_EQ(stats.peak_allocated_bytes, peak_bytes);
    ASSERT_EQ(stats.num_allocations, num_allocations);
    ASSERT_EQ(stats.num_deallocations, num_deallocations);
    ASSERT_GE(stats.reserved_bytes, stats.allocated_bytes);
    ASSERT_GE(stats.peak_reserved_bytes, stats.reserved_bytes);
    if (GetParam().limit_bytes != 0) {
      ASSERT_LE(stats.reserved_bytes, GetParam().limit_bytes);
    }
  }
  for (const auto& [data, piece] : pieces) {
    ASSERT_TRUE(intact(piece));
    deallocate(piece);
  }
  resource_.trim();
  EXPECT_EQ(resource_.stats().allocated_bytes, 0u);
  EXPECT_EQ(resource_.stats().reserved_bytes, 0u);
  EXPECT_EQ(resource_.stats().num_invalid_frees, 0u);
}

TEST_P(ResourceConformance, ManyThreads) {
  constexpr int kThreads = 8;
  const int steps = num_steps(4000);
  std::atomic<int> num_damaged{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t, steps, &num_damaged] {
      Random random(static_cast<std::uint64_t>(t) + 1);
      std::vector<Piece> pieces;
      for (int step = 0; step < steps; ++step) {
        if (pieces.size() < 16 && random.below(3) != 0) {
          try {
            pieces.push_back(allocate(random.log_uniform(13), std::size_t{1} << random.below(13),
                                      static_cast<unsigned char>(t * 16 + static_cast<int>(pieces.size()))));
          } catch (const OutOfMemory&) {
          }
        } else if (!pieces.empty()) {
          std::swap(pieces[random.below(pieces.size())], pieces.back());
          if (!intact(pieces.back())) ++num_damaged;
          deallocate(pieces.back());
          pieces.pop_back();
        }
        if (step % 500 == 0) resource_.trim();
      }
      for (const Piece& piece : pieces) deallocate(piece);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_damaged, 0);
  const MemoryStats stats = resource_.stats();
  EXPECT_EQ(stats.allocated_bytes, 0u);
  EXPECT_EQ(stats.num_allocations, stats.num_deallocations);
  EXPECT_EQ(stats.num_invalid_frees, 0u);
}

inline std::string case_name(const ::testing::TestParamInfo<ResourceCase>& info) { return info.param.name; }

}  // namespace flashkernel::testing
