// The state of a launch: programs (thread blocks) of warps of 32 lanes, and what each instruction needs.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

constexpr u32 ALL = ~0u;

// What can be found; the order is that of KINDS in execute.py.
enum Kind { BOUNDS, MISALIGNED, RACE_PROGRAMS, RACE_THREADS, DIVERGED, DEADLOCK, UNWRITTEN, LIMIT };

// An instruction as execute.py encodes it: operands are slots of the register file.
struct Instruction {
    s32 op, pred, negate, line, count, flags;
    s32 x[8];
};

// Flags of memory instructions.
enum Flag : s32 { STRONG = 1, ACQUIRE = 2, RELEASE = 4, SIGNED = 8, SHARED = 16, SIZE_SHIFT = 8, WIDTH_SHIFT = 16 };

struct Launch;
struct Program;

// One slot: 32 lanes of up to 8 bytes; a register of 32 bits uses the first half.
struct alignas(64) Slot {
    u8 bytes[256];
};

enum class Lane : u8 { RUN, COLLECTIVE, BARRIER, DONE };

struct Warp {
    Program* program;
    u32 index;
    u32 epoch = 1;  // of `bar.warp.sync`
    s32 pc[32] = {};
    Lane state[32] = {};
    std::vector<Slot> slots;

    template <class T> T* at(s32 slot) { return reinterpret_cast<T*>(slots[slot].bytes); }
    u32 lanes(Lane wanted) const {
        u32 mask = 0;
        for (int l = 0; l < 32; l++) mask |= u32(state[l] == wanted) << l;
        return mask;
    }
};

// Who wrote and who read a granule of memory last, and when: see `Shadow` in memory.cpp.
struct Access {
    s32 program = -1;
    u32 thread = 0, barrier = 0, warp = 0, clock = 0;
    s32 line = 0;
    bool strong = false;
    u8 by = 0;  // of reads: 0 one thread, 1 lanes of a warp, 2 warps of a program, 3 programs
};
struct Cell {
    Access write, read;
    u64 value = 0;  // written last
};

// Memory that kernels may access, with the shadow of its granules, which is made where it is needed.
struct Region {
    u64 begin, end, granule;
    std::vector<std::unique_ptr<Cell[]>> pages;
};

struct Sector {
    u8 data[32];
    u32 mask = 0;
};

// A thread block. Plain stores stay in `pending`, where only this program sees them, until they are drained.
struct Program {
    Launch* launch;
    u32 id, x, y, z;
    u32 barrier = 1;  // number of barriers passed
    std::vector<Warp> warps;
    std::vector<u8> shared;
    std::vector<Cell> shared_cells;
    std::unordered_map<u64, Sector> pending;
    std::unordered_map<s32, u32> seen, fenced, unfenced;  // vector clocks; see `synchronize` in memory.cpp
    u32 clock = 1;
    bool starved = false;
};

struct Finding {
    s64 count = 0;
    u64 address = 0;
    u32 program = 0, thread = 0, other_program = 0, other_thread = 0;
};

// What one seed chooses.
struct Schedule {
    u64 seed;
    u32 resident;     // programs at a time
    u32 order;        // in which programs begin: 0 ascending, 1 descending, 2 random
    u32 drain;        // when plain stores are seen: 0 at the end of a program, 1 at once, 2 at random
    u32 slice;        // most instructions of a warp at a time
    u32 starve;       // whether one program at a time is nearly never run
    u64 limit;        // most instructions of a launch
};

struct Launch {
    const Instruction* code;
    u32 length;
    Schedule schedule;
    std::mt19937_64 random;
    std::vector<Region> regions;
    Region* last = nullptr;
    std::map<std::pair<int, std::pair<s32, s32>>, Finding> findings;
    std::unordered_map<u64, std::unordered_map<s32, u32>> published;
    u64 instructions = 0, read = 0, written = 0, atomics = 0;
    u64 spins = 0;  // strong reads since memory changed
    bool stopped = false;

    void note(Kind kind, s32 line, s32 other_line, u64 address, const Program& program, u32 thread, s32 other_program,
              u32 other_thread);
    Region* region(u64 address, u64 size);
};

// memory.cpp
void load(Warp& warp, const Instruction& i, u32 mask);
void store(Warp& warp, const Instruction& i, u32 mask);
void atomic(Warp& warp, const Instruction& i, u32 mask, int kind);
void fence(Program& program);
void drain(Program& program);
void drain_some(Program& program);
u32 load_shared(Warp& warp, u32 lane, u32 address, u32 bytes, s32 line);

// arithmetic.cpp, convert.cpp: instructions whose lanes do not interact
using Function = void (*)(Warp&, const Instruction&, u32);
struct Operation {
    const char* name;
    Function run;
};
extern const Operation INTEGERS[], FLOATS[], CONVERSIONS[];
extern const int INTEGER_COUNT, FLOAT_COUNT, CONVERSION_COUNT;

// warp.cpp
// Instructions that the warp or the program takes part in; the order is that of CONTROL in warp.cpp.
enum Control { BRA, RET, BAR, LD, ST, FENCE, SHFL_BFLY, SHFL_UP, SHFL_DOWN, SHFL_IDX, BALLOT, VOTE_ANY, VOTE_ALL,
               REDUX_ADD, REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, REDUX_XOR, LDMATRIX,
               WARP_SYNC, ACTIVE, ATOM };
void run(Warp& warp, u32 budget);
bool runnable(Warp& warp);

// Apply a function to the active lanes.
template <class D, class A, class F> inline void unary(Warp& w, const Instruction& i, u32 mask, F f) {
    D* d = w.at<D>(i.x[0]);
    const A* a = w.at<A>(i.x[1]);
    if (mask == ALL) {
#pragma GCC ivdep
        for (int l = 0; l < 32; l++) d[l] = f(a[l]);
    } else
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) d[l] = f(a[l]);
}
template <class D, class A, class B, class F> inline void binary(Warp& w, const Instruction& i, u32 mask, F f) {
    D* d = w.at<D>(i.x[0]);
    const A* a = w.at<A>(i.x[1]);
    const B* b = w.at<B>(i.x[2]);
    if (mask == ALL) {
#pragma GCC ivdep
        for (int l = 0; l < 32; l++) d[l] = f(a[l], b[l]);
    } else
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) d[l] = f(a[l], b[l]);
}
template <class D, class A, class B, class C, class F>
inline void ternary(Warp& w, const Instruction& i, u32 mask, F f) {
    D* d = w.at<D>(i.x[0]);
    const A* a = w.at<A>(i.x[1]);
    const B* b = w.at<B>(i.x[2]);
    const C* c = w.at<C>(i.x[3]);
    if (mask == ALL) {
#pragma GCC ivdep
        for (int l = 0; l < 32; l++) d[l] = f(a[l], b[l], c[l]);
    } else
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) d[l] = f(a[l], b[l], c[l]);
}

}  // namespace ptx
