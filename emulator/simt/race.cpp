// See race.hpp. Shadow memory: a cell for every two bytes of shared memory, with its last write and the reads since.
#include "simt/race.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "simt/shared.hpp"
#include "simt/simt.hpp"
#include "simt/warp.hpp"

namespace simt {

extern "C" char __executable_start;

namespace race {

bool enabled = false;
volatile bool paused = false;

namespace {

constexpr std::uint32_t kUnderWay = 0xffffffffu;         // the time of a cp.async that nobody has waited for
constexpr unsigned kMostAgents = 1 << 15, kListed = 16;  // 16 blocks of 1024 threads have room, and their barriers

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
  bool has_twins;  // writes beside it that left the bytes as they were: see State::twins
  Access* reads;
};

// A thread's write that nothing orders with what came before. It is judged at the next event, when it has been made:
// threads that write the same over each other (zeros past an end, say) do no harm.
struct Contested {
  struct Item {
    Cell* cell;
    SharedPlace place;
    Access then;
    bool then_wrote;
    std::size_t at;  // of its two bytes, in `bytes`
  };
  static constexpr std::size_t kMost = 64;
  const unsigned char* address = nullptr;  // null: none
  std::size_t size = 0;
  unsigned char bytes[kMost];  // before
  Access now{};
  std::vector<Item> items;
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
  std::unordered_map<const Cell*, std::vector<Access>> twins;
  Contested contested;
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
  const unsigned per_block = static_cast<unsigned>(s.clocks.size()) / running_blocks();
  std::string text = "thread " + std::to_string(access.agent % per_block);
  if (running_blocks() > 1) text += " of the cluster's block " + std::to_string(access.agent / per_block);
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

  // f(cell, its place) for each two bytes.
  template <class F>
  void each(const SharedPlace& first, std::size_t bytes, F f) const {
    State& s = state();
    Cell* const cells = s.cells + first.cell;
    const std::size_t count = (first.odd + bytes + 1) / 2;
    for (std::size_t i = 0; i < count; ++i) {
      Cell& cell = cells[i];
      if (cell.generation != s.generation) cell = Cell{s.generation, 0, 0, {}, false, nullptr};
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

  // With `contested`, a conflict is kept there.
  void write(Cell& cell, const SharedPlace& at, Contested* contested = nullptr) const {
    const Access* then = nullptr;
    bool then_wrote = true;
    if (const char* const missing = conflict_with_writes(cell, &then)) {
      if (!contested) report(now_, true, *then, true, at, missing);
    } else {
      then = unordered_read(cell);
      then_wrote = false;
      if (then && !contested) report(now_, true, *then, false, at, kUnordered);
    }
    if (then && contested)
      contested->items.push_back({&cell, at, *then, then_wrote, 0});
    else
      take(cell);
  }

  // The cell's last write is this one.
  void take(Cell& cell) const {
    if (cell.capacity > kListed) std::memset(cell.reads, 0, cell.capacity * sizeof(Access));
    cell.num_reads = 0;
    if (cell.has_twins) state().twins.erase(&cell);
    cell.has_twins = false;
    cell.write = now_;
  }

  void against_write(const Cell& cell, const SharedPlace& at, bool now_writes) const {
    const Access* then;
    if (const char* const missing = conflict_with_writes(cell, &then, !now_writes))
      report(now_, now_writes, *then, true, at, missing);
  }

 private:
  // What is missing after the last write; a reader needs to come after one of several that wrote the same.
  const char* conflict_with_writes(const Cell& cell, const Access** then, bool one_is_enough = false) const {
    const Access& w = cell.write;
    if (!w.time || (now_.kind == kAtomic && w.kind == kAtomic)) return nullptr;
    *then = &w;
    const char* missing = missing_after(w);
    if (!cell.has_twins) return missing;
    for (const Access& twin : state().twins[&cell]) {
      const char* const of_twin = missing_after(twin);
      if (one_is_enough && !(missing && of_twin)) return nullptr;
      if (!one_is_enough && !missing && of_twin) {
        *then = &twin;
        missing = of_twin;
      }
    }
    return missing;
  }
  const char* missing_after(const Access& w) const {
    if (!before(w, clock_)) return kUnordered;
    if (now_.kind == kEngine && w.kind != kEngine && known(clock_.proxied, w.agent) < w.time) return kNoFence;
    return nullptr;
  }

  const Access* unordered_read(const Cell& cell) const {
    const unsigned count = cell.capacity > kListed ? cell.capacity : cell.num_reads;
    for (unsigned i = 0; i < count; ++i)
      if (cell.reads[i].time && !before(cell.reads[i], clock_)) return &cell.reads[i];
    return nullptr;
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

// Judges the write that is left over from before.
static void settle() {
  Contested& c = state().contested;
  if (!c.address) return;
  const unsigned char* const address = c.address;
  c.address = nullptr;
  for (const Contested::Item& item : c.items) {
    const std::size_t end = std::min(item.at + 2, c.size);
    if (std::memcmp(address + item.at, c.bytes + item.at, end - item.at) == 0) {
      item.cell->has_twins = true;
      state().twins[item.cell].push_back(c.now);
    } else {
      report(c.now, true, item.then, item.then_wrote, item.place, kUnordered);
      Visit(Clock{}, c.now).take(*item.cell);
    }
  }
}

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
  s.twins.clear();
  s.contested.address = nullptr;
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
  settle();
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
  settle();
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
  settle();
  state().any_proxy_fence = true;
  Clock& clock = clock_of(*current);
  join(clock.proxied, clock.seen);
  tick(*current);
}

void access(const Thread& thread, const void* address, std::size_t bytes, bool write, const void* from) {
  if (!enabled) return;
  SharedPlace place;
  if (!find_shared(address, &place)) return;
  settle();
  const Access now = plain(thread, from);
  const Visit visit(clock_of(thread), now);
  if (!write) {
    visit.each(place, bytes, [&](Cell& cell, const SharedPlace& at) { visit.read(cell, at); });
    return;
  }
  // Static memory of a cluster's blocks shares its addresses.
  const bool waits = bytes <= Contested::kMost && (place.is_dynamic || running_blocks() == 1);
  Contested& contested = state().contested;
  contested.items.clear();
  visit.each(place, bytes,
             [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at, waits ? &contested : nullptr); });
  if (contested.items.empty()) return;
  contested.address = static_cast<const unsigned char*>(address);
  contested.size = bytes;
  contested.now = now;
  std::memcpy(contested.bytes, address, bytes);
  for (Contested::Item& item : contested.items)
    item.at = item.place.offset > place.offset ? item.place.offset - place.offset - (place.odd ? 1 : 0) : 0;
}

void access(const Thread& thread, const void* address, std::size_t bytes, bool write) {
  access(thread, address, bytes, write, thread.code);
}

void atomic(const void* address, std::size_t bytes) {
  SharedPlace place;
  if (!enabled || !current || !find_shared(address, &place)) return;
  settle();
  Access now = plain(*current, __builtin_return_address(0));
  now.kind = kAtomic;
  const Visit visit(clock_of(*current), now);
  visit.each(place, bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
}

void look(std::uint32_t shared, std::size_t bytes, const void* from) {
  if (!enabled || !current) return;
  settle();
  const Access now = plain(*current, from);
  const Visit visit(clock_of(*current), now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.against_write(cell, at, false); });
}

void begin_copy(std::uint32_t shared, std::size_t bytes, const void* from) {
  if (!enabled) return;
  settle();
  Access now = plain(*current, from);
  now.kind = kCopy;
  now.time = kUnderWay;
  const Visit visit(clock_of(*current), now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
}

void landed(std::uint32_t shared, std::size_t bytes) {
  if (!enabled) return;
  settle();
  const Access now = plain(*current, &__executable_start);
  Visit(clock_of(*current), now).each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace&) {
    if (cell.write.agent == now.agent && cell.write.time == kUnderWay) cell.write.time = now.time;
  });
}

void engine_write(std::uint32_t shared, std::size_t bytes, Agent agent, std::uint32_t piece, const void* from) {
  if (!enabled) return;
  settle();
  const Access now = of_engine(agent, piece, from);
  const Visit visit(clock_of(*current), now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.write(cell, at); });
}

void engine_read(const Clock& clock, std::uint32_t shared, std::size_t bytes, Agent agent, std::uint32_t piece,
                 const void* from) {
  if (!enabled) return;
  settle();
  const Access now = of_engine(agent, piece, from);
  const Visit visit(clock, now);
  visit.each(place_of(shared), bytes, [&](Cell& cell, const SharedPlace& at) { visit.read(cell, at); });
}
void engine_read(std::uint32_t shared, std::size_t bytes, Agent agent, std::uint32_t piece, const void* from) {
  if (enabled) engine_read(clock_of(*current), shared, bytes, agent, piece, from);
}

}  // namespace race
}  // namespace simt
