// From sorted lookups to updated rows, and pooling. Included inside the namespace of an instruction set,
// after rules.h and sums.h.

constexpr int64_t kAhead = 24;         // lookups between a prefetch and its use
constexpr int64_t kAheadLines = 16;  // of a row that are prefetched; the hardware follows from there

inline int64_t lines_of(int64_t bytes) {
  const int64_t lines = (bytes + 63) / 64;
  return lines < kAheadLines ? lines : kAheadLines;
}

// A jump that is always the same costs less than a loop that has to find its end.
// Inlined always: a call that only prefetches has no effect that GCC knows, so it would leave it out.
__attribute__((always_inline)) inline void prefetch(const void* p, int64_t lines) {
  const char* at = static_cast<const char*>(p) - 64 * (kAheadLines - lines);
#define KEYEDOPT_LINE(left) \
  case left:                \
    __builtin_prefetch(at + 64 * (kAheadLines - left)); /* fall through */
  switch (lines) {
    KEYEDOPT_LINE(16)
    KEYEDOPT_LINE(15)
    KEYEDOPT_LINE(14)
    KEYEDOPT_LINE(13)
    KEYEDOPT_LINE(12)
    KEYEDOPT_LINE(11)
    KEYEDOPT_LINE(10)
    KEYEDOPT_LINE(9)
    KEYEDOPT_LINE(8)
    KEYEDOPT_LINE(7)
    KEYEDOPT_LINE(6)
    KEYEDOPT_LINE(5)
    KEYEDOPT_LINE(4)
    KEYEDOPT_LINE(3)
    KEYEDOPT_LINE(2)
    KEYEDOPT_LINE(1)
    default:
      break;
  }
#undef KEYEDOPT_LINE
}

inline int64_t size_of(int dtype) { return dtype == kFloat ? 4 : 2; }

// Where the rows of a table and of its states are, to be prefetched.
struct Ahead {
  const char* weight;
  int64_t size, lines, state_lines[2];
  const Table& table;

  explicit Ahead(const Table& of)
      : weight(static_cast<const char*>(of.weight)),
        size(of.dim * size_of(of.dtype)),
        lines(lines_of(size)),
        state_lines{lines_of(of.width[0] * 4), lines_of(of.width[1] * 4)},
        table(of) {}
  __attribute__((always_inline)) void fetch(int64_t row) const {
    prefetch(weight + row * size, lines);
    for (int i = 0; i < 2; ++i) prefetch(table.state[i] + row * table.width[i], state_lines[i]);
    if (table.counter) __builtin_prefetch(table.counter + row);
  }
};

// Where the gradients of sorted lookups are. Simple: there is one source, and what is in it comes as it is.
template <class K, bool kSimple>
struct Gradients {
  const Job& job;
  const Entry<K>* entries;

  const float* row(int64_t i, float* scale) const {
    const uint64_t place = entries[i].place;
    if (kSimple) return job.sources->base + static_cast<int64_t>(place) * job.sources->stride;
    const Source& source = job.sources[job.shift < 64 ? place >> job.shift : 0];
    uint64_t number = place & job.mask;
    if (scale) *scale = source.scale ? source.scale[number] : 1.0f;
    if (source.row) number = source.row[number];
    return source.base + static_cast<int64_t>(number) * source.stride;
  }
  void fill(int64_t from, int64_t count, const float** rows, float* scale) const {
    for (int64_t i = 0; i < count; ++i) rows[i] = row(from + i, scale ? scale + i : nullptr);
  }
};

template <class K, bool kSimple>
void chunk_of(const Job& job, const Entry<K>* entries, int64_t count, double* out) {
  sum_many(Gradients<K, kSimple>{job, entries}, count, job.table->dim, !kSimple && job.scaled, out);
}

inline bool simple(const Job& job) { return !job.scaled && job.shift >= 64; }

template <class K>
void chunk(const Job& job, const Entry<K>* entries, int64_t count, double* out) {
  if (simple(job)) {
    chunk_of<K, true>(job, entries, count, out);
  } else {
    chunk_of<K, false>(job, entries, count, out);
  }
}

// A run of any length: chunks as `combine` would have them, but one after the other.
template <class K>
void long_run(const Job& job, const Entry<K>* entries, int64_t count, Scratch& scratch, float* out) {
  const int64_t dim = job.table->dim;
  double *sum = scratch.wide, *part = sum + padded(dim);
  chunk(job, entries, count < kChunk ? count : kChunk, sum);
  for (int64_t i = kChunk; i < count; i += kChunk) {
    chunk(job, entries + i, count - i < kChunk ? count - i : kChunk, part);
    add_wide(sum, part, dim);
  }
  round_row(sum, dim, out);
}

// The end of the run that contains entry i.
template <class K>
int64_t run_end(const Entry<K>* entries, int64_t i, int64_t total) {
  const K key = entries[i].key;
  int64_t j = i + 1;
  const int64_t near = total - i > 32 ? i + 32 : total;
  while (j < near && entries[j].key == key) ++j;
  if (j < near || j == total) return j;
  int64_t step = 32;
  while (j + step < total && entries[j + step].key == key) {
    j += step;
    step *= 2;
  }
  int64_t high = j + step < total ? j + step : total;  // entries[j - 1] is of the run, entries[high] is not
  while (j < high) {
    const int64_t middle = j + (high - j) / 2;
    if (entries[middle].key == key) {
      j = middle + 1;
    } else {
      high = middle;
    }
  }
  return j;
}

// Rows that wait to be updated together, with their gradients: theirs, or sums in the scratch.
struct Waiting {
  const Job& job;
  Scratch& scratch;
  int64_t stride, most, count;
  int64_t rows[kTogether];
  const float* grads[kTogether];

  Waiting(const Job& of, Scratch& memory)
      : job(of),
        scratch(memory),
        stride(padded(of.table->dim)),
        most(1024 / stride < 1 ? 1 : 1024 / stride < kTogether ? 1024 / stride : kTogether),
        count(0) {}
  float* sum() const { return scratch.sum + count * stride; }
  void add(int64_t row, const float* grad) {
    rows[count] = row;
    grads[count] = grad;
    if (++count == most) finish();
  }
  void finish() {
    job.update(*job.rule, *job.table, rows, grads, count, scratch.work);
    count = 0;
  }
};

template <class K, bool kSimple>
int64_t segment_of(const Job& job, const Entry<K>* entries, int64_t begin, int64_t end, int64_t total,
                   int64_t first_row, Scratch& scratch, Hot* hot) {
  const Table& table = *job.table;
  const Gradients<K, kSimple> gradients{job, entries};
  const Ahead to_come(table);
  const int64_t lines = lines_of(table.dim * 4);
  Waiting waiting(job, scratch);
  int64_t ahead = begin, distinct = 0;
  for (int64_t i = begin; i < end;) {
    const int64_t j = run_end(entries, i, total);
    if (ahead < i) ahead = i;
    const int64_t until = i + kAhead < total ? i + kAhead : total;
    for (; ahead < until; ++ahead) {
      prefetch(gradients.row(ahead, nullptr), lines);
      if (job.rule) to_come.fetch(static_cast<int64_t>(entries[ahead].key));
    }
    const int64_t row = static_cast<int64_t>(entries[i].key);
    if (hot && j - i > kHot) {
      *hot++ = {i, j, first_row + distinct};
      ++distinct;
      i = j;
      continue;
    }
    float* sum = job.rule ? waiting.sum() : job.grads + (first_row + distinct) * table.dim;
    const float* grad = sum;
    if (j - i == 1 && job.rule && (kSimple || !job.scaled)) {
      grad = gradients.row(i, nullptr);
    } else if (j - i <= kBlock) {
      sum_few(Gradients<K, kSimple>{job, entries + i}, j - i, table.dim, !kSimple && job.scaled, sum);
    } else {
      long_run(job, entries + i, j - i, scratch, sum);
    }
    if (job.rule) {
      waiting.add(row, grad);
    } else {
      job.rows[first_row + distinct] = row;
    }
    ++distinct;
    i = j;
  }
  if (waiting.count) waiting.finish();
  return distinct;
}

template <class K>
int64_t segment(const Job& job, const Entry<K>* entries, int64_t begin, int64_t end, int64_t total,
                int64_t first_row, Scratch& scratch, Hot* hot) {
  return simple(job) ? segment_of<K, true>(job, entries, begin, end, total, first_row, scratch, hot)
                     : segment_of<K, false>(job, entries, begin, end, total, first_row, scratch, hot);
}

// The rows of a bag.
template <class W>
struct Bag {
  const W* weight;
  int64_t dim;
  const int64_t* values;
  const float* weights;

  void fill(int64_t from, int64_t count, const W** rows, float* scale) const {
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = weight + values[from + i] * dim;
      if (scale) scale[i] = weights[from + i];
    }
  }
};

template <class W>
void look_up_as(const Table& table, const Lookup& lookup, int64_t begin, int64_t end, Scratch& scratch) {
  const W* weight = static_cast<const W*>(table.weight);
  const int64_t dim = table.dim, lines = lines_of(dim * static_cast<int64_t>(sizeof(W)));
  int64_t ahead = lookup.offsets ? lookup.offsets[begin] : begin;
  const int64_t last = lookup.offsets ? lookup.offsets[end] : end;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t i = lookup.offsets ? lookup.offsets[b] : b;
    const int64_t j = lookup.offsets ? lookup.offsets[b + 1] : b + 1;
    for (const int64_t until = j + kAhead < last ? j + kAhead : last; ahead < until; ++ahead)
      prefetch(weight + lookup.values[ahead] * dim, lines);
    float* out = lookup.out + b * dim;
    if (i == j) {
      std::memset(out, 0, static_cast<size_t>(dim) * sizeof(float));
      continue;
    }
    const Bag<W> bag{weight, dim, lookup.values + i, lookup.weights ? lookup.weights + i : nullptr};
    sum_of<W>(bag, j - i, dim, lookup.weights != nullptr, scratch, scratch.tree, out);
    if (!lookup.mean || j - i == 1) continue;
    constexpr bool kWhole = false;
    const vf length = set1(static_cast<float>(j - i));
    KEYEDOPT_COLUMNS(dim) { put(out + c, get(out + c, n) / length, n); }
  }
}

void look_up(const Table& table, const Lookup& lookup, int64_t begin, int64_t end, Scratch& scratch) {
  if (table.dtype == kFloat) look_up_as<float>(table, lookup, begin, end, scratch);
  if (table.dtype == kHalf) look_up_as<half>(table, lookup, begin, end, scratch);
  if (table.dtype == kBfloat) look_up_as<bfloat>(table, lookup, begin, end, scratch);
}

void update_rows(const Rule& rule, const Table& table, Update update, const int64_t* rows, const float* grads,
                 int64_t stride, int64_t begin, int64_t end, Scratch& scratch) {
  const Ahead to_come(table);
  const float* some[kTogether];
  for (int64_t i = begin; i < end; i += kTogether) {
    const int64_t count = end - i < kTogether ? end - i : kTogether;
    for (int64_t r = 0; r < count; ++r) {
      some[r] = grads + (i + r) * stride;
      if (i + r + 16 < end) to_come.fetch(rows[i + r + 16]);
    }
    update(rule, table, rows + i, some, count, scratch.work);
  }
}

int64_t outside(const int64_t* values, int64_t begin, int64_t end, int64_t rows) {
  const uint64_t limit = static_cast<uint64_t>(rows);
  for (int64_t i = begin; i < end; i += 256) {
    const int64_t until = end - i < 256 ? end : i + 256;
    uint64_t bad = 0;
    for (int64_t k = i; k < until; ++k) bad |= static_cast<uint64_t>(values[k]) >= limit ? 1u : 0u;
    if (!bad) continue;
    for (int64_t k = i; k < until; ++k)
      if (static_cast<uint64_t>(values[k]) >= limit) return k;
  }
  return end;
}

template <class W, bool kWhole>
constexpr Update kSgdRule = each<sgd<W, kWhole>>;
template <class W, bool kWhole>
constexpr Update kAdagradRule = each<adagrad<W, kWhole>>;
template <class W, bool kWhole>
constexpr Update kRowwiseAdagradRule = rowwise_adagrad<W, kWhole>;
template <class W, bool kWhole>
constexpr Update kAdamRule = each<adam<W, kWhole, false, false>>;
template <class W, bool kWhole>
constexpr Update kPartialAdamRule = each<adam<W, kWhole, true, false>>;
template <class W, bool kWhole>
constexpr Update kLambRule = each<adam<W, kWhole, false, true>>;
template <class W, bool kWhole>
constexpr Update kPartialLambRule = each<adam<W, kWhole, true, true>>;
template <class W, bool kWhole>
constexpr Update kLarsRule = each<lars<W, kWhole>>;

// A rule for every dtype and width.
#define KEYEDOPT_RULE(rule)                                   \
  {                                                           \
    {rule<float, false>, rule<float, true>},                  \
        {rule<half, false>, rule<half, true>},                \
        {rule<bfloat, false>, rule<bfloat, true>},            \
  }

const Kernels kernels = {{KEYEDOPT_RULE(kSgdRule), KEYEDOPT_RULE(kAdagradRule),
                          KEYEDOPT_RULE(kRowwiseAdagradRule), KEYEDOPT_RULE(kAdamRule),
                          KEYEDOPT_RULE(kPartialAdamRule), KEYEDOPT_RULE(kLambRule),
                          KEYEDOPT_RULE(kPartialLambRule), KEYEDOPT_RULE(kLarsRule)},
                         segment<uint32_t>,
                         segment<uint64_t>,
                         chunk<uint32_t>,
                         chunk<uint64_t>,
                         combine,
                         look_up,
                         update_rows,
                         outside};
