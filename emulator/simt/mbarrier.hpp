// Barriers in shared memory that count arrivals and bytes (PTX ISA, mbarrier), in the emulator's own 64 bits.
#pragma once

#include <cstdint>

#include "simt/simt.hpp"

namespace simt {

void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals, Where);
void mbarrier_invalidate(std::uint32_t barrier, Where);
/// Announces bytes, then arrives `arrivals` times (0 or 1).
void mbarrier_arrive(std::uint32_t barrier, unsigned arrivals, std::uint32_t bytes, Where);
/// Bytes have come, by the copy engine; the barrier's address is one of map_shared.
void mbarrier_complete(std::uint32_t cluster_barrier, std::uint32_t bytes, Where);
/// For race.hpp: the engine whose bytes the barrier counts, and the number of the phase that they come in.
struct EnginePiece {
  unsigned agent;
  std::uint32_t piece;
};
EnginePiece mbarrier_piece(std::uint32_t cluster_barrier, Where);
bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity, Where);
void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, Where);

}  // namespace simt
