// A step of SGD, Adagrad or Adam on dense parameters: each number read and written once, gradients only read.
#pragma once

#include <cstdint>
#include <vector>

#include "machine.h"

namespace keyedopt {

enum Algorithm { kSgd, kAdagrad, kAdam };

// The options of a step, as fused/native_steps.py lists them.
struct Options {
    int algorithm;
    bool maximize, decoupled, nesterov, first;
    double factor, limit;  // of gradients, which are multiplied, then limited to [-limit, limit]
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay;
};

// What the loops take, worked out in double precision.
struct Rule {
    int algorithm;
    bool has_momentum, nesterov, first;
    float factor, limit, sign, l2, keep;  // keep: what decoupled decay leaves of a weight
    float rate, eps;
    float beta1, rest1, beta2, rest2, unbias;  // unbias: 1 / √(1 - β₂ᵗ); SGD has μ in beta1, 1 - damping in rest1
};

// The rule of the t-th step, t from 1.
Rule rule_of(const Options& options, double t);

// A parameter, its gradient, and its states in the order of `ALGORITHMS`; null for those that there are not.
struct Param {
    float* weight;
    const float* grad;
    float* states[2];
    int64_t count;
    Rule rule;
};

// Memory of different parameters must not overlap. False: no memory for the plan, and nothing is done.
bool step_all(const std::vector<Param>& params, int threads, Machine machine);

}  // namespace keyedopt
