// Sum runs (the sorted lookups of one row) in batches, so that loads of several rows overlap. Included inside the
// namespace of an instruction set, after sums.h.

constexpr int64_t kListed = 512;  // most lookups in a batch
constexpr uint32_t kStages = 2;   // batches in work: the first is summed while the memory of the second is prefetched

// A batch: runs of at most kBlock lookups, each with a slot for its sum.
struct Batch {
  // A run of more than kShort lookups; `grads[at]` is its first.
  struct Block {
    uint32_t slot, at, count;
  };
  int64_t first;   // output row of the first run, if sums are written
  int64_t count;   // runs, one for each row
  int64_t length;  // lookups of short runs, at the beginning of `grads`
  int64_t rows[kTogether];
  const float* grads[kListed];
  float scales[kListed];
  uint32_t slots[kListed];
  Block blocks[kTogether];
  int64_t number;  // runs longer than kShort; their lookups are at the end of `grads`
};

// Return whether the run that begins at entry i has more than `count` lookups.
template <class K>
inline bool is_longer(const Entry<K>* entries, int64_t i, int64_t end, int64_t count) {
  return i + count < end && entries[i + count].key == entries[i].key;
}

// Return the end of the run that contains entry i.
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
  int64_t high = j + step < total ? j + step : total;  // entries[j - 1] is in the run, entries[high] is not
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

// List whole runs from entry i on, where a run of at most kBlock begins. Stop after `most` rows, before a longer run,
// or at the end; return the end of the listed runs. No branch depends on the boundary between two short runs, because
// a processor cannot predict it.
template <class Gradients, class K>
int64_t list_runs(const Gradients& gradients, const Entry<K>* entries, int64_t i, int64_t end, int64_t most,
                  bool scaled, Batch& batch) {
  int64_t n = 0, slot = -1, last = kListed;
  K before = static_cast<K>(~entries[i].key);
  batch.number = 0;
  while (i < end) {
    const K key = entries[i].key;
    const bool fresh = key != before;
    if ((slot + fresh == most) | (fresh & (last - n < kBlock + kShort))) break;
    slot += fresh;
    before = key;
    batch.rows[slot] = static_cast<int64_t>(key);
    // True only at the beginning of a longer run: inside a short run the entry so far ahead has another row.
    if (is_longer(entries, i, end, kShort)) {
      if (is_longer(entries, i, end, kBlock)) {
        --slot;
        break;
      }
      const int64_t count = run_end(entries, i, end) - i;
      last -= count;
      gradients.fill(i, count, batch.grads + last, scaled ? batch.scales + last : nullptr);
      if (gradients.far()) prefetch_each(batch.grads + last, count, gradients.job.table->dim);
      batch.blocks[batch.number++] = {static_cast<uint32_t>(slot), static_cast<uint32_t>(last),
                                      static_cast<uint32_t>(count)};
      i += count;
      continue;
    }
    batch.slots[n] = static_cast<uint32_t>(slot);
    batch.grads[n] = gradients.row(i, scaled ? batch.scales + n : nullptr);
    ++n;
    ++i;
  }
  batch.count = slot + 1;
  batch.length = n;
  return i;
}

// Sum columns [c, c + 16 kVectors) of all runs into their slots; unless kWhole the last vector has n columns, of which
// all sixteen are written if slots are padded. Each lookup writes the sum of its run so far, so the last lookup of a
// run writes the total. Prefetch the memory of the next batch.
template <int kVectors, bool kScaled, bool kWhole = true>
inline void stream(const Batch& batch, const Batch* next, int64_t c, int64_t n, float* sums, int64_t stride) {
  const int64_t coming = next ? next->length : 0, written = stride % 16 == 0 ? 16 : n;
  vf sum[kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) sum[k] = set1(0.0f);
  uint32_t before = 0;
  for (int64_t i = 0; i < batch.length; ++i) {
    const uint32_t slot = batch.slots[i], keep = slot == before ? ~0u : 0u;
    const float* grad = batch.grads[i] + c;
    float* to = sums + slot * stride + c;
    if (i < coming)
      for (int k = 0; k < kVectors; ++k) __builtin_prefetch(next->grads[i] + c + 16 * k, 0, kFar);
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      const bool whole = kWhole || k + 1 < kVectors;
      const vf x = whole ? load(grad + 16 * k) : load(grad + 16 * k, n), kept = keep_if(keep, sum[k]);
      sum[k] = kScaled ? fma(x, set1(batch.scales[i]), kept) : kept + x;
      put(to + 16 * k, sum[k], whole ? 16 : written);
    }
    before = slot;
  }
  for (int64_t i = batch.length; i < coming; ++i)
    for (int k = 0; k < kVectors; ++k) __builtin_prefetch(next->grads[i] + c + 16 * k, 0, kFar);
}

// Sum the gradients of each run into its slot: (count, dim) at `sums`.
template <bool kScaled>
void sum_batch_of(const Batch& batch, const Batch* next, int64_t dim, float* sums, int64_t stride) {
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) stream<4, kScaled>(batch, next, c, 16, sums, stride);
  const int64_t left = dim - c, n = (left + 15) % 16 + 1;
  if (left == 16) {
    stream<1, kScaled>(batch, next, c, n, sums, stride);
  } else if (left == 32) {
    stream<2, kScaled>(batch, next, c, n, sums, stride);
  } else if (left > 48) {
    stream<4, kScaled, false>(batch, next, c, n, sums, stride);
  } else if (left > 32) {
    stream<3, kScaled, false>(batch, next, c, n, sums, stride);
  } else if (left > 16) {
    stream<2, kScaled, false>(batch, next, c, n, sums, stride);
  } else if (left > 0) {
    stream<1, kScaled, false>(batch, next, c, n, sums, stride);
  }
  for (int64_t b = 0; b < batch.number; ++b) {
    const Batch::Block& one = batch.blocks[b];
    float* sum = sums + one.slot * stride;
    block_of<kScaled>(batch.grads + one.at, batch.scales + one.at, one.count, dim, sum);
  }
}

// Sum a batch, and update its rows or write the sums; prefetch the memory of the next batch.
inline void finish(const Job& job, const Batch& batch, const Batch* next, Scratch& scratch) {
  const int64_t dim = job.table->dim, stride = job.rule ? padded(dim) : dim;
  float* sums = job.rule ? scratch.sums : job.grads + batch.first * dim;
  if (job.scaled) {
    sum_batch_of<true>(batch, next, dim, sums, stride);
  } else {
    sum_batch_of<false>(batch, next, dim, sums, stride);
  }
  if (job.rule) {
    const Rows rows{batch.rows, sums, stride, batch.count, next ? next->rows : nullptr, next ? next->count : 0};
    job.update(*job.rule, *job.table, rows, scratch.work);
  } else {
    std::memcpy(job.rows + batch.first, batch.rows, static_cast<size_t>(batch.count) * sizeof(int64_t));
  }
}
