#include "c_api.h"

#include "confidence_head.h"
#include "expert_subset_moe.h"
#include "gdn_block_scan.h"
#include "version.h"

using namespace clover;

namespace {

template <class T>
const T& as(const void* pointer) {
  return *static_cast<const T*>(pointer);
}

// Calls `run` with a number of the type of the experts' banks.
template <class Run>
auto with_weights(int type, Run run) {
  if (type == CLOVER_E4M3) return run(e4m3{});
  if (type == CLOVER_E2M1) return run(e2m1x2{});
  return run(bf16{});
}

}  // namespace

#define CLOVER_API __attribute__((visibility("default")))

extern "C" {

CLOVER_API const char* clover_plugins_version() { return CLOVER_PLUGINS_VERSION; }

CLOVER_API const char* clover_gdn_unsupported(const void* shape) { return gdn_unsupported(as<GdnShape>(shape)); }
CLOVER_API const char* clover_moe_unsupported(int type, const void* shape) {
  return with_weights(type, [&](auto w) { return moe_unsupported<decltype(w)>(as<MoeShape>(shape)); });
}
CLOVER_API const char* clover_head_unsupported(const void* shape) { return head_unsupported(as<HeadShape>(shape)); }

CLOVER_API size_t clover_gdn_workspace(const void* shape) { return gdn_workspace(as<GdnShape>(shape)); }
CLOVER_API size_t clover_moe_workspace(int type, const void* shape) {
  return with_weights(type, [&](auto w) { return moe_workspace<decltype(w)>(as<MoeShape>(shape)); });
}
CLOVER_API size_t clover_head_workspace(const void* shape) { return head_workspace(as<HeadShape>(shape)); }

CLOVER_API int clover_gdn_block_scan(int type, const void* shape, const void* arguments, void* workspace, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (type == CLOVER_FLOAT32) return gdn_block_scan<float>(as<GdnShape>(shape), as<GdnArguments<float>>(arguments), workspace, on);
  return gdn_block_scan<bf16>(as<GdnShape>(shape), as<GdnArguments<bf16>>(arguments), workspace, on);
}
CLOVER_API int clover_expert_subset_moe(int type, const void* shape, const void* arguments, void* workspace, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return with_weights(type, [&](auto w) {
    using W = decltype(w);
    return static_cast<int>(expert_subset_moe<W>(as<MoeShape>(shape), as<MoeArguments<W>>(arguments), workspace, on));
  });
}
CLOVER_API int clover_confidence_head(const void* shape, const void* arguments, void* workspace, void* stream) {
  return confidence_head(as<HeadShape>(shape), as<HeadArguments>(arguments), workspace, static_cast<cudaStream_t>(stream));
}
}
