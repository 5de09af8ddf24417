#include "../kernels/gdn_block_scan.h"

#include "plugin.h"

namespace clover::trt {
namespace {

enum In { kQkv, kA, kB, kConv, kRightConv, kALog, kDtBias, kTemperature, kMemoryBias, kMemorySlope, kConvState, kState, kPrefix, kCommit, kNoisy, kInputs };
enum Out { kOut, kConvStateOut, kStateOut, kOutputs };

struct Traits {
  static constexpr const char* kName = "GdnBlockScan";
  static constexpr int32_t kShapeInputs = 0;
  struct Attributes {
    int32_t k_heads, v_heads, k_dim, v_dim, kernel, right_kernel;
  };
  static const std::vector<Attribute<Attributes>>& attributes() {
    static const std::vector<Attribute<Attributes>> all = {
        {"k_heads", &Attributes::k_heads}, {"v_heads", &Attributes::v_heads}, {"k_dim", &Attributes::k_dim},
        {"v_dim", &Attributes::v_dim},     {"kernel", &Attributes::kernel},   {"right_kernel", &Attributes::right_kernel}};
    return all;
  }
  static GdnShape shape(const Attributes& a, int rows, int tokens) {
    return {rows, tokens, a.k_heads, a.v_heads, a.k_dim, a.v_dim, a.kernel, a.right_kernel, tokens < 64 ? tokens : 64};
  }
  static std::string check(const Attributes& a) { return expected(gdn_unsupported(shape(a, 1, 32))); }
  static int32_t outputs(const Attributes&) { return kOutputs; }
  static bool takes(const Attributes&, int32_t inputs) { return inputs == kInputs; }

  template <class TypeOf>
  static bool takes_type(int32_t at, DataType type, TypeOf type_of) {
    if (at == kQkv) return type == DataType::kBF16 || type == DataType::kFLOAT;
    if (at >= kPrefix) return type == DataType::kINT32;
    if ((at >= kALog && at <= kMemorySlope) || at == kState) return type == DataType::kFLOAT;
    return type == type_of(kQkv);
  }
  static DataType output_type(const Attributes&, int32_t at, const DataType* in) { return at == kStateOut ? DataType::kFLOAT : in[kQkv]; }
  static DimsExprs output_shape(const Attributes& a, int32_t at, const DimsExprs* in, const DimsExprs*, nvinfer1::IExprBuilder& build) {
    if (at == kConvStateOut) return in[kConvState];
    if (at == kStateOut) return in[kState];
    return dims({in[kQkv].d[0], in[kQkv].d[1], build.constant(a.v_heads), build.constant(a.v_dim)});
  }
  static int32_t aliased(int32_t output) { return output == kConvStateOut ? kConvState : output == kStateOut ? kState : -1; }

  static std::string check_shape(const Attributes& a, const PluginTensorDesc* in) {
    const GdnShape s = shape(a, size(in[kQkv], 0), size(in[kQkv], 1));
    if (in[kQkv].dims.nbDims != 3 || size(in[kQkv], 2) != s.channels())
      return "qkv: expected [rows, tokens, " + std::to_string(s.channels()) + "]";
    if (in[kState].dims.nbDims != 4 || size(in[kState], 1) != a.v_heads || size(in[kState], 2) != a.k_dim || size(in[kState], 3) != a.v_dim)
      return "recurrent_state: its sizes are not those of the attributes";
    return "";
  }
  static size_t workspace(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc*) {
    return gdn_workspace(shape(a, size(in[kQkv], 0), size(in[kQkv], 1)));
  }

  template <class T>
  static cudaError_t run_as(const GdnShape& s, const void* const* in, void* const* out, void* workspace, cudaStream_t stream) {
    const auto t = [&](int i) { return static_cast<const T*>(in[i]); };
    const auto f = [&](int i) { return static_cast<const float*>(in[i]); };
    const auto n = [&](int i) { return static_cast<const int32_t*>(in[i]); };
    const GdnArguments<T> arguments{t(kQkv), t(kA), t(kB), t(kConv), t(kRightConv), f(kALog), f(kDtBias), f(kTemperature), f(kMemoryBias),
                                    f(kMemorySlope), t(kConvState), f(kState), {n(kPrefix), n(kCommit), n(kNoisy)},
                                    static_cast<T*>(out[kOut]), static_cast<T*>(out[kConvStateOut]), static_cast<float*>(out[kStateOut])};
    return gdn_block_scan<T>(s, arguments, workspace, stream);
  }
  static cudaError_t run(const Attributes& a, const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs,
                         void* const* outputs, void* workspace, cudaStream_t stream) {
    const GdnShape s = shape(a, size(in[kQkv], 0), size(in[kQkv], 1));
    return in[kQkv].type == DataType::kBF16 ? run_as<bf16>(s, inputs, outputs, workspace, stream)
                                            : run_as<float>(s, inputs, outputs, workspace, stream);
  }
};

}  // namespace

nvinfer1::IPluginCreatorInterface* gdn_block_scan_creator() {
  static Creator<Traits> creator;
  return &creator;
}

}  // namespace clover::trt
