// See test_tensor.hpp. Memory that spans little is poisoned and watched whole; memory that spans gigabytes (strides
// past 2^31) is reserved, not committed, and watched around each element.
#include "conformance/test_tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>

#include "conformance/device_memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace flashkernel::conformance {
namespace {

constexpr std::int64_t kGuard = 64;                           // watched elements on both sides
constexpr std::int64_t kSparseBytes = std::int64_t{1} << 26;  // 64 MiB: from here on, only around the elements

struct Format {
  int mantissa_bits, exponent_bits;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return {10, 5};
    case DType::kBFloat16: return {7, 8};
    default: return {23, 8};
  }
}

// A NaN that no arithmetic makes (quiet, with a payload), or an integer that is no index.
std::uint64_t poison_bits(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 0x7fc5a5a5u;
    case DType::kFloat16: return 0x7e5au;
    case DType::kBFloat16: return 0x7fdau;
    case DType::kInt32: return 0x7f5a5a5au;
    case DType::kInt64: return 0x7f5a5a5a5a5a5a5aull;
    case DType::kUInt8:
    case DType::kInt8: return 0x5au;
    case DType::kFloat8E4M3: return 0x7fu;  // the only NaN there is
  }
  return 0;
}

// float8_e4m3fn: 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones are NaN. Rounds half to even,
// saturates.
std::uint64_t encode_e4m3(double value) {
  const std::uint64_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  const double magnitude = std::min(std::abs(value), 448.0);
  int exponent = magnitude == 0 ? -6 : std::max(std::ilogb(magnitude), -6);
  double units = std::nearbyint(std::ldexp(magnitude, 3 - exponent));
  if (units >= 16) units /= 2, ++exponent;
  return sign | ((static_cast<std::uint64_t>(exponent + 6) << 3) + static_cast<std::uint64_t>(units));
}

double decode_e4m3(std::uint64_t bits) {
  const int field = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  const double magnitude = (bits & 0x7f) == 0x7f ? std::numeric_limits<double>::quiet_NaN()
                           : field == 0          ? std::ldexp(mantissa, -9)
                                                 : std::ldexp(mantissa + 8, field - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

}  // namespace

std::uint64_t encode(DType dtype, double value) {
  if (dtype == DType::kFloat8E4M3) return encode_e4m3(value);
  if (!is_floating(dtype)) return static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
  const Format format = format_of(dtype);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const std::uint64_t sign =
      std::signbit(value) ? std::uint64_t{1} << (format.mantissa_bits + format.exponent_bits) : 0;
  const std::uint64_t infinity = ((std::uint64_t{1} << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(value)) return sign | infinity | (std::uint64_t{1} << (format.mantissa_bits - 1));
  if (std::isinf(value)) return sign | infinity;
  const double magnitude = std::abs(value);
  // Units of the last place of value's binade (or of the subnormals), rounded half to even.
  int exponent = magnitude == 0 ? 1 - bias : std::max(std::ilogb(magnitude), 1 - bias);
  double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  if (units >= std::ldexp(1.0, format.mantissa_bits + 1)) {
    units /= 2;
    ++exponent;
  }
  if (exponent > bias) return sign | infinity;
  const auto mantissa = static_cast<std::uint64_t>(units);
  // The hidden bit, when there is one, adds one to the exponent field.
  return sign | ((static_cast<std::uint64_t>(exponent + bias - 1) << format.mantissa_bits) + mantissa);
}

double decode(DType dtype, std::uint64_t bits) {
  if (dtype == DType::kInt32) return static_cast<std::int32_t>(bits);
  if (dtype == DType::kInt64) return static_cast<double>(static_cast<std::int64_t>(bits));
  if (dtype == DType::kUInt8) return static_cast<std::uint8_t>(bits);
  if (dtype == DType::kInt8) return static_cast<std::int8_t>(bits);
  if (dtype == DType::kFloat8E4M3) return decode_e4m3(bits);
  const Format format = format_of(dtype);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const std::uint64_t mantissa = bits & ((std::uint64_t{1} << format.mantissa_bits) - 1);
  const int field = static_cast<int>((bits >> format.mantissa_bits) & ((1u << format.exponent_bits) - 1));
  const bool negative = (bits >> (format.mantissa_bits + format.exponent_bits)) & 1;
  double value;
  if (field == (1 << format.exponent_bits) - 1) {
    value = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (field == 0) {
    value = std::ldexp(static_cast<double>(mantissa), 1 - bias - format.mantissa_bits);
  } else {
    value = std::ldexp(static_cast<double>(mantissa + (std::uint64_t{1} << format.mantissa_bits)),
                       field - bias - format.mantissa_bits);
  }
  return negative ? -value : value;
}

std::uint64_t Random::bits() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.283185307179586 * uniform());
}

std::int64_t Random::integer(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
}

void Random::shuffle(std::vector<std::int64_t>& values) {
  for (std::size_t i = values.size(); i > 1; --i)
    std::swap(values[i - 1], values[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(i) - 1))]);
}

// The host image, and for other devices its twin there.
struct TestTensor::Memory {
  Memory(std::size_t bytes, Device device) : bytes(bytes), device(device) {
#if defined(__linux__)
    data = static_cast<unsigned char*>(mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (data == MAP_FAILED)
      throw std::runtime_error("TestTensor: no address space for " + std::to_string(bytes) + " bytes");
#else
    data = static_cast<unsigned char*>(std::malloc(std::max<std::size_t>(bytes, 1)));
    if (!data) throw std::bad_alloc();
#endif
    if (!device.is_cpu()) twin = static_cast<unsigned char*>(device_allocate(device, bytes));
  }
  ~Memory() {
    if (twin) device_free(device, twin);
#if defined(__linux__)
    munmap(data, std::max<std::size_t>(bytes, 1));
#else
    std::free(data);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uint64_t load(std::int64_t i, std::size_t size) const {
    std::uint64_t value = 0;
    std::memcpy(&value, data + static_cast<std::size_t>(i) * size, size);
    return value;
  }
  void store(std::int64_t i, std::size_t size, std::uint64_t value) {
    std::memcpy(data + static_cast<std::size_t>(i) * size, &value, size);
  }

  unsigned char* data;
  unsigned char* twin = nullptr;
  std::size_t bytes;
  Device device;
  std::vector<bool> is_element;      // dense: one flag per element of memory
  std::vector<std::int64_t> around;  // sparse: watched positions
};

TestTensor::TestTensor(std::string name, DType dtype, Shape shape, const Layout& layout, Device device)
    : name_(std::move(name)), dtype_(dtype), shape_(std::move(shape)), device_(device) {
  const int ndim = static_cast<int>(shape_.size());
  strides_ = layout.strides;
  if (strides_.empty()) {
    strides_.assign(shape_.size(), 0);
    std::vector<int> order = layout.order;
    if (order.empty())
      for (int d = 0; d < ndim; ++d) order.push_back(d);
    std::int64_t stride = 1;
    for (auto d = order.rbegin(); d != order.rend(); ++d) {
      if (std::count(layout.expanded.begin(), layout.expanded.end(), *d)) continue;
      strides_[static_cast<std::size_t>(*d)] = stride;
      stride *= std::max<std::int64_t>(shape_[static_cast<std::size_t>(*d)], 1);
      if (d == order.rbegin()) stride += layout.gap;
    }
  }
  std::int64_t low = 0, high = 0;
  for (int d = 0; d < ndim; ++d) {
    const std::int64_t reach = (std::max<std::int64_t>(shape_[d], 1) - 1) * strides_[d];
    (reach < 0 ? low : high) += reach;
  }
  first_ = kGuard + layout.offset - low;
  extent_ = first_ + high + 1 + kGuard;
  memory_ = std::make_unique<Memory>(static_cast<std::size_t>(extent_) * dtype_bytes(dtype_), device_);
  if (extent_ * static_cast<std::int64_t>(dtype_bytes(dtype_)) < kSparseBytes) {
    memory_->is_element.assign(static_cast<std::size_t>(extent_), false);
    for (std::int64_t i = 0; i < numel(); ++i) memory_->is_element[static_cast<std::size_t>(position(i))] = true;
  } else {
    std::set<std::int64_t> elements, around;
    for (std::int64_t i = 0; i < numel(); ++i) elements.insert(position(i));
    for (const std::int64_t element : elements)
      for (std::int64_t i = std::max<std::int64_t>(element - kGuard, 0); i < std::min(element + kGuard + 1, extent_);
           ++i)
        if (!elements.count(i)) around.insert(i);
    memory_->around.assign(around.begin(), around.end());
  }
  poison_all();
  poison_elements();
}

TestTensor::~TestTensor() = default;
TestTensor::TestTensor(TestTensor&&) noexcept = default;

template <class F>
void TestTensor::for_each_watched(F&& f) const {
  for (std::size_t i = 0; i < memory_->is_element.size(); ++i)
    if (!memory_->is_element[i]) f(static_cast<std::int64_t>(i));
  for (const std::int64_t i : memory_->around) f(i);
}

template <class F>
void TestTensor::for_each_run(F&& f) const {
  if (!memory_->is_element.empty() || extent_ == 0) {
    f(std::int64_t{0}, extent_);
    return;
  }
  std::set<std::int64_t> touched(memory_->around.begin(), memory_->around.end());
  for (std::int64_t i = 0; i < numel(); ++i) touched.insert(position(i));
  for (auto at = touched.begin(); at != touched.end();) {
    const std::int64_t first = *at;
    std::int64_t last = first;
    while (++at != touched.end() && *at == last + 1) last = *at;
    f(first, last - first + 1);
  }
}

void TestTensor::upload() {
  if (!memory_->twin) return;
  const std::size_t size = dtype_bytes(dtype_);
  for_each_run([&](std::int64_t first, std::int64_t count) {
    const std::size_t at = static_cast<std::size_t>(first) * size;
    copy_to_device(device_, memory_->twin + at, memory_->data + at, static_cast<std::size_t>(count) * size);
  });
}

void TestTensor::download() {
  if (!memory_->twin) return;
  const std::size_t size = dtype_bytes(dtype_);
  for_each_run([&](std::int64_t first, std::int64_t count) {
    const std::size_t at = static_cast<std::size_t>(first) * size;
    copy_from_device(device_, memory_->data + at, memory_->twin + at, static_cast<std::size_t>(count) * size);
  });
}

void TestTensor::poison_all() {
  for_each_watched([&](std::int64_t i) { memory_->store(i, dtype_bytes(dtype_), poison_bits(dtype_)); });
}

void TestTensor::poison_elements() {
  for (std::int64_t i = 0; i < numel(); ++i) memory_->store(position(i), dtype_bytes(dtype_), poison_bits(dtype_));
}

std::string TestTensor::damage() const {
  std::string text;
  for_each_watched([&](std::int64_t i) {
    const std::uint64_t found = memory_->load(i, dtype_bytes(dtype_));
    if (text.empty() && found != poison_bits(dtype_))
      text = name_ + ": memory outside the tensor changed, " + std::to_string(i - first_) + " elements from its first";
  });
  return text;
}

std::int64_t TestTensor::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape_) count *= extent;
  return count;
}

std::int64_t TestTensor::position(std::int64_t index) const {
  std::int64_t at = first_;
  for (std::size_t d = shape_.size(); d-- > 0;) {
    at += index % shape_[d] * strides_[d];
    index /= shape_[d];
  }
  return at;
}

std::int64_t TestTensor::flat(const Shape& index) const {
  std::int64_t at = 0;
  for (std::size_t d = 0; d < shape_.size(); ++d) at = at * shape_[d] + index.at(d);
  return at;
}

TensorView TestTensor::view() const {
  TensorView view;
  view.data = (memory_->twin ? memory_->twin : memory_->data) + static_cast<std::size_t>(first_) * dtype_bytes(dtype_);
  view.dtype = dtype_;
  view.device = device_;
  view.ndim = static_cast<int>(shape_.size());
  std::copy(shape_.begin(), shape_.end(), view.shape);
  std::copy(strides_.begin(), strides_.end(), view.strides);
  return view;
}

bool TestTensor::to_host(TensorView& view) const {
  const auto* data = static_cast<const unsigned char*>(view.data);
  if (!memory_->twin || data < memory_->twin || data >= memory_->twin + memory_->bytes) return false;
  view.data = memory_->data + (data - memory_->twin);
  view.device = Device::cpu();
  return true;
}

void TestTensor::set(std::int64_t index, double value) {
  memory_->store(position(index), dtype_bytes(dtype_), encode(dtype_, value));
}

double TestTensor::get(std::int64_t index) const {
  return decode(dtype_, memory_->load(position(index), dtype_bytes(dtype_)));
}

void TestTensor::fill(const std::function<double()>& next) {
  for (std::int64_t i = 0; i < numel(); ++i) set(i, next());
}

std::vector<double> TestTensor::values() const {
  std::vector<double> values(static_cast<std::size_t>(numel()));
  for (std::int64_t i = 0; i < numel(); ++i) values[static_cast<std::size_t>(i)] = get(i);
  return values;
}

std::vector<unsigned char> TestTensor::snapshot() const {
  const std::size_t size = dtype_bytes(dtype_);
  std::vector<unsigned char> bytes(static_cast<std::size_t>(numel()) * size);
  for (std::int64_t i = 0; i < numel(); ++i)
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * size,
                memory_->data + static_cast<std::size_t>(position(i)) * size, size);
  return bytes;
}

void TestTensor::restore(const std::vector<unsigned char>& bytes) {
  const std::size_t size = dtype_bytes(dtype_);
  for (std::int64_t i = 0; i < numel(); ++i)
    std::memcpy(memory_->data + static_cast<std::size_t>(position(i)) * size,
                bytes.data() + static_cast<std::size_t>(i) * size, size);
  poison_all();
}

}  // namespace flashkernel::conformance
