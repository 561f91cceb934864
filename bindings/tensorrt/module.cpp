// Attention as a plugin of TensorRT (IPluginV3), for version 10 and later.
//
// IPluginRegistry::loadLibrary loads this library and calls getCreators; a network or an ONNX model then has plugins
// (nodes) FlashKernelAttention, version 1, namespace "":
//   out = FlashKernelAttention(q, k, v)  q [batch, heads_q, seq_q, head_dim], k [batch, heads_kv, seq_k, head_dim],
//                             v [batch, heads_kv, seq_k, head_dim_v], out [batch, heads_q, seq_q, head_dim_v];
//                             float, half or bfloat16, all of one type, in the linear format
//   fields: causal, window_left, window_right (int32; 0, -1, -1), softcap, scale (float32; 0, 1 / sqrt(head_dim))
// Scratch memory is the library's own, ordered by the stream that TensorRT gives. This file compiles against TensorRT's
// public headers. It has never been loaded by TensorRT.
#include <NvInferRuntime.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "flashkernel/attention.hpp"
#include "flashkernel/error.hpp"

namespace {

namespace fk = flashkernel;
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr char kName[] = "FlashKernelAttention";
constexpr char kPluginVersion[] = "1";
constexpr std::int32_t kInputs = 3;

nvinfer1::ILoggerFinder* logger_finder = nullptr;  // set when the library is loaded

void log_error(const char* text) noexcept {
  nvinfer1::ILogger* logger = logger_finder != nullptr ? logger_finder->findLogger() : nullptr;
  if (logger != nullptr) logger->log(nvinfer1::ILogger::Severity::kERROR, text);
}

/// What `body` throws goes to TensorRT's log; nothing is thrown into its code. True: nothing was thrown.
template <typename Body>
bool guarded(Body&& body) noexcept {
  try {
    body();
    return true;
  } catch (const std::exception& error) {
    log_error(error.what());
    return false;
  }
}

std::optional<fk::DType> dtype_of(DataType type) {
  if (type == DataType::kFLOAT) return fk::DType::kFloat32;
  if (type == DataType::kHALF) return fk::DType::kFloat16;
  if (type == DataType::kBF16) return fk::DType::kBFloat16;
  return std::nullopt;
}

/// The fields of a plugin, as they are given, kept and written into an engine.
struct Settings {
  std::int32_t causal = 0;
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  float softcap = 0.0f;
  float scale = std::numeric_limits<float>::quiet_NaN();  ///< none was given

  std::vector<PluginField> fields() const {
    return {{"causal", &causal, PluginFieldType::kINT32, 1},
            {"window_left", &window_left, PluginFieldType::kINT32, 1},
            {"window_right", &window_right, PluginFieldType::kINT32, 1},
            {"softcap", &softcap, PluginFieldType::kFLOAT32, 1},
            {"scale", &scale, PluginFieldType::kFLOAT32, 1}};
  }

  void set(const PluginField& given) {
    for (const PluginField& own : fields()) {
      if (std::strcmp(own.name, given.name) != 0) continue;
      if (given.type != own.type || given.length != 1 || given.data == nullptr) {
        throw fk::InvalidArgument(std::string(kName) + ": the field " + given.name +
                                  " is of another type or length; one " +
                                  (own.type == PluginFieldType::kINT32 ? "int32" : "float32") + " is needed");
      }
      std::memcpy(const_cast<void*>(own.data), given.data, 4);  // both types have 4 bytes
      return;
    }
    throw fk::InvalidArgument(std::string(kName) + ": there is no field " + given.name);
  }

  fk::AttentionOptions options() const {
    fk::AttentionOptions options;
    options.causal = causal != 0;
    options.window_left = window_left;
    options.window_right = window_right;
    options.softcap = softcap;
    if (!std::isnan(scale)) options.scale = scale;
    return options;
  }
};

class Attention final : public nvinfer1::IPluginV3,
                        public nvinfer1::IPluginV3OneCore,
                        public nvinfer1::IPluginV3OneBuild,
                        public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit Attention(const Settings& settings) : settings_(settings) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
      default: return nullptr;
    }
  }
  nvinfer1::IPluginV3* clone() noexcept override {
    nvinfer1::IPluginV3* copy = nullptr;
    guarded([&] { copy = new Attention(settings_); });
    return copy;
  }

  const char* getPluginName() const noexcept override { return kName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return ""; }

  std::int32_t getNbOutputs() const noexcept override { return 1; }
  std::int32_t getOutputDataTypes(DataType* outputs, std::int32_t, const DataType* inputs,
                                  std::int32_t) const noexcept override {
    outputs[0] = inputs[0];
    return 0;
  }
  std::int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, std::int32_t count, const nvinfer1::DimsExprs*,
                               std::int32_t, nvinfer1::DimsExprs* outputs, std::int32_t,
                               nvinfer1::IExprBuilder&) noexcept override {
    if (count != kInputs || inputs[0].nbDims != 4 || inputs[1].nbDims != 4 || inputs[2].nbDims != 4) {
      log_error("FlashKernelAttention: three inputs q, k, v of 4 dims [batch, heads, seq, head_dim] are needed");
      return 1;
    }
    outputs[0] = inputs[0];
    outputs[0].d[3] = inputs[2].d[3];
    return 0;
  }
  bool supportsFormatCombination(std::int32_t place, const nvinfer1::DynamicPluginTensorDesc* tensors, std::int32_t,
                                 std::int32_t) noexcept override {
    const nvinfer1::PluginTensorDesc& found = tensors[place].desc;
    return found.format == nvinfer1::TensorFormat::kLINEAR && dtype_of(found.type) &&
           found.type == tensors[0].desc.type;
  }
  std::int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, std::int32_t,
                               const nvinfer1::DynamicPluginTensorDesc*, std::int32_t) noexcept override {
    return 0;
  }
  std::int32_t onShapeChange(const nvinfer1::PluginTensorDesc*, std::int32_t, const nvinfer1::PluginTensorDesc*,
                             std::int32_t) noexcept override {
    return 0;
  }

  std::int32_t enqueue(const nvinfer1::PluginTensorDesc* inputs, const nvinfer1::PluginTensorDesc* outputs,
                       const void* const* read, void* const* written, void*, cudaStream_t stream) noexcept override {
    return guarded([&] {
      int index = 0;
      if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
        throw fk::Error(std::string(kName) + ": cudaGetDevice: " + cudaGetErrorString(error));
      }
      const auto view = [&](const nvinfer1::PluginTensorDesc& tensor, const void* data) {
        const auto& d = tensor.dims.d;
        return fk::TensorView(const_cast<void*>(data), dtype_of(tensor.type).value(), {d[0], d[1], d[2], d[3]},
                              fk::Device::cuda(index));
      };
      fk::ExecutionContext context;
      context.stream.handle = stream;
      fk::attention(view(inputs[0], read[0]), view(inputs[1], read[1]), view(inputs[2], read[2]),
                    view(outputs[0], written[0]), {}, settings_.options(), context);
    })
               ? 0
               : 1;
  }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    const bool made = guarded([&] { fields_ = settings_.fields(); });
    collection_ = {made ? static_cast<std::int32_t>(fields_.size()) : 0, fields_.data()};
    return &collection_;
  }

 private:
  Settings settings_;
  std::vector<PluginField> fields_;  // what TensorRT was last told; they point into settings_
  PluginFieldCollection collection_{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : fields_(Settings().fields()) {
    for (PluginField& field : fields_) field.data = nullptr;  // names and types alone
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
  }
  nvinfer1::IPluginV3* createPlugin(const char*, const PluginFieldCollection* given,
                                    nvinfer1::TensorRTPhase) noexcept override {
    nvinfer1::IPluginV3* plugin = nullptr;
    guarded([&] {
      Settings settings;
      for (std::int32_t i = 0; given != nullptr && i < given->nbFields; ++i) settings.set(given->fields[i]);
      plugin = new Attention(settings);
    });
    return plugin;
  }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return kName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return ""; }

 private:
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace

extern "C" [[gnu::visibility("default")]] void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  logger_finder = finder;
}

extern "C" [[gnu::visibility("default")]] nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
  static Creator creator;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
  count = 1;
  return creators;
}
