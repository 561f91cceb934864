// A tensor for tests: any dtype, any strides and offset, every byte that is not an element poisoned and watched.
// Used by conformance.hpp and by tests that want poisoned memory. Values go in and come out as double.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "flashkernel/tensor_view.hpp"

namespace flashkernel::conformance {

using Shape = std::vector<std::int64_t>;

/// One value in a dtype's bits and back, by the definition of the formats (independent of the library's own
/// conversions).
std::uint64_t encode(DType dtype, double value);
double decode(DType dtype, std::uint64_t bits);

/// splitmix64 with Box-Muller: the same numbers on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits();
  double uniform();                                           // [0, 1)
  double normal();                                            // mean 0, variance 1
  void normals(double* values, std::size_t count);            // as many calls of normal()
  std::int64_t integer(std::int64_t low, std::int64_t high);  // [low, high]
  void shuffle(std::vector<std::int64_t>& values);

 private:
  std::uint64_t state_;
};

/// Where the elements of a shape lie.
struct Layout {
  Shape strides = {};              // empty: as `order` and `gap` say
  std::vector<int> order = {};     // dims from the outermost to the innermost; empty: 0, 1, 2, ...
  std::int64_t gap = 0;            // unused elements after each run of the innermost dim
  std::int64_t offset = 0;         // elements before the first
  std::vector<int> expanded = {};  // dims with stride 0: every index is the same element
};

class TestTensor {
 public:
  /// blank: it has an address (of no device), a shape and strides, but takes no values and watches nothing.
  TestTensor(std::string name, DType dtype, Shape shape, const Layout& layout = {}, Device device = {},
             bool blank = false);
  ~TestTensor();
  TestTensor(TestTensor&&) noexcept;
  /// Another one over this one's memory. It takes no values.
  TestTensor same_memory() const;
  TestTensor& operator=(const TestTensor&) = delete;

  const std::string& name() const { return name_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t numel() const { return numel_; }
  TensorView view() const;
  /// A view of this tensor's device memory as the same view of its host image; false if `view` lies elsewhere.
  bool to_host(TensorView& view) const;

  /// Takes no values: work on them can be left out.
  bool blank() const { return blank_; }

  /// Row-major index <-> value. Rounds to the dtype.
  void set(std::int64_t index, double value);
  double get(std::int64_t index) const;
  void set_at(std::initializer_list<std::int64_t> index, double value) {
    if (!blank_) set(flat(index), value);
  }
  double get_at(std::initializer_list<std::int64_t> index) const { return get(flat(index)); }
  /// Row-major: a value a call, or all of them.
  void fill(const std::function<double()>& next);
  void fill(const std::vector<double>& values);
  /// Each value becomes f of it.
  void transform(const std::function<double(double)>& f);
  std::vector<double> values() const;
  std::int64_t flat(std::initializer_list<std::int64_t> index) const;

  /// Elements as if never written: NaN, or for integers a number that no kernel may take for an index.
  void poison_elements();
  /// Empty, or a sentence on the first byte outside the elements that changed since construction.
  std::string damage() const;
  /// All bytes of the elements; restore() puts a snapshot back, and the poison around them.
  std::vector<unsigned char> snapshot() const;
  void restore(const std::vector<unsigned char>& bytes);
  /// Whether the elements are those of a snapshot.
  bool holds(const std::vector<unsigned char>& bytes) const;

  /// Copies between the host image and the device; on the CPU they are one.
  void upload();
  void download();

 private:
  struct Memory;
  TestTensor(const TestTensor&) = default;
  std::int64_t position(std::int64_t index) const;  // element offset into memory_
  void poison_all();
  void watch_everything();
  void watch_surroundings();
  template <class F>
  void for_each_row(F&& f) const;

  struct Dim {
    std::int64_t extent, stride;
  };

  std::string name_;
  DType dtype_;
  Shape shape_, strides_;
  std::vector<Dim> dims_;  // the shape and the strides, with those merged that follow one another in memory
  Device device_;
  bool blank_;
  std::int64_t numel_ = 1;
  std::int64_t first_ = 0;   // element offset of index 0
  std::int64_t extent_ = 0;  // elements of memory
  std::shared_ptr<Memory> memory_;
};

}  // namespace flashkernel::conformance
