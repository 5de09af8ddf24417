#include "../kernels/expert_subset_moe.h"

#include "plugin.h"

namespace clover::trt {
namespace {

// The scales are there when the banks are e4m3.
enum In { kX, kRouter, kGateUp, kDown, kSharedGate, kSharedUp, kSharedDown, kScalarGate, kPrefix, kCommit, kNoisy, kMass, kInputs, kGateUpScale = kInputs, kDownScale, kInputsFp8 };
enum Out { kOut, kDistinct, kOutputs };

struct Traits {
  static constexpr const char* kName = "ExpertSubsetMoe";
  static constexpr int32_t kShapeInputs = 0;
  struct Attributes {
    int32_t num_experts, top_k;
  };
  static const std::vector<Attribute<Attributes>>& attributes() {
    static const std::vector<Attribute<Attributes>> all = {{"num_experts", &Attributes::num_experts}, {"top_k", &Attributes::top_k}};
    return all;
  }
  static MoeShape shape(const Attributes& a, const PluginTensorDesc* in) {
    const int tokens = size(in[kX], 1);
    return {size(in[kX], 0), tokens, size(in[kX], 2), a.num_experts, a.top_k, size(in[kDown], 2), size(in[kSharedGate], 0),
            tokens < 64 ? tokens : 64};
  }
  static std::string check(const Attributes& a) {
    return expected(moe_unsupported<bf16>({1, 32, 128, a.num_experts, a.top_k, 128, 128, 32}));
  }
  static int32_t outputs(const Attributes&) { return kOutputs; }
  static bool takes(const Attributes&, int32_t inputs) { return inputs == kInputs || inputs == kInputsFp8; }

  template <class TypeOf>
  static bool takes_type(int32_t at, DataType type, TypeOf type_of) {
    if (at == kGateUp) return type == DataType::kBF16 || type == DataType::kFP8;
    if (at == kDown) return type == type_of(kGateUp);
    if (at == kPrefix || at == kCommit || at == kNoisy) return type == DataType::kINT32;
    if (at == kMass) return type == DataType::kFLOAT;
    return type == DataType::kBF16;
  }
  static DataType output_type(const Attributes&, int32_t at, const DataType*) { return at == kOut ? DataType::kBF16 : DataType::kINT64; }
  static DimsExprs output_shape(const Attributes&, int32_t at, const DimsExprs* in, const DimsExprs*, nvinfer1::IExprBuilder& build) {
    return at == kOut ? in[kX] : dims({build.constant(1)});
  }
  static int32_t aliased(int32_t) { return -1; }

  static std::string check_shape(const Attributes& a, const PluginTensorDesc* in) {
    if (in[kX].dims.nbDims != 3 || in[kGateUp].dims.nbDims != 3 || in[kDown].dims.nbDims != 3) return "x and the banks: expected three axes";
    const MoeShape s = shape(a, in);
    if (size(in[kGateUp], 0) != s.experts || size(in[kGateUp], 1) != 2 * s.width || size(in[kGateUp], 2) != s.hidden ||
        size(in[kDown], 0) != s.experts || size(in[kDown], 1) != s.hidden)
      return "the banks: expected [" + std::to_string(s.experts) + ", 2 * width, " + std::to_string(s.hidden) + "] and [experts, hidden, width]";
    return expected(in[kGateUp].type == DataType::kFP8 ? moe_unsupported<e4m3>(s) : moe_unsupported<bf16>(s));
  }
  static size_t workspace(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc*) {
    const MoeShape s = shape(a, in);
    return in[kGateUp].type == DataType::kFP8 ? moe_workspace<e4m3>(s) : moe_workspace<bf16>(s);
  }

  template <class W>
  static cudaError_t run_as(const MoeShape& s, const void* const* in, void* const* out, void* workspace, cudaStream_t stream) {
    const auto t = [&](int i) { return static_cast<const bf16*>(in[i]); };
    const auto n = [&](int i) { return static_cast<const int32_t*>(in[i]); };
    constexpr bool fp8 = sizeof(W) == 1;
    const MoeArguments<W> arguments{t(kX), t(kRouter), static_cast<const W*>(in[kGateUp]), static_cast<const W*>(in[kDown]), t(kSharedGate),
                                    t(kSharedUp), t(kSharedDown), t(kScalarGate), {n(kPrefix), n(kCommit), n(kNoisy)},
                                    static_cast<const float*>(in[kMass]), fp8 ? t(kGateUpScale) : nullptr, fp8 ? t(kDownScale) : nullptr,
                                    static_cast<bf16*>(out[kOut]), static_cast<int64_t*>(out[kDistinct])};
    return expert_subset_moe<W>(s, arguments, workspace, stream);
  }
  static cudaError_t run(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs,
                         void* const* outputs, void* workspace, cudaStream_t stream) {
    const MoeShape s = shape(a, in);
    return in[kGateUp].type == DataType::kFP8 ? run_as<e4m3>(s, inputs, outputs, workspace, stream)
                                              : run_as<bf16>(s, inputs, outputs, workspace, stream);
  }
};

}  // namespace

nvinfer1::IPluginCreatorInterface* expert_subset_moe_creator() {
  static Creator<Traits> creator;
  return &creator;
}

}  // namespace clover::trt
