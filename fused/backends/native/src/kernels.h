// The structures of the native backend: tables, lookups, the numbers of a step, and the table of kernels that
// each instruction set fills in. Nothing here depends on Python or torch.
#pragma once

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
  kAlgorithms = 8
};
enum Decay : int { kNoDecay = 0, kL2 = 1, kDecoupled = 2 };

// Storage of half precision; computing is in float.
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
  float* state[2];   // null where the algorithm has fewer
  int64_t width[2];  // dim, or 1 for a state of one number a row, or 0
  int64_t* counter;  // (rows,), steps of each row; null for one count of all
  int64_t number;    // which table of the call: part of the key of stochastic rounding
};

struct Lookup {
  int64_t table;
  const int64_t* values;  // (count,)
  int64_t count;
  const int64_t* offsets;  // (bags + 1,); null without pooling, and then bags == count
  int64_t bags;
  const float* weights;  // (count,) or null
  bool mean;
  const float* grad;  // row b begins at grad + b * stride
  int64_t stride;
  float* out;  // (bags, dim), of a forward
};

// One step's numbers, as the formulas use them.
struct Rule {
  int algorithm;
  int decay;
  bool nesterov, first, before_correction, stochastic;
  float lr, rate, eps, sign, weight_decay, momentum, undamped, eta;
  float beta1, rest1, beta2, rest2;  // rest = 1 - beta
  float low1, low2, rest_low2;       // what they lack as float32, which would err alike in every step
  double exact_beta1, exact_beta2;
  float max_norm;      // negative: no limit
  float gain, spread;  // direction = gain * m / (spread * sqrt(v) + eps)
  uint64_t seed;
};

// A number as the sum of two floats, none negative. Both are 0 or neither, so inf times the number is inf.
inline void split(double number, float* high, float* low) {
  *high = static_cast<float>(number);
  if (*high > number) *high = std::nextafter(*high, 0.0f);
  *low = static_cast<float>(number - *high);
  if (*low == 0.0f && number > 0.0) *low = std::numeric_limits<float>::min();  // which is nothing beside it
}

// Bias corrections of count t, as `gain` and `spread`.
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

// A sorted lookup: its row, and its gradient (source, index in the source).
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

// Memory of a thread, reused by later calls.
struct Scratch {
  float* sums = nullptr;  // `together` rows: gradients
  float* sum = nullptr;   // a row: the gradient of a long run
  float* work = nullptr;  // a row: what a rule needs
  float* leaf = nullptr;  // a row: a block of a long run
  double* blocks = nullptr;  // a row: the sum of blocks
  double* chunks = nullptr;  // a row: the sum of chunks
};
constexpr int64_t kShort = 8;     // rows that are summed one after the other
constexpr int64_t kBlock = 64;    // rows that are summed in registers
constexpr int64_t kChunk = 4096;  // rows of a long run that one thread sums
constexpr int64_t kHot = 16384;   // a run longer than this is shared by threads
constexpr int64_t kCached = 1 << 20;  // bytes that a second cache holds
constexpr int64_t kTogether = 16;  // rows that are updated in one call: the number of elements of a vector

// The number of rows of this width that are updated together, so that their memory fits in the first cache.
inline int64_t together(int64_t dim) {
  const int64_t fit = 2048 / dim;
  return fit < 1 ? 1 : fit < kTogether ? fit : kTogether;
}

// The distance between rows that are padded to whole vectors.
inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// At most kTogether distinct rows with their gradients, and the rows after them.
struct Rows {
  const int64_t* rows;
  const float* grads;  // that of row r begins at grads + r * stride
  int64_t stride;
  int64_t count;
  const int64_t* next;
  int64_t coming;
};

// Update rows by their gradients.
using Update = void (*)(const Rule&, const Table&, const Rows&, float* work);

// A sorted table: what its kernels need to know.
struct Job {
  const Table* table;
  const Rule* rule;  // null: write sums to `rows` and `grads` instead
  Update update;
  const Source* sources;
  int shift;      // place >> shift is the source
  uint64_t mask;  // place & mask is the number in it
  bool scaled;    // whether any source has `row` or `scale`
  int64_t* rows;  // (U,)
  float* grads;   // (U, dim)
  bool far = false;  // whether the gradients are more than a second cache holds
};

// A long run that several threads will sum: entries [begin, end), and its row of the output.
struct Hot {
  int64_t begin, end, out;
};

// Kernels of one instruction set.
struct Kernels {
  Update update[kAlgorithms][3][4];  // by algorithm, dtype and width: any, whole vectors, 64, 128
  // Sum and update the runs of sorted entries [begin, end), into row `first` and on of the output where sums
  // are written; runs above kHot are put into `hot` (room for all) when it is not null.
  void (*segment32)(const Job&, const Entry<uint32_t>*, int64_t begin, int64_t end, int64_t first, Scratch&,
                    Hot* hot);
  void (*segment64)(const Job&, const Entry<uint64_t>*, int64_t begin, int64_t end, int64_t first, Scratch&,
                    Hot* hot);
  // Sum one chunk of a long run into `out`.
  void (*chunk32)(const Job&, const Entry<uint32_t>*, int64_t count, Scratch&, float* out);
  void (*chunk64)(const Job&, const Entry<uint64_t>*, int64_t count, Scratch&, float* out);
  // Sum `count` chunk sums, one after the other in memory, into `out`.
  void (*combine)(const float* sums, int64_t count, int64_t dim, Scratch&, float* out);
  // Pool bags [begin, end), or copy rows [begin, end) without offsets.
  void (*look_up)(const Table&, const Lookup&, int64_t begin, int64_t end, Scratch&);
  // Update rows[begin..end) by gradients that are summed already.
  void (*update_rows)(const Rule&, const Table&, Update, const int64_t* rows, const float* grads,
                      int64_t stride, int64_t begin, int64_t end, Scratch&);
  // Position of the first value outside [0, rows) in values[begin..end), or `end`.
  int64_t (*outside)(const int64_t* values, int64_t begin, int64_t end, int64_t rows);
};

inline Update update_of(const Kernels& kernels, const Rule& rule, const Table& table) {
  const int width = table.dim == 64 ? 2 : table.dim == 128 ? 3 : table.dim % 16 == 0 ? 1 : 0;
  return kernels.update[rule.algorithm][table.dtype][width];
}

const Kernels* kernels_plain();
const Kernels* kernels_avx2();    // null where it was not compiled
const Kernels* kernels_avx512();  // null where it was not compiled

}  // namespace keyedopt
