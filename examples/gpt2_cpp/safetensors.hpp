// One *.safetensors file: u64 length of a JSON header, the header, the data. Used by gpt2.hpp.
// Every offset is checked against the file before it is used.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashkernel/dtype.hpp"
#include "json.hpp"

namespace gpt2 {

namespace fk = flashkernel;

inline float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1F;
  std::uint32_t mantissa = bits & 0x3FFu, result;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&result, &value, 4);
    result |= sign;
  } else {
    result = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  float value;
  std::memcpy(&value, &result, 4);
  return value;
}

class Safetensors {
 public:
  explicit Safetensors(const std::string& path) : path_(path), file_(read_file(path)) {
    std::uint64_t header_bytes = 0;
    if (file_.size() >= 8) std::memcpy(&header_bytes, file_.data(), 8);  // little-endian, as the machines that run this
    if (file_.size() < 8 || header_bytes > file_.size() - 8) fail("is not a safetensors file");
    header_ = Json::parse(file_.substr(8, header_bytes));
    data_ = 8 + header_bytes;
  }

  bool contains(const std::string& name) const { return !header_[name].is_null(); }

  /// The values of `name`, which must have `shape`, as bytes of `dtype`: float32 from F32, F16 or BF16; float16 from
  /// F16.
  std::vector<std::uint8_t> read(const std::string& name, const std::vector<std::int64_t>& shape,
                                 fk::DType dtype) const {
    const Json& entry = header_[name];
    if (entry.is_null()) fail("has no tensor " + name);
    std::uint64_t count = 1;
    const std::vector<Json>& dims = entry["shape"].array();
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (dims.size() != shape.size() || dims[d].integer() != shape[d]) fail(name + " has not the config's shape");
      count *= static_cast<std::uint64_t>(shape[d]);
    }
    const std::string& stored = entry["dtype"].string();
    const std::uint64_t width = stored == "F32" ? 4 : stored == "F16" || stored == "BF16" ? 2 : 0;
    const std::vector<Json>& offsets = entry["data_offsets"].array();
    const auto begin = static_cast<std::uint64_t>(offsets.at(0).integer());
    const auto end = static_cast<std::uint64_t>(offsets.at(1).integer());
    if (width == 0) fail(name + " is " + stored + "; F32, F16 or BF16 is needed");
    if (begin > end || end > file_.size() - data_ || end - begin != count * width)
      fail(name + " lies outside of the file");
    const char* from = file_.data() + data_ + begin;
    std::vector<std::uint8_t> values(count * fk::dtype_bytes(dtype));
    if ((stored == "F32" && dtype == fk::DType::kFloat32) || (stored == "F16" && dtype == fk::DType::kFloat16)) {
      std::memcpy(values.data(), from, values.size());
    } else if (dtype == fk::DType::kFloat32) {
      for (std::uint64_t i = 0; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, from + 2 * i, 2);
        const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;  // BF16 is the upper half of F32
        float value = half_to_float(bits);
        if (stored == "BF16") std::memcpy(&value, &wide, 4);
        std::memcpy(values.data() + 4 * i, &value, 4);
      }
    } else {
      fail(name + " is " + stored + "; run in float32, or store F16");
    }
    return values;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(path_ + ": " + what); }

  std::string path_, file_;
  Json header_;
  std::size_t data_ = 0;
};

}  // namespace gpt2
