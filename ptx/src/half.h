// float16 and bfloat16 as bits, converted with one rounding to nearest, ties to even.
#pragma once
#include <cmath>
#include <cstring>

#include "machine.h"

namespace ptx {

using Wide = __float128;  // the product of two halves and its sum with a third are exact in it

template <class T, class B> inline T from_bits(B bits) {
    static_assert(sizeof(T) == sizeof(B));
    T out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// Round to a format of `digits` bits behind the point and exponents from `least` on.
inline u16 narrow(Wide x, int digits, int least, int bias, u16 infinity, u16 nan, bool negative) {
    u16 sign = negative ? 0x8000 : 0;
    if (x != x) return nan;
    if (x < 0) x = -x;
    if (x == 0) return sign;
    if (x > Wide(3.5e38)) return sign | infinity;
    int exponent;  // of a double: the range of the double contains both formats
    double near = double(x);
    if (near == 0) return sign;
    std::frexp(near, &exponent);
    exponent -= 1;
    if (Wide(std::ldexp(1.0, exponent)) > x) exponent -= 1;  // the conversion rounded up to a power of two
    if (exponent < least) exponent = least;
    Wide scaled = x * Wide(std::ldexp(1.0, digits - exponent));
    u64 whole = u64(scaled);
    Wide rest = scaled - Wide(whole);
    if (rest > Wide(0.5) || (rest == Wide(0.5) && (whole & 1))) whole += 1;
    u64 bits = whole + (u64(exponent + bias - 1) << digits);
    if (whole < (1ull << digits)) bits = whole;  // subnormal
    return sign | (bits >= infinity ? infinity : u16(bits));
}
inline u16 half_from_wide(Wide x) { return narrow(x, 10, -14, 15, 0x7c00, 0x7fff, x < 0); }
inline u16 bfloat_from_wide(Wide x) { return narrow(x, 7, -126, 127, 0x7f80, 0x7fff, x < 0); }

inline float float_from_half(u16 h) {
    u32 sign = u32(h & 0x8000) << 16, exponent = h >> 10 & 31, digits = h & 0x3ff;
    if (exponent == 31) return from_bits<float>(digits ? 0x7fffffffu : sign | 0x7f800000u);
    float size = exponent ? std::ldexp(1.0f + digits / 1024.0f, int(exponent) - 15) : std::ldexp(float(digits), -24);
    return from_bits<float>(sign | from_bits<u32>(size));
}
inline float float_from_bfloat(u16 b) { return from_bits<float>(u32(b) << 16); }
inline Wide wide_from_half(u16 h) { return float_from_half(h); }
inline Wide wide_from_bfloat(u16 b) { return float_from_bfloat(b); }

inline u16 half_from_float(float x) {
    u16 out = half_from_wide(x);
    return x == 0 && std::signbit(x) ? 0x8000 : out;
}
inline u16 bfloat_from_float(float x) {
    u32 bits = from_bits<u32>(x);
    if (x != x) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace ptx
