// A step of SGD, Adagrad or Adam on dense parameters: each element is read and written once, gradients only read.
#pragma once

#include <cstdint>
#include <vector>

#include "machine.h"

namespace keyedopt {

enum Algorithm { kSgd, kAdagrad, kAdam };

// The options of a step, in the order of fused/dense/cpu_dense_steps.py.
struct Options {
    int algorithm;
    bool maximize, decoupled, nesterov, first;
    double factor, limit;  // gradients are multiplied by `factor`, then clamped to [-limit, limit]
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay;
};

// The constants of the loops, computed in double precision.
struct Rule {
    int algorithm;
    bool has_momentum, nesterov, first;
    float factor, limit, sign, l2, keep;  // keep: 1 - lr * weight_decay, for decoupled decay
    float rate, eps;
    float beta1, rest1, beta2, rest2, unbias;  // unbias: 1 / √(1 - β₂ᵗ); SGD has μ in beta1, 1 - damping in rest1
};

// The constants of step t, from 1.
Rule rule_of(const Options& options, double t);

// A parameter, its gradient, and its states in the order of `ALGORITHMS`; null for missing states.
struct Param {
    float* weight;
    const float* grad;
    float* states[2];
    int64_t count;
    Rule rule;
};

// Memory of different parameters must not overlap. False, and nothing is written, if memory for the plan ran out.
bool step_all(const std::vector<Param>& params, int threads, Machine machine);

}  // namespace keyedopt
