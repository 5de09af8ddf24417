// gdn_block_scan against docs/block-step.md written out in double precision, token by token.
#include "gdn_block_scan.h"
#include "harness.h"

using namespace clover;
using namespace clover::test;

namespace {

double sigmoid_exact(double x) { return 1.0 / (1.0 + std::exp(-x)); }

struct Inputs {
  std::vector<double> qkv, a, b, conv, right_conv, A_log, dt_bias, temperature, memory_bias, memory_slope, conv_state, state;
};

struct Outputs {
  std::vector<double> out, conv_state, state;
};

Outputs reference(const GdnShape& s, const Inputs& x, const std::vector<std::vector<int32_t>>& lengths) {
  const size_t C = static_cast<size_t>(s.channels()), K = static_cast<size_t>(s.kernel), T = static_cast<size_t>(s.tokens);
  const size_t kd = static_cast<size_t>(s.k_dim), vd = static_cast<size_t>(s.v_dim), vh = static_cast<size_t>(s.v_heads);
  Outputs y{std::vector<double>(static_cast<size_t>(s.rows) * T * vh * vd, 0.0), x.conv_state, x.state};
  for (size_t row = 0; row < static_cast<size_t>(s.rows); ++row) {
    const size_t prefix = static_cast<size_t>(lengths[0][row]), commit = static_cast<size_t>(lengths[1][row]),
                 end = commit + static_cast<size_t>(lengths[2][row]);
    auto history = [&](size_t at, size_t c) {  // the old state's K - 1 inputs, then the row
      return at < K - 1 ? x.conv_state[(row * C + c) * (K - 1) + at] : x.qkv[(row * T + at - (K - 1)) * C + c];
    };
    std::vector<double> mixed(end * C);
    for (size_t t = 0; t < end; ++t) {
      for (size_t c = 0; c < C; ++c) {
        double sum = 0.0;
        for (size_t tap = 0; tap < K; ++tap) sum += history(t + tap, c) * x.conv[c * K + tap];
        for (size_t tap = 0; t >= commit && tap < static_cast<size_t>(s.right_kernel); ++tap)
          if (t + 1 + tap < end)
            sum += x.qkv[(row * T + t + 1 + tap) * C + c] * x.right_conv[c * static_cast<size_t>(s.right_kernel) + tap];
        mixed[t * C + c] = sum * sigmoid_exact(sum);
      }
    }
    for (size_t c = 0; c < C; ++c)
      for (size_t i = 0; i < K - 1; ++i) y.conv_state[(row * C + c) * (K - 1) + i] = history(commit + i, c);
    for (size_t head = 0; head < vh; ++head) {
      const size_t k_head = head / (vh / static_cast<size_t>(s.k_heads)), keys = static_cast<size_t>(s.k_heads) * kd;
      auto normed = [&](size_t t, size_t first) {
        std::vector<double> out(mixed.begin() + static_cast<long>(t * C + first + k_head * kd),
                                mixed.begin() + static_cast<long>(t * C + first + k_head * kd + kd));
        double sum = 1e-6;
        for (double value : out) sum += value * value;
        for (double& value : out) value /= std::sqrt(sum);
        return out;
      };
      auto value_of = [&](size_t t, size_t d) { return mixed[t * C + 2 * keys + head * vd + d]; };
      auto out_of = [&](size_t t, size_t d) -> double& { return y.out[((row * T + t) * vh + head) * vd + d]; };
      double* S = &y.state[(row * vh + head) * kd * vd];
      const double scale = 1.0 / std::sqrt(static_cast<double>(kd));
      for (size_t t = 0; t < commit; ++t) {
        const std::vector<double> q = normed(t, 0), k = normed(t, keys);
        const double in = x.a[(row * T + t) * vh + head] + x.dt_bias[head];
        const double decay = std::exp(-std::exp(x.A_log[head]) * std::log1p(std::exp(in)));
        const double beta = sigmoid_exact(x.b[(row * T + t) * vh + head]);
        for (size_t d = 0; d < vd; ++d) {
          double known = 0.0, read = 0.0;
          for (size_t r = 0; r < kd; ++r) known += (S[r * vd + d] *= decay) * k[r];
          for (size_t r = 0; r < kd; ++r) read += (S[r * vd + d] += k[r] * beta * (value_of(t, d) - known)) * q[r];
          out_of(t, d) = read * scale;
        }
      }
      const double n = static_cast<double>(prefix + commit);
      for (size_t t = commit; t < end; ++t) {
        const std::vector<double> q = normed(t, 0);
        std::vector<double> weight;
        for (size_t j = commit; j < end; ++j) {
          const std::vector<double> k = normed(j, keys);
          double sum = 0.0;
          for (size_t r = 0; r < kd; ++r) sum += q[r] * k[r];
          weight.push_back(std::exp(x.temperature[head] * sum));
        }
        const double memory = n == 0 ? 0.0 : std::exp(x.memory_bias[head] + x.memory_slope[head] * std::log1p(n));
        double total = memory;
        for (double each : weight) total += each;
        for (size_t d = 0; d < vd; ++d) {
          double read = 0.0;
          for (size_t r = 0; r < kd; ++r) read += S[r * vd + d] * q[r] * scale;
          double sum = memory * read;
          for (size_t j = commit; j < end; ++j) sum += weight[j - commit] * value_of(j, d);
          out_of(t, d) = sum / total;
        }
      }
    }
  }
  return y;
}

template <class T>
void run(const Case& c) {
  const auto lengths = c.lengths();
  GdnShape s{static_cast<int>(lengths[0].size()), c.number("tokens"), c.number("k_heads"), c.number("v_heads"),
             c.number("k_dim"), c.number("v_dim"), c.number("kernel"), c.number("right_kernel"), 32};
  if (const char* expected = gdn_unsupported(s)) fail(std::string("expected ") + expected);
  const size_t rows = static_cast<size_t>(s.rows), tokens = rows * static_cast<size_t>(s.tokens), C = static_cast<size_t>(s.channels()),
               heads = static_cast<size_t>(s.v_heads);
  Random random(7);
  auto qkv = random.normal<T>(tokens * C, 1.0), a = random.normal<T>(tokens * heads, 1.0), b = random.normal<T>(tokens * heads, 1.0);
  auto conv = random.normal<T>(C * static_cast<size_t>(s.kernel), 0.5);
  auto right = random.normal<T>(C * static_cast<size_t>(s.right_kernel), 0.5);
  auto A_log = random.normal<float>(heads, 0.5, -1.0), dt_bias = random.normal<float>(heads, 1.0);
  auto temperature = random.normal<float>(heads, 1.0, 4.0), bias = random.normal<float>(heads, 1.0);
  auto slope = random.normal<float>(heads, 0.2);
  auto conv_state = random.normal<T>(rows * C * static_cast<size_t>(s.kernel - 1), 1.0);
  auto state = random.normal<float>(rows * heads * static_cast<size_t>(s.k_dim * s.v_dim), 0.3);
  Inputs x{to_double(qkv), to_double(a), to_double(b), to_double(conv), to_double(right), to_double(A_log), to_double(dt_bias),
           to_double(temperature), to_double(bias), to_double(slope), to_double(conv_state), to_double(state)};
  Outputs expected = reference(s, x, lengths);

  Buffer<T> qkv_d(qkv), a_d(a), b_d(b), conv_d(conv), right_d(right), old_conv(conv_state), new_conv(conv_state.size());
  Buffer<float> A_d(A_log), dt_d(dt_bias), temperature_d(temperature), bias_d(bias), slope_d(slope), old_state(state),
      new_state(state.size());
  Buffer<int32_t> prefix(lengths[0]), commit(lengths[1]), noisy(lengths[2]);
  Buffer<T> out(tokens * heads * static_cast<size_t>(s.v_dim));
  Buffer<unsigned char> workspace(gdn_workspace(s));
  GdnArguments<T> arguments{qkv_d.get(), a_d.get(), b_d.get(), conv_d.get(), right_d.get(), A_d.get(), dt_d.get(),
                            temperature_d.get(), bias_d.get(), slope_d.get(), old_conv.get(), old_state.get(),
                            {prefix.get(), commit.get(), noisy.get()}, out.get(), new_conv.get(), new_state.get()};
  const double limit = c.is_bf16() ? 1e-2 : 1e-5;
  Report report("gdn " + c.text("name"), c.text("type"));
  std::vector<double> first;
  size_t differing = 0;
  for (uint64_t seed : seeds()) {
    set_order(seed);
    check(gdn_block_scan<T>(s, arguments, workspace.get(), nullptr));
    auto found = to_double(out.values());
    if (first.empty()) {
      first = found;
      report.near("out", found, expected.out, limit);
      report.near("recurrent state", to_double(new_state.values()), expected.state, limit);
      report.near("convolution state", to_double(new_conv.values()), expected.conv_state, 0.0);
    }
    differing += found != first;
  }
  report.note("order of threads", static_cast<double>(differing), 0.0);
  // In place: the same bits as with separate buffers; rows that commit nothing keep theirs.
  auto apart_state = new_state.values();
  auto apart_conv = to_double(new_conv.values());
  arguments.conv_state_out = old_conv.get();
  arguments.recurrent_state_out = old_state.get();
  check(gdn_block_scan<T>(s, arguments, workspace.get(), nullptr));
  report.same("in place, state", old_state.values(), apart_state);
  report.same("in place, convolution", to_double(old_conv.values()), apart_conv);
  report.same("in place, out", to_double(out.values()), first);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("expected the path of cases.txt");
  for (const Case& each : read_cases(arguments[1], "gdn")) each.is_bf16() ? run<bf16>(each) : run<float>(each);
  return Report::failures() > 0;
}
