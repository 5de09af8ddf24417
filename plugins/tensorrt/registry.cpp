// Entry points that TensorRT's plugin registry looks up in the library, and where messages go.
#include <atomic>
#include <cstdio>

#include "plugin.h"

namespace clover::trt {

namespace {
std::atomic<nvinfer1::ILoggerFinder*> finder{nullptr};
}

void log_error(const std::string& message) noexcept {
  nvinfer1::ILoggerFinder* found = finder.load();
  nvinfer1::ILogger* logger = found == nullptr ? nullptr : found->findLogger();
  if (logger != nullptr) logger->log(nvinfer1::ILogger::Severity::kERROR, message.c_str());
  else std::fprintf(stderr, "%s\n", message.c_str());
}

}  // namespace clover::trt

extern "C" {

__attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { clover::trt::finder.store(finder); }

__attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static nvinfer1::IPluginCreatorInterface* const creators[] = {
      clover::trt::gdn_block_scan_creator(), clover::trt::expert_subset_moe_creator(), clover::trt::confidence_head_creator()};
  count = 3;
  return creators;
}
}
