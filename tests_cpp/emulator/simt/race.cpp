// See race.hpp. Shadow memory: a cell for every two bytes of shared memory, with its last write and the reads since.
#include "simt/race.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "simt/shared.hpp"
#include "simt/simt.hpp"
#include "simt/warp.hpp"

namespace simt {

extern "C" char __executable_start;

namespace race {

bool enabled = false;
volatile bool paused = false;

namespace {

constexpr std::uint32_t kUnderWay = 0xffffffffu;  // the time of a cp.async that nobody has waited for
constexpr unsigned kMostAgents = 8192, kListed = 16;

enum Kind : std::uint16_t { kPlain, kAtomic, kCopy, kEngine };  // kEngine: through the asynchronous proxy

struct Access {
  std::uint32_t time;  // of its agent; 0: none
  std::uint32_t code;  // offset in the program
  std::uint16_t agent;
  std::uint16_t kind;
};

struct Cell {
  std::uint32_t generation;           // of the block that used it last
  std::uint16_t num_reads, capacity;  // capacity above kListed: indexed by agent
  Access write;
  Access* reads;
};

// Lists of reads live as long as the cluster.
class Arena {
 public:
  Access* allocate(unsigned count) {
    if (used_ + count > kChunk || chunk_ == chunks_.size()) {
      if (chunk_ < chunks_.size()) ++chunk_;
      if (chunk_ == chunks_.size()) chunks_.emplace_back(new Access[kChunk]);
      used_ = 0;
    }
    Access* const list = chunks_[chunk_].get() + used_;
    used_ += count;
    std::memset(list, 0, count * sizeof(Access));
    return list;
  }
  void clear() { chunk_ = used_ = 0; }

 private:
  static constexpr std::size_t kChunk = 1 << 18;
  static_assert(kChunk >= kMostAgents, "a list fits");
  std::vector<std::unique_ptr<Access[]>> chunks_;
  std::size_t chunk_ = 0, used_ = 0;
};

struct State {
  std::vector<Clock> clocks;  // of the cluster's threads
  unsigned agents = 0;        // threads first
  bool any_proxy_fence = false;
  std::uint32_t generation = 0;
  Cell* cells = nullptr;
  Arena arena;
};

State& state() {
  static State& only = *new State;
  return only;
}

// The larger of each entry; what is missing is 0.
void join(std::vector<std::uint32_t>& into, const std::vector<std::uint32_t>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  std::uint32_t* const a = into.data();
  const std::uint32_t* const b = from.data();
  for (std::size_t i = 0; i < from.size(); ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
}
void join(Clock& into, const Clock& from) {
  join(into.seen, from.seen);
  if (state().any_proxy_fence) join(into.proxied, from.proxied);
}

std::uint32_t known(const std::vector<std::uint32_t>& times, unsigned agent) {
  return agent < times.size() ? times[agent] : 0;
}
void learn(Clock& clock, unsigned agent, std::uint32_t time) {
  if (agent >= clock.seen.size()) clock.seen.resize(agent + 1);
  clock.seen[agent] = std::max(clock.seen[agent], time);
}

Clock& clock_of(const Thread& thread) { return state().clocks[thread.number]; }
void tick(const Thread& thread) { ++clock_of(thread).seen[thread.number]; }

bool before(const Access& access, const Clock& clock) { return known(clock.seen, access.agent) >= access.time; }

std::uint32_t offset_of(const void* code) {
  return static_cast<std::uint32_t>(static_cast<const char*>(code) - &__executable_start);
}

std::string actor(const Access& access) {
  if (access.kind == kEngine) return "the engine";
  const State& s = state();
  const unsigned per_block = static_cast<unsigned>(s.clocks.size()) / cluster_blocks();
  std::string text = "thread " + std::to_string(access.agent % per_block);
  if (cluster_blocks() > 1) text += " of the cluster's block " + std::to_string(access.agent / per_block);
  return text;
}

std::string sentence(const Access& access, bool write) {
  std::string does = write ? " writes it at " : " reads it at ";
  if (access.kind == kCopy && access.time == kUnderWay) does = " copies to it (cp.async, under way) at ";
  return actor(access) + does + describe_code(access.code);
}

void report(const Access& now, bool now_writes, const Access& then, bool then_wrote, const SharedPlace& place,
            const char* missing) {
  const std::string text = "race on byte " + std::to_string(place.offset) + " of " +
                           (place.is_dynamic ? "dynamic" : "static") + " shared memory: " + sentence(now, now_writes) +
                           "; before, " + sentence(then, then_wrote) + "; " + missing;
  if (!report_only(now.code, then.code, text)) fault(text);
}

constexpr const char* kUnordered = "no barrier orders the two";
constexpr const char* kNoFence = "ordered, but without a fence.proxy.async between them";

class Visit {
 public:
  Visit(const Clock& clock, const Access& now) : clock_(clock), now_(now) {}

  // All cells of the bytes; false where they are no shared memory.
  template <class F>
  void each(const SharedPlace& first, std::size_t bytes, F f) const {
    State& s = state();
    Cell* const cells = s.cells + first.cell;
    const std::size_t count = (first.odd + bytes + 1) / 2;
    for (std::size_t i = 0; i < count; ++i) {
      Cell& cell = cells[i];
      if (cell.generation != s.generation) cell = Cell{s.generation, 0, 0, {}, nullptr};
      SharedPlace at = first;
      at.offset += static_cast<std::uint32_t>(2 * i);
      f(cell, at);
    }
  }

  void read(Cell& cell, const SharedPlace& at) const {
    against_write(cell, at, false);
    if (cell.capacity > kListed && now_.agent < cell.capacity) {
      cell.reads[now_.agent] = now_;
      return;
    }
    for (unsigned i = 0; cell.capacity <= kListed && i < cell.num_reads; ++i)
      if (cell.reads[i].agent == now_.agent) {
        cell.reads[i] = now_;
        return;
      }
    if (cell.capacity > kListed || cell.num_reads == cell.capacity) make_room(cell);
    if (cell.capacity > kListed)
      cell.reads[now_.agent] = now_;
    else
      cell.reads[cell.num_reads++] = now_;
  }

  void write(Cell& cell, const SharedPlace& at) const {
    against_write(cell, at, true);
    if (cell.capacity > kListed) {
      for (unsigned i = 0; i < cell.capacity; ++i)
        if (cell.reads[i].time && !before(cell.reads[i], clock_)) return conflict(cell, cell.reads[i], at);
      forget_reads(cell);
    } else {
      for (unsigned i = 0; i < cell.num_reads; ++i)
        if (!before(cell.reads[i], clock_)) return conflict(cell, cell.reads[i], at);
      cell.num_reads = 0;
    }
    cell.write = now_;
  }

  void against_write(const Cell& cell, const SharedPlace& at, bool now_writes) const {
    const Access& w = cell.write;
    if (!w.time || (now_.kind == kAtomic && w.kind == kAtomic)) return;
    if (!before(w, clock_)) return report(now_, now_writes, w, true, at, kUnordered);
    if (now_.kind == kEngine && w.kind != kEngine && known(clock_.proxied, w.agent) < w.time)
      report(now_, now_writes, w, true, at, kNoFence);
  }

 private:
  void conflict(Cell& cell, const Access& then, const SharedPlace& at) const {
    report(now_, true, then, false, at, kUnordered);
    forget_reads(cell);
    cell.write = now_;
  }

  static void forget_reads(Cell& cell) {
    if (cell.capacity > kListed) std::memset(cell.reads, 0, cell.capacity * sizeof(Access));
    cell.num_reads = 0;
  }

  // Reads that this one comes after need not be remembered: what comes after this one comes after them.
  void make_room(Cell& cell) const {
    State& s = state();
    if (cell.capacity > kListed) {  // an agent that is newer than the table
      Access* const table = s.arena.allocate(s.agents);
      std::copy(cell.reads, cell.reads + cell.capacity, table);
      cell.reads = table;
      cell.capacity = static_cast<std::uint16_t>(s.agents);
      return;
    }
    unsigned kept = 0;
    for (unsigned i = 0; i < cell.num_reads; ++i)
      if (!before(cell.reads[i], clock_)) cell.reads[kept++] = cell.reads[i];
    cell.num_reads = static_cast<std::uint16_t>(kept);
    if (kept < cell.capacity) return;
    if (cell.capacity < kListed) {
      const unsigned capacity = cell.capacity == 0 ? 4 : kListed;
      Access* const list = s.arena.allocate(capacity);
      std::copy(cell.reads, cell.reads + kept, list);
      cell.reads = list;
      cell.capacity = static_cast<std::uint16_t>(capacity);
    } else {
      const unsigned all = std::max(s.agents, kListed + 1);
      Access* const table = s.arena.allocate(all);
      for (unsigned i = 0; i < kept; ++i) table[cell.reads[i].agent] = cell.reads[i];
      cell.reads = table;
      cell.capacity = static_cast<std::uint16_t>(all);
    }
  }

  const Clock& clock_;
  const Access& now_;
};

Access plain(const Thread& thread, const void* code) {
  return {clock_of(thread).seen[thread.number], offset_of(code), static_cast<std::uint16_t>(thread.number), kPlain};
}
Access of_engine(Agent agent, std::uint32_t piece, const void* code) {
  return {piece, offset_of(code), static_cast<std::uint16_t>(agent), kEngine};
}

}  // namespace

Agent new_agent() {
  State& s = state();
  if (s.agents == kMostAgents) fault("racecheck: too many barriers and engines");
  return s.agents++;
}

void start_cluster(unsigned threads) {
  if (!enabled) return;
  State& s = state();
  if (!s.cells) {
    void* const memory = mmap(nullptr, shadow_cells() * sizeof(Cell), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    s.cells = static_cast<Cell*>(memory);
  }
  paused = false;  // a fault may have left it so
  ++s.generation;
  s.arena.clear();
  s.agents = threads;
  s.any_proxy_fence = false;
  s.clocks.resize(threads);
  for (unsigned t = 0; t < threads; ++t) {
    s.clocks[t].seen.assign(threads, 0);
    s.clocks[t].seen[t] = 1;
    s.clocks[t].proxied.clear();
  }
}

void release(Clock& clock) {
  if (!enabled) return;
  join(clock, clock_of(*current));
  tick(*current);
}
void acquire(const Thread& thread, const Clock& clock) {
  if (enabled) join(clock_of(thread), clock);
}
void acquire(const Clock& clock) { acquire(*current, clock); }

void engine_done(Clock& clock, Agent agent, std::uint32_t piece) {
  if (enabled) learn(clock, agent, piece);
}
void engine_done(const Thread& thread, Agent agent, std::uint32_t piece) {
  if (enabled) learn(clock_of(thread), agent, piece);
}
void engine_done(Agent agent, std::uint32_t piece) { engine_done(*current, agent, piece); }

Clock of_warp(const Warp& warp) {
  Clock all;
  for (const Thread* thread : warp.threads)
    if (thread && (warp.lanes >> thread->lane & 1)) join(all, clock_of(*thread));
  return all;
}

void sync_lanes(std::uint32_t lanes) {
  if (!enabled) return;
  const Warp& warp = *current->warp;
  Clock all;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (lanes >> lane & 1) join(all, clock_of(*warp.threads[lane]));
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    join(clock_of(*warp.threads[lane]), all);
    tick(*warp.threads[lane]);
  }
}

void proxy_fence() {
  if (!enabled) return;
  state().any_proxy_fence = true;
  Clock& clock = clock_of(*current);
  join(clock.proxied, clock.seen);
  tick(*current);
}

void access(const Thread& thread, const void* address, std::size_t bytes, bool write, const void* from) {
  if (!enabled) return;
  SharedPlace place;
  if (!find_shared(address, &place)) return;
  const Access now = plain(thread, from);
  const Visit visit(clock_of(thread), now);
  if (write)
    visit.each(place, bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
  else
    visit.each(place, bytes, [&](Cell& cell, const SharedPlace& at) { visit.read(cell, at); });
}

void access(const Thread& thread, const void* address, std::size_t bytes, bool write) {
  access(thread, address, bytes, write, thread.code);
}

void atomic(const void* address, std::size_t bytes) {
  SharedPlace place;
  if (!enabled || !current || !find_shared(address, &place)) return;
  Access now = plain(*current, __builtin_return_address(0));
  now.kind = kAtomic;
  const Visit visit(clock_of(*current), now);
  visit.each(place, bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
}

void look(std::uint32_t shared, std::size_t bytes, const void* from) {
  if (!enabled || !current) return;
  const Access now = plain(*current, from);
  const Visit visit(clock_of(*current), now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.against_write(cell, at, false); });
}

void begin_copy(std::uint32_t shared, std::size_t bytes, const void* from) {
  if (!enabled) return;
  Access now = plain(*current, from);
  now.kind = kCopy;
  now.time = kUnderWay;
  const Visit visit(clock_of(*current), now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
}

void landed(std::uint32_t shared, std::size_t bytes) {
  if (!enabled) return;
  const Access now = plain(*current, &__executable_start);
  Visit(clock_of(*current), now).each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace&) {
    if (cell.write.agent == now.agent && cell.write.time == kUnderWay) cell.write.time = now.time;
  });
}

void engine_write(std::uint32_t shared, std::size_t bytes, Agent agent, std::uint32_t piece, const void* from) {
  if (!enabled) return;
  const Access now = of_engine(agent, piece, from);
  const Visit visit(clock_of(*current), now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
}

void engine_read(const Clock& clock, std::uint32_t shared, std::size_t bytes, Agent agent, std::uint32_t piece,
                 const void* from) {
  if (!enabled) return;
  const Access now = of_engine(agent, piece, from);
  const Visit visit(clock, now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.read(cell, at); });
}
void engine_read(std::uint32_t shared, std::size_t bytes, Agent agent, std::uint32_t piece, const void* from) {
  if (enabled) engine_read(clock_of(*current), shared, bytes, agent, piece, from);
}

}  // namespace race
}  // namespace simt
