// The small types that every call is made of: views, dtypes, devices, streams, and the errors with their numbers.
#include "flashkernel/tensor_view.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "flashkernel/error.hpp"
#include "flashkernel/flashkernel.hpp"

namespace flashkernel {
namespace {

template <class Call>
std::string refusal_of(Call&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "not refused";
}

TEST(TensorView, IsAbsentUntilItIsGivenAShape) {
  const TensorView absent;
  EXPECT_FALSE(absent.defined());
  EXPECT_EQ(absent.numel(), 0);
  EXPECT_EQ(to_string(absent), "absent");
  float value = 0;
  const TensorView scalar(&value, DType::kFloat32, {});
  EXPECT_TRUE(scalar.defined());
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_TRUE(scalar.is_contiguous());
  EXPECT_EQ(to_string(scalar), "float32[] on cpu");
}

TEST(TensorView, IsRowMajorUnlessStridesAreGiven) {
  float data[24] = {};
  const TensorView view(data, DType::kFloat16, {2, 3, 4}, Device::cuda(1));
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(to_string(view), "float16[2, 3, 4] on cuda:1");
  const TensorView swapped = view.transpose(0, 2);
  EXPECT_EQ(swapped.shape[0], 4);
  EXPECT_EQ(swapped.strides[0], 1);
  EXPECT_EQ(swapped.strides[2], 12);
  EXPECT_EQ(swapped.data, view.data);
  EXPECT_FALSE(swapped.is_contiguous());
  EXPECT_TRUE(swapped.transpose(2, 0).is_contiguous());
}

TEST(TensorView, StridesOfDimsOfOneAndOfNothingDoNotMatter) {
  float data[8] = {};
  EXPECT_TRUE(TensorView(data, DType::kFloat32, {1, 8, 1}, {-5, 1, 77}).is_contiguous());
  EXPECT_TRUE(TensorView(data, DType::kFloat32, {3, 0, 2}, {9, 9, 9}).is_contiguous());
  EXPECT_FALSE(TensorView(data, DType::kFloat32, {2, 4}, {0, 1}).is_contiguous());
  EXPECT_FALSE(TensorView(data, DType::kFloat32, {2, 4}, {5, 1}).is_contiguous());
  EXPECT_FALSE(TensorView(data, DType::kFloat32, {8}, {-1}).is_contiguous());
  // An empty view keeps strides that a later resize could use: they count a dim of 0 as 1.
  const TensorView empty(data, DType::kFloat32, {2, 0, 4});
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_EQ(empty.strides[0], 4);
}

TEST(TensorView, RefusesShapesThatAreNone) {
  float value = 0;
  const auto view = [&](std::initializer_list<std::int64_t> shape) {
    return refusal_of([&] { TensorView(&value, DType::kFloat32, shape); });
  };
  EXPECT_EQ(view({1, 1, 1, 1, 1, 1, 1, 1}), "not refused");
  EXPECT_EQ(view({1, 1, 1, 1, 1, 1, 1, 1, 1}), "TensorView: 9 dims; at most 8");
  EXPECT_EQ(view({2, -3}), "TensorView: shape[1]=-3; must not be negative");
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(view({1, kMax}), "not refused");
  EXPECT_NE(view({2, kMax}).find("TensorView: shape[1]=9223372036854775807"), std::string::npos);
  EXPECT_NE(view({std::int64_t{1} << 32, 0, std::int64_t{1} << 32}).find("elements"), std::string::npos);
  const auto strided = refusal_of([&] { TensorView(&value, DType::kFloat32, {kMax, kMax}, {0, 0}); });
  EXPECT_NE(strided.find("TensorView: shape[1]="), std::string::npos) << strided;
  EXPECT_EQ(refusal_of([&] { TensorView(&value, DType::kFloat32, {1, 1}, {1}); }), "TensorView: 1 strides for 2 dims");
  const TensorView two(&value, DType::kFloat32, {1, 1});
  EXPECT_EQ(refusal_of([&] { two.transpose(0, 2); }), "TensorView::transpose: dims 0, 2 of a tensor with 2 dims");
  EXPECT_NE(refusal_of([&] { two.transpose(-1, 0); }), "not refused");
}

TEST(DTypes, SizesNamesAndKinds) {
  const struct {
    DType dtype;
    std::size_t bytes;
    const char* name;
    bool floating, quantized, index;
  } expected[] = {{DType::kFloat32, 4, "float32", true, false, false},
                  {DType::kFloat16, 2, "float16", true, false, false},
                  {DType::kBFloat16, 2, "bfloat16", true, false, false},
                  {DType::kInt32, 4, "int32", false, false, true},
                  {DType::kInt64, 8, "int64", false, false, true},
                  {DType::kUInt8, 1, "uint8", false, false, false},
                  {DType::kFloat8E4M3, 1, "float8_e4m3fn", false, true, false},
                  {DType::kInt8, 1, "int8", false, true, false}};
  for (const auto& each : expected) {
    EXPECT_EQ(dtype_bytes(each.dtype), each.bytes) << each.name;
    EXPECT_STREQ(dtype_name(each.dtype), each.name);
    EXPECT_EQ(is_floating(each.dtype), each.floating) << each.name;
    EXPECT_EQ(is_quantized(each.dtype), each.quantized) << each.name;
    EXPECT_EQ(is_index(each.dtype), each.index) << each.name;
  }
}

TEST(Devices, CompareAndName) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device::cuda(3)), "cuda:3");
  EXPECT_EQ(Device{}, Device::cpu());
  EXPECT_NE(Device::cuda(0), Device::cuda(1));
  EXPECT_NE(Device::cuda(0), Device::cpu());
  EXPECT_TRUE(Device::cuda(0).is_cuda() && !Device::cuda(0).is_cpu());
  EXPECT_GE(num_cuda_devices(), 0);
  int mark = 0;
  EXPECT_EQ(Stream{}, Stream{nullptr});
  EXPECT_NE(Stream{}, Stream{&mark});
}

TEST(Errors, CarryTheirNumbersAndAreOneFamily) {
  const OutOfPages pages("text", 5, 2, 8, 100);
  EXPECT_EQ(pages.requested_pages, 5u);
  EXPECT_EQ(pages.free_pages, 2u);
  EXPECT_EQ(pages.num_pages, 8u);
  EXPECT_EQ(pages.requested_bytes, 500u);
  EXPECT_EQ(pages.free_bytes, 200u);
  EXPECT_EQ(pages.peak_bytes, 800u);
  EXPECT_STREQ(pages.what(), "text");
  const BadBlockTable table("text", 1, 2, -3);
  EXPECT_EQ(table.sequence, 1);
  EXPECT_EQ(table.slot, 2);
  EXPECT_EQ(table.page, -3);
  EXPECT_EQ(CudaError("text", 700).code, 700);
  EXPECT_THROW(throw pages, OutOfMemory);
  EXPECT_THROW(throw pages, Error);
  EXPECT_THROW(throw table, InvalidArgument);
  EXPECT_THROW(throw Unsupported("text"), Error);
  EXPECT_THROW(throw CudaError("text", 2), std::runtime_error);
}

}  // namespace
}  // namespace flashkernel
