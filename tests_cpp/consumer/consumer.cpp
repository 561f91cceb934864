// What a C++ user of the installed package sees: public headers, a linked library, typed errors across its boundary.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "flashkernel/flashkernel.hpp"

namespace fk = flashkernel;

namespace {

int failures = 0;

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

// Uniform keys: the output is the mean of the values, whatever the queries.
void attention_runs() {
  std::vector<float> q(2 * 3 * 8, 1.0f), k(2 * 4 * 8, 0.5f), v(2 * 4 * 8), out(2 * 3 * 8), lse(2 * 3);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 8 % 4);
  const auto view = [](std::vector<float>& data, std::int64_t seq) {
    return fk::TensorView(data.data(), fk::DType::kFloat32, {1, 2, seq, 8});
  };
  fk::attention(view(q, 3), view(k, 4), view(v, 4), view(out, 3),
                fk::TensorView(lse.data(), fk::DType::kFloat32, {1, 2, 3}));
  for (const float value : out)
    check(std::fabs(value - 1.5f) < 1e-5f, "attention over equal keys is the mean of the values");
}

void errors_cross_the_boundary() {
  try {
    fk::set_num_threads(0);
    check(false, "set_num_threads(0) is refused");
  } catch (const fk::InvalidArgument&) {
  }
  fk::KvPagePoolOptions options;
  options.num_pages = 1;
  options.heads_kv = 1;
  options.head_dim = 8;
  options.page_size = 16;
  fk::KvPagePool pool(options);
  fk::KvCache cache(pool);
  const fk::SequenceId sequence = cache.create();
  std::vector<std::int64_t> slots(17);
  try {
    cache.append(sequence, 17, slots.data());
    check(false, "17 tokens do not fit one page of 16");
  } catch (const fk::OutOfMemory& error) {
    check(dynamic_cast<const fk::OutOfPages*>(&error) != nullptr, "it is OutOfPages");
  }
}

}  // namespace

int main() {
  attention_runs();
  errors_cross_the_boundary();
  check(!fk::kernels().empty(), "kernels are registered");
  check(std::strlen(FLASHKERNEL_VERSION_STRING) > 0, "there is a version");
  if (failures == 0)
    std::printf("flashkernel %s works, %zu kernels\n", FLASHKERNEL_VERSION_STRING, fk::kernels().size());
  return failures;
}
