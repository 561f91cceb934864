// Argument checks that every front door shares: one sentence per refusal, always "op: what was got; what is needed".
// Invariant: all checks of an op run before its first write.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashkernel/error.hpp"
#include "flashkernel/tensor_view.hpp"
#include "ops/index_copies.hpp"
#include "ops/params_common.hpp"

namespace flashkernel {

/// A tensor by the name that a refusal gives it.
struct NamedView {
  const char* name;
  const TensorView& view;
};

class Checker {
 public:
  Checker(const char* op, Device device) : op_(op), device_(device) {}

  std::string op() const { return op_; }
  Device device() const noexcept { return device_; }

  /// Throws InvalidArgument "op: <message>".
  [[noreturn]] void fail(const std::string& message) const;
  void require(bool condition, const std::string& message) const {
    if (!condition) fail(message);
  }

  /// Present, on the op's device, data not null unless empty, sizes that fit 64 bits.
  void tensor(const char* name, const TensorView& view) const;
  void floating(const char* name, const TensorView& view) const;  // float32, float16 or bfloat16
  void index(const char* name, const TensorView& view) const;     // int32 or int64
  void dtype(const char* name, const TensorView& view, DType needed) const;
  void ndim(const char* name, const TensorView& view, int least, int most) const;
  /// shape[d] == needed, where `why` says what it must agree with: "q.shape[3]".
  void extent(const char* name, const TensorView& view, int d, std::int64_t needed, const char* why) const;
  void same_shape(const char* name, const TensorView& view, const char* other_name, const TensorView& other) const;
  /// The other's dtype and shape.
  void like(const char* name, const TensorView& view, const char* other_name, const TensorView& other) const;
  void last_dim_contiguous(const char* name, const TensorView& view) const;
  void contiguous(const char* name, const TensorView& view) const;
  /// Written tensors must not overlap themselves: no two indices may name one element.
  void writable(const char* name, const TensorView& view) const;
  /// fp32 or the op's dtype: biases, weights of norms.
  void float32_or(const char* name, const TensorView& view, DType op_dtype) const;
  /// A vector of `length` in fp32 or the op's dtype, contiguous; an absent view gives a null pointer.
  TypedPointer optional_vector(const char* name, const TensorView& view, std::int64_t length, DType op_dtype) const;
  /// The same in any floating dtype.
  TypedPointer optional_floating_vector(const char* name, const TensorView& view, std::int64_t length) const;
  /// A written tensor must share no element with the other, in whole or in part. Interleaved slices of one buffer pass:
  /// the answer is exact. Absent views pass. What cannot be told by bounded work is refused (ops/overlap.hpp).
  void no_overlap(const char* name, const TensorView& written, const char* other_name, const TensorView& other) const;
  /// `no_overlap` with each of the others.
  void apart(const char* name, const TensorView& written, std::initializer_list<NamedView> others) const;
  /// The written view is the very same tensor as the other, or shares no memory with it (as `no_overlap`).
  void same_or_apart(const char* name, const TensorView& written, const char* other_name,
                     const TensorView& other) const;
  /// first <= indices[i] < end for i < count, where the indices are on the host (on a GPU nothing is read); `bound`
  /// says what `end` is: "num_pages". The lowest int64 as `first` means no lower bound.
  void indices_in_range(const char* name, IndexArray indices, std::int64_t count, std::int64_t first, std::int64_t end,
                        const char* bound) const;
  /// A 1-D run of indices: what is to be checked and used is the copy that is returned (on a GPU, the array itself).
  IndexArray index_array(const char* name, const TensorView& view, std::int64_t needed_length,
                         IndexCopies& copies) const;

 private:
  [[noreturn]] void fail_untold(const char* name, const TensorView& written, const char* other_name,
                                const TensorView& other) const;

  const char* op_;
  Device device_;
};

/// "op: q.shape[3]=96" style pieces.
std::string shape_text(const char* name, const TensorView& view, int d);

/// A view with leading dims of 1 added until it has `ndim` dims.
TensorView with_leading_dims(const TensorView& view, int ndim);

}  // namespace flashkernel
