// Instructions on floating-point numbers, rounded once as the hardware does; NaN is the canonical NaN.
#include <cmath>
#include <limits>

#include "half.h"
#include "machine.h"

namespace ptx {
namespace {

float canonical(float x) { return x == x ? x : from_bits<float>(0x7fffffffu); }
double canonical(double x) { return x == x ? x : from_bits<double>(0xfff8000000000000ull); }
float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }
template <class T> T least(T a, T b) {
    if (a != a || b != b) return a == a ? a : (b == b ? b : canonical(a));
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T> T greatest(T a, T b) {
    if (a != a || b != b) return a == a ? a : (b == b ? b : canonical(a));
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}

#define LAMBDA [](Warp & w, const Instruction& i, u32 m)
#define OP1(name, D, A, e) {name, LAMBDA { unary<D, A>(w, i, m, [](A a) { return D(e); }); }}
#define OP2(name, D, A, B, e) {name, LAMBDA { binary<D, A, B>(w, i, m, [](A a, B b) { return D(e); }); }}
#define OP3(name, D, A, B, C, e) {name, LAMBDA { ternary<D, A, B, C>(w, i, m, [](A a, B b, C c) { return D(e); }); }}
#define COMPARE(t, T)                                                                                              \
    OP2("setp.lt." t, u8, T, T, a < b), OP2("setp.le." t, u8, T, T, a <= b), OP2("setp.gt." t, u8, T, T, a > b),   \
        OP2("setp.ge." t, u8, T, T, a >= b), OP2("setp.eq." t, u8, T, T, a == b),                                  \
        OP2("setp.ne." t, u8, T, T, a < b || a > b), OP2("setp.ltu." t, u8, T, T, !(a >= b)),                      \
        OP2("setp.leu." t, u8, T, T, !(a > b)), OP2("setp.gtu." t, u8, T, T, !(a <= b)),                           \
        OP2("setp.geu." t, u8, T, T, !(a < b)), OP2("setp.equ." t, u8, T, T, !(a < b || a > b)),                   \
        OP2("setp.neu." t, u8, T, T, a != b), OP2("setp.num." t, u8, T, T, a == a && b == b),                      \
        OP2("setp.nan." t, u8, T, T, a != a || b != b)
#define ARITHMETIC(t, T)                                                                                           \
    OP2("add." t, T, T, T, canonical(a + b)), OP2("sub." t, T, T, T, canonical(a - b)),                            \
        OP2("mul." t, T, T, T, canonical(a* b)), OP2("div." t, T, T, T, canonical(a / b)),                         \
        OP3("fma." t, T, T, T, T, canonical(std::fma(a, b, c))), OP1("sqrt." t, T, T, canonical(std::sqrt(a))),    \
        OP1("neg." t, T, T, -a), OP1("abs." t, T, T, std::fabs(a)), OP2("min." t, T, T, T, least(a, b)),           \
        OP2("max." t, T, T, T, greatest(a, b)), OP2("copysign." t, T, T, T, std::copysign(b, a)),                  \
        OP1("rcp." t, T, T, canonical(T(1) / a))
#define HALF(t, R, W)                                                                                              \
    OP2("add." t, u16, u16, u16, W(R(a) + R(b))), OP2("sub." t, u16, u16, u16, W(R(a) - R(b))),                    \
        OP2("mul." t, u16, u16, u16, W(R(a) * R(b))), OP3("fma." t, u16, u16, u16, u16, W(R(a) * R(b) + R(c)))

}  // namespace

const Operation FLOATS[] = {
    COMPARE("f32", float), COMPARE("f64", double), ARITHMETIC("f32", float), ARITHMETIC("f64", double),
    HALF("f16", wide_from_half, half_from_wide), HALF("bf16", wide_from_bfloat, bfloat_from_wide),
    OP2("add.ftz.f32", float, float, float, canonical(flush(flush(a) + flush(b)))),
    OP2("sub.ftz.f32", float, float, float, canonical(flush(flush(a) - flush(b)))),
    OP2("mul.ftz.f32", float, float, float, canonical(flush(flush(a) * flush(b)))),
    OP3("fma.ftz.f32", float, float, float, float, canonical(flush(std::fma(flush(a), flush(b), flush(c))))),
    OP1("abs.ftz.f32", float, float, std::fabs(flush(a))), OP1("neg.ftz.f32", float, float, -flush(a)),
    // approximations: the exact result, which the documented error of the hardware contains
    OP1("ex2.approx.f32", float, float, std::exp2(a)), OP1("lg2.approx.f32", float, float, std::log2(a)),
    OP1("rsqrt.approx.f32", float, float, 1 / std::sqrt(a)), OP1("sin.approx.f32", float, float, std::sin(a)),
    OP1("cos.approx.f32", float, float, std::cos(a)), OP1("tanh.approx.f32", float, float, std::tanh(a)),
};
const int FLOAT_COUNT = sizeof(FLOATS) / sizeof(*FLOATS);

}  // namespace ptx
