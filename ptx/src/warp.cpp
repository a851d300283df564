// A warp: lanes with a program counter each, which run together where they are at the same instruction.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

bool active(const Instruction& i, Warp& w, u32 mask, u32& out) {
    if (i.pred < 0) {
        out = mask;
        return true;
    }
    const u8* p = w.at<u8>(i.pred);
    u32 chosen = 0;
    for (int l = 0; l < 32; l++) chosen |= u32((p[l] != 0) != (i.negate != 0)) << l;
    out = mask & chosen;
    return out != 0;
}

u32 member_mask(const Instruction& i, Warp& w, u32 lane) {
    return i.op == LDMATRIX ? ALL : w.at<u32>(i.x[4])[lane];
}

u32 reduced(int op, const u32* a, u32 mask) {
    bool first = true;
    u32 out = 0;
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        u32 x = a[l];
        if (first) out = x;
        else if (op == REDUX_ADD) out += x;
        else if (op == REDUX_MIN_S) out = std::min(s32(out), s32(x));
        else if (op == REDUX_MAX_S) out = std::max(s32(out), s32(x));
        else if (op == REDUX_MIN_U) out = std::min(out, x);
        else if (op == REDUX_MAX_U) out = std::max(out, x);
        else if (op == REDUX_AND) out &= x;
        else if (op == REDUX_OR) out |= x;
        else out ^= x;
        first = false;
    }
    return out;
}

void shuffle(Warp& w, const Instruction& i, u32 mask) {
    const u32 *a = w.at<u32>(i.x[1]), *b = w.at<u32>(i.x[2]), *c = w.at<u32>(i.x[3]);
    u32 out[32];
    u8 valid[32];
    for (u32 l = 0; l < 32; l++) {
        u32 clamp = c[l] & 31, segment = c[l] >> 8 & 31, step = b[l] & 31;
        u32 top = (l & segment) | (clamp & ~segment), bottom = l & segment;
        s32 from = i.op == SHFL_BFLY ? s32(l ^ step) : i.op == SHFL_UP ? s32(l - step)
                   : i.op == SHFL_DOWN ? s32(l + step) : s32(bottom | (step & ~segment));
        valid[l] = i.op == SHFL_UP ? from >= s32(top) : from <= s32(top);
        if (!valid[l]) from = s32(l);
        if ((mask >> l & 1) && !(mask >> from & 1))
            w.program->launch->note(DIVERGED, i.line, 0, 0, *w.program, w.index * 32 + l, -1, 0);
        out[l] = a[from];
    }
    for (u32 l = 0; l < 32; l++)
        if (mask >> l & 1) {
            w.at<u32>(i.x[0])[l] = out[l];
            if (i.x[5] >= 0) w.at<u8>(i.x[5])[l] = valid[l];
        }
}

// Load matrices of 8 × 8 elements of 16 bits; lanes 8k … 8k + 7 have the addresses of the rows of matrix k.
void load_matrices(Warp& w, const Instruction& i, u32 mask) {
    u32 out[4][32];
    bool transposed = i.flags & 1;
    for (s32 k = 0; k < i.count; k++)
        for (u32 l = 0; l < 32; l++) {
            u32 parts[2];
            for (u32 half = 0; half < 2; half++) {
                u32 row = transposed ? l % 4 * 2 + half : l / 4, column = transposed ? l / 4 : l % 4 * 2 + half;
                u32 base = w.at<u32>(i.x[5])[8 * k + row] + u32(i.x[6]);
                parts[half] = load_shared(w, l, base + 2 * column, 2, i.line) & 0xffff;
            }
            out[k][l] = parts[0] | parts[1] << 16;
        }
    for (s32 k = 0; k < i.count; k++)
        for (u32 l = 0; l < 32; l++)
            if (mask >> l & 1) w.at<u32>(i.x[k])[l] = out[k][l];
}

// An instruction of several lanes, all of which are here.
void collective(Warp& w, const Instruction& i, u32 mask) {
    if (i.op >= SHFL_BFLY && i.op <= SHFL_IDX) return shuffle(w, i, mask);
    if (i.op == LDMATRIX) return load_matrices(w, i, mask);
    if (i.op == WARP_SYNC) {
        w.epoch++;
        return;
    }
    u32 value = 0;
    if (i.op >= BALLOT && i.op <= VOTE_ALL) {
        for (u32 l = 0; l < 32; l++)
            value |= u32((mask >> l & 1) && (w.at<u8>(i.x[1])[l] != 0) != (i.flags & 1)) << l;
        if (i.op != BALLOT) {
            bool yes = i.op == VOTE_ANY ? value != 0 : value == mask;
            for (u32 l = 0; l < 32; l++)
                if (mask >> l & 1) w.at<u8>(i.x[0])[l] = yes;
            return;
        }
    } else
        value = reduced(i.op, w.at<u32>(i.x[1]), mask);
    for (u32 l = 0; l < 32; l++)
        if (mask >> l & 1) w.at<u32>(i.x[0])[l] = value;
}

void set(Warp& w, u32 mask, s32 pc, Lane state) {
    for (u32 l = 0; l < 32; l++)
        if (mask >> l & 1) w.pc[l] = pc, w.state[l] = state;
}

// Run a collective at which all its lanes wait; return whether there was one.
bool finish_collective(Warp& w) {
    u32 waiting = w.lanes(Lane::COLLECTIVE);
    for (u32 l = 0; l < 32; l++) {
        if (!(waiting >> l & 1)) continue;
        const Instruction& i = w.program->launch->code[w.pc[l]];
        u32 here = 0;
        for (u32 k = 0; k < 32; k++) here |= u32((waiting >> k & 1) && w.pc[k] == w.pc[l]) << k;
        u32 wanted = member_mask(i, w, l);
        if ((here & wanted) != wanted) continue;
        collective(w, i, wanted);
        set(w, wanted, w.pc[l] + 1, Lane::RUN);
        return true;
    }
    return false;
}

// Choose lanes at the same instruction; those that are the farthest behind, so that lanes meet again.
u32 choose(Warp& w, s32& pc) {
    u32 mask = 0;
    pc = INT32_MAX;
    for (u32 l = 0; l < 32; l++) {
        if (w.state[l] != Lane::RUN || w.pc[l] > pc) continue;
        if (w.pc[l] < pc) pc = w.pc[l], mask = 0;
        mask |= 1u << l;
    }
    return mask;
}

}  // namespace

bool runnable(Warp& w) { return w.lanes(Lane::RUN) || w.lanes(Lane::COLLECTIVE); }

void run(Warp& w, u32 budget) {
    Launch& launch = *w.program->launch;
    while (budget) {
        s32 pc;
        u32 mask = choose(w, pc);
        if (!mask) {
            if (!w.lanes(Lane::COLLECTIVE) || finish_collective(w)) {
                if (!w.lanes(Lane::RUN)) return;
                continue;
            }
            // some lanes wait for others that ended or wait elsewhere
            u32 waiting = w.lanes(Lane::COLLECTIVE);
            u32 lane = u32(__builtin_ctz(waiting));
            launch.note(DIVERGED, launch.code[w.pc[lane]].line, 0, 0, *w.program, w.index * 32 + lane, -1, 0);
            launch.stopped = true;
            return;
        }
        u32 alive = ~w.lanes(Lane::DONE);
        for (;;) {
            const Instruction& i = launch.code[pc];
            launch.instructions++;
            if (budget) budget--;
            u32 chosen;
            if (i.op >= ATOM) {
                if (active(i, w, mask, chosen)) {
                    if (i.op < ATOM + 16) atomic(w, i, chosen, i.op - ATOM);
                    else if (i.op < ATOM + 16 + INTEGER_COUNT) INTEGERS[i.op - ATOM - 16].run(w, i, chosen);
                    else if (i.op < ATOM + 16 + INTEGER_COUNT + FLOAT_COUNT)
                        FLOATS[i.op - ATOM - 16 - INTEGER_COUNT].run(w, i, chosen);
                    else CONVERSIONS[i.op - ATOM - 16 - INTEGER_COUNT - FLOAT_COUNT].run(w, i, chosen);
                }
                pc++;
                if (i.op < ATOM + 16 && !(i.flags & SHARED) && launch.random() % 2) budget = 0;
            } else if (i.op == LD || i.op == ST) {
                if (active(i, w, mask, chosen)) i.op == LD ? load(w, i, chosen) : store(w, i, chosen);
                pc++;
                if ((i.flags & STRONG) && launch.random() % 2) budget = 0;
            } else if (i.op == FENCE) {
                fence(*w.program);
                pc++;
            } else if (i.op == ACTIVE) {
                for (u32 l = 0; l < 32; l++)
                    if (mask >> l & 1) w.at<u32>(i.x[0])[l] = mask;
                pc++;
            } else if (i.op == BRA) {
                active(i, w, mask, chosen);
                if (mask == alive && (chosen == mask || chosen == 0)) pc = chosen ? i.x[0] : pc + 1;
                else {
                    set(w, chosen, i.x[0], Lane::RUN);
                    set(w, mask & ~chosen, pc + 1, Lane::RUN);
                    break;
                }
            } else if (i.op == RET) {
                active(i, w, mask, chosen);
                set(w, chosen, pc, Lane::DONE);
                set(w, mask & ~chosen, pc + 1, Lane::RUN);
                break;
            } else if (i.op == BAR) {
                active(i, w, mask, chosen);
                if (chosen != mask) {
                    launch.note(DIVERGED, i.line, 0, 0, *w.program, w.index * 32, -1, 0);
                    set(w, mask & ~chosen, pc + 1, Lane::RUN);
                }
                set(w, chosen, pc, Lane::BARRIER);
                break;
            } else {  // a collective
                active(i, w, mask, chosen);
                u32 lane = chosen ? u32(__builtin_ctz(chosen)) : 0;
                if (chosen == mask && (member_mask(i, w, lane) & chosen) == member_mask(i, w, lane) &&
                    (mask & ~member_mask(i, w, lane)) == 0) {
                    collective(w, i, mask);
                    pc++;
                } else {
                    set(w, mask & ~chosen, pc + 1, Lane::RUN);
                    set(w, chosen, pc, Lane::COLLECTIVE);
                    break;
                }
            }
            if (!budget || mask != alive) {  // others may be at the next instruction
                set(w, mask, pc, Lane::RUN);
                break;
            }
        }
        if (launch.stopped) return;
    }
}

static_assert(sizeof(Instruction) == 14 * sizeof(s32));

}  // namespace ptx
