// The free blocks of one stream in size bins, found in O(1) for ordinary alignments (two-level segregated fit: Masmano
// et al., "TLSF: a New Dynamic Memory Allocator for Real-Time Systems", 2004), and the table from a pointer to its
// block in use. Used by BlockCache only. Invariant: nothing here allocates, except BlockTable::reserve.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/sizes.hpp"

namespace flashkernel::detail {

/// Unit of sizes and of addresses inside a segment.
inline constexpr std::size_t kGranule = 256;

struct Segment;
struct StreamState;

/// A piece of a segment: in use (`owner` null, in the BlockTable), free (in a list of `owner`), or held by two graphs.
struct Block {
  std::byte* data = nullptr;
  std::size_t size = 0;       ///< a multiple of kGranule
  std::size_t requested = 0;  ///< what the caller asked for
  Segment* segment = nullptr;
  StreamState* owner = nullptr;
  StreamState* home = nullptr;  ///< in use: the capture that it was given out in, where it returns to
  StreamState* also = nullptr;  ///< held: the capture that it was given back in
  Block* before = nullptr;      ///< neighbours in the segment, by address
  Block* after = nullptr;
  Block* previous = nullptr;  ///< in a free list
  Block* next = nullptr;      ///< in a free list, in a chain of the BlockTable, or among spare or held nodes
};

/// Bytes before the first multiple of `alignment` in the block.
inline std::size_t padding(const Block& block, std::size_t alignment) noexcept {
  return (alignment - reinterpret_cast<std::uintptr_t>(block.data) % alignment) % alignment;
}

inline bool fits(const Block& block, std::size_t size, std::size_t alignment) noexcept {
  const std::size_t pad = padding(block, alignment);
  return pad <= block.size && size <= block.size - pad;
}

class FreeLists {
 public:
  bool empty() const noexcept { return num_blocks_ == 0; }

  void insert(Block& block) noexcept {
    const std::size_t bin = bin_of(block.size);
    block.previous = nullptr;
    block.next = heads_[bin];
    if (block.next != nullptr) block.next->previous = &block;
    heads_[bin] = &block;
    occupied_[bin / 64] |= std::uint64_t{1} << (bin % 64);
    ++num_blocks_;
  }

  void remove(Block& block) noexcept {
    const std::size_t bin = bin_of(block.size);
    if (block.next != nullptr) block.next->previous = block.previous;
    if (block.previous != nullptr) {
      block.previous->next = block.next;
    } else {
      heads_[bin] = block.next;
      if (block.next == nullptr) occupied_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
    }
    block.previous = block.next = nullptr;
    --num_blocks_;
  }

  /// A block that holds `size` bytes at `alignment`, from the smallest bin that has one; null if there is none. In the
  /// first bin some blocks are too small; in later ones the first block fits unless `alignment` exceeds kGranule.
  Block* find(std::size_t size, std::size_t alignment) const noexcept {
    for (std::size_t bin = next_occupied(bin_of(size)); bin < kNumBins; bin = next_occupied(bin + 1)) {
      for (Block* block = heads_[bin]; block != nullptr; block = block->next) {
        if (fits(*block, size, alignment)) return block;
      }
    }
    return nullptr;
  }

  Block* any() const noexcept {
    const std::size_t bin = next_occupied(0);
    return bin < kNumBins ? heads_[bin] : nullptr;
  }

 private:
  // 8 bins for 0..7 granules, then 8 for each power of two from 2^3 to 2^55 granules: (55 - 3 + 2) * 8.
  static constexpr std::size_t kNumBins = 432;

  static std::size_t bin_of(std::size_t size) noexcept {
    const std::size_t granules = size / kGranule;
    if (granules < 8) return granules;
    std::size_t log2 = 3;
    for (std::size_t rest = granules >> 4; rest != 0; rest >>= 1) ++log2;
    return (log2 - 2) * 8 + ((granules >> (log2 - 3)) & 7);
  }

  std::size_t next_occupied(std::size_t bin) const noexcept {
    if (bin >= kNumBins) return kNumBins;
    std::size_t word = bin / 64;
    std::uint64_t bits = occupied_[word] & (~std::uint64_t{0} << (bin % 64));
    while (bits == 0) {
      if (++word == occupied_.size()) return kNumBins;
      bits = occupied_[word];
    }
    std::size_t bit = 0;
    while ((bits & 1) == 0) {
      bits >>= 1;
      ++bit;
    }
    return word * 64 + bit;
  }

  std::array<Block*, kNumBins> heads_{};
  std::array<std::uint64_t, (kNumBins + 63) / 64> occupied_{};
  std::size_t num_blocks_ = 0;
};

/// Pointer -> block in use. `insert` may follow a `reserve` and then never allocates.
class BlockTable {
 public:
  /// Room for one block more.
  void reserve() {
    if (num_blocks_ < buckets_.size()) return;
    std::vector<Block*> larger(buckets_.empty() ? 64 : buckets_.size() * 2, nullptr);
    for (Block* chain : buckets_) {
      while (chain != nullptr) {
        Block* block = chain;
        chain = chain->next;
        Block*& head = larger[bucket_of(block->data, larger.size())];
        block->next = head;
        head = block;
      }
    }
    buckets_.swap(larger);
  }

  void insert(Block& block) noexcept {
    Block*& head = buckets_[bucket_of(block.data, buckets_.size())];
    block.next = head;
    head = &block;
    ++num_blocks_;
  }

  /// Takes the block at `data` out; null if none in use starts there.
  Block* take(const void* data) noexcept {
    if (buckets_.empty()) return nullptr;
    for (Block** link = &buckets_[bucket_of(data, buckets_.size())]; *link != nullptr; link = &(*link)->next) {
      if ((*link)->data != data) continue;
      Block* block = *link;
      *link = block->next;
      block->next = nullptr;
      --num_blocks_;
      return block;
    }
    return nullptr;
  }

 private:
  static std::size_t bucket_of(const void* data, std::size_t num_buckets) noexcept {
    const std::uint64_t granule = reinterpret_cast<std::uintptr_t>(data) / kGranule;
    return static_cast<std::size_t>((granule * 0x9E3779B97F4A7C15u) >> 32) & (num_buckets - 1);  // Fibonacci hashing
  }

  std::vector<Block*> buckets_;  // a power of two
  std::size_t num_blocks_ = 0;
};

}  // namespace flashkernel::detail
