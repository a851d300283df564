#include "dense.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "../backends/native/src/pool.h"

namespace keyedopt {
namespace {

constexpr int kLanes = 64;
constexpr int64_t kAhead = 256;       // elements to prefetch ahead: processors stop prefetching at the end of a page
constexpr int64_t kMost = 1 << 17;    // elements of a task: shorter streams of memory are slower
constexpr int64_t kLeast = 1 << 13;   // fewer elements are not worth another thread
constexpr int64_t kTensor = 1 << 6;   // constant cost of a tensor, in elements

struct Piece { const Param* param; int64_t begin, count; };

// Functions of one element. No branch depends on an element, so loops can be vectorized.

template <bool kMomentum>
struct Sgd {
    static constexpr int kStates = kMomentum ? 1 : 0;
    Rule r;
    INLINE void operator()(float& w, float g, float& buffer, float&) const {
        if (kMomentum) {
            buffer = r.first ? g : r.beta1 * buffer + r.rest1 * g;
            g = r.nesterov ? g + r.beta1 * buffer : buffer;
        }
        w = r.keep * w - r.rate * g;
    }
};

struct Adagrad {
    static constexpr int kStates = 1;
    Rule r;
    INLINE void operator()(float& w, float g, float& sum, float&) const {
        sum += g * g;
        w = r.keep * w - r.rate * g / (__builtin_sqrtf(sum) + r.eps);
    }
};

struct Adam {
    static constexpr int kStates = 2;
    Rule r;
    INLINE void operator()(float& w, float g, float& m, float& v) const {
        m = r.beta1 * m + r.rest1 * g;
        v = r.beta2 * v + r.rest2 * g * g;
        w = r.keep * w - r.rate * m / (__builtin_sqrtf(v) * r.unbias + r.eps);
    }
};

template <class Formula>
struct Sweep {
    const Formula formula;
    float* const w;
    const float* const g;
    float *const a, *const b;

    INLINE void one(int64_t i) const {
        const Rule& r = formula.r;
        float unused = 0.0f, grad = g[i] * r.factor;
        grad = r.sign * (grad < -r.limit ? -r.limit : grad > r.limit ? r.limit : grad);  // NaN remains NaN
        grad = r.l2 != 0.0f ? grad + r.l2 * w[i] : grad;
        formula(w[i], grad, Formula::kStates > 0 ? a[i] : unused, Formula::kStates > 1 ? b[i] : unused);
    }

    INLINE void all(int64_t count) const {
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            for (int64_t line = i + kAhead; line < i + kAhead + kLanes; line += 16) {
                __builtin_prefetch(w + line, 0, kFar);
                __builtin_prefetch(g + line, 0, kFar);
                if (Formula::kStates > 0) __builtin_prefetch(a + line, 0, kFar);
                if (Formula::kStates > 1) __builtin_prefetch(b + line, 0, kFar);
            }
#pragma GCC ivdep
            for (int64_t lane = i; lane < i + kLanes; ++lane) one(lane);
        }
        for (; i < count; ++i) one(i);
    }
};

template <class Formula>
INLINE void sweep(const Piece& piece) {
    const Param& p = *piece.param;
    float* const a = Formula::kStates > 0 ? p.states[0] + piece.begin : nullptr;
    float* const b = Formula::kStates > 1 ? p.states[1] + piece.begin : nullptr;
    Sweep<Formula>{{p.rule}, p.weight + piece.begin, p.grad + piece.begin, a, b}.all(piece.count);
}

INLINE void step_piece(const Piece& piece) {
    switch (piece.param->rule.algorithm) {
        case kSgd: piece.param->rule.has_momentum ? sweep<Sgd<true>>(piece) : sweep<Sgd<false>>(piece); break;
        case kAdagrad: sweep<Adagrad>(piece); break;
        default: sweep<Adam>(piece);
    }
}

void step_plain(const Piece& piece) { step_piece(piece); }
#ifdef FOR_EACH_MACHINE
FOR_AVX2 void step_avx2(const Piece& piece) { step_piece(piece); }
FOR_AVX512 void step_avx512(const Piece& piece) { step_piece(piece); }
#endif

void (*step_for(Machine machine))(const Piece&) {
#ifdef FOR_EACH_MACHINE
    if (machine == Machine::avx512) return step_avx512;
    if (machine == Machine::avx2) return step_avx2;
#endif
    (void)machine;
    return step_plain;
}

}  // namespace

Rule rule_of(const Options& o, double t) {
    Rule r{};
    r.algorithm = o.algorithm;
    r.has_momentum = o.momentum != 0.0;
    r.nesterov = o.nesterov;
    r.first = o.first;
    r.factor = static_cast<float>(o.factor);
    r.limit = static_cast<float>(o.limit);
    r.sign = o.maximize ? -1.0f : 1.0f;
    r.l2 = o.decoupled ? 0.0f : static_cast<float>(o.weight_decay);
    r.keep = o.decoupled ? static_cast<float>(1.0 - o.lr * o.weight_decay) : 1.0f;
    r.eps = static_cast<float>(o.eps);
    r.rate = static_cast<float>(o.lr);
    if (o.algorithm == kSgd) {
        r.beta1 = static_cast<float>(o.momentum);
        r.rest1 = static_cast<float>(1.0 - o.dampening);
    } else if (o.algorithm == kAdagrad) {
        r.rate = static_cast<float>(o.lr / (1.0 + (t - 1.0) * o.lr_decay));
    } else {
        r.rate = static_cast<float>(o.lr / (1.0 - std::pow(o.beta1, t)));
        r.beta1 = static_cast<float>(o.beta1);
        r.rest1 = static_cast<float>(1.0 - o.beta1);
        r.beta2 = static_cast<float>(o.beta2);
        r.rest2 = static_cast<float>(1.0 - o.beta2);
        r.unbias = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(o.beta2, t)));
    }
    return r;
}

bool step_all(const std::vector<Param>& params, int threads, Machine machine) try {
    int64_t total = 0;
    for (const Param& param : params) total += param.count + kTensor;
    const int64_t share = std::clamp(total / (4 * std::max(threads, 1)), kLeast, kMost);
    std::vector<Piece> pieces;
    std::vector<size_t> tasks{0};  // the first piece of each task
    int64_t taken = 0;
    for (const Param& param : params) {
        for (int64_t at = 0; at < param.count;) {
            const int64_t count = std::min(share - taken, param.count - at);
            pieces.push_back({&param, at, count});
            at += count;
            taken += count + kTensor;
            if (taken < share) continue;
            tasks.push_back(pieces.size());
            taken = 0;
        }
    }
    if (tasks.back() < pieces.size()) tasks.push_back(pieces.size());
    auto* const step = step_for(machine);
    return parallel(threads, static_cast<int64_t>(tasks.size()) - 1, [&](int64_t task) {
        for (size_t i = tasks[task]; i < tasks[task + 1]; ++i) step(pieces[i]);
    });
} catch (const std::bad_alloc&) {
    return false;
}

}  // namespace keyedopt
