// Bulk groups: a thread's TMA stores, done when their group is waited for. See simt.hpp.
#include <functional>
#include <utility>

#include "simt/machine.hpp"
#include "simt/race.hpp"
#include "simt/simt.hpp"

namespace simt {

void bulk_add(std::function<void()> work) {
  if (!current->bulk) current->bulk = new BulkGroups;
  current->bulk->open.push_back(std::move(work));
}

BulkPiece bulk_piece() {
  if (!current->bulk) current->bulk = new BulkGroups;
  BulkGroups& bulk = *current->bulk;
  if (bulk.agent == 0) bulk.agent = race::new_agent();
  return {bulk.agent, bulk.num_closed + 1};
}

void bulk_commit() {
  if (!current->bulk) return;
  current->bulk->closed.push_back(std::move(current->bulk->open));
  current->bulk->open.clear();
  ++current->bulk->num_closed;
}

void bulk_wait(unsigned groups_left) {
  if (!current->bulk) return;
  auto& closed = current->bulk->closed;
  for (; closed.size() > groups_left; closed.pop_front())
    for (const auto& work : closed.front()) work();
  const BulkGroups& bulk = *current->bulk;
  if (bulk.agent) race::engine_done(bulk.agent, bulk.num_closed - static_cast<std::uint32_t>(closed.size()));
}

}  // namespace simt
