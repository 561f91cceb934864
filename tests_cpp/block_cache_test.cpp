// BlockCache with streams that lag: a block must never reach a stream that does not come after its last user.
#include "memory/block_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "flashkernel/error.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {
namespace {

constexpr std::size_t kStreams = 4;
constexpr std::size_t kMiB = std::size_t{1} << 20;

/// What a stream's work comes after: a count of work items of each stream (a vector clock).
using Clock = std::array<std::uint64_t, kStreams>;

Stream stream_of(std::size_t index) { return Stream{reinterpret_cast<void*>(index)}; }
std::size_t index_of(Stream stream) { return reinterpret_cast<std::size_t>(stream.handle); }

void raise(Clock& clock, const Clock& other) {
  for (std::size_t i = 0; i < kStreams; ++i) clock[i] = std::max(clock[i], other[i]);
}

/// A device that runs nothing and knows what comes after what.
class FakeDevice final : public detail::StreamEvents {
 public:
  std::uintptr_t key(Stream stream) const noexcept override { return index_of(stream); }
  bool record(void*& event, Stream stream) noexcept override {
    if (!alive[index_of(stream)]) used_dead_stream = true;
    if (capturing[index_of(stream)]) return false;
    if (event == nullptr) {
      event = new Clock;
      ++num_events;
    }
    *static_cast<Clock*>(event) = clocks[index_of(stream)];
    return true;
  }
  bool done(void* event) noexcept override {
    for (std::size_t i = 0; i < kStreams; ++i) {
      if (completed[i] < (*static_cast<Clock*>(event))[i]) return false;
    }
    return true;
  }
  bool wait(Stream stream, void* event) noexcept override {
    if (!alive[index_of(stream)]) used_dead_stream = true;
    if (capturing[index_of(stream)]) return false;
    raise(clocks[index_of(stream)], *static_cast<Clock*>(event));
    ++num_waits;
    return true;
  }
  void destroy(void* event) noexcept override {
    delete static_cast<Clock*>(event);
    --num_events;
  }

  std::uint64_t capture(Stream stream) noexcept override { return graphs[index_of(stream)]; }
  bool when_graph_is_gone(Stream stream, void (*gone)(void*), void* argument) noexcept override {
    watchers.emplace(graphs[index_of(stream)], std::make_pair(gone, argument));
    return true;
  }
  void destroy_graph(std::uint64_t graph) {
    for (auto [at, end] = watchers.equal_range(graph); at != end; at = watchers.erase(at)) {
      at->second.first(at->second.second);
    }
  }

  void work(std::size_t stream) { ++clocks[stream][stream]; }
  void complete(std::size_t stream) {
    // What has run has run after everything that it waited for.
    raise(completed, clocks[stream]);
  }
  bool comes_after(std::size_t stream, std::size_t user, std::uint64_t when) const {
    return clocks[stream][user] >= when || completed[user] >= when;
  }

  std::array<Clock, kStreams> clocks{};
  Clock completed{};
  std::array<bool, kStreams> capturing{};
  std::array<std::uint64_t, kStreams> graphs{};  // that the streams are captured into; 0: none
  std::multimap<std::uint64_t, std::pair<void (*)(void*), void*>> watchers;
  std::array<bool, kStreams> alive{true, true, true, true};
  bool used_dead_stream = false;
  int num_events = 0;
  int num_waits = 0;
};

/// Remembers the last user of every granule and checks each new one against it.
class HazardChecker {
 public:
  explicit HazardChecker(FakeDevice& device) : device_(device) {}
  bool may_use(std::size_t stream, const void* data, std::size_t bytes) {
    for_each(data, bytes, [&](Use& use) { ok_ = ok_ && device_.comes_after(stream, use.stream, use.when); });
    return ok_;
  }
  void used(std::size_t stream, const void* data, std::size_t bytes) {
    for_each(data, bytes, [&](Use& use) { use = {stream, device_.clocks[stream][stream]}; });
  }

 private:
  struct Use {
    std::size_t stream = 0;
    std::uint64_t when = 0;
  };
  template <typename F>
  void for_each(const void* data, std::size_t bytes, F f) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data) / detail::kGranule;
    for (std::size_t i = 0; i * detail::kGranule < bytes; ++i) f(uses_[begin + i]);
  }
  FakeDevice& device_;
  std::map<std::uintptr_t, Use> uses_;
  bool ok_ = true;
};

/// A stream-ordered upstream: what it gives out belongs to that stream's order.
class OrderedUpstream final : public MemoryResource {
 public:
  OrderedUpstream(FakeDevice& device, HazardChecker& checker, std::size_t limit)
      : device_(device), checker_(checker), host_(limit) {}
  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) override {
    void* data = host_.allocate(bytes, alignment, stream);
    device_.work(index_of(stream));
    checker_.used(index_of(stream), data, bytes);
    return data;
  }
  void deallocate(void* data, std::size_t bytes, std::size_t alignment, Stream stream) noexcept override {
    ok = ok && checker_.may_use(index_of(stream), data, bytes);
    host_.deallocate(data, bytes, alignment, stream);
  }
  Device device() const noexcept override { return Device::cpu(); }
  MemoryStats stats() const override { return host_.stats(); }
  bool ok = true;

 private:
  FakeDevice& device_;
  HazardChecker& checker_;
  HostResource host_;
};

TEST(BlockCache, AnotherStreamGetsABlockOnlyAfterItsWork) {
  FakeDevice device;
  HostResource host(2 * kMiB);  // one small segment
  detail::BlockCache cache(host, device, 0);
  void* first = cache.allocate(kMiB, 256, stream_of(1));
  void* second = cache.allocate(kMiB, 256, stream_of(1));
  device.work(1);
  cache.deallocate(first, stream_of(1));
  EXPECT_EQ(cache.allocate(kMiB, 256, stream_of(2)), first);  // nowhere else to get it: stream 2 waits
  EXPECT_EQ(device.num_waits, 1);
  EXPECT_GE(device.clocks[2][1], 1u);
  cache.deallocate(second, stream_of(1));
  device.complete(1);
  EXPECT_EQ(cache.allocate(kMiB, 256, stream_of(2)), second);  // its work has run: no wait
  EXPECT_EQ(device.num_waits, 1);
  cache.deallocate(first, stream_of(2));
  cache.deallocate(second, stream_of(2));
}

TEST(BlockCache, PrefersUpstreamToWaiting) {
  FakeDevice device;
  HostResource host;
  detail::BlockCache cache(host, device, 0);
  void* first = cache.allocate(kMiB, 256, stream_of(1));
  device.work(1);
  cache.deallocate(first, stream_of(1));
  void* second = cache.allocate(kMiB, 256, stream_of(2));
  EXPECT_NE(first, second);
  EXPECT_EQ(device.num_waits, 0);
  cache.deallocate(second, stream_of(2));
}

TEST(BlockCache, WhatIsLeftOfANewSegmentBelongsToItsStream) {
  FakeDevice device;
  HazardChecker checker(device);
  OrderedUpstream upstream(device, checker, 0);
  detail::BlockCache cache(upstream, device, 0);
  cache.deallocate(cache.allocate(1, 256, stream_of(1)), stream_of(1));
  device.complete(1);
  void* first = cache.allocate(2 * kMiB, 256, stream_of(1));  // from a new segment, in the order of stream 1
  void* second = cache.allocate(2 * kMiB, 256, stream_of(2));
  EXPECT_TRUE(checker.may_use(2, second, 2 * kMiB));
  cache.deallocate(first, stream_of(1));
  cache.deallocate(second, stream_of(2));
}

TEST(BlockCache, OneDefaultStreamNeedsNoEvents) {
  FakeDevice device;
  HostResource host;
  detail::BlockCache cache(host, device, 0);
  for (int i = 0; i < 100; ++i) cache.deallocate(cache.allocate(1000, 256, Stream{}), Stream{});
  cache.trim();
  EXPECT_EQ(device.num_events, 0);
}

TEST(BlockCache, ADestroyedStreamIsNotTouched) {
  FakeDevice device;
  HostResource host(2 * kMiB);
  {
    detail::BlockCache cache(host, device, 0);
    void* data = cache.allocate(kMiB, 256, stream_of(3));
    device.work(3);
    cache.deallocate(data, stream_of(3));
    device.alive[3] = false;
    void* first = cache.allocate(kMiB, 256, stream_of(1));
    void* second = cache.allocate(kMiB, 256, stream_of(2));
    cache.deallocate(first, stream_of(1));
    cache.deallocate(second, stream_of(2));
    EXPECT_EQ(cache.trim(), 2 * kMiB);
    cache.check();
  }
  EXPECT_FALSE(device.used_dead_stream);
  EXPECT_EQ(device.num_events, 0);
}

TEST(BlockCache, ACapturingStreamNeitherGivesNorWaits) {
  FakeDevice device;
  HostResource host(2 * kMiB);
  detail::BlockCache cache(host, device, 0);
  void* first = cache.allocate(kMiB, 256, stream_of(1));
  void* second = cache.allocate(kMiB, 256, stream_of(1));
  device.work(1);
  cache.deallocate(first, stream_of(1));
  device.capturing[2] = true;
  EXPECT_THROW(cache.allocate(kMiB, 256, stream_of(2)), OutOfMemory);
  device.capturing = {};
  device.capturing[1] = true;
  cache.deallocate(second, stream_of(1));
  EXPECT_THROW(cache.allocate(kMiB, 256, stream_of(2)), OutOfMemory);
  EXPECT_EQ(cache.trim(), 0u);
  EXPECT_EQ(cache.allocate(2 * kMiB - 512, 256, stream_of(1)), first);  // its own stream may
  device.capturing = {};
  cache.deallocate(first, stream_of(1));
  cache.check();
}

TEST(BlockCache, ACapturesMemoryIsItsOwnUntilItsGraphIsGone) {
  FakeDevice device;
  HostResource host;
  detail::BlockCache cache(host, device, 0);
  device.graphs[1] = 7;
  void* captured = cache.allocate(kMiB, 256, stream_of(1));
  cache.deallocate(captured, stream_of(1));
  EXPECT_EQ(cache.allocate(kMiB, 256, stream_of(1)), captured);  // one node after another: the capture may reuse it
  void* late = cache.allocate(kMiB, 256, stream_of(1));
  cache.deallocate(captured, stream_of(1));
  device.graphs[1] = 0;  // the capture ends, its graph lives
  cache.deallocate(late, stream_of(1));
  device.complete(1);
  for (const std::size_t stream : {0, 1, 2}) {
    std::set<void*> others;
    for (int i = 0; i < 4; ++i) others.insert(cache.allocate(kMiB, 256, stream_of(stream)));
    EXPECT_EQ(others.count(captured) + others.count(late), 0u) << "stream " << stream;
    for (void* data : others) cache.deallocate(data, stream_of(stream));
  }
  cache.check();
  cache.trim();
  EXPECT_EQ(cache.stats().reserved_bytes, 2 * kMiB) << "the graph's segment stays";
  device.destroy_graph(7);
  EXPECT_EQ(cache.trim(), 2 * kMiB);
  EXPECT_EQ(cache.stats().reserved_bytes, 0u);
  cache.check();
}

TEST(BlockCache, BranchesOfACaptureNeverShareMemory) {
  FakeDevice device;
  HostResource host;
  detail::BlockCache cache(host, device, 0);
  device.graphs[1] = device.graphs[2] = 7;  // stream 2 was forked from stream 1: their nodes run side by side
  void* first = cache.allocate(kMiB, 256, stream_of(1));
  cache.deallocate(first, stream_of(1));
  void* second = cache.allocate(kMiB, 256, stream_of(2));
  EXPECT_NE(second, first);
  EXPECT_EQ(cache.allocate(kMiB, 256, stream_of(1)), first);
  cache.deallocate(first, stream_of(2));  // the caller says that stream 2 was the last to use it
  void* third = cache.allocate(kMiB, 256, stream_of(1));
  EXPECT_NE(third, first);
  EXPECT_EQ(cache.allocate(kMiB, 256, stream_of(2)), first);
  for (void* data : {first, second, third}) cache.deallocate(data, stream_of(2));
  cache.check();
  device.graphs = {};
  device.destroy_graph(7);
  cache.trim();
  EXPECT_EQ(cache.stats().reserved_bytes, 0u);
}

TEST(BlockCache, MemoryThatTwoCapturesUseServesNobodyElseUntilBothGraphsAreGone) {
  FakeDevice device;
  HostResource host;
  detail::BlockCache cache(host, device, 0);
  device.graphs[1] = 7;
  void* data = cache.allocate(kMiB, 256, stream_of(1));
  device.graphs[1] = 8;
  cache.deallocate(data, stream_of(1));
  void* captured = cache.allocate(kMiB, 256, stream_of(1));
  EXPECT_NE(captured, data);
  device.graphs[1] = 0;
  device.destroy_graph(7);
  void* eager = cache.allocate(kMiB, 256, stream_of(1));
  EXPECT_NE(eager, data);
  cache.check();
  cache.deallocate(captured, stream_of(1));
  cache.deallocate(eager, stream_of(1));
  device.destroy_graph(8);
  cache.trim();
  EXPECT_EQ(cache.stats().reserved_bytes, 0u);
}

TEST(BlockCache, RandomCapturesNeverShareMemory) {
  const std::uint64_t seed = seed_or(78);
  SCOPED_TRACE(replay(seed));
  Random random(seed);
  FakeDevice device;
  HostResource host;
  detail::BlockCache cache(host, device, 0);
  struct Piece {
    std::byte* data;
    std::size_t bytes, stream;
  };
  std::vector<Piece> pieces;
  struct Use {
    std::uint64_t graph = 0;  // the last one whose capture used the granule
    std::size_t stream = 0;   // the branch of it
  };
  std::map<std::uintptr_t, Use> used_by;
  std::set<std::uint64_t> alive;
  std::uint64_t next_graph = 1;
  const int steps = num_steps(10000);
  for (int step = 0; step < steps; ++step) {
    const std::size_t stream = random.below(kStreams);
    switch (random.below(8)) {
      case 0:
      case 1:
      case 2: {
        const std::size_t bytes = random.log_uniform(18);
        auto* data = static_cast<std::byte*>(cache.allocate(bytes, 256, stream_of(stream)));
        for (std::size_t at = 0; at < bytes; at += detail::kGranule) {
          Use& use = used_by[reinterpret_cast<std::uintptr_t>(data) + at];
          ASSERT_TRUE(use.graph == 0 || (use.graph == device.graphs[stream] && use.stream == stream) ||
                      alive.count(use.graph) == 0)
              << "memory of graph " << use.graph << " was given out again, step " << step;
          use = {device.graphs[stream], stream};
        }
        pieces.push_back({data, bytes, stream});
        break;
      }
      case 3:
      case 4:
      case 5: {
        if (pieces.empty()) break;
        std::swap(pieces[random.below(pieces.size())], pieces.back());
        const Piece piece = pieces.back();
        pieces.pop_back();
        if (const std::uint64_t graph = device.graphs[piece.stream]) {  // a captured free: the graph uses it too
          for (std::size_t at = 0; at < piece.bytes; at += detail::kGranule) {
            used_by[reinterpret_cast<std::uintptr_t>(piece.data) + at] = {graph, piece.stream};
          }
        }
        cache.deallocate(piece.data, stream_of(piece.stream));
        break;
      }
      case 6: device.complete(stream); break;
      default:
        if (stream != 0 && random.one_in(20)) {
          const std::uint64_t other = device.graphs[random.below(kStreams)];  // maybe a capture that it is forked into
          device.graphs[stream] = device.graphs[stream] != 0 ? 0 : other != 0 ? other : next_graph++;
          if (device.graphs[stream] != 0) alive.insert(device.graphs[stream]);
        }
        if (random.one_in(20) && !alive.empty()) {
          const std::uint64_t graph = *alive.begin();
          if (std::count(device.graphs.begin(), device.graphs.end(), graph) == 0) {
            alive.erase(graph);
            device.destroy_graph(graph);
          }
        }
        if (random.one_in(40)) cache.trim();
        break;
    }
    if (step % 64 == 0) {
      ASSERT_NO_THROW(cache.check());
    }
  }
  device.graphs = {};
  for (const Piece& piece : pieces) cache.deallocate(piece.data, stream_of(piece.stream));
  for (const std::uint64_t graph : alive) device.destroy_graph(graph);
  for (std::size_t stream = 0; stream < kStreams; ++stream) device.complete(stream);
  cache.trim();
  EXPECT_EQ(cache.stats().reserved_bytes, 0u) << "memory of graphs that are gone did not go back";
}

TEST(BlockCache, RandomStreamsNeverRace) {
  const std::uint64_t seed = seed_or(77);
  SCOPED_TRACE(replay(seed));
  Random random(seed);
  for (int round = 0; round < 4; ++round) {
    FakeDevice device;
    HazardChecker checker(device);
    OrderedUpstream upstream(device, checker, round % 2 == 0 ? 6 * kMiB : 30 * kMiB);
    {
      detail::BlockCache cache(upstream, device, round < 2 ? 0 : 5 * kMiB);
      struct Piece {
        void* data;
        std::size_t bytes;
        std::size_t stream;
      };
      std::vector<Piece> pieces;
      const int steps = num_steps(10000);
      for (int step = 0; step < steps; ++step) {
        const std::size_t stream = random.below(kStreams);
        switch (random.below(8)) {
          case 0:
          case 1:
          case 2: {
            const std::size_t bytes = random.log_uniform(random.one_in(20) ? 22 : 17);
            try {
              void* data = cache.allocate(bytes, std::size_t{256} << random.below(4), stream_of(stream));
              device.work(stream);
              ASSERT_TRUE(checker.may_use(stream, data, bytes)) << "a block reached a stream too early, step " << step;
              checker.used(stream, data, bytes);
              pieces.push_back({data, bytes, stream});
            } catch (const OutOfMemory&) {
            }
            break;
          }
          case 3:
          case 4:
          case 5: {
            if (pieces.empty()) break;
            std::swap(pieces[random.below(pieces.size())], pieces.back());
            const Piece piece = pieces.back();
            // Usually on its own stream; else the caller has ordered the other stream after it.
            const std::size_t last = random.one_in(5) ? stream : piece.stream;
            raise(device.clocks[last], device.clocks[piece.stream]);
            device.work(last);
            checker.used(last, piece.data, piece.bytes);
            cache.deallocate(piece.data, stream_of(last));
            pieces.pop_back();
            break;
          }
          case 6: device.complete(stream); break;
          default:
            if (random.one_in(40)) device.capturing[1 + random.below(kStreams - 1)] = random.one_in(2);
            if (random.one_in(40)) cache.trim();
            break;
        }
        if (step % 64 == 0) {
          ASSERT_NO_THROW(cache.check());
        }
        ASSERT_TRUE(upstream.ok) << "memory went back upstream too early, step " << step;
      }
      device.capturing = {};
      for (const Piece& piece : pieces) cache.deallocate(piece.data, stream_of(piece.stream));
      for (std::size_t i = 0; i < kStreams; ++i) {  // a mark that could not be set while capturing
        void* data = nullptr;
        try {
          data = cache.allocate(1, 256, stream_of(i));
        } catch (const OutOfMemory&) {
        }
        cache.deallocate(data, stream_of(i));
      }
      cache.trim();
      EXPECT_EQ(cache.stats().reserved_bytes, 0u);
      EXPECT_TRUE(upstream.ok);
    }
    EXPECT_EQ(device.num_events, 0);
    EXPECT_EQ(upstream.stats().allocated_bytes, 0u);
  }
}

}  // namespace
}  // namespace flashkernel::testing
