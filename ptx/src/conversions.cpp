// cvt: between integers, floating-point numbers and half precision.
#include <cmath>
#include <limits>
#include <type_traits>

#include "half.h"
#include "machine.h"

namespace ptx {
namespace {

// Float to integer saturates; NaN becomes 0.
template <class I, class F> I to_integer(F x) {
    if (x != x) return 0;
    if (x <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    if (x >= F(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
    return I(x);
}
float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

#define LAMBDA [](Warp & w, const Instruction& i, u32 m)
#define OP1(name, D, A, e) {name, LAMBDA { unary<D, A>(w, i, m, [](A a) { return D(e); }); }}
#define OP2(name, D, A, B, e) {name, LAMBDA { binary<D, A, B>(w, i, m, [](A a, B b) { return D(e); }); }}
#define FROM(s, S, R)                                                                                             \
    OP1("cvt.16." s, u16, R, S(a)), OP1("cvt.32." s, u32, R, S(a)), OP1("cvt.64." s, u64, R, S(a)),                     \
        OP1("cvt.f32." s, float, R, S(a)), OP1("cvt.f64." s, double, R, S(a))
#define TO(d, D, s, S)                                                                                              \
    OP1("cvt.rzi." d "." s, D, S, to_integer<D>(std::trunc(a))), OP1("cvt.rni." d "." s, D, S, to_integer<D>(std::rint(a))), \
        OP1("cvt.rmi." d "." s, D, S, to_integer<D>(std::floor(a))), OP1("cvt.rpi." d "." s, D, S, to_integer<D>(std::ceil(a)))
#define INTEGERS_FROM(s, S) TO("u32", u32, s, S), TO("s32", s32, s, S), TO("u64", u64, s, S), TO("s64", s64, s, S)

}  // namespace

const Operation CONVERSIONS[] = {
    FROM("u8", u8, u16), FROM("s8", s8, u16), FROM("u16", u16, u16), FROM("s16", s16, s16), FROM("u32", u32, u32),
    FROM("s32", s32, s32),
    FROM("u64", u64, u64), FROM("s64", s64, s64),
    INTEGERS_FROM("f32", float), INTEGERS_FROM("f64", double),
    OP1("cvt.f32.f64", float, double, a), OP1("cvt.f64.f32", double, float, a),
    OP1("cvt.rmi.f32.f32", float, float, std::floor(a)), OP1("cvt.rpi.f32.f32", float, float, std::ceil(a)),
    OP1("cvt.rni.f32.f32", float, float, std::rint(a)), OP1("cvt.rzi.f32.f32", float, float, std::trunc(a)),
    OP1("cvt.rmi.ftz.f32.f32", float, float, std::floor(flush(a))),
    OP1("cvt.f32.f16", float, u16, float_from_half(a)), OP1("cvt.f32.bf16", float, u16, float_from_bfloat(a)),
    OP1("cvt.f16.f32", u16, float, half_from_float(a)), OP1("cvt.bf16.f32", u16, float, bfloat_from_float(a)),
    OP2("cvt.f16x2.f32", u32, float, float, u32(half_from_float(a)) << 16 | half_from_float(b)),
    OP2("cvt.bf16x2.f32", u32, float, float, u32(bfloat_from_float(a)) << 16 | bfloat_from_float(b)),
};
const int CONVERSION_COUNT = sizeof(CONVERSIONS) / sizeof(*CONVERSIONS);

}  // namespace ptx
