// confidence_head against docs/block-step.md written out in double precision.
#include <algorithm>
#include <numeric>

#include "confidence_head.h"
#include "harness.h"

using namespace clover;
using namespace clover::test;

namespace {


// Distinct ids of each row; the last fifth of the entries is unused and holds the mask id.
std::vector<int64_t> draw_ids(Random& random, int rows, int count, int vocabulary, int mask) {
  std::vector<int64_t> ids;
  for (int row = 0; row < rows; ++row) {
    std::vector<int64_t> all(static_cast<size_t>(vocabulary));
    std::iota(all.begin(), all.end(), 0);
    for (int i = 0; i < count; ++i) {
      std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(i + random.below(vocabulary - i))]);
      ids.push_back(5 * i < 4 * count ? all[static_cast<size_t>(i)] : mask);
    }
  }
  return ids;
}

void run(const Case& c) {
  HeadShape s{c.number("rows"), c.number("positions"), c.number("hidden"), c.number("vocabulary"), c.number("history"), c.number("biases"),
              c.number("candidates")};
  if (const char* expected = head_unsupported(s)) fail(std::string("expected ") + expected);
  const size_t B = static_cast<size_t>(s.rows), L = static_cast<size_t>(s.positions), N = B * L, H = static_cast<size_t>(s.hidden),
               V = static_cast<size_t>(s.vocabulary), R = static_cast<size_t>(s.history), A = static_cast<size_t>(s.biases),
               k = static_cast<size_t>(s.candidates);
  Random random(13);
  auto hidden = random.normal<bf16>(N * H, 1.0), weight = random.normal<bf16>(V * H, 2.0 / std::sqrt(static_cast<double>(H)));
  const int mask = s.vocabulary - 7;
  std::vector<float> vocab_mask(V, 0.0f);
  vocab_mask[static_cast<size_t>(mask)] = -INFINITY;
  for (size_t v = V - 3; v < V; ++v) vocab_mask[v] = -INFINITY;
  auto history_ids = draw_ids(random, s.rows, s.history, s.vocabulary, mask), bias_ids = draw_ids(random, s.rows, s.biases, s.vocabulary, mask);
  std::vector<float> counts(B * R);
  for (float& count : counts) count = static_cast<float>(1 + random.below(4));
  auto repetition = random.normal<float>(B, 0.1, 1.5), presence = random.normal<float>(B, 0.3), frequency = random.normal<float>(B, 0.3);
  auto bias_values = random.normal<float>(B * L * A, 3.0);

  std::vector<double> logits(N * V), controlled, log_total(N);
  const auto h = to_double(hidden), w = to_double(weight);
  for (size_t n = 0; n < N; ++n)
    for (size_t v = 0; v < V; ++v)
      logits[n * V + v] = std::inner_product(&h[n * H], &h[n * H] + H, &w[v * H], 0.0);
  controlled = logits;
  for (size_t n = 0; n < N; ++n) {
    const size_t b = n / L;
    double* row = &controlled[n * V];
    for (size_t r = 0; r < R; ++r) {
      const size_t id = static_cast<size_t>(history_ids[b * R + r]);
      const double penalty = static_cast<double>(repetition[b]);
      row[id] = (row[id] < 0 ? row[id] * penalty : row[id] / penalty) - static_cast<double>(presence[b]) -
                static_cast<double>(frequency[b]) * static_cast<double>(counts[b * R + r]);
    }
    for (size_t a = 0; a < A; ++a)
      row[static_cast<size_t>(bias_ids[b * A + a])] += static_cast<double>(bias_values[n * A + a]);
    for (size_t v = 0; v < V; ++v) row[v] += static_cast<double>(vocab_mask[v]);
    const double most = *std::max_element(row, row + V);
    double sum = 0.0;
    for (size_t v = 0; v < V; ++v) sum += std::exp(row[v] - most);
    log_total[n] = most + std::log(sum);
  }

  Buffer<bf16> hidden_d(hidden), weight_d(weight);
  Buffer<float> mask_d(vocab_mask), counts_d(counts), repetition_d(repetition), presence_d(presence), frequency_d(frequency),
      bias_values_d(bias_values), logprobs(N * k), logits_d(N * V);
  Buffer<int64_t> history_d(history_ids), bias_d(bias_ids), ids(N * k);
  Buffer<unsigned char> workspace(head_workspace(s));
  HeadArguments arguments{hidden_d.get(),   weight_d.get(),   mask_d.get(),      history_d.get(), counts_d.get(),
                          repetition_d.get(), presence_d.get(), frequency_d.get(), bias_d.get(),    bias_values_d.get(),
                          ids.get(),        logprobs.get(),   logits_d.get()};
  Report report("head " + c.text("name"), c.text("type"));
  std::vector<double> first;
  size_t differing = 0;
  for (uint64_t seed : seeds()) {
    set_order(seed);
    check(confidence_head(s, arguments, workspace.get(), nullptr));
    const auto found = to_double(logprobs.values());
    if (first.empty()) {
      first = found;
      report.near("logits", to_double(logits_d.values()), logits, 1e-5);
      // What each candidate's log-probability is in double precision, and that none better was passed over.
      const auto chosen = ids.values();
      size_t wrong = 0;
      double off = 0.0;
      for (size_t n = 0; n < N; ++n) {
        std::vector<double> best(&controlled[n * V], &controlled[n * V] + V);
        std::sort(best.rbegin(), best.rend());
        std::vector<bool> seen(V, false);
        for (size_t i = 0; i < k; ++i) {
          if (i >= V || std::isinf(best[i])) {
            wrong += found[n * k + i] != -INFINITY;
            continue;
          }
          const size_t id = static_cast<size_t>(chosen[n * k + i]);
          const bool valid = id < V && !seen[id];
          wrong += !valid;
          if (!valid) continue;
          seen[id] = true;
          off = std::max(off, std::fabs(found[n * k + i] - (controlled[n * V + id] - log_total[n])));
          off = std::max(off, std::fabs(controlled[n * V + id] - best[i]));
        }
      }
      report.note("candidates", static_cast<double>(wrong), 0.0);
      report.note("log-probabilities", off, 1e-4);
    }
    differing += std::memcmp(found.data(), first.data(), found.size() * sizeof(double)) != 0;
  }
  report.note("order of threads", static_cast<double>(differing), 0.0);

  // A position whose logits are not numbers says so, and its neighbours do not notice.
  auto broken = hidden;
  broken[(N - 1) * H] = bf16{0x7fc0};
  hidden_d.set(broken);
  arguments.logits = nullptr;
  check(confidence_head(s, arguments, workspace.get(), nullptr));
  const auto found = to_double(logprobs.values());
  report.note("not a number", static_cast<double>(!std::isnan(found[(N - 1) * k])), 0.0);
  report.note("its neighbours", static_cast<double>(std::memcmp(found.data(), first.data(), (N - 1) * k * sizeof(double)) != 0), 0.0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("expected the path of cases.txt");
  for (const Case& each : read_cases(arguments[1], "head")) run(each);
  return Report::failures() > 0;
}
