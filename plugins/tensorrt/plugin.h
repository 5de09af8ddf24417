// What the three plugins share: attributes read from fields and written back, types and formats, errors with the
// plugin's name. A plugin says in its `Traits` what sets it apart; see gdn_block_scan_plugin.cpp for the smallest one.
//
// Written against TensorRT 10.14 and for 11.x: IPluginV3 with the second build interface, whose outputs may share the
// memory of an input.
#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "../kernels/version.h"

namespace clover::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

constexpr const char* kNamespace = "clover";
constexpr const char* kVersion = "1";

// Where messages go: the logger that TensorRT hands to the library, or standard error.
void log_error(const std::string& message) noexcept;

// An integer attribute and where it lives in `Attributes`.
template <class Attributes>
struct Attribute {
  const char* name;
  int32_t Attributes::*member;
};

template <class Traits>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  using Attributes = typename Traits::Attributes;

  explicit Plugin(const Attributes& attributes) : attributes_(attributes) {
    for (const auto& each : Traits::attributes()) fields_.emplace_back(each.name, &(attributes_.*each.member), PluginFieldType::kINT32, 1);
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
  }
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  // ---- IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3* clone() noexcept override { return new (std::nothrow) Plugin(attributes_); }

  // ---- core
  const char* getPluginName() const noexcept override { return Traits::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // ---- build
  int32_t getNbOutputs() const noexcept override { return Traits::outputs(attributes_); }

  int32_t getOutputDataTypes(DataType* out, int32_t outputs, const DataType* in, int32_t inputs) const noexcept override {
    if (outputs != getNbOutputs() || !Traits::takes(attributes_, inputs)) return fail("inputs or outputs of another number");
    for (int32_t i = 0; i < outputs; ++i) out[i] = Traits::output_type(attributes_, i, in);
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs* in, int32_t inputs, const DimsExprs* shapes, int32_t shape_inputs, DimsExprs* out,
                          int32_t outputs, nvinfer1::IExprBuilder& build) noexcept override {
    if (outputs != getNbOutputs() || !Traits::takes(attributes_, inputs) || shape_inputs != Traits::kShapeInputs)
      return fail("inputs or outputs of another number");
    for (int32_t i = 0; i < outputs; ++i) out[i] = Traits::output_shape(attributes_, i, in, shapes, build);
    return 0;
  }

  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* all, int32_t inputs, int32_t outputs) noexcept override {
    if (!Traits::takes(attributes_, inputs) || outputs != getNbOutputs() || all[at].desc.format != TensorFormat::kLINEAR) return false;
    const DataType type = all[at].desc.type;
    if (at < inputs) return Traits::takes_type(at, type, [&](int32_t i) { return all[i].desc.type; });
    std::vector<DataType> types;
    for (int32_t i = 0; i < inputs; ++i) types.push_back(all[i].desc.type);
    return type == Traits::output_type(attributes_, at - inputs, types.data());
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc*, int32_t) noexcept override {
    if (!Traits::takes(attributes_, inputs)) return fail("inputs of another number");
    std::vector<PluginTensorDesc> most;
    for (int32_t i = 0; i < inputs; ++i) {
      most.push_back(in[i].desc);
      most.back().dims = in[i].max;
    }
    const std::string wrong = Traits::check_shape(attributes_, most.data());
    return wrong.empty() ? 0 : fail(wrong);
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc* out,
                          int32_t outputs) const noexcept override {
    std::vector<PluginTensorDesc> most;
    for (int32_t i = 0; i < inputs + outputs; ++i) {
      const DynamicPluginTensorDesc& each = i < inputs ? in[i] : out[i - inputs];
      most.push_back(each.desc);
      most.back().dims = each.max;
    }
    return Traits::workspace(attributes_, most.data(), most.data() + inputs);
  }

  int32_t getAliasedInput(int32_t output) noexcept override { return Traits::aliased(output); }

  // What the time of a tactic depends on beside shapes and types.
  const char* getTimingCacheID() noexcept override {
    identity_ = Traits::kName;
    for (const PluginField& field : fields_) identity_ += std::string(" ") + field.name + "=" + std::to_string(*static_cast<const int32_t*>(field.data));
    identity_ += std::string(" ") + CLOVER_PLUGINS_VERSION;
    return identity_.c_str();
  }
  const char* getMetadataString() noexcept override { return getTimingCacheID(); }

  // ---- runtime
  int32_t onShapeChange(const PluginTensorDesc* in, int32_t inputs, const PluginTensorDesc*, int32_t) noexcept override {
    if (!Traits::takes(attributes_, inputs)) return fail("inputs of another number");
    const std::string wrong = Traits::check_shape(attributes_, in);
    return wrong.empty() ? 0 : fail(wrong);
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    const cudaError_t error = Traits::run(attributes_, in, out, inputs, outputs, workspace, stream);
    return error == cudaSuccess ? 0 : fail(cudaGetErrorString(error));
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  int32_t fail(const std::string& message) const noexcept {
    log_error(std::string("clover::") + Traits::kName + ": " + message);
    return -1;
  }

  Attributes attributes_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
  std::string identity_;
};

template <class Traits>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    for (const auto& each : Traits::attributes()) fields_.emplace_back(each.name, nullptr, PluginFieldType::kINT32, 1);
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
  }

  nvinfer1::IPluginV3* createPlugin(const char* name, const PluginFieldCollection* given, nvinfer1::TensorRTPhase) noexcept override {
    typename Traits::Attributes attributes{};
    std::string wrong;
    for (const auto& wanted : Traits::attributes()) {
      const PluginField* found = nullptr;
      for (int32_t i = 0; given != nullptr && i < given->nbFields; ++i)
        if (std::strcmp(given->fields[i].name, wanted.name) == 0) found = &given->fields[i];
      if (found == nullptr) {
        wrong += std::string(" ") + wanted.name + ": missing;";
      } else if (found->data == nullptr || found->length != 1 ||
                 (found->type != PluginFieldType::kINT32 && found->type != PluginFieldType::kINT64)) {
        wrong += std::string(" ") + wanted.name + ": expected one whole number;";
      } else {
        attributes.*wanted.member = found->type == PluginFieldType::kINT32 ? *static_cast<const int32_t*>(found->data)
                                                                           : static_cast<int32_t>(*static_cast<const int64_t*>(found->data));
      }
    }
    if (wrong.empty()) wrong = Traits::check(attributes);
    if (!wrong.empty()) {
      log_error(std::string("clover::") + Traits::kName + " (" + (name == nullptr ? "" : name) + "):" + wrong);
      return nullptr;
    }
    return new (std::nothrow) Plugin<Traits>(attributes);
  }

  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return Traits::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

// Creators of the three plugins, each in the file of its plugin.
nvinfer1::IPluginCreatorInterface* gdn_block_scan_creator();
nvinfer1::IPluginCreatorInterface* expert_subset_moe_creator();
nvinfer1::IPluginCreatorInterface* confidence_head_creator();

// ---- help for traits
inline DimsExprs dims(std::initializer_list<const nvinfer1::IDimensionExpr*> each) {
  DimsExprs out{};
  for (const nvinfer1::IDimensionExpr* one : each) out.d[out.nbDims++] = one;
  return out;
}
inline std::string expected(const char* what) { return what == nullptr ? "" : std::string(" expected ") + what; }
inline int size(const PluginTensorDesc& tensor, int axis) { return static_cast<int>(tensor.dims.d[axis]); }

}  // namespace clover::trt
