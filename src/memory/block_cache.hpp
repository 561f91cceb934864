// The allocator behind CachingResource: segments from upstream, cut into blocks that are split, coalesced and kept in
// free lists per stream. Tests give it an upstream that fails and streams that lag.
// Invariants: a segment's blocks tile it; two free neighbours of one stream are one block; a free block's memory may be
// touched by its owner's queued work until the owner's `event` (a capture's, until its graph is gone); metadata is
// allocated before anything changes.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>

#include "core/fork_safe.hpp"
#include "flashkernel/memory_resource.hpp"
#include "memory/free_lists.hpp"
#include "memory/stream_events.hpp"

namespace flashkernel::detail {

/// Small requests share small segments, so that they don't pin a large one.
enum Pool : int { kSmallPool = 0, kLargePool = 1 };
inline constexpr std::size_t kSmallLimit = std::size_t{1} << 20;  // also what a large block must have left to be split
inline constexpr std::size_t kSmallSegment = std::size_t{2} << 20;
inline constexpr std::size_t kLargeSegment = std::size_t{20} << 20;  // for requests up to half of it
inline constexpr std::size_t kLargeRounding = std::size_t{2} << 20;  // for those above

struct Segment {
  std::byte* data = nullptr;
  std::size_t size = 0;
  std::size_t alignment = 0;
  Pool pool = kSmallPool;
  Block* first = nullptr;
  std::size_t num_used = 0;
  Segment* previous = nullptr;
  Segment* next = nullptr;
};

/// Free blocks whose last user was one stream. `event` marks the end of their use when `marked`.
/// Or those of one stream's part of a capture into a graph, which replays may use at any time until the graph is
/// `gone`: they serve this part only (the other streams' nodes may run side by side with it) and are never marked.
struct StreamState {
  std::uintptr_t key = 0;
  std::uint64_t capture = 0;
  std::shared_ptr<std::atomic<bool>> gone;  // of captures
  std::size_t num_used = 0;                 // blocks in use whose home this is, and held ones
  Stream stream{};
  void* event = nullptr;
  bool marked = false;
  FreeLists lists[2];
  StreamState* next = nullptr;
};

class BlockCache {
 public:
  BlockCache(MemoryResource& upstream, StreamEvents& events, std::size_t limit_bytes);
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream);
  void deallocate(void* pointer, Stream stream) noexcept;
  std::size_t trim();
  MemoryStats stats() const;
  /// Throws std::logic_error if an invariant does not hold. For tests.
  void check() const;

 private:
  StreamState& state_of(Stream stream);
  StreamState& state_of(std::uintptr_t key, std::uint64_t capture, Stream stream);
  void recycle_captures();
  bool mark(StreamState& state) noexcept;
  void remark(StreamState& state) noexcept;

  Block* take_finished(const StreamState& own, Pool pool, std::size_t size, std::size_t alignment) noexcept;
  void adopt_all(StreamState& own) noexcept;
  Block* new_segment(StreamState& own, Pool pool, std::size_t size, std::size_t alignment, std::string& reason);
  Block* search(StreamState& own, Pool pool, std::size_t size, std::size_t alignment, std::string& reason);
  void* use(Block& block, StreamState& user, std::size_t bytes, std::size_t size, std::size_t alignment) noexcept;
  void release(Block& block, StreamState& owner) noexcept;
  std::size_t trim_locked();
  [[noreturn]] void throw_out_of_memory(std::size_t bytes, const std::string& reason) const;

  void reserve_nodes();
  Block& take_node() noexcept;
  void return_node(Block& node) noexcept;
  Block& split(Block& block, std::size_t size) noexcept;
  void poison(const Block& block) const noexcept;

  MemoryResource& upstream_;
  StreamEvents& events_;
  const std::size_t limit_bytes_;
  const bool is_host_;

  mutable ForkSafeMutex mutex_;
  MemoryStats stats_;
  BlockTable used_;
  StreamState* streams_ = nullptr;  // the last one used comes first
  std::size_t num_captures_ = 0;    // among them
  Segment* segments_ = nullptr;
  Block* held_ = nullptr;  // given out in one capture and back in another: nobody's until both graphs are gone
  std::deque<Block> nodes_;
  Block* spare_nodes_ = nullptr;
  std::size_t num_spare_nodes_ = 0;
};

}  // namespace flashkernel::detail
