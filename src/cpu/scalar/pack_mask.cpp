// pack_mask, a word of 32 keys at a time.
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {

void pack_mask(const PackMaskParams& p, void*, Stream) {
  const std::int64_t words = p.words();
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t row = at / words, word = at % words;
      const std::int64_t count = std::min<std::int64_t>(32, p.columns - 32 * word);
      const std::uint8_t* from = p.mask + p.offset(row, p.stride_mask) + 32 * word * p.stride_mask_column;
      std::uint32_t bits = 0;
      for (std::int64_t j = 0; j < count; ++j)
        bits |= static_cast<std::uint32_t>(from[j * p.stride_mask_column] != 0) << j;
      p.out[p.offset(row, p.stride_out) + word] = bits;
    }
  };
  parallel_for(p.rows() * words, grain_for(32), task);
}

}  // namespace flashkernel::cpu_scalar
