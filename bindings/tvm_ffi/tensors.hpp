// Tensors and errors of TVM-FFI as the library's own.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/optional.h>

#include <string>

#include "flashkernel/error.hpp"
#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel::tvm_ffi {

namespace ffi = ::tvm::ffi;

using Tensor = ffi::TensorView;
using MaybeTensor = ffi::Optional<Tensor>;

inline DType dtype_of(const DLDataType& type) {
  const auto is = [&](int code, int bits) { return type.code == code && type.bits == bits && type.lanes == 1; };
  if (is(kDLFloat, 32)) return DType::kFloat32;
  if (is(kDLFloat, 16)) return DType::kFloat16;
  if (is(kDLBfloat, 16)) return DType::kBFloat16;
  if (is(kDLInt, 32)) return DType::kInt32;
  if (is(kDLInt, 64)) return DType::kInt64;
  if (is(kDLInt, 8)) return DType::kInt8;
  if (is(kDLUInt, 8)) return DType::kUInt8;
  if (is(kDLFloat8_e4m3fn, 8)) return DType::kFloat8E4M3;
  TVM_FFI_THROW(TypeError) << "flashkernel: a tensor's dtype is DLPack's code " << int{type.code} << " with "
                           << int{type.bits} << " bits; float32, float16, bfloat16, int32, int64, int8, uint8 or "
                           << "float8_e4m3fn is needed";
}

/// A borrowed view of a tensor.
inline TensorView view(const Tensor& tensor) {
  TensorView found;
  if (tensor.ndim() > kMaxDims)
    TVM_FFI_THROW(ValueError) << "flashkernel: a tensor has " << tensor.ndim() << " dims; at most " << kMaxDims
                              << " are needed";
  const DLDevice device = tensor.device();
  if (device.device_type == kDLCUDA)
    found.device = Device::cuda(device.device_id);
  else if (device.device_type != kDLCPU && device.device_type != kDLCUDAHost)
    TVM_FFI_THROW(ValueError) << "flashkernel: a tensor is on DLPack's device type " << int{device.device_type}
                              << "; the CPU (1) or CUDA (2) is needed";
  found.data = static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
  found.dtype = dtype_of(tensor.dtype());
  found.ndim = tensor.ndim();
  for (int d = 0; d < found.ndim; ++d) {
    found.shape[d] = tensor.size(d);
    found.strides[d] = tensor.stride(d);
  }
  return found;
}

/// Absent where the caller gave None.
inline TensorView view(const MaybeTensor& tensor) { return tensor.has_value() ? view(*tensor) : TensorView{}; }

/// The stream that the caller's framework works on, of the device of `tensor`.
inline ExecutionContext context_of(const TensorView& tensor) {
  ExecutionContext context;
  if (tensor.device.is_cuda()) context.stream.handle = TVMFFIEnvGetStream(kDLCUDA, tensor.device.index);
  return context;
}

/// Runs a call; the library's errors become those that Python knows.
template <class Call>
void run(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (const Unsupported& error) {
    TVM_FFI_THROW(NotImplementedError) << error.what();
  } catch (const OutOfMemory& error) {
    TVM_FFI_THROW(MemoryError) << error.what();
  } catch (const Error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

}  // namespace flashkernel::tvm_ffi
