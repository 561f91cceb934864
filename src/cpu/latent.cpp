// See latent.hpp. An element is looked up among the 256 that there are, times its scale.
#include "cpu/latent.hpp"

#include "core/float_types.hpp"
#include "core/thread_pool.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kNumbersOfTask = 4096;

struct Elements {
  float number[256];

  Elements() {
    for (int i = 0; i < 256; ++i) number[i] = to_float(Float8E4M3{static_cast<std::uint8_t>(i)});
  }
};

template <class T>
void widen_row(const Elements& elements, const LatentFormat& format, const std::uint8_t* row, T* to) {
  const std::int64_t narrow = format.narrow_columns();
  for (std::int64_t first = 0; first < narrow; first += kLatentGroup) {
    const float scale = format.scale_of(row, first);
    const std::int64_t last = std::min(narrow, first + kLatentGroup);
    for (std::int64_t d = first; d < last; ++d) to[d] = from_float<T>(elements.number[row[d]] * scale);
  }
  for (std::int64_t d = narrow; d < format.columns; ++d)
    to[d] = from_float<T>(to_float(BFloat16{format.bits_of(row, d)}));
}

}  // namespace

void widen_latent(const MlaDecodeParams& params, const WidenedPlan& plan, const WidenedPages& pages) {
  static const Elements elements;
  const AttentionParams& call = params.attention;
  const std::int64_t tokens = plan.pages * kWidenedPage;
  list_pages(call, plan, pages);
  visit_floating(plan.dtype, [&](auto zero) {
    using T = decltype(zero);
    // What no query sees stays as the workspace was.
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t at = begin; at < end; ++at) {
        const std::int64_t b = at / tokens, token = at % tokens;
        if (token >= call.k_length(b)) continue;
        widen_row(elements, params.format, static_cast<const std::uint8_t*>(call.k) + call.k_offset(b, 0, token),
                  static_cast<T*>(pages.k) + at * plan.dim);
      }
    };
    parallel_for(call.batch * tokens, std::max<std::int64_t>(1, kNumbersOfTask / plan.dim), task);
  });
}

}  // namespace flashkernel::cpu
