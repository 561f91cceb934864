// See test_tensor.hpp. Memory that spans little is poisoned and watched whole; memory that spans gigabytes (strides
// past 2^31) is reserved, not committed, and watched around each element.
#include "conformance/test_tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "conformance/device_memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Compiled a second time for processors with AVX2: the same operations on twice as many numbers. (No FMA, which would
// give others.) Not under sanitizers, which are not ready yet when the choice is made.
#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FK_WIDER_VECTORS __attribute__((target_clones("avx2", "default")))
#define FK_INLINE inline __attribute__((always_inline))
#else
#define FK_WIDER_VECTORS
#define FK_INLINE inline
#endif

namespace flashkernel::conformance {
namespace {

constexpr std::int64_t kGuard = 64;                           // watched elements on both sides
constexpr std::int64_t kSparseBytes = std::int64_t{1} << 26;  // 64 MiB: from here on, only around the elements

// An IEEE format as a type: a loop over elements knows its format while it is compiled.
template <int kMantissa, int kExponent>
struct Format {
  static constexpr int mantissa_bits = kMantissa, exponent_bits = kExponent, bias = (1 << (kExponent - 1)) - 1;
};

std::uint64_t bits_of(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
double double_of(std::uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
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
    case DType::kInt4x2:
    case DType::kFloat4E2M1x2:
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

// Elements [begin, end) of a tensor's memory.
struct Span {
  std::int64_t begin, end;
};

// Calls f with a word of the size of the dtype's elements.
template <class F>
decltype(auto) with_word(DType dtype, F&& f) {
  switch (dtype_bytes(dtype)) {
    case 1: return f(std::uint8_t{});
    case 2: return f(std::uint16_t{});
    case 4: return f(std::uint32_t{});
    default: return f(std::uint64_t{});
  }
}

double decode_e4m3(std::uint64_t bits) {
  const int field = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  const double magnitude = (bits & 0x7f) == 0x7f ? std::numeric_limits<double>::quiet_NaN()
                           : field == 0          ? std::ldexp(mantissa, -9)
                                                 : std::ldexp(mantissa + 8, field - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

template <class F>
std::uint64_t encode_ieee(F format, double value) {
  const std::uint64_t sign =
      std::signbit(value) ? std::uint64_t{1} << (format.mantissa_bits + format.exponent_bits) : 0;
  const double magnitude = std::abs(value);
  // The usual case, in the bits of the double: drop the mantissa's low end, half to even, and move the bias.
  if (magnitude >= std::ldexp(1.0, 1 - format.bias) && magnitude < std::ldexp(1.0, format.bias)) {
    const int dropped = 52 - format.mantissa_bits;
    const std::uint64_t bits = bits_of(magnitude);
    const std::uint64_t rounded = bits + (std::uint64_t{1} << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return sign | ((rounded >> dropped) - (static_cast<std::uint64_t>(1023 - format.bias) << format.mantissa_bits));
  }
  const std::uint64_t infinity = ((std::uint64_t{1} << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(value)) return sign | infinity | (std::uint64_t{1} << (format.mantissa_bits - 1));
  if (std::isinf(value)) return sign | infinity;
  // Units of the last place of value's binade (or of the subnormals), rounded half to even.
  int exponent = magnitude == 0 ? 1 - format.bias : std::max(std::ilogb(magnitude), 1 - format.bias);
  double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  if (units >= std::ldexp(1.0, format.mantissa_bits + 1)) {
    units /= 2;
    ++exponent;
  }
  if (exponent > format.bias) return sign | infinity;
  const auto mantissa = static_cast<std::uint64_t>(units);
  // The hidden bit, when there is one, adds one to the exponent field.
  return sign | ((static_cast<std::uint64_t>(exponent + format.bias - 1) << format.mantissa_bits) + mantissa);
}

template <class F>
double decode_ieee(F format, std::uint64_t bits) {
  const std::uint64_t mantissa = bits & ((std::uint64_t{1} << format.mantissa_bits) - 1);
  const int field = static_cast<int>((bits >> format.mantissa_bits) & ((1u << format.exponent_bits) - 1));
  const bool negative = (bits >> (format.mantissa_bits + format.exponent_bits)) & 1;
  double value;
  if (field == (1 << format.exponent_bits) - 1) {
    value = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (field == 0) {
    value = static_cast<double>(mantissa) * std::ldexp(1.0, 1 - format.bias - format.mantissa_bits);
  } else {
    value = double_of((static_cast<std::uint64_t>(field + 1023 - format.bias) << 52) |
                      (mantissa << (52 - format.mantissa_bits)));
  }
  return negative ? -value : value;
}

// Calls f with two functions, one value to bits and back: what is chosen by the dtype is chosen once, not an element.
template <class F>
decltype(auto) with_codec(DType dtype, F&& f) {
  const auto ieee = [&](auto format) {
    return f([format](double value) { return encode_ieee(format, value); },
             [format](std::uint64_t bits) { return decode_ieee(format, bits); });
  };
  const auto integer = [&](auto zero) {
    return f([](double value) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); },
             [](std::uint64_t bits) { return static_cast<double>(static_cast<decltype(zero)>(bits)); });
  };
  switch (dtype) {
    case DType::kFloat32: return ieee(Format<23, 8>{});
    case DType::kFloat16: return ieee(Format<10, 5>{});
    case DType::kBFloat16: return ieee(Format<7, 8>{});
    case DType::kFloat8E4M3: return f(encode_e4m3, decode_e4m3);
    case DType::kInt32: return integer(std::int32_t{});
    case DType::kInt4x2:
    case DType::kFloat4E2M1x2:  // bytes of two elements
    case DType::kUInt8: return integer(std::uint8_t{});
    case DType::kInt8: return integer(std::int8_t{});
    default: return integer(std::int64_t{});
  }
}

}  // namespace

std::uint64_t encode(DType dtype, double value) {
  return with_codec(dtype, [&](auto to_bits, auto) { return to_bits(value); });
}

double decode(DType dtype, std::uint64_t bits) {
  return with_codec(dtype, [&](auto, auto from_bits) { return from_bits(bits); });
}

std::uint64_t Random::bits() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

// A normal number from two uniform ones in [0, 1): sqrt(-2 log(1 - u)) cos(2 pi v). Tests spend a good part of their
// time on it, so that logarithm and cosine are polynomials without a branch, which compilers make vectors of; within
// two units in the last place of a double. Written out, since under a sanitizer a loop over the coefficients stays one,
// with its divisions.
FK_INLINE double box_muller(double u, double v) {
  // 1 - u = m 2^e with m between sqrt(1/2) and sqrt(2); log(m) by the series of 2 artanh(s), |s| < 0.172.
  constexpr std::uint64_t kRootHalf = 0x3fe6a09e667f3bcdull, kOffset = 64;
  const std::uint64_t bits = bits_of(1 - u), field = (bits - kRootHalf + (kOffset << 52)) >> 52;  // e + 64
  const double m = double_of(bits + (kOffset << 52) - (field << 52));
  const double e = double_of(field | 0x4330000000000000ull) - (0x1p52 + 64);
  const double s = (m - 1) / (m + 1), z = s * s;
  double log = 1.0 / 21;
  log = log * z + 1.0 / 19, log = log * z + 1.0 / 17, log = log * z + 1.0 / 15, log = log * z + 1.0 / 13;
  log = log * z + 1.0 / 11, log = log * z + 1.0 / 9, log = log * z + 1.0 / 7, log = log * z + 1.0 / 5;
  log = log * z + 1.0 / 3, log = log * z + 1;
  log = e * 0.69314718055994530942 + 2 * s * log;
  // cos(2 pi v) = -cos(2 pi (v - 1/2)) = -sin(2 pi (1/4 - |v - 1/2|)), by Taylor's series up to pi / 2.
  const double x = 6.283185307179586477 * (0.25 - std::abs(v - 0.5)), y = x * x;
  double sine = 1 - y * (1.0 / (22 * 23));
  sine = 1 - sine * y * (1.0 / (20 * 21)), sine = 1 - sine * y * (1.0 / (18 * 19));
  sine = 1 - sine * y * (1.0 / (16 * 17)), sine = 1 - sine * y * (1.0 / (14 * 15));
  sine = 1 - sine * y * (1.0 / (12 * 13)), sine = 1 - sine * y * (1.0 / (10 * 11));
  sine = 1 - sine * y * (1.0 / (8 * 9)), sine = 1 - sine * y * (1.0 / (6 * 7));
  sine = 1 - sine * y * (1.0 / (4 * 5)), sine = 1 - sine * y * (1.0 / (2 * 3));
  return std::sqrt(-2 * log) * -(x * sine);
}

FK_WIDER_VECTORS void Random::normals(double* values, std::size_t count) {
  constexpr std::size_t kBlock = 128;
  double u[kBlock], v[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    for (std::size_t i = 0; i < size; ++i) u[i] = uniform(), v[i] = uniform();
    for (std::size_t i = 0; i < size; ++i) values[begin + i] = box_muller(u[i], v[i]);
  }
}

double Random::normal() {
  const double u = uniform();
  return box_muller(u, uniform());
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
  Memory(std::size_t bytes, Device device, bool blank) : bytes(bytes), device(device) {
#if defined(__linux__)
    data = static_cast<unsigned char*>(mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (data == MAP_FAILED)
      throw std::runtime_error("TestTensor: no address space for " + std::to_string(bytes) + " bytes");
#else
    data = static_cast<unsigned char*>(std::malloc(std::max<std::size_t>(bytes, 1)));
    if (!data) throw std::bad_alloc();
#endif
    if (!device.is_cpu() && !blank) twin = static_cast<unsigned char*>(device_allocate(device, bytes));
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

  template <class Word>
  Word* words() const {
    return reinterpret_cast<Word*>(data);
  }

  unsigned char* data;
  unsigned char* twin = nullptr;
  std::size_t bytes;
  Device device;
  std::vector<Span> touched;  // all that is poisoned, watched or set: everything, or the surroundings of the elements
  std::vector<Span> watched;  // touched, without the elements
};

TestTensor::TestTensor(std::string name, DType dtype, Shape shape, const Layout& layout, Device device, bool blank)
    : name_(std::move(name)), dtype_(dtype), shape_(std::move(shape)), device_(device), blank_(blank) {
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
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    const std::int64_t reach = (std::max<std::int64_t>(shape_[d], 1) - 1) * strides_[d];
    (reach < 0 ? low : high) += reach;
    numel_ *= shape_[d];
    if (shape_[d] == 1) continue;
    if (!dims_.empty() && dims_.back().stride == shape_[d] * strides_[d]) {
      dims_.back() = {dims_.back().extent * shape_[d], strides_[d]};
    } else {
      dims_.push_back({shape_[d], strides_[d]});
    }
  }
  if (dims_.empty()) dims_.push_back({1, 1});
  first_ = kGuard + layout.offset - low;
  extent_ = first_ + high + 1 + kGuard;
  memory_ = std::make_shared<Memory>(static_cast<std::size_t>(extent_) * dtype_bytes(dtype_), device_, blank_);
  if (blank_) return;
  if (extent_ * static_cast<std::int64_t>(dtype_bytes(dtype_)) < kSparseBytes) {
    watch_everything();
  } else {
    watch_surroundings();
  }
  poison_all();
  poison_elements();
}

TestTensor::~TestTensor() = default;
TestTensor::TestTensor(TestTensor&&) noexcept = default;

TestTensor TestTensor::same_memory() const {
  TestTensor other(*this);
  other.blank_ = true;
  return other;
}

// Calls f(index of the first, position of it, count, stride) for the elements of each row of dims_'s innermost.
template <class F>
void TestTensor::for_each_row(F&& f) const {
  const auto [extent, stride] = dims_.back();
  if (numel_ == 0) return;
  for (std::int64_t index = 0; index < numel_; index += extent) f(index, position(index), extent, stride);
}

void TestTensor::watch_everything() {
  memory_->touched = {{0, extent_}};
  std::vector<unsigned char> is_element(static_cast<std::size_t>(extent_), 0);
  for_each_row([&](std::int64_t, std::int64_t at, std::int64_t count, std::int64_t stride) {
    if (stride == 1) std::memset(is_element.data() + at, 1, static_cast<std::size_t>(count));
    if (stride != 1)
      for (std::int64_t i = 0; i < count; ++i) is_element[static_cast<std::size_t>(at + i * stride)] = 1;
  });
  const auto first = is_element.begin(), last = is_element.end();
  for (auto at = first; at != last;) {
    const auto end = std::find(at, last, 1);
    if (end != at) memory_->watched.push_back({at - first, end - first});
    at = std::find(end, last, 0);
  }
}

void TestTensor::watch_surroundings() {
  std::vector<std::int64_t> elements(static_cast<std::size_t>(numel_));
  for (std::int64_t i = 0; i < numel_; ++i) elements[static_cast<std::size_t>(i)] = position(i);
  std::sort(elements.begin(), elements.end());
  std::vector<Span>& touched = memory_->touched;
  for (const std::int64_t element : elements) {
    const Span around = {std::max<std::int64_t>(element - kGuard, 0), std::min(element + kGuard + 1, extent_)};
    if (touched.empty() || around.begin > touched.back().end) touched.push_back(around);
    touched.back().end = around.end;
  }
  auto element = elements.begin();
  for (const Span& span : touched) {
    std::int64_t at = span.begin;
    for (; element != elements.end() && *element < span.end; ++element) {
      if (*element > at) memory_->watched.push_back({at, *element});
      at = *element + 1;
    }
    if (at < span.end) memory_->watched.push_back({at, span.end});
  }
}

void TestTensor::upload() {
  if (!memory_->twin) return;
  const std::size_t size = dtype_bytes(dtype_);
  for (const auto& [begin, end] : memory_->touched) {
    const std::size_t at = static_cast<std::size_t>(begin) * size;
    copy_to_device(device_, memory_->twin + at, memory_->data + at, static_cast<std::size_t>(end - begin) * size);
  }
}

void TestTensor::download() {
  if (!memory_->twin) return;
  const std::size_t size = dtype_bytes(dtype_);
  for (const auto& [begin, end] : memory_->touched) {
    const std::size_t at = static_cast<std::size_t>(begin) * size;
    copy_from_device(device_, memory_->data + at, memory_->twin + at, static_cast<std::size_t>(end - begin) * size);
  }
}

void TestTensor::poison_all() {
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    Word* const words = memory_->words<Word>();
    for (const auto& [begin, end] : memory_->watched)
      std::fill(words + begin, words + end, static_cast<Word>(poison_bits(dtype_)));
  });
}

void TestTensor::poison_elements() {
  if (blank_) return;
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    Word* const words = memory_->words<Word>();
    const auto poison = static_cast<Word>(poison_bits(dtype_));
    for_each_row([&](std::int64_t, std::int64_t at, std::int64_t count, std::int64_t stride) {
      for (std::int64_t i = 0; i < count; ++i) words[at + i * stride] = poison;
    });
  });
}

std::string TestTensor::damage() const {
  return with_word(dtype_, [&](auto zero) -> std::string {
    using Word = decltype(zero);
    const Word* const words = memory_->words<Word>();
    const auto poison = static_cast<Word>(poison_bits(dtype_));
    for (const auto& [begin, end] : memory_->watched)
      for (std::int64_t i = begin; i < end; ++i)
        if (words[i] != poison)
          return name_ + ": memory outside the tensor changed, " + std::to_string(i - first_) +
                 " elements from its first";
    return "";
  });
}

std::int64_t TestTensor::position(std::int64_t index) const {
  std::int64_t at = first_;
  for (std::size_t d = dims_.size(); --d > 0;) {
    at += index % dims_[d].extent * dims_[d].stride;
    index /= dims_[d].extent;
  }
  return at + index * dims_[0].stride;
}

std::int64_t TestTensor::flat(std::initializer_list<std::int64_t> index) const {
  if (index.size() != shape_.size()) throw std::invalid_argument(name_ + ": an index of the wrong rank");
  std::int64_t at = 0;
  for (std::size_t d = 0; d < shape_.size(); ++d) at = at * shape_[d] + index.begin()[d];
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
  if (blank_) return;
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    memory_->words<Word>()[position(index)] = static_cast<Word>(encode(dtype_, value));
  });
}

double TestTensor::get(std::int64_t index) const {
  if (blank_) return 0;
  return with_word(dtype_,
                   [&](auto zero) { return decode(dtype_, memory_->words<decltype(zero)>()[position(index)]); });
}

void TestTensor::fill(const std::function<double()>& next) {
  if (blank_) return;
  std::vector<double> values(static_cast<std::size_t>(numel_));
  std::generate(values.begin(), values.end(), next);
  fill(values);
}

void TestTensor::fill(const std::vector<double>& values) {
  if (blank_) return;
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    Word* const words = memory_->words<Word>();
    with_codec(dtype_, [&](auto to_bits, auto) {
      for_each_row([&](std::int64_t index, std::int64_t at, std::int64_t count, std::int64_t stride) {
        const double* const row = values.data() + index;
        for (std::int64_t i = 0; i < count; ++i) words[at + i * stride] = static_cast<Word>(to_bits(row[i]));
      });
    });
  });
}

void TestTensor::transform(const std::function<double(double)>& f) {
  if (blank_) return;
  std::vector<double> changed = values();
  for (double& value : changed) value = f(value);
  fill(changed);
}

std::vector<double> TestTensor::values() const {
  std::vector<double> values(static_cast<std::size_t>(numel_));
  with_word(dtype_, [&](auto zero) {
    const auto* const words = memory_->words<decltype(zero)>();
    with_codec(dtype_, [&](auto, auto from_bits) {
      for_each_row([&](std::int64_t index, std::int64_t at, std::int64_t count, std::int64_t stride) {
        double* const row = values.data() + index;
        for (std::int64_t i = 0; i < count; ++i) row[i] = from_bits(words[at + i * stride]);
      });
    });
  });
  return values;
}

std::vector<unsigned char> TestTensor::snapshot() const {
  std::vector<unsigned char> bytes(static_cast<std::size_t>(numel_) * dtype_bytes(dtype_));
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    const Word* const words = memory_->words<Word>();
    for_each_row([&](std::int64_t index, std::int64_t at, std::int64_t count, std::int64_t stride) {
      Word* const row = reinterpret_cast<Word*>(bytes.data()) + index;
      for (std::int64_t i = 0; i < count; ++i) row[i] = words[at + i * stride];
    });
  });
  return bytes;
}

bool TestTensor::holds(const std::vector<unsigned char>& bytes) const {
  bool same = bytes.size() == static_cast<std::size_t>(numel_) * dtype_bytes(dtype_);
  if (!same) return false;
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    const Word* const words = memory_->words<Word>();
    for_each_row([&](std::int64_t index, std::int64_t at, std::int64_t count, std::int64_t stride) {
      const Word* const row = reinterpret_cast<const Word*>(bytes.data()) + index;
      for (std::int64_t i = 0; i < count; ++i) same &= row[i] == words[at + i * stride];
    });
  });
  return same;
}

void TestTensor::restore(const std::vector<unsigned char>& bytes) {
  with_word(dtype_, [&](auto zero) {
    using Word = decltype(zero);
    Word* const words = memory_->words<Word>();
    for_each_row([&](std::int64_t index, std::int64_t at, std::int64_t count, std::int64_t stride) {
      const Word* const row = reinterpret_cast<const Word*>(bytes.data()) + index;
      for (std::int64_t i = 0; i < count; ++i) words[at + i * stride] = row[i];
    });
  });
  poison_all();
}

}  // namespace flashkernel::conformance
