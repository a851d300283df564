// Update rows from sorted lookups, and pool rows. Included inside the namespace of an instruction set, after rules.h
// and sums.h.

constexpr int64_t kDistance = 16;  // lookups between a prefetch and its use in a forward pass
constexpr int64_t kFarApart = 512;  // floats between two rows of output that the hardware does not prefetch
constexpr int64_t kAhead = 8;       // rows of output between a prefetch and its use

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
  sum_of(Gradients<K, kSimple>{job, entries}, count, job.table->dim, !kSimple && job.scaled, scratch, out);
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

// The rows of a bag, and of the bags that follow it in memory, up to value `end`.
template <class W>
struct Bag {
  const W* weight;
  int64_t dim;
  const int64_t* values;
  const float* weights;
  int64_t end;

  const W* operator[](int64_t i) const { return weight + values[i] * dim; }
  const W* later(int64_t i) const { return (*this)[i + kDistance < end ? i + kDistance : end - 1]; }
  Bag from(int64_t i) const { return {weight, dim, values + i, weights ? weights + i : nullptr, end - i}; }
};

// Sum the rows of a bag, block by block.
template <class W>
void pool(const Bag<W>& bag, int64_t count, Scratch& scratch, float* out) {
  if (count <= kBlock) {
    block(bag, bag.weights, count, bag.dim, out);
    return;
  }
  const Total total(scratch.blocks, bag.dim);
  for (int64_t i = 0; i < count; i += kBlock) {
    const Bag<W> some = bag.from(i);
    block(some, some.weights, count - i < kBlock ? count - i : kBlock, bag.dim, scratch.leaf);
    total.add(scratch.leaf);
  }
  total.round(out);
}

// Pool bags [begin, end), or copy rows, each bag by sum(rows, count, out).
template <class W, class Sum>
KEYEDOPT_INLINE inline void pool_bags(const Table& table, const Lookup& lookup, int64_t begin, int64_t end,
                                      const Sum& sum) {
  const int64_t dim = table.dim, size = dim * static_cast<int64_t>(sizeof(W));
  const auto place = [&](int64_t b) { return lookup.offsets ? lookup.offsets[b] : b; };
  const Bag<W> all{static_cast<const W*>(table.weight), dim, lookup.values, lookup.weights, place(end)};
  const bool far = lookup.stride > kFarApart;
  for (int64_t i = place(begin), n = 0; i < all.end && n < kDistance; ++i, ++n) prefetch(all[i], 0, size);
  for (int64_t b = begin, i = place(begin); b < end; ++b) {
    const int64_t next = place(b + 1), count = next - i;
    float* out = lookup.out + b * lookup.stride;
    if (far) __builtin_prefetch(out + kAhead * lookup.stride, 1);
    if (count == 0) {
      std::memset(out, 0, static_cast<size_t>(dim) * sizeof(float));
      continue;
    }
    sum(all.from(i), count, out);
    i = next;
    if (!lookup.mean || count == 1) continue;
    constexpr bool kWhole = false;
    const vf length = set1(static_cast<float>(count));
    KEYEDOPT_COLUMNS(dim) { put(out + c, get(out + c, n) / length, n); }
  }
}

// Pool bags of rows of kVectors vectors; unless kWhole the last one is not full. With the sum inside the loop a bag of
// two rows of 16 columns takes two thirds of the time.
template <class W, int kVectors, bool kWhole>
void look_up_strip(const Table& table, const Lookup& lookup, int64_t begin, int64_t end, Scratch& scratch) {
  const int64_t n = (table.dim + 15) % 16 + 1;
  pool_bags<W>(table, lookup, begin, end, [&](const Bag<W>& bag, int64_t count, float* out) KEYEDOPT_INLINE {
    if (count <= kBlock) {
      strip<kVectors, false, kWhole>(bag, nullptr, count, 0, n, out);
    } else {
      pool(bag, count, scratch, out);
    }
  });
}

constexpr int kStrips = 8;  // most vectors of a row that are summed at once

template <class W>
constexpr std::array<std::array<decltype(Kernels::look_up), kStrips>, 2> strips() {
  return {{{look_up_strip<W, 1, false>, look_up_strip<W, 2, false>, look_up_strip<W, 3, false>,
            look_up_strip<W, 4, false>, look_up_strip<W, 5, false>, look_up_strip<W, 6, false>,
            look_up_strip<W, 7, false>, look_up_strip<W, 8, false>},
           {look_up_strip<W, 1, true>, look_up_strip<W, 2, true>, look_up_strip<W, 3, false>,
            look_up_strip<W, 4, true>, look_up_strip<W, 5, false>, look_up_strip<W, 6, false>,
            look_up_strip<W, 7, false>, look_up_strip<W, 8, true>}}};
}

template <class W>
void look_up_as(const Table& table, const Lookup& lookup, int64_t begin, int64_t end, Scratch& scratch) {
  static constexpr auto look_up_strips = strips<W>();
  const int64_t vectors = (table.dim + 15) / 16;
  if (!lookup.weights && vectors <= kStrips)
    return look_up_strips[table.dim % 16 == 0][vectors - 1](table, lookup, begin, end, scratch);
  pool_bags<W>(table, lookup, begin, end,
               [&](const Bag<W>& bag, int64_t count, float* out) { pool(bag, count, scratch, out); });
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
    // The sign of a value, and of its distance to the last row: a comparison of unsigned numbers is slow.
    uint64_t signs = 0;
    for (int64_t k = i; k < until; ++k) {
      const uint64_t value = static_cast<uint64_t>(values[k]);
      signs |= value | (limit - 1 - value);
    }
    if (signs >> 63 == 0) continue;
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
