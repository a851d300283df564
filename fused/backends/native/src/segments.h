// From sorted lookups to updated rows, and pooling. Included inside the namespace of an instruction set,
// after rules.h and sums.h.

constexpr int64_t kAhead = 24;         // lookups between a prefetch and its use
constexpr int64_t kAheadBytes = 1024;  // of a row that are prefetched; the hardware follows from there

// Inlined always: a call that only prefetches has no effect that GCC knows, so it would leave it out.
__attribute__((always_inline)) inline void prefetch(const void* p, int64_t bytes) {
  const char* at = static_cast<const char*>(p);
  bytes = bytes < kAheadBytes ? bytes : kAheadBytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

inline int64_t size_of(int dtype) { return dtype == kFloat ? 4 : 2; }

__attribute__((always_inline)) inline void prefetch_row(const Table& table, int64_t row) {
  const int64_t size = table.dim * size_of(table.dtype);
  prefetch(static_cast<const char*>(table.weight) + row * size, size);
  for (int i = 0; i < 2; ++i)
    if (table.width[i]) prefetch(table.state[i] + row * table.width[i], table.width[i] * 4);
  if (table.counter) __builtin_prefetch(table.counter + row);
}

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
void chunk_of(const Job& job, const Entry<K>* entries, int64_t count, Scratch& scratch, float* out) {
  sum_of<float>(Gradients<K, kSimple>{job, entries}, count, job.table->dim, !kSimple && job.scaled, scratch,
                out);
}

inline bool simple(const Job& job) { return !job.scaled && job.shift >= 64; }

template <class K>
void chunk(const Job& job, const Entry<K>* entries, int64_t count, Scratch& scratch, float* out) {
  if (simple(job)) {
    chunk_of<K, true>(job, entries, count, scratch, out);
  } else {
    chunk_of<K, false>(job, entries, count, scratch, out);
  }
}

// A run of any length: chunks as `combine` would have them, but one after the other.
template <class K>
void long_run(const Job& job, const Entry<K>* entries, int64_t count, Scratch& scratch, float* out) {
  const int64_t dim = job.table->dim;
  if (count <= kChunk) {
    chunk(job, entries, count, scratch, out);
    return;
  }
  const Total total(scratch.chunks, dim);
  for (int64_t i = 0; i < count; i += kChunk) {
    chunk(job, entries + i, count - i < kChunk ? count - i : kChunk, scratch, out);
    total.add(out);
  }
  total.round(out);
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

template <class K, bool kSimple>
int64_t segment_of(const Job& job, const Entry<K>* entries, int64_t begin, int64_t end, int64_t total,
                   int64_t first_row, Scratch& scratch, Hot* hot) {
  const Table& table = *job.table;
  const Gradients<K, kSimple> gradients{job, entries};
  int64_t ahead = begin, distinct = 0;
  for (int64_t i = begin; i < end;) {
    const int64_t j = run_end(entries, i, total);
    if (ahead < i) ahead = i;
    const int64_t until = i + kAhead < total ? i + kAhead : total;
    for (; ahead < until; ++ahead) {
      prefetch(gradients.row(ahead, nullptr), table.dim * 4);
      if (job.rule && (ahead == begin || entries[ahead].key != entries[ahead - 1].key))
        prefetch_row(table, static_cast<int64_t>(entries[ahead].key));
    }
    const int64_t row = static_cast<int64_t>(entries[i].key);
    if (hot && j - i > kHot) {
      *hot++ = {i, j, first_row + distinct};
      ++distinct;
      i = j;
      continue;
    }
    float* sum = job.rule ? scratch.sum : job.grads + (first_row + distinct) * table.dim;
    const float* grad = sum;
    if (j - i == 1 && job.rule && (kSimple || !job.scaled)) {
      grad = gradients.row(i, nullptr);
    } else if (j - i <= kBlock) {
      sum_of<float>(Gradients<K, kSimple>{job, entries + i}, j - i, table.dim, !kSimple && job.scaled,
                    scratch, sum);
    } else {
      long_run(job, entries + i, j - i, scratch, sum);
    }
    if (job.rule) {
      job.update(*job.rule, table, row, grad, scratch.work);
    } else {
      job.rows[first_row + distinct] = row;
    }
    ++distinct;
    i = j;
  }
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
  const int64_t dim = table.dim;
  int64_t ahead = lookup.offsets ? lookup.offsets[begin] : begin;
  const int64_t last = lookup.offsets ? lookup.offsets[end] : end;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t i = lookup.offsets ? lookup.offsets[b] : b;
    const int64_t j = lookup.offsets ? lookup.offsets[b + 1] : b + 1;
    for (const int64_t until = j + kAhead < last ? j + kAhead : last; ahead < until; ++ahead)
      prefetch(weight + lookup.values[ahead] * dim, dim * static_cast<int64_t>(sizeof(W)));
    float* out = lookup.out + b * dim;
    if (i == j) {
      std::memset(out, 0, static_cast<size_t>(dim) * sizeof(float));
      continue;
    }
    const Bag<W> bag{weight, dim, lookup.values + i, lookup.weights ? lookup.weights + i : nullptr};
    sum_of<W>(bag, j - i, dim, lookup.weights != nullptr, scratch, out);
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
  for (int64_t i = begin; i < end; ++i) {
    if (i + 16 < end) prefetch_row(table, rows[i + 16]);
    update(rule, table, rows[i], grads + i * stride, scratch.work);
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

// A rule for every dtype and width.
#define KEYEDOPT_RULE(rule, ...)                                         \
  {                                                                      \
    {rule<float, false __VA_ARGS__>, rule<float, true __VA_ARGS__>},     \
        {rule<half, false __VA_ARGS__>, rule<half, true __VA_ARGS__>}, { \
      rule<bfloat, false __VA_ARGS__>, rule<bfloat, true __VA_ARGS__>    \
    }                                                                    \
  }
#define KEYEDOPT_COMMA ,
#define KEYEDOPT_ADAM(partial, layered) KEYEDOPT_RULE(adam, KEYEDOPT_COMMA partial KEYEDOPT_COMMA layered)

const Kernels kernels = {{KEYEDOPT_RULE(sgd, ), KEYEDOPT_RULE(adagrad, ), KEYEDOPT_RULE(rowwise_adagrad, ),
                          KEYEDOPT_ADAM(false, false), KEYEDOPT_ADAM(true, false), KEYEDOPT_ADAM(false, true),
                          KEYEDOPT_ADAM(true, true), KEYEDOPT_RULE(lars, )},
                         segment<uint32_t>,
                         segment<uint64_t>,
                         chunk<uint32_t>,
                         chunk<uint64_t>,
                         combine,
                         look_up,
                         update_rows,
                         outside};
