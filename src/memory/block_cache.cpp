#include "memory/block_cache.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "flashkernel/error.hpp"
#include "memory/poison.hpp"

namespace flashkernel::detail {

BlockCache::BlockCache(MemoryResource& upstream, StreamEvents& events, std::size_t limit_bytes)
    : upstream_(upstream), events_(events), limit_bytes_(limit_bytes), is_host_(upstream.device().is_cpu()) {}

BlockCache::~BlockCache() {
  try {
    recycle_captures();
  } catch (const std::bad_alloc&) {  // no room to note the default stream: their memory stays with upstream
  }
  trim_locked();
  for (Segment* segment = segments_; segment != nullptr;) {  // still in use: stays with upstream
    if (is_host_) unpoison_memory(segment->data, segment->size);
    Segment* next = segment->next;
    delete segment;
    segment = next;
  }
  while (streams_ != nullptr) {
    StreamState* next = streams_->next;
    if (streams_->event != nullptr) events_.destroy(streams_->event);
    delete streams_;
    streams_ = next;
  }
}

// ---- Streams ----

namespace {
void set_gone(void* flag) {
  const std::unique_ptr<std::shared_ptr<std::atomic<bool>>> owned(
      static_cast<std::shared_ptr<std::atomic<bool>>*>(flag));
  (*owned)->store(true, std::memory_order_release);
}
}  // namespace

StreamState& BlockCache::state_of(Stream stream) {
  return state_of(events_.key(stream), events_.capture(stream), stream);  // a capture's branches run side by side
}

StreamState& BlockCache::state_of(std::uintptr_t key, std::uint64_t capture, Stream stream) {
  for (StreamState** link = &streams_; *link != nullptr; link = &(*link)->next) {
    if ((*link)->key != key || (*link)->capture != capture) continue;
    StreamState* state = *link;
    *link = state->next;
    state->next = streams_;
    streams_ = state;
    state->stream = stream;
    return *state;
  }
  auto state = std::make_unique<StreamState>();
  state->key = key;
  state->capture = capture;
  state->stream = stream;
  if (capture != 0) {
    state->gone = std::make_shared<std::atomic<bool>>(false);
    auto flag = std::make_unique<std::shared_ptr<std::atomic<bool>>>(state->gone);
    if (events_.when_graph_is_gone(stream, set_gone, flag.get())) flag.release();  // else its memory stays with it
    ++num_captures_;
  }
  state->next = streams_;
  streams_ = state.release();
  return *streams_;
}

/// Gives the memory of captures whose graphs are gone to the default stream.
void BlockCache::recycle_captures() {
  if (num_captures_ == 0) return;
  const auto is_gone = [](const StreamState& state) { return state.gone->load(std::memory_order_acquire); };
  for (Block** link = &held_; *link != nullptr;) {
    Block* block = *link;
    if (!is_gone(*block->home) || !is_gone(*block->also)) {
      link = &block->next;
      continue;
    }
    StreamState& heir = state_of(events_.key(Stream{}), 0, Stream{});
    *link = block->next;
    --block->home->num_used;
    --block->also->num_used;
    --block->segment->num_used;
    block->home = block->also = nullptr;
    release(*block, heir);
    heir.marked = false;
  }
  for (StreamState** link = &streams_; *link != nullptr;) {
    StreamState* state = *link;
    if (state->capture == 0 || !is_gone(*state)) {
      link = &state->next;
      continue;
    }
    if (!state->lists[0].empty() || !state->lists[1].empty()) {
      StreamState& heir = state_of(events_.key(Stream{}), 0, Stream{});
      for (FreeLists& lists : state->lists) {
        while (Block* block = lists.any()) {
          lists.remove(*block);
          release(*block, heir);
        }
      }
      heir.marked = false;
      link = &streams_;  // the list has changed order
      continue;
    }
    if (state->num_used != 0) {  // some of its memory is still in use
      link = &state->next;
      continue;
    }
    *link = state->next;
    delete state;
    --num_captures_;
  }
}

/// The default stream is never destroyed, so that its event can wait until another stream wants its memory: programs
/// with one stream never pay for an event. Others are marked when they give memory back and their handles are not used
/// after that.
bool BlockCache::mark(StreamState& state) noexcept {
  if (!state.marked && state.stream.handle == nullptr && state.capture == 0)
    state.marked = events_.record(state.event, state.stream);
  return state.marked;
}

/// Moves the mark to now; `state.stream` is one that the caller uses in this call.
void BlockCache::remark(StreamState& state) noexcept {
  state.marked = state.stream.handle != nullptr && state.capture == 0 && events_.record(state.event, state.stream);
}

/// A block of another stream whose work has run.
Block* BlockCache::take_finished(const StreamState& own, Pool pool, std::size_t size, std::size_t alignment) noexcept {
  for (StreamState* state = streams_; state != nullptr; state = state->next) {
    if (state == &own) continue;
    Block* block = state->lists[pool].find(size, alignment);
    if (block != nullptr && mark(*state) && events_.done(state->event)) return block;
  }
  return nullptr;
}

/// Makes `own` wait for the other streams and gives it their free blocks.
void BlockCache::adopt_all(StreamState& own) noexcept {
  for (StreamState* state = streams_; state != nullptr; state = state->next) {
    if (state == &own || (state->lists[0].empty() && state->lists[1].empty())) continue;
    if (!mark(*state) || !events_.wait(own.stream, state->event)) continue;
    for (FreeLists& lists : state->lists) {
      while (Block* block = lists.any()) {
        lists.remove(*block);
        release(*block, own);
      }
    }
  }
  remark(own);  // so that a third stream waits for what `own` now waits for
}

// ---- Blocks ----

void BlockCache::reserve_nodes() {
  // One allocation takes three at most: a new segment's block and what is split off before and after the caller's part.
  while (num_spare_nodes_ < 3) {
    nodes_.emplace_back();
    return_node(nodes_.back());
  }
  used_.reserve();
}

Block& BlockCache::take_node() noexcept {
  Block& node = *spare_nodes_;
  spare_nodes_ = node.next;
  --num_spare_nodes_;
  node = Block{};
  return node;
}

void BlockCache::return_node(Block& node) noexcept {
  node = Block{};
  node.next = spare_nodes_;
  spare_nodes_ = &node;
  ++num_spare_nodes_;
}

void BlockCache::poison(const Block& block) const noexcept {
  if (is_host_) poison_memory(block.data, block.size);
}

/// Cuts `block` after `size` bytes; returns the rest, which is in no list.
Block& BlockCache::split(Block& block, std::size_t size) noexcept {
  Block& rest = take_node();
  rest.data = block.data + size;
  rest.size = block.size - size;
  rest.segment = block.segment;
  rest.before = &block;
  rest.after = block.after;
  if (rest.after != nullptr) rest.after->before = &rest;
  block.after = &rest;
  block.size = size;
  return rest;
}

/// Puts a block that is in no list into those of `owner`, merged with free neighbours of the same owner.
void BlockCache::release(Block& block, StreamState& owner) noexcept {
  FreeLists& lists = owner.lists[block.segment->pool];
  Block* merged = &block;
  block.owner = &owner;
  if (Block* after = block.after; after != nullptr && after->owner == &owner) {
    lists.remove(*after);
    block.size += after->size;
    block.after = after->after;
    if (block.after != nullptr) block.after->before = &block;
    return_node(*after);
  }
  if (Block* before = block.before; before != nullptr && before->owner == &owner) {
    lists.remove(*before);
    before->size += block.size;
    before->after = block.after;
    if (before->after != nullptr) before->after->before = before;
    return_node(block);
    merged = before;
  }
  lists.insert(*merged);
}

/// Takes the caller's part out of a free block, for `user`.
void* BlockCache::use(Block& block, StreamState& user, std::size_t bytes, std::size_t size,
                      std::size_t alignment) noexcept {
  Block* part = &block;
  StreamState& owner = *block.owner;
  FreeLists& lists = owner.lists[block.segment->pool];
  lists.remove(block);
  if (const std::size_t pad = padding(block, alignment); pad != 0) {
    part = &split(block, pad);
    lists.insert(block);
  }
  // A sliver of a large segment would serve no large request: it stays with the block.
  const bool is_large = block.segment->pool == kLargePool && size > kSmallLimit;
  if (part->size - size >= (is_large ? kSmallLimit : kGranule)) {
    Block& rest = split(*part, size);
    rest.owner = &owner;
    lists.insert(rest);
  }
  part->owner = nullptr;
  part->requested = bytes;
  if (user.capture != 0) {
    part->home = &user;
    ++user.num_used;
  }
  ++part->segment->num_used;
  used_.insert(*part);
  if (is_host_) unpoison_memory(part->data, bytes);

  stats_.allocated_bytes += bytes;
  stats_.peak_allocated_bytes = std::max(stats_.peak_allocated_bytes, stats_.allocated_bytes);
  ++stats_.num_allocations;
  return part->data;
}

// ---- Upstream ----

/// A free block of a new segment that holds `size` bytes; null, with the reason, if there is no memory for one.
Block* BlockCache::new_segment(StreamState& own, Pool pool, std::size_t size, std::size_t alignment,
                               std::string& reason) {
  const std::size_t room = limit_bytes_ == 0 ? kMaxBytes : limit_bytes_ - stats_.reserved_bytes;
  if (size > room) {
    reason = "limit_bytes=" + std::to_string(limit_bytes_);
    return nullptr;
  }
  auto segment = std::make_unique<Segment>();
  segment->size = size;
  segment->alignment = std::max(alignment, kGranule);
  segment->pool = pool;
  try {
    segment->data = static_cast<std::byte*>(upstream_.allocate(size, segment->alignment, own.stream));
  } catch (const OutOfMemory& error) {
    reason = error.what();
    return nullptr;
  } catch (const std::bad_alloc&) {
    reason = "upstream threw std::bad_alloc";
    return nullptr;
  }
  if (is_host_) poison_memory(segment->data, size);
  stats_.reserved_bytes += size;
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, stats_.reserved_bytes);
  ++stats_.num_upstream_allocations;

  Block& block = take_node();
  block.data = segment->data;
  block.size = size;
  block.segment = segment.get();
  segment->first = &block;
  segment->next = segments_;
  if (segments_ != nullptr) segments_->previous = segment.get();
  segments_ = segment.release();
  release(block, own);
  remark(own);  // upstream's memory may be `own`'s in stream order only
  return &block;
}

std::size_t BlockCache::trim_locked() {
  std::size_t trimmed_bytes = 0;
  for (Segment* segment = segments_; segment != nullptr;) {
    Segment* next = segment->next;
    // The default stream waits for everyone who used the segment, and upstream gets it back in that stream's order.
    bool is_free = segment->num_used == 0;
    for (Block* block = segment->first; is_free && block != nullptr; block = block->after) {
      StreamState* owner = block->owner;
      is_free = owner->capture == 0 &&
                (owner->stream.handle == nullptr || (mark(*owner) && events_.wait(Stream{}, owner->event)));
    }
    if (is_free) {
      for (Block* block = segment->first; block != nullptr;) {
        Block* after = block->after;
        block->owner->lists[segment->pool].remove(*block);
        return_node(*block);
        block = after;
      }
      (segment->previous != nullptr ? segment->previous->next : segments_) = segment->next;
      if (segment->next != nullptr) segment->next->previous = segment->previous;
      if (is_host_) unpoison_memory(segment->data, segment->size);
      upstream_.deallocate(segment->data, segment->size, segment->alignment, Stream{});
      trimmed_bytes += segment->size;
      delete segment;
    }
    segment = next;
  }
  stats_.reserved_bytes -= trimmed_bytes;
  return trimmed_bytes;
}

// ---- The door ----

/// From the cheapest source to the dearest; null, with the reason, when all are dry.
Block* BlockCache::search(StreamState& own, Pool pool, std::size_t size, std::size_t alignment, std::string& reason) {
  if (Block* block = own.lists[pool].find(size, alignment)) return block;
  if (Block* block = take_finished(own, pool, size, alignment)) return block;

  std::size_t segment_size = pool == kSmallPool ? kSmallSegment : kLargeSegment;
  if (pool == kLargePool && size > kLargeSegment / 2) segment_size = round_up(size, kLargeRounding);
  if (segment_size > size) {
    if (Block* block = new_segment(own, pool, segment_size, alignment, reason)) return block;
  }
  if (Block* block = new_segment(own, pool, size, alignment, reason)) return block;

  if (own.capture != 0) return nullptr;  // a captured stream can wait for no event from outside
  adopt_all(own);
  if (Block* block = own.lists[pool].find(size, alignment)) return block;
  if (Block* block = own.lists[1 - pool].find(size, alignment)) return block;

  if (trim_locked() == 0) return nullptr;
  return new_segment(own, pool, size, alignment, reason);
}

void* BlockCache::allocate(std::size_t bytes, std::size_t alignment, Stream stream) {
  if (!is_power_of_two(alignment)) {
    throw InvalidArgument("CachingResource: alignment=" + std::to_string(alignment) + "; needs a power of two");
  }
  const ForkSafeLock lock(mutex_);
  if (bytes > kMaxBytes / 2 || alignment > kMaxBytes / 2) throw_out_of_memory(bytes, "more than any memory holds");
  const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kGranule);
  const Pool pool = size <= kSmallLimit && alignment <= kSmallLimit ? kSmallPool : kLargePool;
  std::string reason;
  try {
    reserve_nodes();
    recycle_captures();
    StreamState& own = state_of(stream);
    if (Block* block = search(own, pool, size, alignment, reason)) return use(*block, own, bytes, size, alignment);
  } catch (const std::bad_alloc&) {
    throw_out_of_memory(bytes, "no memory for the cache's own records");
  }
  throw_out_of_memory(bytes, reason);
}

void BlockCache::deallocate(void* pointer, Stream stream) noexcept {
  if (pointer == nullptr) return;
  const ForkSafeLock lock(mutex_);
  Block* block = used_.take(pointer);
  if (block == nullptr) {
    ++stats_.num_invalid_frees;
    return;
  }
  stats_.allocated_bytes -= block->requested;
  ++stats_.num_deallocations;
  poison(*block);
  block->requested = 0;  // where it is held or lost below: it counts as used, by nobody
  StreamState* const home = block->home;
  StreamState* owner = nullptr;
  try {
    owner = &state_of(stream);
  } catch (const std::bad_alloc&) {
    return;  // a new stream, and not even room to note it
  }
  if (home != nullptr) {
    if (owner->capture != 0 && owner->capture != home->capture) {
      block->also = owner;
      ++owner->num_used;
      block->next = held_;
      held_ = block;
      return;
    }
    if (owner->capture == 0) owner = home;
    block->home = nullptr;
    --home->num_used;
  }
  --block->segment->num_used;
  release(*block, *owner);
  remark(*owner);
}

std::size_t BlockCache::trim() {
  const ForkSafeLock lock(mutex_);
  recycle_captures();
  const std::size_t trimmed_bytes = trim_locked();
  for (StreamState** link = &streams_; *link != nullptr;) {  // forget streams that hold nothing
    StreamState* state = *link;
    if (state->capture == 0 && state->lists[0].empty() && state->lists[1].empty()) {
      *link = state->next;
      if (state->event != nullptr) events_.destroy(state->event);
      delete state;
    } else {
      link = &state->next;
    }
  }
  return trimmed_bytes;
}

MemoryStats BlockCache::stats() const {
  const ForkSafeLock lock(mutex_);
  return stats_;
}

void BlockCache::throw_out_of_memory(std::size_t bytes, const std::string& reason) const {
  const std::size_t cached_bytes = stats_.reserved_bytes - stats_.allocated_bytes;
  const std::size_t free_bytes = cached_bytes + (limit_bytes_ == 0 ? 0 : limit_bytes_ - stats_.reserved_bytes);
  throw OutOfMemory("CachingResource: out of memory; requested " + std::to_string(bytes) + " bytes, allocated " +
                        std::to_string(stats_.allocated_bytes) + ", reserved " + std::to_string(stats_.reserved_bytes) +
                        ", free " + std::to_string(free_bytes) + ", peak " +
                        std::to_string(stats_.peak_allocated_bytes) + " (" + reason + ")",
                    bytes, free_bytes, stats_.peak_allocated_bytes);
}

void BlockCache::check() const {
  const ForkSafeLock lock(mutex_);
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::logic_error(std::string("BlockCache: ") + what);
  };
  std::size_t reserved_bytes = 0, allocated_bytes = 0;
  for (const Segment* segment = segments_; segment != nullptr; segment = segment->next) {
    reserved_bytes += segment->size;
    std::size_t offset = 0, num_used = 0;
    const Block* before = nullptr;
    for (const Block* block = segment->first; block != nullptr; block = block->after) {
      require(block->data == segment->data + offset, "blocks leave a gap or overlap");
      require(block->before == before && block->segment == segment, "a block's neighbours are wrong");
      require(block->size != 0 && block->size % kGranule == 0, "a block's size is not a multiple of the granule");
      require(block->requested <= block->size || block->owner != nullptr, "a block is smaller than what was asked for");
      require(before == nullptr || before->owner == nullptr || before->owner != block->owner,
              "free neighbours not merged");
      if (block->owner == nullptr) {
        ++num_used;
        allocated_bytes += block->requested;
      }
      offset += block->size;
      before = block;
    }
    require(offset == segment->size, "blocks do not fill their segment");
    require(num_used == segment->num_used, "a segment's count of blocks in use is wrong");
  }
  require(reserved_bytes == stats_.reserved_bytes, "reserved_bytes is wrong");
  require(allocated_bytes == stats_.allocated_bytes, "allocated_bytes is wrong");
}

}  // namespace flashkernel::detail
