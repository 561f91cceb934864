// The lists of a decode step: what must hold of them, and that each mutation is refused.
#include "cuda/decode_step/check_list.hpp"

#include <gtest/gtest.h>

#include <string>

namespace flashkernel::cuda::decode_step {
namespace {

constexpr std::size_t kShared = 227 * 1024;

Geometry llama_1b(int rows, int blocks) {
  Geometry g;
  g.rows = rows, g.layers = 16, g.hidden = 2048, g.heads_q = 32, g.heads_kv = 8, g.head_dim = 64;
  g.inner = 8192, g.outputs = 128256;
  return cut(g, blocks);
}
Geometry small(int blocks) {
  Geometry g;
  g.rows = 2, g.layers = 2, g.hidden = 96, g.heads_q = 4, g.heads_kv = 2, g.head_dim = 64;
  g.inner = 160, g.outputs = 101;
  return cut(g, blocks);
}
std::string why(const Geometry& g, const Lists& lists) {
  const char* const found = check_lists(g, lists, kShared);
  return found ? found : "";
}

TEST(DecodeStepPlan, ListsOfEveryGeometryMayRun) {
  for (const int rows : {1, 2, 5, 8})
    for (const int blocks : {1, 4, 78, 114, 132, 144}) {
      const Geometry g = llama_1b(rows, blocks);
      EXPECT_EQ(why(g, lists_of(g)), "") << rows << " rows, " << blocks << " blocks";
    }
  for (const int blocks : {1, 3, 16, 132}) EXPECT_EQ(why(small(blocks), lists_of(small(blocks))), "") << blocks;
}

TEST(DecodeStepPlan, BlocksHaveEqualShares) {
  const Geometry g = llama_1b(1, 132);
  for (int phase = 0; phase < g.phases(); ++phase) {
    int least = 1 << 30, most = 0;
    for (int block = 0; block < g.blocks; ++block) {
      const int count = instruction_of(g, block, phase).count;
      least = std::min(least, count), most = std::max(most, count);
    }
    EXPECT_LE(most - least, 1) << phase;
  }
  EXPECT_EQ(g.parts, 16);
  EXPECT_EQ(llama_1b(8, 132).parts, 2);
}

TEST(DecodeStepPlan, EveryRowOfAMatrixIsInOneUnit) {
  const Geometry g = small(4);
  for (const Opcode op : {Opcode::kQkv, Opcode::kOut, Opcode::kGateUp, Opcode::kDown, Opcode::kHead}) {
    std::vector<int> seen(static_cast<std::size_t>(g.matrix_rows(op)), 0);
    for (int unit = 0; unit < g.units(op); ++unit)
      for (int i = 0; i < kUnitRows; ++i)
        if (op != Opcode::kHead || unit * kUnitRows + i < g.outputs)
          ++seen[static_cast<std::size_t>(g.row_of(op, unit, i))];
    for (std::size_t row = 0; row < seen.size(); ++row) EXPECT_EQ(seen[row], 1) << static_cast<int>(op) << " " << row;
  }
}

TEST(DecodeStepPlan, EachMutationIsRefused) {
  const Geometry g = small(3);
  const Lists good = lists_of(g);
  int tried = 0;
  const auto refused = [&](const char* what, std::size_t block, std::size_t at, auto mutate) {
    Lists lists = good;
    mutate(lists[block]);
    EXPECT_NE(why(g, lists), "") << what << " of instruction " << at << " of block " << block;
    ++tried;
  };
  for (std::size_t block = 0; block < good.size(); ++block)
    for (std::size_t at = 0; at < good[block].size(); ++at) {
      const Instruction& now = good[block][at];
      const auto change = [&](const char* what, auto edit) {
        refused(what, block, at, [&](std::vector<Instruction>& list) { edit(list[at]); });
      };
      if (now.wait >= 0) {
        change("no wait", [](Instruction& i) { i.wait = -1; });
        change("an earlier wait", [](Instruction& i) { --i.wait; });
        change("a wait for fewer", [](Instruction& i) { --i.target; });
        change("a wait for more", [](Instruction& i) { ++i.target; });
      }
      if (now.raise >= 0) {
        change("no arrival", [](Instruction& i) { i.raise = -1; });
        change("another arrival", [](Instruction& i) { ++i.raise; });
      }
      change("a unit less", [](Instruction& i) { --i.count; });
      change("a unit more", [](Instruction& i) { ++i.count; });
      change("other units", [](Instruction& i) { ++i.first; });
      change("another k", [](Instruction& i) { ++i.k; });
      change("another layer", [](Instruction& i) { i.layer ^= 1; });
      refused("nothing", block, at,
              [&](std::vector<Instruction>& list) { list.erase(list.begin() + static_cast<std::ptrdiff_t>(at)); });
      refused("twice", block, at, [&](std::vector<Instruction>& list) { list.push_back(list[at]); });
      if (at > 0)
        refused("before the one before", block, at,
                [&](std::vector<Instruction>& list) { std::swap(list[at], list[at - 1]); });
    }
  EXPECT_GT(tried, 300);
}

TEST(DecodeStepPlan, SharedMemoryHoldsTheRing) {
  const Geometry g = small(3);
  EXPECT_STREQ(check_lists(g, lists_of(g), 99 * 1024), "the ring does not fit");
}

}  // namespace
}  // namespace flashkernel::cuda::decode_step
