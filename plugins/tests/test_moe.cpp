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

// A bank in e4m3 as the checkpoint has it: values, a bf16 scale for each block of 128 x 128, and what they stand for.
struct Quantized {
  std::vector<e4m3> values;
  std::vector<bf16> scales;
  Vector exact;
};

Quantized quantized(const Vector& weights, size_t matrices, size_t rows, size_t columns) {
  const size_t down = rows / 128, across = columns / 128;
  Quantized q{std::vector<e4m3>(weights.size()), std::vector<bf16>(matrices * down * across), Vector(weights.size())};
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
  std::vector<W> gate_up_values, down_values;
  std::vector<bf16> gate_up_scale, down_scale;
  if constexpr (sizeof(W) == 1) {
    Quantized first = quantized(inputs.gate_up, E, 2 * I, H), second = quantized(inputs.down, E, H, I);
    gate_up_values = first.values, gate_up_scale = first.scales, inputs.gate_up = first.exact;
    down_values = second.values, down_scale = second.scales, inputs.down = second.exact;
  } else {
    gate_up_values = gate_up;
    down_values = down;
  }
  const float mass = std::stof(c.text("mass"));
  const Outputs expected = reference(s, inputs, lengths, static_cast<double>(mass));

  Buffer<bf16> x_d(x), router_d(router), shared_gate_d(shared_gate), shared_up_d(shared_up), shared_down_d(shared_down), scalar_d(scalar),
      gate_up_scale_d(gate_up_scale), down_scale_d(down_scale), out(N * H);
  Buffer<W> gate_up_d(gate_up_values), down_d(down_values);
  Buffer<int32_t> prefix(lengths[0]), commit(lengths[1]), noisy(lengths[2]);
  Buffer<float> mass_d(std::vector<float>(rows, mass));
  Buffer<int64_t> distinct(1);
  Buffer<unsigned char> workspace(moe_workspace<W>(s));
  const MoeArguments<W> arguments{x_d.get(), router_d.get(), gate_up_d.get(), down_d.get(), shared_gate_d.get(), shared_up_d.get(),
                                  shared_down_d.get(), scalar_d.get(), {prefix.get(), commit.get(), noisy.get()}, mass_d.get(),
                                  gate_up_scale_d.get(), down_scale_d.get(), out.get(), distinct.get()};
  Report report("moe " + c.text("name"), c.text("type"));
  Vector first;
  size_t differing = 0;
  for (uint64_t seed : seeds()) {
    set_order(seed);
    check(expert_subset_moe<W>(s, arguments, workspace.get(), nullptr));
    const Vector found = to_double(out.values());
    if (first.empty()) {
      first = found;
      report.near("out", found, expected.out, sizeof(W) == 1 ? 6e-2 : 1e-2);
      report.same("distinct experts", distinct.values(), expected.distinct);
    }
    differing += found != first;
  }
  report.note("order of threads", static_cast<double>(differing), 0.0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("expected the path of cases.txt");
  for (const Case& each : read_cases(arguments[1], "moe")) each.is_bf16() ? run<bf16>(each) : run<e4m3>(each);
  return Report::failures() > 0;
}
