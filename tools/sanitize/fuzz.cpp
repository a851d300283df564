// Call the engine, and by fuzz_bulk.cpp the loops of fused/bulk, at random for a number of seconds, with valid and
// invalid input. Built with sanitizers, see run.sh. Assertions: invalid calls are refused and write nothing, and
// results of valid calls do not depend on threads.
#include "fuzz.h"

#include <chrono>
#include <thread>

#include "../../fused/backends/native/src/engine.h"

using namespace keyedopt;

namespace {

struct Memory {
  std::vector<std::vector<uint16_t>>
      weights;  // exactly as long as the table, so that sanitizers notice accesses beyond its end
  std::vector<std::vector<float>> states;
  std::vector<std::vector<int64_t>> counters;
  std::vector<Table> tables;
};

// Lookups and their memory.
struct Call {
  std::vector<std::vector<int64_t>> values, offsets;
  std::vector<std::vector<float>> weights, grads, outs;
  std::vector<Lookup> lookups;
  bool bad = false;
};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  float number() { return static_cast<float>(below(2001) - 1000) / 500.0f; }

  void fill(Memory* memory, int algorithm) {
    const int64_t count = 1 + below(4);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t rows = below(8) == 0 ? below(2) : 1 + below(below(6) == 0 ? 20000 : 50);
      const int64_t dim = 1 + below(40);
      const int dtype = static_cast<int>(below(3));
      Table table{nullptr, rows, dim, dtype, {nullptr, nullptr}, {0, 0}, nullptr, t};
      memory->weights.emplace_back(static_cast<size_t>(rows * dim * (dtype == kFloat ? 2 : 1)), 0);
      table.weight = memory->weights.back().data();
      const bool partial = algorithm == kPartialRowwiseAdam || algorithm == kPartialRowwiseLamb;
      const bool adam = partial || algorithm == kAdam || algorithm == kLamb;
      const int states = adam || algorithm == kFtrl ? 2 : algorithm == kSgd ? static_cast<int>(below(2)) : 1;
      for (int s = 0; s < states; ++s) {
        table.width[s] = algorithm == kRowwiseAdagrad || (partial && s == 1) ? 1 : dim;
        memory->states.emplace_back(static_cast<size_t>(rows * table.width[s]), 0.5f);
        table.state[s] = memory->states.back().data();
      }
      if (adam && below(2)) {
        memory->counters.emplace_back(static_cast<size_t>(rows), 3);
        table.counter = memory->counters.back().data();
      }
      memory->tables.push_back(table);
    }
  }

  void fill(Call* call, const std::vector<Table>& tables, bool bad) {
    const int64_t count = 1 + below(6);
    for (int64_t l = 0; l < count; ++l) {
      const int64_t t = below(static_cast<int64_t>(tables.size()));
      const Table& table = tables[static_cast<size_t>(t)];
      const int64_t number_of = !table.rows ? 0 : below(15) == 0 ? below(60000) : below(200);
      std::vector<int64_t> values(static_cast<size_t>(number_of));
      const bool skewed = below(2);
      for (int64_t& value : values) value = skewed && below(4) ? table.rows / 2 : below(table.rows);
      const bool pooled = below(3) > 0;
      std::vector<int64_t> offsets;
      int64_t bags = number_of;
      if (pooled) {
        offsets.push_back(0);
        while (offsets.back() < number_of && static_cast<int64_t>(offsets.size()) < 3000)
          offsets.push_back(std::min(number_of, offsets.back() + below(20)));
        offsets.push_back(number_of);
        bags = static_cast<int64_t>(offsets.size()) - 1;
      }
      if (bad && l == count - 1) call->bad = spoil(&values, &offsets, table.rows);
      // In a packed input the values of other keys, which no table may have, come first.
      const int64_t first = pooled && below(2) ? below(50) : 0;
      values.insert(values.begin(), static_cast<size_t>(first), int64_t{-1});
      for (int64_t& offset : offsets) offset += first;
      std::vector<float> weights(below(2) ? values.size() : 0);
      for (float& weight : weights) weight = number();
      std::vector<float> grads(static_cast<size_t>(bags * table.dim));
      for (float& grad : grads) grad = number();
      call->values.push_back(std::move(values));
      call->offsets.push_back(std::move(offsets));
      call->weights.push_back(std::move(weights));
      call->grads.push_back(std::move(grads));
      call->outs.emplace_back(static_cast<size_t>(bags * table.dim));
      call->lookups.push_back(
          {t, call->values.back().data(), number_of, pooled ? call->offsets.back().data() : nullptr, bags,
           call->weights.back().empty() ? nullptr : call->weights.back().data(), below(2) != 0,
           call->grads.back().data(), table.dim, call->outs.back().data(), first});
    }
  }

  Rule rule(int algorithm) {
    Rule rule{};
    rule.algorithm = algorithm;
    rule.decay = static_cast<int>(below(3));
    rule.nesterov = below(2);
    rule.first = below(2);
    rule.before_correction = below(2);
    rule.stochastic = below(2);
    rule.lr = rule.rate = 0.1f;
    rule.eps = below(2) ? 1e-8f : 0.0f;
    rule.sign = below(2) ? 1.0f : -1.0f;
    rule.weight_decay = rule.decay ? 0.1f : 0.0f;
    rule.momentum = 0.9f;
    rule.undamped = 0.5f;
    rule.eta = 0.1f;
    rule.exact_beta1 = 0.9;
    rule.exact_beta2 = 0.99;
    rule.beta1 = 0.9f;
    rule.rest1 = 0.1f;
    rule.beta2 = 0.99f;
    rule.rest2 = 0.01f;
    rule.max_norm = below(2) ? 1.0f : -1.0f;
    rule.l1 = below(2) ? 0.5f : 0.0f;
    rule.ridge = rule.shrinkage = 0.25f;
    rule.seed = random_();
    correct(rule, static_cast<double>(1 + below(10)), &rule.gain, &rule.spread);
    return rule;
  }

 private:
  bool spoil(std::vector<int64_t>* values, std::vector<int64_t>* offsets, int64_t rows) {
    const int64_t wrong[] = {-1, rows, INT64_MIN, INT64_MAX, rows + (int64_t{1} << 32)};
    if (offsets->size() > 2 && below(2)) {
      (*offsets)[static_cast<size_t>(below(static_cast<int64_t>(offsets->size())))] =
          static_cast<int64_t>(static_cast<uint64_t>(wrong[below(5)]) + 70000u);
      for (size_t i = 0; i + 1 < offsets->size(); ++i)
        if ((*offsets)[i] > (*offsets)[i + 1]) return true;
      return offsets->front() != 0 || offsets->back() != static_cast<int64_t>(values->size());
    }
    if (values->empty()) return false;
    (*values)[static_cast<size_t>(below(static_cast<int64_t>(values->size())))] = wrong[below(5)];
    return true;
  }

  std::mt19937_64 random_;
};

bool same(const Memory& a, const Memory& b) {
  return a.weights == b.weights && a.counters == b.counters && [&] {
    for (size_t i = 0; i < a.states.size(); ++i)
      if (!a.states[i].empty() &&
          std::memcmp(a.states[i].data(), b.states[i].data(), a.states[i].size() * sizeof(float)))
        return false;
    return true;
  }();
}

void once(uint64_t seed, const Kernels* kernels) {
  const bool bad = seed % 4 == 0;
  const int algorithm = static_cast<int>(seed / 4 % kAlgorithms);
  Memory results[3];
  Call calls[3];
  for (int r = 0; r < 3; ++r) {
    Fuzz fuzz(seed);
    fuzz.fill(&results[r], algorithm);
    fuzz.fill(&calls[r], results[r].tables, bad);
    const Memory before = results[r];
    const Rule rule = fuzz.rule(algorithm);
    const Run run{kernels, r == 0 ? 1 : 2 * r};
    const std::vector<Table>& tables = results[r].tables;
    const std::vector<Lookup>& lookups = calls[r].lookups;
    expect(look_up(tables, lookups, run).empty() != calls[r].bad, "a forward", seed);
    expect(update(tables, lookups, rule, run).empty() != calls[r].bad, "an update", seed);
    expect(!calls[r].bad || same(results[r], before), "a refused update wrote something", seed);
    Coalescing coalescing;
    expect(sort_lookups(tables, lookups, run, &coalescing).empty() != calls[r].bad, "a sort", seed);
    if (calls[r].bad) continue;
    std::vector<std::vector<int64_t>> rows;
    std::vector<std::vector<float>> grads;
    std::vector<int64_t*> row_memory;
    std::vector<float*> grad_memory;
    std::vector<Summed> summed;
    for (size_t i = 0; i < coalescing.tables.size(); ++i) {
      const int64_t dim = tables[static_cast<size_t>(coalescing.tables[i])].dim,
                    distinct = coalescing.distinct[i];
      rows.emplace_back(static_cast<size_t>(distinct));
      grads.emplace_back(static_cast<size_t>(distinct * dim));
      row_memory.push_back(rows.back().data());
      grad_memory.push_back(grads.back().data());
      summed.push_back({coalescing.tables[i], rows.back().data(), grads.back().data(), distinct, dim});
    }
    expect(sum_lookups(coalescing, row_memory, grad_memory, run).empty(), "a sum", seed);
    expect(update_rows(tables, summed, rule, run).empty(), "an update of rows", seed);
  }
  expect(same(results[0], results[1]) && same(results[0], results[2]), "threads changed a bit", seed);
  expect(calls[0].outs == calls[1].outs || calls[0].bad, "threads changed a forward", seed);
}

}  // namespace

// fuzz SECONDS [SEED] [INSTRUCTION_SET]
int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10.0;
  uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const char* names[] = {"plain", "avx2", "avx512"};
  const auto begin = std::chrono::steady_clock::now();
  uint64_t done = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
    const Kernels* kernels = kernels_named(count > 3 ? arguments[3] : names[seed % 3]);
    const auto call = [&](uint64_t of) {
      if (of % 6 == 0) bulk_once(of);
      if (of % 6 && kernels) once(of, kernels);
    };
    if (seed % 5) {
      call(seed);
    } else {  // two calls in parallel
      std::thread other([&] { call(seed + 1000000); });
      call(seed);
      other.join();
    }
    ++seed;
    ++done;
  }
  std::printf("%llu calls, all good\n", static_cast<unsigned long long>(done));
  return 0;
}
