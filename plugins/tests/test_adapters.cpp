// Every build-phase method of the three plugins, through the interfaces that TensorRT uses. Needs no GPU.
#include <NvInfer.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace nvinfer1;

extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count);
extern "C" void setLoggerFinder(ILoggerFinder* finder);

namespace {

int failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      std::printf("line %d: FAILED: %s\n", __LINE__, #condition);    \
      ++failures;                                                    \
    }                                                                \
  } while (false)

class Logger : public ILogger, public ILoggerFinder {
 public:
  void log(Severity, const char* message) noexcept override { last = message; }
  ILogger* findLogger() override { return this; }
  std::string last;
} logger;

// Expressions as TensorRT has them, all constants here.
class Expression : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  explicit Expression(int64_t value) : value_(value) { mImpl = this; }

 private:
  bool isConstant() const noexcept override { return true; }
  int64_t getConstantValue() const noexcept override { return value_; }
  bool isSizeTensor() const noexcept override { return false; }
  int64_t value_;
};

class Builder : public IExprBuilder, private apiv::VExprBuilder {
 public:
  Builder() { mImpl = this; }
  DimsExprs dims(const std::vector<int64_t>& sizes) {
    DimsExprs out{};
    for (int64_t size : sizes) out.d[out.nbDims++] = constant(size);
    return out;
  }

 private:
  const IDimensionExpr* constant(int64_t value) noexcept override {
    all_.push_back(std::make_unique<Expression>(value));
    return all_.back().get();
  }
  const IDimensionExpr* operation(DimensionOperation, const IDimensionExpr&, const IDimensionExpr&) noexcept override { return nullptr; }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) noexcept override { return nullptr; }
  std::vector<std::unique_ptr<Expression>> all_;
};

std::vector<int64_t> sizes(const DimsExprs& dims) {
  std::vector<int64_t> out;
  for (int32_t i = 0; i < dims.nbDims; ++i) out.push_back(dims.d[i]->getConstantValue());
  return out;
}

struct Tensor {
  DataType type;
  std::vector<int64_t> dims;
};

DynamicPluginTensorDesc describe(const Tensor& tensor, TensorFormat format = TensorFormat::kLINEAR) {
  DynamicPluginTensorDesc out{};
  out.desc.type = tensor.type;
  out.desc.format = format;
  for (int64_t size : tensor.dims) out.max.d[out.max.nbDims++] = size;
  out.desc.dims = out.min = out.opt = out.max;
  return out;
}

using Fields = std::map<std::string, int32_t>;

IPluginV3* create(IPluginCreatorV3One& creator, const Fields& values) {
  std::vector<PluginField> fields;
  for (const auto& [name, value] : values) fields.emplace_back(name.c_str(), &value, PluginFieldType::kINT32, 1);
  PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  return creator.createPlugin("node", &collection, TensorRTPhase::kBUILD);
}

struct Expected {
  const char* name;
  Fields fields;
  std::map<std::string, std::string> refused;  // field set to -1, and what the message has
  std::vector<Tensor> inputs;
  std::vector<int64_t> shape_inputs;
  std::vector<Tensor> outputs;
  std::vector<int32_t> aliased;
  std::vector<int64_t> wrong_dims;  // sizes of input 0 that configurePlugin refuses
};

void drive(IPluginCreatorV3One& creator, const Expected& e) {
  std::printf("%s\n", e.name);
  CHECK(std::string(creator.getPluginName()) == e.name);
  CHECK(std::string(creator.getPluginVersion()) == "1");
  CHECK(std::string(creator.getPluginNamespace()) == "clover");
  CHECK(static_cast<size_t>(creator.getFieldNames()->nbFields) == e.fields.size());
  for (int32_t i = 0; i < creator.getFieldNames()->nbFields; ++i) CHECK(e.fields.count(creator.getFieldNames()->fields[i].name) == 1);

  for (const auto& [name, message] : e.refused) {
    Fields wrong = e.fields;
    wrong[name] = -1;
    CHECK(create(creator, wrong) == nullptr);
    CHECK(logger.last.find(message) != std::string::npos && logger.last.find(e.name) != std::string::npos);
  }
  for (const auto& [name, value] : e.fields) {
    Fields missing = e.fields;
    missing.erase(name);
    CHECK(create(creator, missing) == nullptr);
    CHECK(logger.last.find(name + ": missing") != std::string::npos);
    const float real = static_cast<float>(value);
    PluginField field(name.c_str(), &real, PluginFieldType::kFLOAT32, 1);
    PluginFieldCollection one{1, &field};
    CHECK(creator.createPlugin("node", &one, TensorRTPhase::kBUILD) == nullptr);
    CHECK(logger.last.find(name + ": expected one whole number") != std::string::npos);
  }

  std::unique_ptr<IPluginV3> plugin(create(creator, e.fields));
  CHECK(plugin != nullptr);
  if (plugin == nullptr) return;
  auto* core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
  auto* build = static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
  auto* runtime = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  CHECK(std::string(core->getPluginName()) == e.name);
  CHECK(build->getInterfaceInfo().major == 2);

  const auto inputs = static_cast<int32_t>(e.inputs.size()), outputs = static_cast<int32_t>(e.outputs.size());
  CHECK(build->getNbOutputs() == outputs);
  std::vector<DataType> in_types, out_types(e.outputs.size());
  std::vector<DynamicPluginTensorDesc> all;
  Builder builder;
  std::vector<DimsExprs> in_dims, out_dims(e.outputs.size());
  for (const Tensor& each : e.inputs) {
    in_types.push_back(each.type);
    in_dims.push_back(builder.dims(each.dims));
    all.push_back(describe(each));
  }
  for (const Tensor& each : e.outputs) all.push_back(describe(each));
  CHECK(build->getOutputDataTypes(out_types.data(), outputs, in_types.data(), inputs) == 0);
  std::vector<DimsExprs> shape_dims = {builder.dims(e.shape_inputs)};
  const int32_t shape_count = e.shape_inputs.empty() ? 0 : 1;
  CHECK(build->getOutputShapes(in_dims.data(), inputs, shape_dims.data(), shape_count, out_dims.data(), outputs, builder) == 0);
  for (size_t i = 0; i < e.outputs.size(); ++i) {
    CHECK(out_types[i] == e.outputs[i].type);
    CHECK(sizes(out_dims[i]) == e.outputs[i].dims);
    CHECK(build->getAliasedInput(static_cast<int32_t>(i)) == e.aliased[i]);
  }
  CHECK(build->getOutputDataTypes(out_types.data(), outputs, in_types.data(), inputs - 1) != 0);
  CHECK(build->getOutputShapes(in_dims.data(), inputs - 1, shape_dims.data(), shape_count, out_dims.data(), outputs, builder) != 0);

  for (int32_t at = 0; at < inputs + outputs; ++at) CHECK(build->supportsFormatCombination(at, all.data(), inputs, outputs));
  for (int32_t at = 0; at < inputs + outputs; ++at) {  // no other layout, no other type
    auto wrong = all;
    wrong[static_cast<size_t>(at)].desc.format = TensorFormat::kCHW4;
    CHECK(!build->supportsFormatCombination(at, wrong.data(), inputs, outputs));
    wrong = all;
    wrong[static_cast<size_t>(at)].desc.type = DataType::kHALF;
    CHECK(!build->supportsFormatCombination(at, wrong.data(), inputs, outputs));
  }
  CHECK(build->configurePlugin(all.data(), inputs, all.data() + inputs, outputs) == 0);
  CHECK(build->getWorkspaceSize(all.data(), inputs, all.data() + inputs, outputs) > 0);
  auto wrong = all;
  wrong[0] = describe({e.inputs[0].type, e.wrong_dims});
  CHECK(build->configurePlugin(wrong.data(), inputs, wrong.data() + inputs, outputs) != 0);
  CHECK(logger.last.find(e.name) != std::string::npos && logger.last.find("xpected") != std::string::npos);
  std::vector<PluginTensorDesc> plain;
  for (const auto& each : all) plain.push_back(each.desc);
  CHECK(runtime->onShapeChange(plain.data(), inputs, plain.data() + inputs, outputs) == 0);

  CHECK(std::string(build->getTimingCacheID()).find(e.name) == 0);
  CHECK(build->getNbTactics() == 0);
  for (const auto& [name, value] : e.fields)
    CHECK(std::string(build->getTimingCacheID()).find(name + "=" + std::to_string(value)) != std::string::npos);

  // What is serialized makes the same plugin; clones outlive their original and are made by many threads at once.
  const PluginFieldCollection* kept = runtime->getFieldsToSerialize();
  std::unique_ptr<IPluginV3> again(creator.createPlugin("node", kept, TensorRTPhase::kRUNTIME));
  CHECK(again != nullptr);
  std::vector<std::unique_ptr<IPluginV3>> clones(8);
  std::vector<std::thread> threads;
  for (auto& clone : clones) threads.emplace_back([&] { clone.reset(plugin->clone()); });
  for (auto& thread : threads) thread.join();
  std::unique_ptr<IPluginV3> attached(runtime->attachToContext(nullptr));
  plugin.reset();
  for (auto& clone : clones) {
    auto* of_clone = static_cast<IPluginV3OneBuildV2*>(clone->getCapabilityInterface(PluginCapabilityType::kBUILD));
    CHECK(of_clone->getNbOutputs() == outputs);
    auto* fields = static_cast<IPluginV3OneRuntime*>(clone->getCapabilityInterface(PluginCapabilityType::kRUNTIME))->getFieldsToSerialize();
    for (int32_t i = 0; i < fields->nbFields; ++i) CHECK(*static_cast<const int32_t*>(fields->fields[i].data) == e.fields.at(fields->fields[i].name));
  }
}

constexpr DataType kBF = DataType::kBF16, kF = DataType::kFLOAT, kI4 = DataType::kINT32, kI8 = DataType::kINT64, kBytes = DataType::kINT8;
const Tensor kLength{kI4, {2}};

std::vector<Expected> expected() {
  Expected gdn{"GdnBlockScan",
               {{"k_heads", 2}, {"v_heads", 4}, {"k_dim", 128}, {"v_dim", 128}, {"kernel", 4}, {"right_kernel", 3}},
               {{"k_dim", "16, 32, 64 or 128"}, {"kernel", "2 to 8 taps"}, {"v_heads", "multiple of k_heads"}},
               {{kBF, {2, 32, 1024}}, {kBF, {2, 32, 4}}, {kBF, {2, 32, 4}}, {kBF, {1024, 1, 4}}, {kBF, {1024, 1, 3}}, {kF, {4}}, {kF, {4}},
                {kF, {4}}, {kF, {4}}, {kF, {4}}, {kBF, {2, 1024, 3}}, {kF, {2, 4, 128, 128}}, kLength, kLength, kLength},
               {},
               {{kBF, {2, 32, 4, 128}}, {kBF, {2, 1024, 3}}, {kF, {2, 4, 128, 128}}},
               {-1, 10, 11},
               {2, 32, 1000}};
  Expected moe{"ExpertSubsetMoe",
               {{"num_experts", 64}, {"top_k", 8}},
               {{"num_experts", "1 to 512 experts"}, {"top_k", "1 to 16 experts a token"}},
               {{kBF, {2, 32, 256}}, {kBF, {64, 256}}, {kBF, {64, 256, 256}}, {kBF, {64, 256, 128}}, {kBF, {96, 256}}, {kBF, {96, 256}},
                {kBF, {256, 96}}, {kBF, {1, 256}}, kLength, kLength, kLength, {kF, {2}}},
               {},
               {{kBF, {2, 32, 256}}, {kI8, {1}}},
               {-1, -1},
               {2, 32, 288}};
  Expected fp8 = moe;
  fp8.inputs[2].type = fp8.inputs[3].type = DataType::kFP8;
  fp8.inputs.push_back({kBF, {64, 2, 2}});
  fp8.inputs.push_back({kBF, {64, 2, 1}});
  Expected fp4 = fp8;
  fp4.inputs[2] = {kBytes, {64, 256, 128}};
  fp4.inputs[3] = {kBytes, {64, 256, 64}};
  fp4.inputs[12] = {DataType::kFP8, {64, 256, 16}};
  fp4.inputs[13] = {DataType::kFP8, {64, 256, 8}};
  fp4.inputs.push_back({kF, {64, 2}});
  fp4.inputs.push_back({kF, {64, 1}});
  Expected head{"ConfidenceHead",
                {{"emit_logits", 0}},
                {{"emit_logits", "expected 0 or 1"}},
                {{kBF, {2, 32, 64}}, {kBF, {1000, 64}}, {kF, {1000}}, {kI8, {2, 5}}, {kF, {2, 5}}, {kF, {2}}, {kF, {2}}, {kF, {2}},
                 {kI8, {2, 3}}, {kF, {2, 32, 3}}},
                {4},
                {{kI8, {2, 32, 4}}, {kF, {2, 32, 4}}},
                {-1, -1},
                {2, 32, 72}};
  Expected logits = head;
  logits.fields["emit_logits"] = 1;
  logits.outputs.push_back({kF, {2, 32, 1000}});
  logits.aliased.push_back(-1);
  return {gdn, moe, fp8, fp4, head, logits};
}

}  // namespace

int main() {
  setLoggerFinder(&logger);
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = getCreators(count);
  CHECK(count == 3);
  for (const Expected& each : expected()) {
    bool found = false;
    for (int32_t i = 0; i < count; ++i) {
      auto& creator = *static_cast<IPluginCreatorV3One*>(creators[i]);
      if (std::strcmp(creator.getPluginName(), each.name) != 0) continue;
      found = true;
      drive(creator, each);
    }
    CHECK(found);
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
