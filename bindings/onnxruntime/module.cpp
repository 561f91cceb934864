// Attention as a custom operator of ONNX Runtime, for its CPU execution provider.
//
// SessionOptions::RegisterCustomOpsLibrary (register_custom_ops_library in Python) loads this library and calls
// RegisterCustomOps. A model then has nodes of the domain "flashkernel":
//   out = Attention(q, k, v)  q [batch, heads_q, seq_q, head_dim], k [batch, heads_kv, seq_k, head_dim],
//                             v [batch, heads_kv, seq_k, head_dim_v], out [batch, heads_q, seq_q, head_dim_v];
//                             float, float16 or bfloat16, all of one type
//   attributes: causal (int, 0), window_left and window_right (int, -1), softcap (float, 0), scale (float,
//                             1 / sqrt(head_dim))
// Errors of the library become the status of the run.
#include <onnxruntime_c_api.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>

#include "flashkernel/attention.hpp"
#include "flashkernel/error.hpp"

namespace {

namespace fk = flashkernel;

/// The table of functions that is asked for, that of ONNX Runtime 1.17: every later runtime has it, whatever the
/// headers are.
constexpr std::uint32_t kVersion = 17;
static_assert(ORT_API_VERSION >= kVersion, "headers of ONNX Runtime 1.17 or later are needed");

/// A status of ONNX Runtime that is no success, on its way up.
struct Failure {
  OrtStatus* status;
};

void check(OrtStatus* status) {
  if (status != nullptr) throw Failure{status};
}

/// What `body` throws as a status; nothing is thrown into ONNX Runtime's code.
template <typename Body>
OrtStatus* guarded(const OrtApi& api, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const fk::Unsupported& error) {
    return api.CreateStatus(ORT_NOT_IMPLEMENTED, error.what());
  } catch (const fk::InvalidArgument& error) {
    return api.CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  }
}

/// An attribute of the node, or `otherwise` where the node has none. ONNX Runtime says the same of one that is absent
/// and of one of another type: what can be read as one of the types that are not meant has the wrong one.
struct Attributes {
  const OrtApi& api;
  const OrtKernelInfo* info;

  template <typename Value>
  bool read(OrtStatus*(ORT_API_CALL* get)(const OrtKernelInfo*, const char*, Value*), const char* name,
            Value& value) const {
    OrtStatus* status = get(info, name, &value);
    if (status != nullptr) api.ReleaseStatus(status);
    return status == nullptr;
  }
  std::int64_t integer(const char* name, std::int64_t otherwise) const {
    std::int64_t value = otherwise;
    if (read(api.KernelInfoGetAttribute_int64, name, value)) return value;
    float other = 0.0f;
    refuse(name, read(api.KernelInfoGetAttribute_float, name, other), "an integer");
    return otherwise;
  }
  float number(const char* name, float otherwise) const {
    float value = otherwise;
    if (read(api.KernelInfoGetAttribute_float, name, value)) return value;
    std::int64_t other = 0;
    refuse(name, read(api.KernelInfoGetAttribute_int64, name, other), "a float");
    return otherwise;
  }
  void refuse(const char* name, bool other, const char* needed) const {
    std::size_t size = 0;  // asks for the length; a string is refused whatever it says
    OrtStatus* status = api.KernelInfoGetAttribute_string(info, name, nullptr, &size);
    const bool text = status == nullptr;
    if (status != nullptr) api.ReleaseStatus(status);
    if (other || text) {
      throw fk::InvalidArgument(std::string("Attention: the attribute ") + name + " is " +
                                (text ? "a string" : "a number of another type") + "; " + needed + " is needed");
    }
  }
};

struct Kernel {
  const OrtApi& api;
  fk::DType dtype;
  fk::AttentionOptions options;

  Kernel(const OrtApi& ort, fk::DType type, const OrtKernelInfo* info) : api(ort), dtype(type) {
    const Attributes attributes{ort, info};
    options.causal = attributes.integer("causal", 0) != 0;
    options.window_left = attributes.integer("window_left", -1);
    options.window_right = attributes.integer("window_right", -1);
    options.softcap = attributes.number("softcap", 0.0f);
    const float scale = attributes.number("scale", std::numeric_limits<float>::quiet_NaN());
    if (!std::isnan(scale)) options.scale = scale;
  }

  fk::TensorView input(OrtKernelContext* context, std::size_t index, const char* name) const {
    const OrtValue* value = nullptr;
    check(api.KernelContext_GetInput(context, index, &value));
    OrtTensorTypeAndShapeInfo* found = nullptr;
    check(api.GetTensorTypeAndShape(value, &found));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> info(
        found, api.ReleaseTensorTypeAndShapeInfo);
    std::size_t dims = 0;
    check(api.GetDimensionsCount(info.get(), &dims));
    if (dims != 4) {
      throw fk::InvalidArgument(std::string("Attention: ") + name + " has " + std::to_string(dims) +
                                " dims; 4 [batch, heads, seq, head_dim] are needed");
    }
    std::array<std::int64_t, 4> shape{};
    check(api.GetDimensions(info.get(), shape.data(), dims));
    void* data = nullptr;
    check(api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));  // only read
    return {data, dtype, {shape[0], shape[1], shape[2], shape[3]}};
  }

  void compute(OrtKernelContext* context) const {
    const fk::TensorView q = input(context, 0, "q");
    const fk::TensorView k = input(context, 1, "k");
    const fk::TensorView v = input(context, 2, "v");
    const std::array<std::int64_t, 4> shape{q.shape[0], q.shape[1], q.shape[2], v.shape[3]};
    OrtValue* value = nullptr;
    check(api.KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &value));
    void* data = nullptr;
    check(api.GetTensorMutableData(value, &data));
    fk::attention(q, k, v, {data, dtype, {shape[0], shape[1], shape[2], shape[3]}}, {}, options);
  }
};

/// The operator for one element type; ONNX Runtime joins those of one name.
struct Attention : OrtCustomOp {
  fk::DType dtype;
  ONNXTensorElementDataType type;

  Attention(fk::DType own, ONNXTensorElementDataType theirs) : OrtCustomOp{}, dtype(own), type(theirs) {
    version = kVersion;
    GetName = [](const OrtCustomOp*) { return "Attention"; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 3; };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 1; };
    GetInputType =
        GetOutputType = [](const OrtCustomOp* op, std::size_t) { return static_cast<const Attention*>(op)->type; };
    GetInputCharacteristic =
        GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return INPUT_OUTPUT_REQUIRED; };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
      return guarded(*api, [&] { *kernel = new Kernel(*api, static_cast<const Attention*>(op)->dtype, info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const auto& own = *static_cast<const Kernel*>(kernel);
      return guarded(own.api, [&] { own.compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }
};

}  // namespace

extern "C" ORT_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kVersion);
  if (api == nullptr) {  // the first table, which all have, can say so
    const std::string text =
        std::string("flashkernel: ONNX Runtime ") + base->GetVersionString() + "; 1.17 or later is needed";
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, text.c_str());
  }
  static const Attention ops[] = {{fk::DType::kFloat32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
                                  {fk::DType::kFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
                                  {fk::DType::kBFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}};
  return guarded(*api, [&] {
    // Kept until the process ends: a session may outlive the options that it was made with.
    OrtCustomOpDomain* domain = nullptr;
    check(api->CreateCustomOpDomain("flashkernel", &domain));
    for (const Attention& op : ops) check(api->CustomOpDomain_Add(domain, &op));
    check(api->AddCustomOpDomain(options, domain));
  });
}
