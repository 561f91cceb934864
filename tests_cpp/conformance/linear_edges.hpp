// Sizes of linear's cases "edges", which the test of Hopper's plan reads, too: each takes ping-pong tiles of its width,
// whose last ones share most of their rows and columns with those before.
#pragma once

#include <cstdint>

namespace flashkernel::conformance {

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

}  // namespace flashkernel::conformance
