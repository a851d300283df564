// Instructions on integers, predicates and bits. A name is that of PTX without modifiers that change nothing.
#include "machine.h"

namespace ptx {
namespace {

template <class T> T shift_left(T a, u32 b) { return b >= 8 * sizeof(T) ? T(0) : T(a << b); }
template <class T> T shift_right(T a, u32 b) {
    constexpr u32 bits = 8 * sizeof(T);
    if (b >= bits) return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
    return T(a >> b);
}
template <class T> T quotient(T a, T b) {
    if (b == 0) return T(-1);
    if (std::is_signed_v<T> && b == T(-1)) return T(0 - std::make_unsigned_t<T>(a));
    return T(a / b);
}
template <class T> T remainder(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == T(-1)) return 0;
    return T(a % b);
}
template <class T> T high(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return T((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
}
template <class T> T field(T a, u32 position, u32 length) {
    constexpr u32 bits = 8 * sizeof(T);
    position &= 255, length &= 255;
    using Unsigned = std::make_unsigned_t<T>;
    if (!std::is_signed_v<T>) {
        if (length == 0 || position >= bits) return 0;
        Unsigned shifted = Unsigned(a) >> position;
        return length >= bits ? T(shifted) : T(shifted & ((Unsigned(1) << length) - 1));
    }
    if (length == 0) return 0;
    u32 top = std::min(position + length - 1, bits - 1);
    bool sign = Unsigned(a) >> top & 1;
    Unsigned out = position < bits ? Unsigned(a) >> position : 0;
    u32 kept = top >= position ? top - position + 1 : 0;
    if (kept < bits) {
        Unsigned low = (Unsigned(1) << kept) - 1;
        out = sign ? (out | ~low) : (out & low);
    }
    return T(out);
}
u32 permute(u32 a, u32 b, u32 selector) {
    u64 bytes = u64(b) << 32 | a;
    u32 out = 0;
    for (int k = 0; k < 4; k++) {
        u32 chosen = selector >> (4 * k) & 15;
        u8 byte = u8(bytes >> (8 * (chosen & 7)));
        if (chosen & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= u32(byte) << (8 * k);
    }
    return out;
}
// Three-input logic: bit k of the table is the result for the inputs that make up k.
u32 logic3(u32 a, u32 b, u32 c, u32 table) {
    u32 out = 0;
    for (int k = 0; k < 8; k++)
        if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return out;
}
void lop3(Warp& w, const Instruction& i, u32 mask) {
    u32 table = w.at<u32>(i.x[4])[0];
    ternary<u32, u32, u32, u32>(w, i, mask, [=](u32 a, u32 b, u32 c) { return logic3(a, b, c, table); });
}
// Copy parts of registers: the registers x[0…] of `count` together hold those of x[4…]; see translate.py.
void unpack(Warp& w, const Instruction& i, u32 mask) {
    u32 bytes = u32(i.flags);  // of a part
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) {
            u64 whole = w.at<u64>(i.x[4])[l];
            if (bytes * i.count == 4) whole = w.at<u32>(i.x[4])[l];
            for (int k = 0; k < i.count; k++) {
                if (i.x[k] < 0) continue;
                u64 part = whole >> (8 * bytes * k);
                if (bytes == 4) w.at<u32>(i.x[k])[l] = u32(part);
                else if (bytes == 2) w.at<u16>(i.x[k])[l] = u16(part);
                else w.at<u16>(i.x[k])[l] = u8(part);
            }
        }
}
void pack(Warp& w, const Instruction& i, u32 mask) {
    u32 bytes = u32(i.flags);
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) {
            u64 whole = 0;
            for (int k = 0; k < i.count; k++) {
                u64 part = bytes == 4 ? w.at<u32>(i.x[4 + k])[l] : w.at<u16>(i.x[4 + k])[l];
                if (bytes == 1) part &= 0xff;
                whole |= part << (8 * bytes * k);
            }
            if (bytes * i.count == 8) w.at<u64>(i.x[0])[l] = whole;
            else if (bytes * i.count == 4) w.at<u32>(i.x[0])[l] = u32(whole);
            else w.at<u16>(i.x[0])[l] = u16(whole);
        }
}

#define LAMBDA [](Warp & w, const Instruction& i, u32 m)
#define OP1(name, D, A, e) {name, LAMBDA { unary<D, A>(w, i, m, [](A a) { return D(e); }); }}
#define OP2(name, D, A, B, e) {name, LAMBDA { binary<D, A, B>(w, i, m, [](A a, B b) { return D(e); }); }}
#define OP3(name, D, A, B, C, e) {name, LAMBDA { ternary<D, A, B, C>(w, i, m, [](A a, B b, C c) { return D(e); }); }}
#define COMPARE(t, T)                                                                                            \
    OP2("setp.lt." t, u8, T, T, a < b), OP2("setp.le." t, u8, T, T, a <= b), OP2("setp.gt." t, u8, T, T, a > b), \
        OP2("setp.ge." t, u8, T, T, a >= b), OP2("setp.eq." t, u8, T, T, a == b), OP2("setp.ne." t, u8, T, T, a != b)
#define ORDERED(t, T)                                                                                \
    COMPARE(t, T), OP2("min." t, T, T, T, a < b ? a : b), OP2("max." t, T, T, T, a > b ? a : b),     \
        OP2("div." t, T, T, T, quotient(a, b)), OP2("rem." t, T, T, T, remainder(a, b)),             \
        OP2("mul.hi." t, T, T, T, high(a, b)), OP2("shr." t, T, T, u32, shift_right(a, b))
#define BITS(n, T)                                                                                                   \
    OP2("add." n, T, T, T, a + b), OP2("sub." n, T, T, T, a - b), OP2("mul.lo." n, T, T, T, u64(a) * b),             \
        OP3("mad.lo." n, T, T, T, T, u64(a) * b + c), OP2("and." n, T, T, T, a & b), OP2("or." n, T, T, T, a | b),   \
        OP2("xor." n, T, T, T, a ^ b), OP1("not." n, T, T, ~a), OP1("neg." n, T, T, T(0) - a), OP1("mov." n, T, T, a), \
        OP2("shl." n, T, T, u32, shift_left(a, b)), OP3("selp." n, T, T, T, u8, c ? a : b)
#define WIDE(t, N, W)                              \
    OP2("mul.wide." t, W, N, N, W(a) * W(b)), OP3("mad.wide." t, W, N, N, W, W(a) * W(b) + c)

}  // namespace

const Operation INTEGERS[] = {
    BITS("16", u16), BITS("32", u32), BITS("64", u64),
    ORDERED("u16", u16), ORDERED("s16", s16), ORDERED("u32", u32), ORDERED("s32", s32), ORDERED("u64", u64),
    ORDERED("s64", s64),
    WIDE("u16", u16, u32), WIDE("s16", s16, s32), WIDE("u32", u32, u64), WIDE("s32", s32, s64),
    OP1("abs.s32", s32, s32, a < 0 ? 0u - u32(a) : u32(a)), OP1("abs.s64", s64, s64, a < 0 ? 0ull - u64(a) : u64(a)),
    OP1("popc.b32", u32, u32, __builtin_popcount(a)), OP1("popc.b64", u32, u64, __builtin_popcountll(a)),
    OP1("clz.b32", u32, u32, a ? __builtin_clz(a) : 32), OP1("clz.b64", u32, u64, a ? __builtin_clzll(a) : 64),
    OP3("bfe.u32", u32, u32, u32, u32, field<u32>(a, b, c)), OP3("bfe.s32", s32, s32, u32, u32, field<s32>(a, b, c)),
    OP3("bfe.u64", u64, u64, u32, u32, field<u64>(a, b, c)), OP3("bfe.s64", s64, s64, u32, u32, field<s64>(a, b, c)),
    OP3("prmt.b32", u32, u32, u32, u32, permute(a, b, c)),
    OP3("shf.l.wrap.b32", u32, u32, u32, u32, (u64(b) << 32 | a) << (c & 31) >> 32),
    OP3("shf.r.wrap.b32", u32, u32, u32, u32, (u64(b) << 32 | a) >> (c & 31)),
    OP2("and.pred", u8, u8, u8, a & b), OP2("or.pred", u8, u8, u8, a | b), OP2("xor.pred", u8, u8, u8, a ^ b),
    OP1("not.pred", u8, u8, !a), OP1("mov.pred", u8, u8, a != 0),
    {"lop3.b32", lop3}, {"unpack", unpack}, {"pack", pack},
};
const int INTEGER_COUNT = sizeof(INTEGERS) / sizeof(*INTEGERS);

}  // namespace ptx
