// Update rows from sorted lookups, and pool rows. Included inside the namespace of an instruction set, after rules.h
// and sums.h.

// Number of lookups between a prefetch and its use in a forward pass. Their memory must fit in the second cache.
inline int64_t ahead_of(int64_t bytes) {
  const int64_t fit = 16384 / bytes;
  return fit < 16 ? 16 : fit < 64 ? fit : 64;
}

// Return whether so many lookups bring a table of narrow rows into the second cache: a line has several rows, and to
// prefetch each row would take longer than to wait for a few lines.
inline bool soon_cached(const Table& table, int64_t count) {
  const int64_t row = table.dim * (table.dtype == kFloat ? 4 : 2), bytes = table.rows * row;
  return row <= 32 && bytes <= kCached && bytes <= 256 * count;
}

// The gradients of sorted lookups. Simple: one source without row numbers and scales.
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
  bool far() const { return job.far; }
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

// Sum a run of any length on this thread, in the same chunks as `combine`, so with the same bits.
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

// Sum the run that begins at entry i separately; return its end.
template <class K>
int64_t alone(const Job& job, const Entry<K>* entries, int64_t i, int64_t end, int64_t place, Scratch& scratch,
              Hot** hot) {
  const int64_t j = run_end(entries, i, end), row = static_cast<int64_t>(entries[i].key);
  if (*hot && j - i > kHot) {
    *(*hot)++ = {i, j, place};
    return j;
  }
  float* sum = job.rule ? scratch.sum : job.grads + place * job.table->dim;
  long_run(job, entries + i, j - i, scratch, sum);
  if (job.rule) {
    job.update(*job.rule, *job.table, {&row, sum, 0, 1, nullptr, 0}, scratch.work);
  } else {
    job.rows[place] = row;
  }
  return j;
}

template <class K, bool kSimple>
void segment_of(const Job& job, const Entry<K>* entries, int64_t begin, int64_t end, int64_t place,
                Scratch& scratch, Hot* hot) {
  const Gradients<K, kSimple> gradients{job, entries};
  const int64_t most = together(job.table->dim);
  const bool prefetches = job.rule && !soon_cached(*job.table, end - begin);
  Batch batches[kStages];
  uint32_t listed = 0, finished = 0;
  for (int64_t i = begin; i < end || finished < listed;) {
    while (i < end && listed - finished < kStages) {
      if (is_longer(entries, i, end, kBlock)) {
        i = alone(job, entries, i, end, place++, scratch, &hot);
        continue;
      }
      Batch& batch = batches[listed++ % kStages];
      i = list_runs(gradients, entries, i, end, most, !kSimple && job.scaled, batch);
      batch.first = place;
      place += batch.count;
      if (prefetches) prefetch_rows(*job.table, batch.rows, batch.count);
    }
    if (finished == listed) continue;
    const Batch& batch = batches[finished++ % kStages];
    finish(job, batch, finished < listed ? &batches[finished % kStages] : nullptr, scratch);
  }
}

template <class K>
void segment(const Job& job, const Entry<K>* entries, int64_t begin, int64_t end, int64_t first,
             Scratch& scratch, Hot* hot) {
  if (simple(job)) {
    segment_of<K, true>(job, entries, begin, end, first, scratch, hot);
  } else {
    segment_of<K, false>(job, entries, begin, end, first, scratch, hot);
  }
}

// The rows of a bag.
template <class W>
struct Bag {
  const W* weight;
  int64_t dim;
  const int64_t* values;
  const float* weights;

  const W* operator[](int64_t i) const { return weight + values[i] * dim; }
  bool far() const { return false; }  // earlier bags have prefetched them
  void fill(int64_t from, int64_t count, const W** rows, float* scale) const {
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = (*this)[from + i];
      if (scale) scale[i] = weights[from + i];
    }
  }
};

template <class W>
void look_up_as(const Table& table, const Lookup& lookup, int64_t begin, int64_t end, Scratch& scratch) {
  const W* weight = static_cast<const W*>(table.weight);
  const int64_t dim = table.dim;
  const int64_t size = dim * static_cast<int64_t>(sizeof(W)), distance = ahead_of(size);
  const int64_t last = lookup.offsets ? lookup.offsets[end] : end;
  int64_t ahead = soon_cached(table, lookup.count) ? last : lookup.offsets ? lookup.offsets[begin] : begin;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t i = lookup.offsets ? lookup.offsets[b] : b;
    const int64_t j = lookup.offsets ? lookup.offsets[b + 1] : b + 1;
    for (const int64_t until = j + distance < last ? j + distance : last; ahead < until; ++ahead)
      prefetch<kFar>(weight + lookup.values[ahead] * dim, 0, size);
    float* out = lookup.out + b * lookup.stride;
    if (i == j) {
      std::memset(out, 0, static_cast<size_t>(dim) * sizeof(float));
      continue;
    }
    const Bag<W> bag{weight, dim, lookup.values + i, lookup.weights ? lookup.weights + i : nullptr};
    if (j - i <= kBlock) {
      block(bag, bag.weights, j - i, dim, out);
    } else {
      sum_of<W>(bag, j - i, dim, lookup.weights != nullptr, scratch, out);
    }
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
  for (int64_t i = begin; i < end; i += kTogether) {
    const int64_t count = end - i < kTogether ? end - i : kTogether, left = end - i - count;
    const int64_t coming = left < kTogether ? left : kTogether, far = left - coming;
    prefetch_rows(table, rows + i + count + coming, far < kTogether ? far : kTogether);
    update(rule, table, {rows + i, grads + i * stride, stride, count, rows + i + count, coming}, scratch.work);
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

// A rule for each width: any (0), whole vectors (16), 64 and 128.
template <class W, int kDim>
constexpr Update kSgdRule = each<W, sgd<W, (kDim > 0)>>;
template <class W, int kDim>
constexpr Update kAdagradRule = each<W, adagrad<W, (kDim > 0)>>;
template <class W, int kDim>
constexpr Update kRowwiseAdagradRule = rowwise_adagrad<W, kDim>;
template <class W, int kDim>
constexpr Update kAdamRule = each<W, adam<W, (kDim > 0), false, false>>;
template <class W, int kDim>
constexpr Update kPartialAdamRule = each<W, adam<W, (kDim > 0), true, false>>;
template <class W, int kDim>
constexpr Update kLambRule = each<W, adam<W, (kDim > 0), false, true>>;
template <class W, int kDim>
constexpr Update kPartialLambRule = each<W, adam<W, (kDim > 0), true, true>>;
template <class W, int kDim>
constexpr Update kLarsRule = each<W, lars<W, (kDim > 0)>>;
template <class W, int kDim>
constexpr Update kFtrlRule = each<W, ftrl<W, (kDim > 0)>>;

// A rule for every dtype and width.
#define KEYEDOPT_WIDTHS(rule, W) {rule<W, 0>, rule<W, 16>, rule<W, 64>, rule<W, 128>}
#define KEYEDOPT_RULE(rule) \
  { KEYEDOPT_WIDTHS(rule, float), KEYEDOPT_WIDTHS(rule, half), KEYEDOPT_WIDTHS(rule, bfloat) }

const Kernels kernels = {{KEYEDOPT_RULE(kSgdRule), KEYEDOPT_RULE(kAdagradRule),
                          KEYEDOPT_RULE(kRowwiseAdagradRule), KEYEDOPT_RULE(kAdamRule),
                          KEYEDOPT_RULE(kPartialAdamRule), KEYEDOPT_RULE(kLambRule),
                          KEYEDOPT_RULE(kPartialLambRule), KEYEDOPT_RULE(kLarsRule),
                          KEYEDOPT_RULE(kFtrlRule)},
                         segment<uint32_t>,
                         segment<uint64_t>,
                         chunk<uint32_t>,
                         chunk<uint64_t>,
                         combine,
                         look_up,
                         update_rows,
                         outside};
