// Call the loops of fused/bulk at random, see run.sh: dense steps, sums of squares, copies, row numbers. Assertions:
// results depend neither on threads nor on the instruction set, no other memory is written, and overlaps and bad rows
// are the same as those that a slow search finds.
#include "fuzz.h"

#include <cmath>
#include <numeric>

#include "../../fused/bulk/copies.h"
#include "../../fused/bulk/dense.h"
#include "../../fused/bulk/rows.h"
#include "../../fused/bulk/squares.h"

using namespace keyedopt;

namespace {

constexpr Machine kMachines[] = {Machine::plain, Machine::avx2, Machine::avx512};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  float number() { return static_cast<float>(below(2001) - 1000) / 500.0f; }
  int64_t size() {
    const int64_t most[] = {2, 70, 3000, 40000};
    return below(below(60) ? most[below(4)] : 300000);  // a thread processes 131072 at a time
  }
  // Memory of exactly this size after up to 15 floats that must not be written, so that rows are not aligned.
  std::vector<float> numbers(int64_t count, int64_t before) {
    std::vector<float> made(static_cast<size_t>(before + count), 77.0f);
    for (int64_t i = before; i < before + count; ++i) made[static_cast<size_t>(i)] = number();
    return made;
  }

 private:
  std::mt19937_64 random_;
};

struct Parameters {
  std::vector<std::vector<float>> memory;  // weight, gradient and two states of each parameter
  std::vector<int64_t> before;
  std::vector<Param> params;

  Parameters(Fuzz* fuzz, const Options& options) {
    const int64_t count = fuzz->below(5);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t size = fuzz->size();
      const double t = 1.0 + static_cast<double>(fuzz->below(9));
      for (int part = 0; part < 4; ++part) {
        before.push_back(fuzz->below(16));
        memory.push_back(fuzz->numbers(size, before.back()));
      }
      for (int part = 2; part < 4; ++part)  // sums of squares are not negative
        if (options.algorithm != kSgd)
          for (float& one : memory[memory.size() - static_cast<size_t>(4 - part)]) one = std::fabs(one);
      float* at[4];
      for (size_t part = 0; part < 4; ++part) {
        const size_t i = memory.size() - 4 + part;
        at[part] = memory[i].data() + before[i];
      }
      params.push_back({at[0], at[1], {at[2], at[3]}, size, rule_of(options, t)});
    }
  }
};

Options options(Fuzz* fuzz) {
  Options o{};
  o.algorithm = static_cast<int>(fuzz->below(3));
  o.maximize = fuzz->below(2);
  o.decoupled = fuzz->below(2);
  o.momentum = fuzz->below(2) ? 0.9 : 0.0;
  o.nesterov = fuzz->below(2);
  o.first = fuzz->below(2);
  o.factor = fuzz->below(2) ? 1.0 : 0.3;
  o.limit = fuzz->below(2) ? 0.5 : INFINITY;
  o.lr = 0.1;
  o.beta1 = 0.9;
  o.beta2 = 0.99;
  o.eps = fuzz->below(2) ? 1e-8 : 0.0;
  o.weight_decay = fuzz->below(2) ? 0.1 : 0.0;
  o.dampening = fuzz->below(2) ? 0.5 : 0.0;
  o.lr_decay = 0.1;
  return o;
}

bool same(const Parameters& a, const Parameters& b) {
  for (size_t i = 0; i < a.memory.size(); ++i)  // compare bits, because NaN is not equal to itself
    if (!a.memory[i].empty() &&
        std::memcmp(a.memory[i].data(), b.memory[i].data(), a.memory[i].size() * sizeof(float)))
      return false;
  return true;
}

void step_once(uint64_t seed) {
  Fuzz first(seed);
  const Options o = options(&first);
  const Parameters given(&first, o);
  std::vector<Parameters> results;
  for (const Machine machine : kMachines) {
    if (!runs(machine)) continue;
    for (int threads = 1; threads < 5; threads += 1 + static_cast<int>(seed % 2)) {
      Fuzz fuzz(seed);
      const Options again = options(&fuzz);
      results.emplace_back(&fuzz, again);
      const bool done = step_all(results.back().params, threads, machine);
      expect(done, "a dense step", seed);
      expect(same(results.back(), results.front()), "threads or machines changed a dense step", seed);
      if (results.size() > 1) results.pop_back();
    }
  }
  for (size_t i = 0; i < given.memory.size(); ++i) {
    const std::vector<float>&was = given.memory[i], &is = results.front().memory[i];
    const bool states = i % 4 >= 2;
    const bool none = states && o.algorithm != kAdam && (i % 4 == 3 || (o.algorithm == kSgd && o.momentum == 0.0));
    const auto until = i % 4 == 1 || none ? was.end() : was.begin() + given.before[i];
    expect(std::equal(was.begin(), until, is.begin()), "a dense step wrote beside its tensors", seed);
  }
}

void square_once(uint64_t seed) {
  Fuzz fuzz(seed);
  std::vector<std::vector<float>> memory;
  std::vector<Stretch> stretches;
  double exact = 0.0;
  for (int64_t i = fuzz.below(5); i-- > 0;) {
    const int64_t before = fuzz.below(16), count = fuzz.size();
    memory.push_back(fuzz.numbers(count, before));
    stretches.push_back({memory.back().data() + before, count});
    exact = std::accumulate(memory.back().begin() + before, memory.back().end(), exact,
                            [](double sum, float x) { return sum + double(x) * double(x); });
  }
  double reference = -1.0, total = 0.0;
  for (const Machine machine : kMachines) {
    if (!runs(machine)) continue;
    for (int threads = 1; threads < 5; ++threads) {
      expect(sum_squares(stretches, threads, machine, &total), "a sum of squares", seed);
      if (reference < 0.0) reference = total;
      expect(total == reference, "threads or machines changed a sum of squares", seed);
    }
  }
  expect(std::fabs(reference - exact) <= 1e-5 * exact, "a sum of squares is wrong", seed);
}

void copy_once(uint64_t seed) {
  Fuzz fuzz(seed);
  std::vector<char> memory(2000, 1);
  std::vector<Copy> copies;
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (int64_t i = fuzz.below(12); i-- > 0;) {
    const int64_t bytes = 1 + fuzz.below(40), to = fuzz.below(1960), from = fuzz.below(1960);
    copies.push_back({memory.data() + to, memory.data() + from, bytes});
    taken.push_back({to, to + bytes});
    taken.push_back({from, from + bytes});
  }
  bool found = false;
  for (size_t i = 0; i < taken.size(); ++i)
    for (size_t j = 0; j < i; ++j) found |= taken[i].first < taken[j].second && taken[j].first < taken[i].second;
  expect(overlap(copies) == found, "an overlap", seed);
  if (found) return;
  for (const Copy& one : copies) std::memset(const_cast<char*>(one.from), 2, static_cast<size_t>(one.bytes));
  make(copies);
  int64_t twos = 0, bytes = 0;
  for (const Copy& one : copies) bytes += 2 * one.bytes;
  for (const char one : memory) twos += one == 2;
  expect(twos == bytes, "a copy", seed);
}

void rows_once(uint64_t seed) {
  Fuzz fuzz(seed);
  const int64_t sizes[] = {0, 1, 7, 1000, int64_t{1} << 40, INT64_MAX};
  const int64_t size = sizes[fuzz.below(6)];
  std::vector<int64_t> numbers(static_cast<size_t>(size ? fuzz.below(3000) : 0));
  for (int64_t& one : numbers) one = fuzz.below(size);
  expect(!first_outside(numbers.data(), static_cast<int64_t>(numbers.size()), size), "good rows", seed);
  const int64_t wrong[] = {-1, size, INT64_MIN, INT64_MAX};
  const int64_t bad = wrong[fuzz.below(4)];
  if (numbers.empty() || (bad >= 0 && bad < size)) return;
  const size_t place = static_cast<size_t>(fuzz.below(static_cast<int64_t>(numbers.size())));
  numbers[place] = bad;
  const int64_t* found = first_outside(numbers.data(), static_cast<int64_t>(numbers.size()), size);
  expect(found == numbers.data() + place, "a bad row", seed);
}

}  // namespace

void bulk_once(uint64_t seed) {
  step_once(seed);
  square_once(seed);
  for (uint64_t i = 0; i < 4; ++i) {
    copy_once(4 * seed + i);
    rows_once(4 * seed + i);
  }
}
