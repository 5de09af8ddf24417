// What the kernel tests share: the table of cases, random inputs, buffers on whatever runs the kernels, comparison.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "numbers.h"

namespace clover::test {

[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(2);
}

// A line of cases.txt: `operation key=value ...`.
struct Case {
  std::string operation;
  std::map<std::string, std::string> fields;

  const std::string& text(const std::string& key) const {
    auto found = fields.find(key);
    if (found == fields.end()) fail("case without " + key);
    return found->second;
  }
  int number(const std::string& key) const { return std::stoi(text(key)); }
  bool is_bf16() const { return text("type") == "bf16"; }

  // `prefix/commit/noisy` of each row, separated by commas.
  std::vector<std::vector<int32_t>> lengths() const {
    std::vector<std::vector<int32_t>> columns(3);
    std::istringstream rows(text("rows"));
    for (std::string row; std::getline(rows, row, ',');) {
      std::istringstream parts(row);
      for (auto& column : columns) {
        std::string part;
        std::getline(parts, part, '/');
        column.push_back(std::stoi(part));
      }
    }
    return columns;
  }
};

inline std::vector<Case> read_cases(const std::string& path, const std::string& operation) {
  std::ifstream file(path);
  if (!file) fail(path + ": cannot be read");
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    Case found;
    if (!(words >> found.operation) || found.operation != operation) continue;
    for (std::string word; words >> word;) {
      size_t equals = word.find('=');
      if (equals == std::string::npos) fail(path + ": expected key=value, found " + word);
      found.fields[word.substr(0, equals)] = word.substr(equals + 1);
    }
    cases.push_back(found);
  }
  if (cases.empty()) fail(path + ": no case of " + operation);
  return cases;
}

// Memory that a kernel can reach, of exactly the size asked for.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
#ifdef CLOVER_HOST
    data_ = static_cast<T*>(std::malloc(count * sizeof(T) + (count == 0)));
    std::memset(static_cast<void*>(data_), 0xff, count * sizeof(T));
#else
    if (cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T) + (count == 0)) != cudaSuccess) fail("no memory on the GPU");
    cudaMemset(data_, 0xff, count * sizeof(T));
#endif
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { set(values); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
#ifdef CLOVER_HOST
    std::free(data_);
#else
    cudaFree(data_);
#endif
  }
  T* get() const { return data_; }
  void set(const std::vector<T>& values) {
#ifdef CLOVER_HOST
    if (count_ > 0) std::memcpy(static_cast<void*>(data_), values.data(), count_ * sizeof(T));
#else
    if (cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) fail("copy to the GPU failed");
#endif
  }
  std::vector<T> values() const {
    std::vector<T> out(count_);
#ifdef CLOVER_HOST
    if (count_ > 0) std::memcpy(static_cast<void*>(out.data()), data_, count_ * sizeof(T));
#else
    if (cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost) != cudaSuccess)
      fail(std::string("copy from the GPU failed: ") + cudaGetErrorString(cudaGetLastError()));
#endif
    return out;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // Normal numbers of this spread around `mean`, as T can hold them.
  template <class T>
  std::vector<T> normal(size_t count, double spread, double mean = 0.0) {
    std::normal_distribution<double> draw(mean, spread);
    std::vector<T> out(count);
    for (T& value : out) value = from_float<T>(static_cast<float>(draw(engine_)));
    return out;
  }
  int below(int limit) { return static_cast<int>(engine_() % static_cast<uint64_t>(limit)); }

 private:
  std::mt19937_64 engine_;
};

template <class T>
std::vector<double> to_double(const std::vector<T>& values) {
  std::vector<double> out;
  for (T value : values) out.push_back(static_cast<double>(to_float(value)));
  return out;
}

// Checks of one case; what is compared, how far off it is, how far it may be.
class Report {
 public:
  Report(std::string name, std::string type) : name_(std::move(name)), type_(std::move(type)) {}
  // ||found - expected|| / ||expected||, as docs/numerics.md has it.
  void near(const std::string& what, const std::vector<double>& found, const std::vector<double>& expected, double limit) {
    double off = 0.0, size = 0.0;
    bool finite = found.size() == expected.size();
    for (size_t i = 0; i < expected.size() && finite; ++i) {
      finite = std::isfinite(found[i]);
      off += (found[i] - expected[i]) * (found[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    double error = finite ? std::sqrt(off / std::max(size, 1e-30)) : INFINITY;
    line(what, error, limit, error <= limit);
  }
  template <class V>
  void same(const std::string& what, const V& found, const V& expected) {
    size_t wrong = found.size() == expected.size() ? 0 : expected.size();
    for (size_t i = 0; i < expected.size() && found.size() == expected.size(); ++i) wrong += found[i] != expected[i];
    line(what, static_cast<double>(wrong), 0.0, wrong == 0);
  }
  void note(const std::string& what, double value, double limit) { line(what, value, limit, value <= limit); }
  static int failures() { return failures_; }

 private:
  void line(const std::string& what, double error, double limit, bool passed) {
    std::printf("%-26s %-5s %-22s %9.2e  limit %7.0e  %s\n", name_.c_str(), type_.c_str(), what.c_str(), error, limit,
                passed ? "ok" : "FAILED");
    failures_ += !passed;
  }
  std::string name_, type_;
  static inline int failures_ = 0;
};

inline void check(cudaError_t error) {
#ifndef CLOVER_HOST
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
#endif
  if (error != cudaSuccess) fail(std::string("the launch failed: ") + cudaGetErrorString(error));
}

// Orders of threads to try; a GPU has its own.
inline std::vector<uint64_t> seeds() {
#ifdef CLOVER_HOST
  return {1, 2, 3};
#else
  return {0};
#endif
}
inline void set_order(uint64_t seed) {
#ifdef CLOVER_HOST
  simt::set_seed(seed);
#else
  (void)seed;
#endif
}

}  // namespace clover::test
