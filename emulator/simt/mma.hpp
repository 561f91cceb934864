// Products of a warp, mma.sync, with the fragment layouts of PTX ISA 9.7.14: what the last lane at a collective runs.
// Called by cuda/ptx/matrix.cuh. They lie here because the runtime is compiled with more optimisation than kernels are.
#pragma once

#include <cstdint>

namespace simt {

/// A lane's fragments: D = A B + D.
struct MmaLane {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

/// 16 x 8 of fp16 or bf16; the depth is the number.
void mma_f16_k8(void* const* lanes_data, std::uint32_t lanes);
void mma_f16_k16(void* const* lanes_data, std::uint32_t lanes);
void mma_bf16_k16(void* const* lanes_data, std::uint32_t lanes);
/// 16 x 8 x 8. The low 13 bits of a value are not read.
void mma_tf32_k8(void* const* lanes_data, std::uint32_t lanes);

}  // namespace simt
