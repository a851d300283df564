#include "squares.h"

#include <algorithm>
#include <new>

#include "../backends/native/src/pool.h"

namespace keyedopt {
namespace {

constexpr int kLanes = 64;
constexpr int64_t kBlock = 1024;     // squares that are summed in float, in 64 sums, before they are added in double
constexpr int64_t kAhead = 512;      // elements to prefetch ahead: processors stop prefetching at the end of a page
constexpr int64_t kChunk = 1 << 17;  // elements with a separate sum
constexpr int64_t kLeast = 1 << 14;  // fewer elements are not worth another thread
constexpr int64_t kTensor = 1 << 6;  // constant cost of a tensor, in elements

INLINE double sum_chunk(const float* x, int64_t count) {
    double total = 0.0;
    for (; count >= kBlock; count -= kBlock, x += kBlock) {
        float sums[kLanes] = {0};
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            for (int line = 0; line < kLanes; line += 16) __builtin_prefetch(x + i + kAhead + line, 0, kFar);
            for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
        }
        for (int lane = 0; lane < kLanes; ++lane) total += double(sums[lane]);
    }
    for (int64_t i = 0; i < count; ++i) total += double(x[i]) * double(x[i]);
    return total;
}

double sum_plain(const Stretch& chunk) { return sum_chunk(chunk.begin, chunk.count); }

#ifdef FOR_EACH_MACHINE
FOR_AVX2 double sum_avx2(const Stretch& chunk) { return sum_chunk(chunk.begin, chunk.count); }
FOR_AVX512 double sum_avx512(const Stretch& chunk) { return sum_chunk(chunk.begin, chunk.count); }
#endif

double (*sum_for(Machine machine))(const Stretch&) {
#ifdef FOR_EACH_MACHINE
    if (machine == Machine::avx512) return sum_avx512;
    if (machine == Machine::avx2) return sum_avx2;
#endif
    (void)machine;
    return sum_plain;
}

}  // namespace

// Each chunk has its own sum, so the result does not depend on which thread computes it.
bool sum_squares(const std::vector<Stretch>& stretches, int threads, Machine machine, double* total) try {
    std::vector<Stretch> chunks;
    std::vector<size_t> tasks{0};  // the first chunk of each task
    int64_t taken = 0;
    for (const Stretch& one : stretches)
        for (int64_t at = 0; at < one.count; at += kChunk) {
            chunks.push_back({one.begin + at, std::min(kChunk, one.count - at)});
            taken += chunks.back().count + kTensor;
            if (taken < kLeast) continue;
            tasks.push_back(chunks.size());
            taken = 0;
        }
    if (tasks.back() < chunks.size()) tasks.push_back(chunks.size());
    std::vector<double> sums(chunks.size());
    auto* const sum = sum_for(machine);
    const auto body = [&](int64_t task) {
        const size_t t = static_cast<size_t>(task);
        for (size_t i = tasks[t]; i < tasks[t + 1]; ++i) sums[i] = sum(chunks[i]);
    };
    if (!parallel(threads, static_cast<int64_t>(tasks.size()) - 1, body)) return false;
    *total = 0.0;
    for (const double one : sums) *total += one;
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

}  // namespace keyedopt
