// What the tests of the C API share: a tensor as both APIs take it, and a check of a call's status.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "c/call.hpp"
#include "flashkernel/flashkernel.h"
#include "flashkernel/flashkernel.hpp"

namespace flashkernel::c_api_tests {

namespace fk = flashkernel;
using Floats = std::vector<float>;
using Shape = std::vector<int64_t>;

inline constexpr fk_device kCpu = {FK_CPU, 0};

inline Floats random_floats(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// A tensor as both APIs take it.
struct Both {
  fk_tensor c{};
  fk::TensorView cpp;
  Both() = default;
  Both(const void* data, fk_dtype dtype, const Shape& shape) {
    EXPECT_EQ(fk_tensor_init(&c, const_cast<void*>(data), dtype, kCpu, static_cast<int>(shape.size()), shape.data()),
              FK_OK)
        << fk_last_error_message();
    cpp = fk::c::Call("test").tensor("tensor", &c);
  }
  Both(const Floats& data, const Shape& shape) : Both(data.data(), FK_FLOAT32, shape) {}
};

#define EXPECT_OK(call) EXPECT_EQ(call, FK_OK) << fk_last_error_message()

// A struct of the C API with its defaults, over bytes that held something else.
template <class Struct>
Struct made(fk_status (*init)(Struct*, size_t)) {
  Struct value;
  std::memset(&value, 0xff, sizeof value);
  EXPECT_EQ(init(&value, sizeof value), FK_OK);
  EXPECT_EQ(value.size, sizeof value);
  return value;
}

struct AttentionInputs {
  Floats q = random_floats(2 * 4 * 5 * 8, 1), k = random_floats(2 * 2 * 7 * 8, 2), v = random_floats(2 * 2 * 7 * 8, 3),
         bias = random_floats(5 * 7, 4), slopes = {0.1f, 0.2f, 0.3f, 0.4f}, sinks = {0.5f, -1.0f, 0.0f, 2.0f};
  Both q_view{q, {2, 4, 5, 8}}, k_view{k, {2, 2, 7, 8}}, v_view{v, {2, 2, 7, 8}}, bias_view{bias, {5, 7}},
      slopes_view{slopes, {4}}, sinks_view{sinks, {4}};
};

}  // namespace flashkernel::c_api_tests
