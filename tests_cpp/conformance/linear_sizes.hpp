// Sizes of linear's cases that the tests of plans for sm90a read, too: on a GPU of 132 multiprocessors and on the
// emulated one of four each takes the kernel that it is there for.
#pragma once

#include <cstdint>

namespace flashkernel::conformance {

/// Cases "edges": ping-pong tiles of each width, whose last ones share most of their rows and columns with those
/// before.
inline constexpr std::int64_t kEdgeRows = 778, kEdgeRowsEmulated = 123, kEdgeIn = 392;

struct LinearEdge {
  std::int64_t columns;            // of a tile
  std::int64_t out, out_emulated;  // on a GPU of 132 multiprocessors, on the emulated one of four
};
inline constexpr LinearEdge kLinearEdges[] = {
    {64, 904, 248},   {80, 1160, 264},  {112, 1912, 400},  // one tile a multiprocessor
    {112, 4040, 776}, {128, 4616, 904}, {144, 2456, 520}, {160, 2728, 584},
    {168, 2888, 648}, {176, 3032, 680}, {192, 3272, 712},
};

/// Cases "few": as few rows as a decode step has. The plan (cuda/linear/few_rows/sm90a/plan.hpp) in words: which
/// kernel; of blocks how many share k, or else how many features one has, and how many a multiprocessor has at a time.
struct FewRowsSize {
  const char* plan;
  std::int64_t rows, in;
  std::int64_t out, out_emulated;
  const char* plan_emulated = nullptr;  // where it is another one
  bool along_out = false;               // the weights
};
inline constexpr FewRowsSize kFewRowsSizes[] = {
    // One, two and three tiles of 8 features for each multiprocessor, the last one cut, with all of k in registers.
    {"direct 1", 1, 3072, 1053, 29},
    {"direct 1", 8, 992, 1053, 29},
    {"direct 1", 2, 3872, 1053, 29},
    {"direct 2", 5, 1504, 2109, 61},
    {"direct 2", 7, 800, 2109, 61},
    {"direct 3", 8, 992, 3165, 93},
    {"direct 3", 3, 736, 3165, 93},
    // k in one slot, by one copy or a copy a row; in slots of 1024 or 2048, which end with it or in the middle of the
    // warps' chunks. Blocks share the features evenly: a part of a tile of 8, and one more in some.
    {"stream", 2, 1600, 11624, 360},
    {"stream", 3, 2016, 9512, 296},
    {"stream", 1, 2592, 7400, 232},
    {"stream", 4, 3072, 6344, 200},
    {"stream", 1, 4096, 4760, 152},
    {"stream", 2, 4128, 4760, 152},
    {"stream", 4, 8192, 2648, 152},
    {"stream", 3, 9376, 2648, 152},
    {"stream", 1, 16384, 2648, 152},
    {"stream", 8, 2048, 26408, 808},
    {"stream", 5, 4096, 13208, 408},
    {"stream", 7, 8192, 6408, 200},
    // All of k in a block: 64 features with lines in pairs and without, less, more; two blocks a multiprocessor; more
    // than one round of these.
    {"blocks of 64, 1, pairs", 6, 2112, 8432, 240},
    {"blocks of 64, 1, pairs", 9, 2048, 8432, 240},
    {"blocks of 64, 1, pairs", 40, 2176, 8432, 240},
    {"blocks of 64, 1, pairs", 64, 2048, 8432, 240},
    {"blocks of 64, 1", 13, 2088, 8432, 240},
    {"blocks of 40, 1", 16, 2112, 5272, 152},
    {"blocks of 40, 1", 27, 2064, 5272, 152},
    {"blocks of 40, 1", 64, 1096, 5272, 152},
    {"blocks of 40, 2", 9, 1096, 5272, 152},
    {"blocks of 40, 2", 32, 776, 5272, 152},
    {"blocks of 32, 2", 3, 1160, 4200, 104},
    {"blocks of 72, 1", 13, 1544, 9496, 280},
    {"blocks of 72, 1", 30, 2112, 9496, 280},
    {"blocks of 72, 1", 64, 776, 9496, 280},
    {"blocks of 56, 2", 16, 1096, 14768, 432},
    {"blocks of 56, 2", 48, 264, 14768, 432},
    {"blocks of 72, 2", 24, 392, 18984, 552},
    {"blocks of 72, 2", 9, 264, 37984, 1120},
    {"blocks of 48, 2", 40, 264, 37984, 1120},
    {"blocks of 64, 1", 13, 2112, 6376, 232, nullptr, true},
    {"blocks of 64, 2", 64, 1096, 6376, 232, nullptr, true},
    // Parts of k.
    {"2 parts, 2", 16, 296, 2920, 56},
    {"2 parts of 48, 1", 64, 2056, 2920, 56, "8 parts, 2"},
    {"2 parts of 48, 1", 8, 16448, 2920, 56, "8 parts, 2"},
    {"2 parts, 1", 11, 16448, 3560, 40, "8 parts, 2"},
    {"4 parts, 2", 24, 600, 1576, 40},
    {"4 parts, 1", 40, 4104, 1576, 40, "8 parts, 2"},
    {"8 parts, 2", 33, 2056, 872, 40},
    {"8 parts, 1", 64, 8200, 872, 40},
    {"8 parts, 2", 27, 2056, 872, 40, nullptr, true},
};

}  // namespace flashkernel::conformance
