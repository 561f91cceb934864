// See mbarrier.hpp. A barrier lives in the 8 bytes that the kernel gives it, so that using them for something else too
// is noticed.
#include "simt/mbarrier.hpp"

#include <cstring>
#include <map>
#include <vector>

#include "simt/race.hpp"
#include "simt/shared.hpp"

namespace simt {
namespace {

constexpr std::int64_t kMostCount = (1 << 20) - 1;  // of arrivals, and of bytes under way
constexpr std::uint64_t kMagic = 2;                 // neither 0 nor poison

struct State {
  std::int64_t pending, count, bytes;
  unsigned phase;
};

struct Waiter {
  Thread* thread;
  std::uint32_t barrier;
};
std::vector<Waiter>& waiters() {
  static std::vector<Waiter>& all = *new std::vector<Waiter>;
  return all;
}

// Barriers whose phase waits for bytes, or has more than were announced, and who touched them last.
std::map<std::uint32_t, Where>& with_bytes() {
  static auto& all = *new std::map<std::uint32_t, Where>;
  return all;
}

// For race.hpp: what arrivals of this phase bring, and what waiting for the last one gives.
struct Knowledge {
  race::Clock open, done;
  race::Agent agent = 0;  // of the bytes; 0: none yet
  std::uint32_t num_phases = 0;
};
std::map<std::uint32_t, Knowledge>& knowledge() {
  static auto& all = *new std::map<std::uint32_t, Knowledge>;
  return all;
}

// An operation on a barrier: which one, and its name and line for messages.
struct Access {
  std::uint32_t barrier;  // as map_shared names it
  const char* what;
  Where where;

  Access(std::uint32_t address, const char* what, Where where)
      : barrier(current ? map_shared(address, current->rank) : address), what(what), where(where) {
    if (address % 8 != 0) stop("the mbarrier is not at a multiple of 8");
  }

  [[noreturn]] void stop(const char* why) const { fault(std::string(what) + " in " + text(where) + ": " + why); }

  State load() const {
    std::uint64_t bits;
    std::memcpy(&bits, shared_pointer(barrier), sizeof(bits));
    if (bits >> 62 != kMagic) stop("the mbarrier is not initialised, or was overwritten");
    State state;
    state.pending = static_cast<std::int64_t>(bits & 0xfffff);
    state.count = static_cast<std::int64_t>(bits >> 20 & 0xfffff);
    state.bytes = static_cast<std::int64_t>(bits >> 40 & 0x1fffff) - (kMostCount + 1);
    state.phase = static_cast<unsigned>(bits >> 61 & 1);
    return state;
  }

  // Ends the phase when everything is in.
  void store(State state) const {
    if (state.bytes < -kMostCount || state.bytes > kMostCount) stop("more than 2^20 - 1 bytes announced or come");
    if (state.pending == 0 && state.bytes == 0) {
      state.pending = state.count;
      state.phase ^= 1;
      if (race::enabled) {
        Knowledge& known = knowledge()[barrier];
        std::swap(known.done, known.open);
        known.open.clear();
        ++known.num_phases;
        if (known.agent) race::engine_done(known.done, known.agent, known.num_phases);
      }
      auto& all = waiters();
      for (std::size_t i = 0; i < all.size();) {
        if (all[i].barrier != barrier) {
          ++i;
          continue;
        }
        wake(all[i].thread);
        all[i] = all.back();
        all.pop_back();
      }
    }
    if (state.bytes == 0)
      with_bytes().erase(barrier);
    else
      with_bytes().insert_or_assign(barrier, where);
    const std::uint64_t bits = static_cast<std::uint64_t>(state.pending) |
                               static_cast<std::uint64_t>(state.count) << 20 |
                               static_cast<std::uint64_t>(state.bytes + kMostCount + 1) << 40 |
                               static_cast<std::uint64_t>(state.phase) << 61 | kMagic << 62;
    std::memcpy(shared_pointer(barrier), &bits, sizeof(bits));
  }
};

}  // namespace

void clear_mbarriers() {
  waiters().clear();
  with_bytes().clear();
  knowledge().clear();
}

std::string bytes_not_come() {
  if (with_bytes().empty()) return "";
  return "the kernel has ended, and " + std::to_string(with_bytes().size()) +
         " of its mbarriers count bytes that were announced and have not come (or the reverse), one of them since " +
         text(with_bytes().begin()->second);
}

EnginePiece mbarrier_piece(std::uint32_t cluster_barrier, Where where) {
  if (!race::enabled) return {};
  const Access access(cluster_barrier, "a bulk copy", where);
  race::look(access.barrier, 8, current->code);
  Knowledge& known = knowledge()[access.barrier];
  if (known.agent == 0) known.agent = race::new_agent();
  return {known.agent, known.num_phases + 1};
}

void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals, Where where) {
  const Access access(barrier, "mbarrier.init", where);
  if (arrivals < 1 || arrivals > kMostCount) access.stop("needs 1 to 2^20 - 1 arrivals");
  race::access(*current, shared_pointer(access.barrier), 8, true, __builtin_return_address(0));
  access.store({arrivals, arrivals, 0, 0});
}

void mbarrier_invalidate(std::uint32_t barrier, Where where) {
  const Access access(barrier, "mbarrier.inval", where);
  access.load();
  race::look(access.barrier, 8, __builtin_return_address(0));
  with_bytes().erase(access.barrier);
  std::memset(shared_pointer(access.barrier), kPoison, 8);
}

void mbarrier_arrive(std::uint32_t barrier, unsigned arrivals, std::uint32_t bytes, Where where) {
  const Access access(barrier, "mbarrier.arrive", where);
  State state = access.load();
  race::look(access.barrier, 8, __builtin_return_address(0));
  if (race::enabled && arrivals > 0) race::release(knowledge()[access.barrier].open);
  state.bytes += bytes;
  if (state.pending < arrivals) access.stop("one arrival more than the phase counts");
  state.pending -= arrivals;
  access.store(state);
}

void mbarrier_complete(std::uint32_t cluster_barrier, std::uint32_t bytes, Where where) {
  const Access access(cluster_barrier, "a bulk copy", where);
  State state = access.load();
  state.bytes -= bytes;
  access.store(state);
}

bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity, Where where) {
  const Access access(barrier, "mbarrier.try_wait", where);
  const bool over = access.load().phase != (parity & 1);
  race::look(access.barrier, 8, __builtin_return_address(0));
  if (over && race::enabled) race::acquire(knowledge()[access.barrier].done);
  return over;
}

void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, Where where) {
  while (!mbarrier_test(barrier, parity, where)) {
    waiters().push_back({current, map_shared(barrier, current->rank)});
    sleep("mbarrier.try_wait", where);
  }
}

}  // namespace simt
