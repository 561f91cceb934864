// See wgmma.hpp.
#include "simt/wgmma.hpp"

#include <cstring>

#include "simt/warp.hpp"
#include "half_bits.h"

namespace simt {
namespace {

// A matrix operand in shared memory, as its descriptor tells.
struct Operand {
  std::uint32_t address, leading, stride, line;  // line: bytes of the swizzle, 0 without
  std::uint32_t bytes;                           // of an element

  Operand(std::uint64_t descriptor, WgmmaElement element, Where where)
      : address(static_cast<std::uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        bytes(bytes_of(element)) {
    constexpr std::uint32_t kLines[] = {0, 128, 64, 32};
    line = kLines[descriptor >> 62];
    if (descriptor >> 49 & 7) fault("wgmma in " + text(where) + ": the emulator knows no base offset in descriptors");
  }

  // Element (row, k), rows along m or n. PTX ISA, canonical layouts; the swizzle works on address bits.
  std::uint32_t place(bool k_major, std::uint32_t row, std::uint32_t k) const {
    std::uint32_t at = address;
    if (line == 0) {  // core matrices of 8 x 16 bytes, each in one piece
      const std::uint32_t per_chunk = 16 / bytes;
      at += k_major ? row / 8 * stride + k / per_chunk * leading + row % 8 * 16 + k % per_chunk * bytes
                    : row / 8 * stride + k / 8 * leading + k % 8 * 16 + row % 8 * 2;
    } else if (k_major) {
      at += row / 8 * stride + row % 8 * line + k * bytes;
    } else {
      const std::uint32_t per_line = line / 2;
      at += row / per_line * leading + k / 8 * stride + k % 8 * line + row % per_line * 2;
    }
    const std::uint32_t mask = line / 16 - (line ? 1 : 0);
    return at ^ (at >> 7 & mask) << 4;
  }
};

float value_of(WgmmaElement element, std::uint32_t bits) {
  switch (element) {
    case WgmmaElement::kF16: return fp16_to_float(static_cast<std::uint16_t>(bits));
    case WgmmaElement::kBf16: return bf16_to_float(static_cast<std::uint16_t>(bits));
    case WgmmaElement::kE4m3: return e4m3_to_float(static_cast<std::uint8_t>(bits));
    default: return e5m2_to_float(static_cast<std::uint8_t>(bits));
  }
}

float read(WgmmaElement element, const Operand& from, bool k_major, std::uint32_t row, std::uint32_t k) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, shared_pointer(from.place(k_major, row, k)), from.bytes);
  return value_of(element, bits);
}

// Reads the operands out of shared memory.
void fetch(Wgmma& op) {
  const auto columns = static_cast<std::uint32_t>(op.columns);
  const std::uint32_t depth = op.depth(), bytes = bytes_of(op.a_element), in_register = 4 / bytes;
  op.operands.resize(depth * (16 + columns));
  float* const a = op.operands.data();
  float* const b = a + 16 * depth;
  if (op.a_in_registers) {
    for (std::uint32_t lane = 0; lane < 32; ++lane)
      for (std::uint32_t r = 0; r < 4; ++r)
        for (std::uint32_t e = 0; e < in_register; ++e)
          a[(lane / 4 + 8 * (r % 2)) * depth + in_register * (4 * (r / 2) + lane % 4) + e] =
              value_of(op.a_element, op.a_registers[lane][r] >> 8 * bytes * e);
  } else {
    const Operand from(op.a, op.a_element, op.where);
    for (std::uint32_t m = 0; m < 16; ++m)
      for (std::uint32_t k = 0; k < depth; ++k)
        a[m * depth + k] = read(op.a_element, from, !op.transposed_a, 16 * op.warp_in_group + m, k);
  }
  const Operand from(op.b, op.b_element, op.where);
  for (std::uint32_t n = 0; n < columns; ++n)
    for (std::uint32_t k = 0; k < depth; ++k) b[k * columns + n] = read(op.b_element, from, !op.transposed_b, n, k);
}

// Adds the product to the warp's accumulators.
void accumulate(const Wgmma& op) {
  const int depth = static_cast<int>(op.depth());
  const float* const a = op.operands.data();
  const float* const b = a + 16 * depth;
  float d[16][256];
  const auto each = [&](auto f) {  // f(row, column, index in lane's d, lane)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < op.columns / 2; ++i)
        f(lane / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2, i, lane);
  };
  if (!op.before.empty()) {
    bool changed = false;
    const float* before = op.before.data();
    for (int lane = 0; lane < 32; ++lane, before += op.columns / 2)
      changed = changed || std::memcmp(before, op.d[lane], static_cast<std::size_t>(op.columns / 2) * 4) != 0;
    if (changed) fault("wgmma in " + text(op.where) + ": its accumulators were written while it was under way");
  }
  each([&](int m, int n, int i, int lane) { d[m][n] = op.accumulate ? op.d[lane][i] : 0.0f; });
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < op.columns; ++n) d[m][n] += a[m * depth + k] * b[k * op.columns + n];
  each([&](int m, int n, int i, int lane) { op.d[lane][i] = d[m][n]; });
}

// For race.hpp: its operands are read from now until its batch is waited for.
void announce_reads(const Warp& warp, WgmmaQueue& queue, const Wgmma& op) {
  if (queue.agent == 0) queue.agent = race::new_agent();
  const race::Clock clock = race::of_warp(warp);
  const std::uint32_t piece = queue.committed + 1;
  // Pieces of 16 bytes: along k, or along the rows where those lie side by side.
  const auto announce = [&](const Operand& from, bool k_major, std::uint32_t first, std::uint32_t rows) {
    const std::uint32_t step = 16 / from.bytes;
    for (std::uint32_t row = first; row < first + rows; row += k_major ? 1 : step)
      for (std::uint32_t k = 0; k < op.depth(); k += k_major ? step : 1)
        race::engine_read(clock, from.place(k_major, row, k), 16, queue.agent, piece, current->code);
  };
  if (!op.a_in_registers) announce(Operand(op.a, op.a_element, op.where), !op.transposed_a, 16 * op.warp_in_group, 16);
  announce(Operand(op.b, op.b_element, op.where), !op.transposed_b, 0, static_cast<std::uint32_t>(op.columns));
}

constexpr std::uint32_t kWholeWarp = 0xffffffffu;

void whole(std::uint32_t lanes, const char* what) {
  if (lanes != kWholeWarp) fault(std::string(what) + ": some lanes of the warp are missing");
}

// The four warps of the current thread's warpgroup.
Warp* warpgroup() { return current->warp - current->linear / 32 % 4; }

// Batch `number` of all four warps. Whoever is through with it has read it.
void fetch_batch(unsigned number) {
  const WgmmaBatch& mine = current->warp->wgmma.batches.front();
  if (mine.fetched) return;
  for (int warp = 0; warp < 4; ++warp) {
    WgmmaQueue& queue = warpgroup()[warp].wgmma;
    WgmmaBatch& batch = queue.batches[number + queue.batches.size() - queue.committed];
    if (batch.products.size() != mine.products.size())
      fault("wgmma: the warps of a warpgroup issue different products");
    for (std::size_t i = 0; i < batch.products.size(); ++i) {
      Wgmma& op = batch.products[i];
      const Wgmma& like = mine.products[i];
      if (op.a != like.a || op.b != like.b || op.columns != like.columns || !(op.where == like.where))
        fault("wgmma in " + text(op.where) + ": the warps of a warpgroup issue different products");
      fetch(op);
    }
    batch.fetched = true;
  }
}

}  // namespace

void wgmma_issue(Warp& warp, Wgmma&& op) {
  WgmmaQueue& queue = warp.wgmma;
  if (!queue.fenced) fault("wgmma in " + text(op.where) + ": no wgmma.fence before the warp's first one");
  bool first = true;
  for (const auto& batch : queue.batches)
    for (const Wgmma& other : batch.products) first = first && other.d[0] != op.d[0];
  for (const Wgmma& other : queue.open) first = first && other.d[0] != op.d[0];
  if (first && op.accumulate)
    for (const float* lane : op.d) op.before.insert(op.before.end(), lane, lane + op.columns / 2);
  if (race::enabled) announce_reads(warp, queue, op);
  queue.open.push_back(std::move(op));
}

void wgmma_fence(Where where) {
  collective("wgmma.fence", kWholeWarp, where, nullptr, [](void* const*, std::uint32_t lanes) {
    whole(lanes, "wgmma.fence");
    if (current->linear / 128 * 128 + 128 > blockDim.x * blockDim.y * blockDim.z)
      fault("wgmma.fence: the block has no four warps for this warpgroup");
    current->warp->wgmma.fenced = true;
  });
}

void wgmma_commit(Where where) {
  collective("wgmma.commit_group", kWholeWarp, where, nullptr, [](void* const*, std::uint32_t lanes) {
    whole(lanes, "wgmma.commit_group");
    WgmmaQueue& queue = current->warp->wgmma;
    queue.batches.push_back({std::move(queue.open), false});
    queue.open.clear();
    ++queue.committed;
    for (int warp = 0; warp < 4; ++warp) {
      for (Thread* thread : warpgroup()[warp].wgmma.waiting) wake(thread);
      warpgroup()[warp].wgmma.waiting.clear();
    }
  });
}

// A batch belongs to the warpgroup: it is over when the products of all four warps are, so that one warp's wait vouches
// for what the others read. Accumulators come in at each warp's own wait.
void wgmma_wait(unsigned batches_left, Where where) {
  WgmmaQueue& mine = current->warp->wgmma;
  const unsigned done = mine.committed > batches_left ? mine.committed - batches_left : 0;
  for (int warp = 0; warp < 4; ++warp)
    while (warpgroup()[warp].wgmma.committed < done) {
      mine.waiting.push_back(current);
      sleep("wgmma.wait_group, for the warpgroup's other warps", where);
    }
  collective("wgmma.wait_group", kWholeWarp, where, &batches_left, [](void* const* data, std::uint32_t lanes) {
    whole(lanes, "wgmma.wait_group");
    WgmmaQueue& queue = current->warp->wgmma;
    for (; queue.batches.size() > *static_cast<const unsigned*>(data[0]); queue.batches.pop_front()) {
      fetch_batch(queue.committed - static_cast<unsigned>(queue.batches.size()));
      for (const Wgmma& op : queue.batches.front().products) accumulate(op);
    }
    const auto done = queue.committed - static_cast<unsigned>(queue.batches.size());
    for (int warp = 0; warp < 4; ++warp)
      if (const race::Agent agent = warpgroup()[warp].wgmma.agent)
        for (const Thread* lane : current->warp->threads) race::engine_done(*lane, agent, done);
  });
}

}  // namespace simt
