// The sum of the squares of all elements of many tensors, at the speed of memory.
#include <vector>

#include "../backends/native/src/pool.h"
#include "machine.h"
#include "tensors.h"

namespace keyedopt {
namespace {

constexpr int kLanes = 64;
constexpr int64_t kBlock = 1024;     // so many squares are summed in float, in 64 sums, before they go to double
constexpr int64_t kAhead = 2048;     // what is fetched meanwhile: a processor stops at the end of a page by itself
constexpr int64_t kChunk = 1 << 17;  // what a thread takes at a time

struct Chunk { const float* begin; int64_t count; };

INLINE double sum_chunk(const float* x, int64_t count) {
    double total = 0.0;
    for (; count >= kBlock; count -= kBlock, x += kBlock) {
        float sums[kLanes] = {0};
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            for (int line = 0; line < kLanes; line += 16) __builtin_prefetch(x + i + kAhead + line);
            for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
        }
        for (int lane = 0; lane < kLanes; ++lane) total += double(sums[lane]);
    }
    for (int64_t i = 0; i < count; ++i) total += double(x[i]) * double(x[i]);
    return total;
}

double sum_plain(const Chunk& chunk) { return sum_chunk(chunk.begin, chunk.count); }

#ifdef FOR_EACH_MACHINE
FOR_AVX2 double sum_avx2(const Chunk& chunk) { return sum_chunk(chunk.begin, chunk.count); }
FOR_AVX512 double sum_avx512(const Chunk& chunk) { return sum_chunk(chunk.begin, chunk.count); }
#endif

double (*sum_for(Machine machine))(const Chunk&) {
#ifdef FOR_EACH_MACHINE
    if (machine == Machine::avx512) return sum_avx512;
    if (machine == Machine::avx2) return sum_avx2;
#endif
    (void)machine;
    return sum_plain;
}

// Each chunk has a sum of its own, so the result is the same for any number of threads.
double sum_all(const std::vector<Chunk>& chunks, int threads) {
    auto* const sum = sum_for(machine_of(""));
    std::vector<double> sums(chunks.size());
    parallel(threads, static_cast<int64_t>(chunks.size()), [&](int64_t i) { sums[i] = sum(chunks[i]); });
    double total = 0.0;
    for (const double one : sums) total += one;
    return total;
}

}  // namespace

PyObject* square_sum(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list and a number of threads are needed");
        return nullptr;
    }
    const long threads = PyLong_AsLong(args[1]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    std::vector<Chunk> chunks;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
        View view;
        const bool plain = look(PyList_GET_ITEM(args[0], i), &view);
        if (!plain || view.device.type != kCpu || view.dtype.code != kFloat || view.dtype.bits != 32) Py_RETURN_NONE;
        const int64_t bytes = dense_bytes(view);
        if (bytes < 0) Py_RETURN_NONE;
        const auto* begin = reinterpret_cast<const float*>(static_cast<const char*>(view.data) + view.byte_offset);
        for (int64_t at = 0; at < bytes / 4; at += kChunk)
            chunks.push_back({begin + at, std::min(kChunk, bytes / 4 - at)});
    }
    double total;
    Py_BEGIN_ALLOW_THREADS;
    total = sum_all(chunks, int(threads));
    Py_END_ALLOW_THREADS;
    return PyFloat_FromDouble(total);
}

}  // namespace keyedopt
