// expert_subset_moe against docs/block-step.md written out in double precision.
#include <algorithm>
#include <numeric>
#include <set>

#include "expert_subset_moe.h"
#include "harness.h"

using namespace clover;
using namespace clover::test;

namespace {

using Vector = std::vector<double>;

double silu_exact(double x) { return x / (1.0 + std::exp(-x)); }

// The `count` best of `score`, ties to the lower index.
std::vector<size_t> best(const Vector& score, size_t count) {
  std::vector<size_t> order(score.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return score[a] > score[b]; });
  order.resize(count);
  return order;
}

struct Inputs {
  Vector x, router, gate_up, down, shared_gate, shared_up, shared_down, scalar;
};

struct Outputs {
  Vector out;
  std::vector<int64_t> distinct;
};

double dot(const double* a, const double* b, size_t count) { return std::inner_product(a, a + count, b, 0.0); }

// down(silu(gate x) * (up x)) of one token.
Vector expert(const double* x, const double* gate, const double* up, const double* down, size_t H, size_t I) {
  Vector inner(I), out(H);
  for (size_t i = 0; i < I; ++i) inner[i] = silu_exact(dot(gate + i * H, x, H)) * dot(up + i * H, x, H);
  for (size_t h = 0; h < H; ++h) out[h] = dot(down + h * I, inner.data(), I);
  return out;
}

Outputs reference(const MoeShape& s, const Inputs& in, const std::vector<std::vector<int32_t>>& lengths, double mass) {
  const size_t H = static_cast<size_t>(s.hidden), E = static_cast<size_t>(s.experts), K = static_cast<size_t>(s.top_k),
               I = static_cast<size_t>(s.width), S = static_cast<size_t>(s.shared_width), T = static_cast<size_t>(s.tokens);
  Outputs y{Vector(static_cast<size_t>(s.rows) * T * H, 0.0), {}};
  std::set<size_t> used;
  for (size_t row = 0; row < static_cast<size_t>(s.rows); ++row) {
    const size_t commit = static_cast<size_t>(lengths[1][row]), end = commit + static_cast<size_t>(lengths[2][row]);
    std::vector<Vector> probabilities;
    Vector score(E, 0.0);
    for (size_t t = 0; t < end; ++t) {
      Vector p(E);
      for (size_t e = 0; e < E; ++e) p[e] = std::exp(dot(&in.router[e * H], &in.x[(row * T + t) * H], H));
      const double total = std::accumulate(p.begin(), p.end(), 0.0);
      for (double& each : p) each /= total;
      if (t >= commit)
        for (size_t e : best(p, K)) score[e] += p[e];
      probabilities.push_back(p);
    }
    const std::vector<size_t> ranked = best(score, E);
    const double total = std::accumulate(score.begin(), score.end(), 0.0);
    std::set<size_t> kept;
    double before = 0.0;
    for (size_t rank = 0; rank < E; ++rank) {
      if (rank < K || (score[ranked[rank]] > 0 && (before < mass * total || mass >= 1.0))) kept.insert(ranked[rank]);
      before += score[ranked[rank]];
    }
    for (size_t t = 0; t < end; ++t) {
      Vector p = probabilities[t];
      const double* x = &in.x[(row * T + t) * H];
      if (t >= commit)
        for (size_t e = 0; e < E; ++e)
          if (kept.count(e) == 0) p[e] = -1.0;
      const std::vector<size_t> chosen = best(p, K);
      double weight = 0.0;
      for (size_t e : chosen) weight += p[e];
      double* out = &y.out[(row * T + t) * H];
      for (size_t e : chosen) {
        used.insert(e);
        const double* gate = &in.gate_up[e * 2 * I * H];
        const Vector part = expert(x, gate, gate + I * H, &in.down[e * H * I], H, I);
        for (size_t h = 0; h < H; ++h) out[h] += p[e] / weight * part[h];
      }
      const Vector part = expert(x, in.shared_gate.data(), in.shared_up.data(), in.shared_down.data(), H, S);
      const double scalar = 1.0 / (1.0 + std::exp(-dot(in.scalar.data(), x, H)));
      for (size_t h = 0; h < H; ++h) out[h] += scalar * part[h];
    }
  }
  y.distinct = {static_cast<int64_t>(used.size())};
  return y;
}

// A bank as a checkpoint has it: values, scales, and what they stand for.
template <class W>
struct Quantized {
  std::vector<W> values;
  std::vector<typename Format<W>::Scale> scales;
  std::vector<float> whole;
  Vector exact;
};

Quantized<bf16> quantized(const Vector& weights, size_t, size_t, size_t, bf16) {
  Quantized<bf16> q{{}, {}, {}, weights};
  for (double weight : weights) q.values.push_back(from_float<bf16>(static_cast<float>(weight)));
  return q;
}

// FP8: a bf16 scale for each block of 128 x 128.
Quantized<e4m3> quantized(const Vector& weights, size_t matrices, size_t rows, size_t columns, e4m3) {
  const size_t down = rows / 128, across = columns / 128;
  Quantized<e4m3> q{std::vector<e4m3>(weights.size()), std::vector<bf16>(matrices * down * across), {}, Vector(weights.size())};
  for (size_t block = 0; block < q.scales.size(); ++block) {
    const size_t first = block / (down * across) * rows * columns + block / across % down * 128 * columns + block % across * 128;
    double most = 0.0;
    for (size_t i = 0; i < 128 * 128; ++i) most = std::max(most, std::fabs(weights[first + i / 128 * columns + i % 128]));
    q.scales[block] = from_float<bf16>(static_cast<float>(most / 448.0));
    const double scale = static_cast<double>(to_float(q.scales[block]));
    for (size_t i = 0; i < 128 * 128; ++i) {
      const size_t at = first + i / 128 * columns + i % 128;
      q.values[at] = from_float<e4m3>(static_cast<float>(weights[at] / scale));
      q.exact[at] = static_cast<double>(to_float(q.values[at])) * scale;
    }
  }
  return q;
}

// NVFP4: an e4m3 scale for each 16 numbers, a float32 one for each matrix; eight numbers of four bytes in the order
// 0 2 4 6 1 3 5 7. Groups of a subnormal and of the largest scale are among them.
Quantized<e2m1x2> quantized(const Vector& given, size_t matrices, size_t rows, size_t columns, e2m1x2) {
  static const double sizes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  static const size_t place[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  Vector weights = given;
  for (size_t i = 0; i < 16; ++i) weights[i] *= 1e-5;
  for (size_t i = 16; i < 32; ++i) weights[i] *= 4.0;
  Quantized<e2m1x2> q{std::vector<e2m1x2>(weights.size() / 2), std::vector<e4m3>(weights.size() / 16), std::vector<float>(matrices),
                      Vector(weights.size())};
  for (size_t matrix = 0; matrix < matrices; ++matrix) {
    double most = 0.0;
    for (size_t i = 0; i < rows * columns; ++i) most = std::max(most, std::fabs(weights[matrix * rows * columns + i]));
    q.whole[matrix] = static_cast<float>(most / (6.0 * 448.0));
  }
  for (size_t group = 0; group < q.scales.size(); ++group) {
    const double whole = static_cast<double>(q.whole[group * 16 / (rows * columns)]);
    double most = 0.0;
    for (size_t i = 0; i < 16; ++i) most = std::max(most, std::fabs(weights[group * 16 + i]));
    q.scales[group] = from_float<e4m3>(static_cast<float>(most / (6.0 * whole)));
    const double scale = static_cast<double>(to_float(q.scales[group])) * whole;
    for (size_t i = 0; i < 16; ++i) {
      const size_t at = group * 16 + i;
      const double size = scale > 0.0 ? std::fabs(weights[at]) / scale : 0.0;
      unsigned code = 0;
      for (unsigned other = 1; other < 8; ++other)
        if (std::fabs(sizes[other] - size) < std::fabs(sizes[code] - size)) code = other;
      const bool negative = weights[at] < 0.0;
      q.exact[at] = (negative ? -1.0 : 1.0) * sizes[code] * scale;
      const size_t nibble = at / 8 * 8 + place[at % 8];
      q.values[nibble / 2].bits |= static_cast<uint8_t>((code | (negative ? 8u : 0u)) << 4 * (nibble % 2));
    }
  }
  return q;
}

template <class W>
void run(const Case& c) {
  const auto lengths = c.lengths();
  MoeShape s{static_cast<int>(lengths[0].size()), c.number("tokens"), c.number("hidden"), c.number("experts"), c.number("top_k"),
             c.number("width"), c.number("shared_width"), 32};
  if (const char* expected = moe_unsupported<W>(s)) fail(std::string("expected ") + expected);
  const size_t rows = static_cast<size_t>(s.rows), N = rows * static_cast<size_t>(s.tokens), H = static_cast<size_t>(s.hidden),
               E = static_cast<size_t>(s.experts), I = static_cast<size_t>(s.width), S = static_cast<size_t>(s.shared_width);
  Random random(11);
  const double in = 1.0 / std::sqrt(static_cast<double>(H)), back = 1.0 / std::sqrt(static_cast<double>(I));
  auto x = random.normal<bf16>(N * H, 1.0), router = random.normal<bf16>(E * H, 1.5 * in);
  auto gate_up = random.normal<bf16>(E * 2 * I * H, in), down = random.normal<bf16>(E * H * I, back);
  auto shared_gate = random.normal<bf16>(S * H, in), shared_up = random.normal<bf16>(S * H, in);
  auto shared_down = random.normal<bf16>(H * S, 1.0 / std::sqrt(static_cast<double>(S))), scalar = random.normal<bf16>(H, in);
  Inputs inputs{to_double(x),           to_double(router),    to_double(gate_up),     to_double(down),
                to_double(shared_gate), to_double(shared_up), to_double(shared_down), to_double(scalar)};
  const Quantized<W> gate_up_q = quantized(inputs.gate_up, 2 * E, I, H, W{}), down_q = quantized(inputs.down, E, H, I, W{});
  inputs.gate_up = gate_up_q.exact, inputs.down = down_q.exact;
  const float mass = std::stof(c.text("mass"));
  const Outputs expected = reference(s, inputs, lengths, static_cast<double>(mass));

  Buffer<bf16> x_d(x), router_d(router), shared_gate_d(shared_gate), shared_up_d(shared_up), shared_down_d(shared_down), scalar_d(scalar),
      out(N * H);
  Buffer<W> gate_up_d(gate_up_q.values), down_d(down_q.values);
  Buffer<typename Format<W>::Scale> gate_up_scale(gate_up_q.scales), down_scale(down_q.scales);
  Buffer<float> gate_up_whole(gate_up_q.whole), down_whole(down_q.whole);
  Buffer<int32_t> prefix(lengths[0]), commit(lengths[1]), noisy(lengths[2]);
  Buffer<float> mass_d(std::vector<float>(rows, mass));
  Buffer<int64_t> distinct(1);
  Buffer<unsigned char> workspace(moe_workspace<W>(s));
  const MoeArguments<W> arguments{x_d.get(), router_d.get(), gate_up_d.get(), down_d.get(), shared_gate_d.get(), shared_up_d.get(),
                                  shared_down_d.get(), scalar_d.get(), {prefix.get(), commit.get(), noisy.get()}, mass_d.get(),
                                  gate_up_scale.get(), down_scale.get(), gate_up_whole.get(), down_whole.get(), out.get(), distinct.get()};
  Report report("moe " + c.text("name"), c.text("type"));
  Vector first;
  size_t differing = 0;
  for (uint64_t seed : seeds()) {
    set_order(seed);
    check(expert_subset_moe<W>(s, arguments, workspace.get(), nullptr));
    const Vector found = to_double(out.values());
    if (first.empty()) {
      first = found;
      report.near("out", found, expected.out, std::is_same_v<W, e4m3> ? 6e-2 : 1e-2);
      report.same("distinct experts", distinct.values(), expected.distinct);
    }
    differing += found != first;
  }
  report.note("order of threads", static_cast<double>(differing), 0.0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("expected the path of cases.txt");
  for (const Case& each : read_cases(arguments[1], "moe")) {
    const std::string& type = each.text("type");
    type == "e2m1" ? run<e2m1x2>(each) : type == "e4m3" ? run<e4m3>(each) : run<bf16>(each);
  }
  return Report::failures() > 0;
}
