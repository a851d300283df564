// The structures of the native backend: tables, lookups, the constants of a step, and the kernels of an instruction
// set. Nothing here depends on Python or torch.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace keyedopt {

enum Dtype : int { kFloat = 0, kHalf = 1, kBfloat = 2 };
enum Algorithm : int {
  kSgd = 0,
  kAdagrad = 1,
  kRowwiseAdagrad = 2,
  kAdam = 3,
  kPartialRowwiseAdam = 4,
  kLamb = 5,
  kPartialRowwiseLamb = 6,
  kLars = 7,
  kFtrl = 8,
  kAlgorithms = 9
};
enum Decay : int { kNoDecay = 0, kL2 = 1, kDecoupled = 2 };

// Storage of half precision; kernels compute in float.
struct half {
  uint16_t bits;
};
struct bfloat {
  uint16_t bits;
};

struct Table {
  void* weight;  // (rows, dim), contiguous
  int64_t rows;
  int64_t dim;
  int dtype;
  float* state[2];   // null for missing states
  int64_t width[2];  // dim; 1 for a state with one number per row; 0 for missing states
  int64_t* counter;  // (rows,), the step count of each row; null for one count per table
  int64_t number;    // number of the table in the call: part of the key of stochastic rounding
};

struct Lookup {
  int64_t table;
  const int64_t* values;  // of the whole input; those of the lookup are [first, first + count)
  int64_t count;
  const int64_t* offsets;  // (bags + 1,), from `first` on; null without pooling, which means bags == count
  int64_t bags;
  const float* weights;  // one for each value of the input, or null
  bool mean;
  const float* grad;  // row b begins at grad + b * stride, or at out + b * stride
  int64_t stride;
  float* out;  // (bags, dim), output of a forward pass
  int64_t first = 0;  // place of the first value; not 0 only in a packed input
};

// The constants of a step, as the formulas use them.
struct Rule {
  int algorithm;
  int decay;
  bool nesterov, first, before_correction, stochastic;
  float lr, rate, eps, sign, weight_decay, momentum, undamped, eta;
  float beta1, rest1, beta2, rest2;  // rest = 1 - beta
  float low1, low2, rest_low2;       // what rounding to float32 cuts off, or all steps would err alike
  double exact_beta1, exact_beta2;
  float max_norm;      // negative: no limit
  float l1, ridge, shrinkage;  // FTRL: the divisor is sqrt(n) / lr + ridge, the gradient g + shrinkage * w
  float gain, spread;  // direction = gain * m / (spread * sqrt(v) + eps)
  uint64_t seed;
};

// Split a number into a sum of two floats, none negative. Both are 0 or neither is, so inf times the number is inf.
inline void split(double number, float* high, float* low) {
  *high = static_cast<float>(number);
  if (*high > number) *high = std::nextafter(*high, 0.0f);
  *low = static_cast<float>(number - *high);
  if (*low == 0.0f && number > 0.0) *low = std::numeric_limits<float>::min();  // negligible beside `high`
}

// Set `gain` and `spread` to the bias corrections of step count t.
inline void correct(const Rule& rule, double t, float* gain, float* spread) {
  const double one = 1.0 - std::pow(rule.exact_beta1, t), two = 1.0 - std::pow(rule.exact_beta2, t);
  if (rule.before_correction) {
    *gain = static_cast<float>(std::sqrt(two) / one);
    *spread = 1.0f;
  } else {
    *gain = static_cast<float>(1.0 / one);
    *spread = static_cast<float>(1.0 / std::sqrt(two));
  }
}

// A sorted lookup: its row, and the place of its gradient (source, index in the source).
template <class K>
struct Entry {
  K key;
  K place;
};

// A source of gradients: gradient r is row `row[r]` of the tensor, times `scale[r]`.
struct Source {
  const float* base;
  int64_t stride;
  const uint32_t* row;  // null: r itself
  const float* scale;   // null: 1
};

// Working memory of a thread, reused by later calls.
struct Scratch {
  float* sums = nullptr;  // together(dim) rows: summed gradients
  float* sum = nullptr;   // one row: the gradient of a long run
  float* work = nullptr;  // one row: working memory of a rule
  float* leaf = nullptr;  // one row: the sum of a block of a long run
  double* blocks = nullptr;  // one row: the sum of blocks
  double* chunks = nullptr;  // one row: the sum of chunks
};
constexpr int64_t kShort = 8;     // longest run that is summed row by row
constexpr int64_t kBlock = 64;    // rows that are summed in registers at a time
constexpr int64_t kChunk = 4096;  // rows of a long run that one thread sums
constexpr int64_t kHot = 16384;   // longer runs are shared by threads
constexpr int64_t kCached = 1 << 20;  // bytes that fit in the second cache
constexpr int64_t kTogether = 16;  // rows that are updated in one call: as many as a vector has elements

// Return how many rows of this width are updated together, so that their memory fits in the first cache.
inline int64_t together(int64_t dim) {
  const int64_t fit = 2048 / dim;
  return fit < 1 ? 1 : fit < kTogether ? fit : kTogether;
}

// Return the distance between rows that are padded to whole vectors.
inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// At most kTogether distinct rows with their gradients, and the next rows, which are prefetched.
struct Rows {
  const int64_t* rows;
  const float* grads;  // the gradient of row r begins at grads + r * stride
  int64_t stride;
  int64_t count;
  const int64_t* next;
  int64_t coming;
};

// Update rows by their gradients.
using Update = void (*)(const Rule&, const Table&, const Rows&, float* work);

// What kernels need to know of a sorted table.
struct Job {
  const Table* table;
  const Rule* rule;  // null: write sums to `rows` and `grads`, and update nothing
  Update update;
  const Source* sources;
  int shift;      // place >> shift is the source
  uint64_t mask;  // place & mask is the index in the source
  bool scaled;    // whether any source has `row` or `scale`
  int64_t* rows;  // (U,)
  float* grads;   // (U, dim)
  bool far = false;  // whether the gradients do not fit in the second cache
};

// A long run that several threads will sum: entries [begin, end), and its row of the output.
struct Hot {
  int64_t begin, end, out;
};

// Kernels of one instruction set.
struct Kernels {
  Update update[kAlgorithms][3][4];  // by algorithm, dtype and width: any, whole vectors, 64, 128
  // Sum the runs of sorted entries [begin, end), and update their rows, or write the sums to the output from row
  // `first` on. If `hot` is not null, runs longer than kHot are appended to it instead; it has room for all.
  void (*segment32)(const Job&, const Entry<uint32_t>*, int64_t begin, int64_t end, int64_t first, Scratch&,
                    Hot* hot);
  void (*segment64)(const Job&, const Entry<uint64_t>*, int64_t begin, int64_t end, int64_t first, Scratch&,
                    Hot* hot);
  // Sum one chunk of a long run into `out`.
  void (*chunk32)(const Job&, const Entry<uint32_t>*, int64_t count, Scratch&, float* out);
  void (*chunk64)(const Job&, const Entry<uint64_t>*, int64_t count, Scratch&, float* out);
  // Add `count` chunk sums, which are contiguous in memory, into `out`.
  void (*combine)(const float* sums, int64_t count, int64_t dim, Scratch&, float* out);
  // Pool bags [begin, end); without offsets, copy rows [begin, end).
  void (*look_up)(const Table&, const Lookup&, int64_t begin, int64_t end, Scratch&);
  // Update rows[begin..end) by summed gradients.
  void (*update_rows)(const Rule&, const Table&, Update, const int64_t* rows, const float* grads,
                      int64_t stride, int64_t begin, int64_t end, Scratch&);
  // Return the position of the first value outside [0, rows) in values[begin..end), or `end`.
  int64_t (*outside)(const int64_t* values, int64_t begin, int64_t end, int64_t rows);
};

inline Update update_of(const Kernels& kernels, const Rule& rule, const Table& table) {
  const int width = table.dim == 64 ? 2 : table.dim == 128 ? 3 : table.dim % 16 == 0 ? 1 : 0;
  return kernels.update[rule.algorithm][table.dtype][width];
}

const Kernels* kernels_plain();
const Kernels* kernels_avx2();    // null on other architectures
const Kernels* kernels_avx512();  // null on other architectures

}  // namespace keyedopt
