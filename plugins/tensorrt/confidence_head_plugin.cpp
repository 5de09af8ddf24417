#include "../kernels/confidence_head.h"

#include "plugin.h"

namespace clover::trt {
namespace {

// How many candidates to return is a shape input: the size of the outputs depends on its value.
enum In { kHidden, kWeight, kVocabMask, kHistoryIds, kHistoryCounts, kRepetition, kPresence, kFrequency, kBiasIds, kBiasValues, kInputs };
enum Out { kIds, kLogprobs, kLogits };

struct Traits {
  static constexpr const char* kName = "ConfidenceHead";
  static constexpr int32_t kShapeInputs = 1;
  struct Attributes {
    int32_t emit_logits;  // 1: a third output, the logits before any control
  };
  static const std::vector<Attribute<Attributes>>& attributes() {
    static const std::vector<Attribute<Attributes>> all = {{"emit_logits", &Attributes::emit_logits}};
    return all;
  }
  static HeadShape shape(const PluginTensorDesc* in, int candidates) {
    return {size(in[kHidden], 0), size(in[kHidden], 1), size(in[kHidden], 2), size(in[kWeight], 0), size(in[kHistoryIds], 1),
            size(in[kBiasIds], 1), candidates};
  }
  static std::string check(const Attributes& a) {
    return a.emit_logits == 0 || a.emit_logits == 1 ? "" : " emit_logits: expected 0 or 1, found " + std::to_string(a.emit_logits);
  }
  static int32_t outputs(const Attributes& a) { return 2 + a.emit_logits; }
  static bool takes(const Attributes&, int32_t inputs) { return inputs == kInputs; }

  template <class TypeOf>
  static bool takes_type(int32_t at, DataType type, TypeOf) {
    if (at == kHidden || at == kWeight) return type == DataType::kBF16;
    return type == (at == kHistoryIds || at == kBiasIds ? DataType::kINT64 : DataType::kFLOAT);
  }
  static DataType output_type(const Attributes&, int32_t at, const DataType*) { return at == kIds ? DataType::kINT64 : DataType::kFLOAT; }
  static DimsExprs output_shape(const Attributes&, int32_t at, const DimsExprs* in, const DimsExprs* shapes, nvinfer1::IExprBuilder&) {
    return dims({in[kHidden].d[0], in[kHidden].d[1], at == kLogits ? in[kWeight].d[0] : shapes[0].d[0]});
  }
  static int32_t aliased(int32_t) { return -1; }

  static std::string check_shape(const Attributes&, const PluginTensorDesc* in) {
    if (in[kHidden].dims.nbDims != 3 || in[kWeight].dims.nbDims != 2 || size(in[kHidden], 2) != size(in[kWeight], 1))
      return "hidden and weight: expected [rows, positions, hidden] and [vocabulary, hidden]";
    return expected(head_unsupported(shape(in, 1)));
  }
  static size_t workspace(const Attributes&, const PluginTensorDesc* in, const PluginTensorDesc* out) {
    return head_workspace(shape(in, size(out[kIds], 2)));
  }
  static cudaError_t run(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                         void* const* outputs, void* workspace, cudaStream_t stream) {
    const auto f = [&](int i) { return static_cast<const float*>(inputs[i]); };
    const auto n = [&](int i) { return static_cast<const int64_t*>(inputs[i]); };
    const HeadArguments arguments{static_cast<const bf16*>(inputs[kHidden]), static_cast<const bf16*>(inputs[kWeight]), f(kVocabMask),
                                  n(kHistoryIds), f(kHistoryCounts), f(kRepetition), f(kPresence), f(kFrequency), n(kBiasIds),
                                  f(kBiasValues), static_cast<int64_t*>(outputs[kIds]), static_cast<float*>(outputs[kLogprobs]),
                                  a.emit_logits == 1 ? static_cast<float*>(outputs[kLogits]) : nullptr};
    return confidence_head(shape(in, size(out[kIds], 2)), arguments, workspace, stream);
  }
};

}  // namespace

nvinfer1::IPluginCreatorInterface* confidence_head_creator() {
  static Creator<Traits> creator;
  return &creator;
}

}  // namespace clover::trt
