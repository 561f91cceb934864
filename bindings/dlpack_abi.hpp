// The structs of the DLPack 1.x ABI (https://dmlc.github.io/dlpack/latest/), written from its specification.
// Used by dlpack.cpp and array.cpp only. Field order and sizes are the ABI: never reorder.
#pragma once

#include <cstdint>

namespace flashkernel::dlpack {

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
inline constexpr Version kVersion{1, 3};

enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  std::int32_t type;
  std::int32_t index;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kOpaque = 3,
  kBFloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3 = 10,  // e4m3fn, from 1.1
  kFloat4E2M1 = 17   // e2m1fn, from 1.1; torch's tensors have lanes of two
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means row-major (only before 1.2)
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // before 1.0
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

inline constexpr std::uint64_t kFlagReadOnly = 1;
inline constexpr std::uint64_t kFlagCopied = 2;

struct ManagedTensorVersioned {  // from 1.0
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// The C exchange API (from 1.3): a table of functions that an array type offers as the attribute
// `__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api". Each returns 0, or -1 with a Python error set.
struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // an older table of the same framework, or null
};

struct ExchangeApi {
  ExchangeHeader header;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensorVersioned** out);
  int (*managed_to_object)(ManagedTensorVersioned* tensor, void** out_object);
  int (*borrow_from_object)(void* object, Tensor* out);  // may be null
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_index, void** out_stream);
};

static_assert(sizeof(void*) != 8 ||
                  (sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 && sizeof(ManagedTensorVersioned) == 80),
              "the DLPack ABI");

}  // namespace flashkernel::dlpack
