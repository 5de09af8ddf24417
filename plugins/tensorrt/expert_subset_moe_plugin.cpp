#include "../kernels/expert_subset_moe.h"

#include "plugin.h"

namespace clover::trt {
namespace {

// The scales are there when the banks are e4m3, and those of whole matrices too when they are NVFP4, whose bytes TensorRT
// sees as int8.
enum In {
  kX, kRouter, kGateUp, kDown, kSharedGate, kSharedUp, kSharedDown, kScalarGate, kPrefix, kCommit, kNoisy, kMass,
  kGateUpScale, kDownScale, kGateUpScale2, kDownScale2
};
constexpr int32_t kInputs = kGateUpScale, kInputsFp8 = kGateUpScale2, kInputsFp4 = kDownScale2 + 1;
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
  // Numbers in a row of a bank; NVFP4 has two a byte.
  static int columns(const PluginTensorDesc& bank) { return size(bank, 2) * (bank.type == DataType::kINT8 ? 2 : 1); }
  static MoeShape shape(const Attributes& a, const PluginTensorDesc* in) {
    const int tokens = size(in[kX], 1);
    return {size(in[kX], 0), tokens, size(in[kX], 2), a.num_experts, a.top_k, columns(in[kDown]), size(in[kSharedGate], 0), tokens < 64 ? tokens : 64};
  }
  static std::string check(const Attributes& a) {
    return expected(moe_unsupported<bf16>({1, 32, 128, a.num_experts, a.top_k, 128, 128, 32}));
  }
  static int32_t outputs(const Attributes&) { return kOutputs; }
  static bool takes(const Attributes&, int32_t inputs) { return inputs == kInputs || inputs == kInputsFp8 || inputs == kInputsFp4; }

  template <class TypeOf>
  static bool takes_type(int32_t at, DataType type, TypeOf type_of) {
    if (at == kGateUp) return type == DataType::kBF16 || type == DataType::kFP8 || type == DataType::kINT8;
    if (at == kDown) return type == type_of(kGateUp);
    if (at == kGateUpScale || at == kDownScale) return type == (type_of(kGateUp) == DataType::kINT8 ? DataType::kFP8 : DataType::kBF16);
    if (at == kGateUpScale2 || at == kDownScale2) return type == DataType::kFLOAT;
    if (at == kPrefix || at == kCommit || at == kNoisy) return type == DataType::kINT32;
    if (at == kMass) return type == DataType::kFLOAT;
    return type == DataType::kBF16;
  }
  static DataType output_type(const Attributes&, int32_t at, const DataType*) { return at == kOut ? DataType::kBF16 : DataType::kINT64; }
  static DimsExprs output_shape(const Attributes&, int32_t at, const DimsExprs* in, const DimsExprs*, nvinfer1::IExprBuilder& build) {
    return at == kOut ? in[kX] : dims({build.constant(1)});
  }
  static int32_t aliased(int32_t) { return -1; }

  // Calls `run` with a number of the type of the banks.
  template <class Run>
  static auto with_weights(const PluginTensorDesc* in, Run run) {
    if (in[kGateUp].type == DataType::kFP8) return run(e4m3{});
    if (in[kGateUp].type == DataType::kINT8) return run(e2m1x2{});
    return run(bf16{});
  }

  static std::string check_shape(const Attributes& a, const PluginTensorDesc* in) {
    if (in[kX].dims.nbDims != 3 || in[kGateUp].dims.nbDims != 3 || in[kDown].dims.nbDims != 3) return "x and the banks: expected three axes";
    const MoeShape s = shape(a, in);
    if (size(in[kGateUp], 0) != s.experts || size(in[kGateUp], 1) != 2 * s.width || columns(in[kGateUp]) != s.hidden ||
        size(in[kDown], 0) != s.experts || size(in[kDown], 1) != s.hidden)
      return "the banks: expected [" + std::to_string(s.experts) + ", 2 * width, " + std::to_string(s.hidden) + "] and [experts, hidden, width]";
    return expected(with_weights(in, [&](auto w) { return moe_unsupported<decltype(w)>(s); }));
  }
  static size_t workspace(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc*) {
    const MoeShape s = shape(a, in);
    return with_weights(in, [&](auto w) { return moe_workspace<decltype(w)>(s); });
  }

  template <class W>
  static cudaError_t run_as(const MoeShape& s, const void* const* in, void* const* out, void* workspace, cudaStream_t stream) {
    const auto t = [&](int i) { return static_cast<const bf16*>(in[i]); };
    const auto n = [&](int i) { return static_cast<const int32_t*>(in[i]); };
    constexpr bool has_scales = !std::is_same_v<W, bf16>, has_whole = std::is_same_v<W, e2m1x2>;
    const auto scale = [&](int i) { return has_scales ? static_cast<const typename Format<W>::Scale*>(in[i]) : nullptr; };
    const auto whole = [&](int i) { return has_whole ? static_cast<const float*>(in[i]) : nullptr; };
    const MoeArguments<W> arguments{t(kX), t(kRouter), static_cast<const W*>(in[kGateUp]), static_cast<const W*>(in[kDown]), t(kSharedGate),
                                    t(kSharedUp), t(kSharedDown), t(kScalarGate), {n(kPrefix), n(kCommit), n(kNoisy)},
                                    static_cast<const float*>(in[kMass]), scale(kGateUpScale), scale(kDownScale),
                                    whole(kGateUpScale2), whole(kDownScale2),
                                    static_cast<bf16*>(out[kOut]), static_cast<int64_t*>(out[kDistinct])};
    return expert_subset_moe<W>(s, arguments, workspace, stream);
  }
  static cudaError_t run(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs,
                         void* const* outputs, void* workspace, cudaStream_t stream) {
    const MoeShape s = shape(a, in);
    return with_weights(in, [&](auto w) { return run_as<decltype(w)>(s, inputs, outputs, workspace, stream); });
  }
};

}  // namespace

nvinfer1::IPluginCreatorInterface* expert_subset_moe_creator() {
  static Creator<Traits> creator;
  return &creator;
}

}  // namespace clover::trt
