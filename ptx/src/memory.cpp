// Memory: bounds and alignment, races, and when stores become visible.
//
// Races. Each granule of memory has a shadow: who wrote and who read it last. Two accesses of which one is a plain
// store conflict unless they are ordered: in one program by a barrier (`bar.sync`; `bar.warp.sync` in a warp), between
// programs by a release and an acquire of the same word. A store of the value that is there already conflicts with
// nothing: compilers let several threads store the same value.
//
// Visibility. The hardware promises that another program sees a plain store only after a release, or when the kernel
// has ended. So plain stores stay in `Program::pending`, and `Schedule::drain` says when they reach memory.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

struct Who {
    u32 thread, warp_epoch;
    s32 line;
    bool strong;
};

bool ordered(const Access& old, Program& p, const Who& who) {
    if (old.by == 3) return false;
    if (old.program != s32(p.id)) {
        auto found = p.seen.find(old.program);
        return found != p.seen.end() && found->second > old.clock;
    }
    if (old.barrier < p.barrier) return true;
    if (old.by == 2) return false;
    bool same_warp = old.thread / 32 == who.thread / 32;
    return (same_warp && old.warp < who.warp_epoch) || (old.by == 0 && old.thread == who.thread);
}

// Report an access that was noted if it conflicts with one that happens now.
void compare(const Access& old, Program& p, const Who& who, u64 address) {
    if (old.program < 0 || (old.strong && who.strong) || ordered(old, p, who)) return;
    Kind kind = old.program == s32(p.id) && old.by < 3 ? RACE_THREADS : RACE_PROGRAMS;
    p.launch->note(kind, who.line, old.line, address, p, who.thread, old.by < 3 ? old.program : -1, old.thread);
}

void shadow(Cell& cell, Program& p, const Who& who, u64 address, bool write, bool same) {
    Access now{s32(p.id), who.thread, p.barrier, who.warp_epoch, p.clock, who.line, who.strong, 0};
    if (!write) {
        compare(cell.write, p, who, address);
        const Access& old = cell.read;
        if (old.program >= 0 && !ordered(old, p, who)) {
            bool same_warp = old.thread / 32 == who.thread / 32;
            now.by = old.program != now.program ? 3 : std::max<u8>(old.by, same_warp ? old.thread != who.thread : 2);
            now.strong = old.strong && who.strong;
        }
        cell.read = now;
        return;
    }
    if (same) return;
    compare(cell.write, p, who, address);
    compare(cell.read, p, who, address);
    cell.read = {};
    cell.write = now;
}

constexpr u64 PAGE = 512;  // cells

Cell& cell_of(Region& region, u64 address) {
    u64 index = (address - region.begin) / region.granule;
    auto& page = region.pages[index / PAGE];
    if (!page) page = std::make_unique<Cell[]>(PAGE);
    return page[index % PAGE];
}

// Read bytes as this program sees them.
void peek(Program& p, u64 address, u8* out, u32 size) {
    std::memcpy(out, reinterpret_cast<const void*>(address), size);
    if (p.pending.empty()) return;
    auto found = p.pending.find(address / 32);
    if (found == p.pending.end()) return;
    for (u32 k = 0; k < size; k++)
        if (found->second.mask >> ((address + k) % 32) & 1) out[k] = found->second.data[(address + k) % 32];
}

void write_back(u64 sector, const Sector& s) {
    for (u32 k = 0; k < 32; k++)
        if (s.mask >> k & 1) *reinterpret_cast<u8*>(sector * 32 + k) = s.data[k];
}

void poke(Program& p, u64 address, const u8* data, u32 size) {
    if (p.launch->schedule.drain == 1) {
        std::memcpy(reinterpret_cast<void*>(address), data, size);
        return;
    }
    Sector& s = p.pending[address / 32];
    for (u32 k = 0; k < size; k++) {
        s.data[(address + k) % 32] = data[k];
        s.mask |= 1u << ((address + k) % 32);
    }
}

void drain_sector(Program& p, u64 address) {
    auto found = p.pending.find(address / 32);
    if (found == p.pending.end()) return;
    write_back(found->first, found->second);
    p.pending.erase(found);
}

void join(std::unordered_map<s32, u32>& into, const std::unordered_map<s32, u32>& from) {
    for (auto [program, clock] : from) {
        u32& mine = into[program];
        mine = std::max(mine, clock);
    }
}

// Vector clocks of programs: an atomic that releases publishes at its address what the program has done and seen;
// one that acquires takes it over. A relaxed one does both only together with a fence before or after.
void synchronize(Program& p, u64 address, s32 flags) {
    auto& published = p.launch->published[address];
    if (flags & RELEASE) {
        drain(p);
        join(published, p.seen);
        published[s32(p.id)] = ++p.clock;
    } else
        join(published, p.fenced);
    join(flags & ACQUIRE ? p.seen : p.unfenced, published);
}

// Check an access; return whether memory may be touched. `what` was read or written of `size` bytes, `whole` is the
// size that must be aligned.
Region* checked(Warp& w, const Instruction& i, u32 lane, u64 address, u32 size) {
    Program& p = *w.program;
    Region* region = p.launch->region(address, size);
    u32 thread = w.index * 32 + lane;
    if (!region) p.launch->note(BOUNDS, i.line, 0, address, p, thread, -1, 0);
    if (address % size) p.launch->note(MISALIGNED, i.line, 0, address, p, thread, -1, 0);
    return region;
}

// Note an access in the shadow; `data` is what a plain store writes.
void shadow_global(Warp& w, const Instruction& i, u32 lane, Region* region, u64 address, u32 size, bool write,
                   const u8* data, bool strong) {
    Program& p = *w.program;
    Who who{w.index * 32 + lane, w.epoch, i.line, strong};
    u64 granule = region->granule, first = address - (address - region->begin) % granule;
    for (u64 a = first; a < address + size; a += granule) {
        Cell& cell = cell_of(*region, a);
        bool same = false;
        if (data && a >= address && a + granule <= address + size) {
            u64 value = 0, old = cell.value;
            std::memcpy(&value, data + (a - address), granule);
            if (cell.write.program < 0) old = 0, peek(p, a, reinterpret_cast<u8*>(&old), u32(granule));
            same = value == old;
            cell.value = value;
        }
        shadow(cell, p, who, a, write, same);
    }
}

bool shared_in_bounds(Warp& w, u32 lane, u32 address, u32 size, s32 line) {
    Program& p = *w.program;
    u32 thread = w.index * 32 + lane;
    if (address % size) p.launch->note(MISALIGNED, line, 0, address, p, thread, -1, 0);
    if (u64(address) + size <= p.shared.size()) return true;
    p.launch->note(BOUNDS, line, 0, address, p, thread, -1, 0);
    return false;
}

void shadow_shared(Warp& w, u32 lane, u32 address, u32 size, s32 line, bool write, const u8* data, bool strong) {
    Program& p = *w.program;
    Who who{w.index * 32 + lane, w.epoch, line, strong};
    bool same = data && !std::memcmp(&p.shared[address], data, size);
    for (u32 k = 0; k < size; k++) {
        Cell& cell = p.shared_cells[address + k];
        if (!write && cell.write.program < 0) p.launch->note(UNWRITTEN, line, 0, address, p, who.thread, -1, 0);
        shadow(cell, p, who, address + k, write, same && cell.write.program >= 0);
    }
}

void put(Warp& w, s32 slot, u32 lane, const u8* data, u32 size, u32 width, bool sign) {
    u64 value = 0;
    std::memcpy(&value, data, size);
    if (sign && size < 8 && value >> (8 * size - 1) & 1) value |= ~0ull << (8 * size);
    if (width == 8) w.at<u64>(slot)[lane] = value;
    else if (width == 4) w.at<u32>(slot)[lane] = u32(value);
    else w.at<u16>(slot)[lane] = u16(value);
}

u64 get(Warp& w, s32 slot, u32 lane, u32 width) {
    return width == 8 ? w.at<u64>(slot)[lane] : width == 4 ? w.at<u32>(slot)[lane] : w.at<u16>(slot)[lane];
}

u32 size_of(const Instruction& i) { return i.flags >> SIZE_SHIFT & 255; }
u32 width_of(const Instruction& i) { return i.flags >> WIDTH_SHIFT & 255; }
u64 address_of(Warp& w, const Instruction& i, u32 lane) {
    return i.flags & SHARED ? u64(u32(w.at<u32>(i.x[4])[lane] + u32(i.x[5]))) : w.at<u64>(i.x[4])[lane] + s64(i.x[5]);
}

}  // namespace

void Launch::note(Kind kind, s32 line, s32 other_line, u64 address, const Program& program, u32 thread,
                  s32 other_program, u32 other_thread) {
    Finding& one = findings[{int(kind), {line, other_line}}];
    if (!one.count++) one = {1, address, program.id, thread, u32(other_program), other_thread};
}

Region* Launch::region(u64 address, u64 size) {
    if (last && address >= last->begin && address + size <= last->end) return last;
    auto found = std::upper_bound(regions.begin(), regions.end(), address,
                                  [](u64 a, const Region& r) { return a < r.begin; });
    if (found == regions.begin()) return nullptr;
    Region& one = *--found;
    if (address + size > one.end) return nullptr;
    return last = &one;
}

void drain(Program& p) {
    for (auto& [sector, s] : p.pending) write_back(sector, s);
    p.pending.clear();
}

void drain_some(Program& p) {
    for (int k = 0; k < 4 && !p.pending.empty(); k++) {
        auto bucket = p.launch->random() % p.pending.bucket_count();
        auto found = p.pending.begin(bucket);
        if (found != p.pending.end(bucket)) drain_sector(p, found->first * 32);
    }
}

void fence(Program& p) {
    drain(p);
    join(p.seen, p.unfenced);
    p.fenced = p.seen;
    p.fenced[s32(p.id)] = ++p.clock;
}

void load(Warp& w, const Instruction& i, u32 mask) {
    Program& p = *w.program;
    u32 size = size_of(i), whole = size * i.count;
    for (u32 l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        u64 address = address_of(w, i, l);
        u8 data[32];
        std::memset(data, 0xEE, sizeof data);
        if (i.flags & SHARED) {
            if (shared_in_bounds(w, l, u32(address), whole, i.line)) {
                shadow_shared(w, l, u32(address), whole, i.line, false, nullptr, i.flags & STRONG);
                std::memcpy(data, &p.shared[address], whole);
            }
        } else if (Region* region = checked(w, i, l, address, whole)) {
            if (i.flags & ACQUIRE) synchronize(p, address, i.flags);
            shadow_global(w, i, l, region, address, whole, false, nullptr, i.flags & STRONG);
            for (s32 k = 0; k < i.count; k++) peek(p, address + k * size, data + k * size, size);
            p.launch->read += whole;
            p.launch->spins += i.flags & STRONG;
        }
        for (s32 k = 0; k < i.count; k++)
            if (i.x[k] >= 0) put(w, i.x[k], l, data + k * size, size, width_of(i), i.flags & SIGNED);
    }
}

void store(Warp& w, const Instruction& i, u32 mask) {
    Program& p = *w.program;
    u32 size = size_of(i), whole = size * i.count, turn = u32(p.launch->random() % 32);
    for (u32 t = 0; t < 32; t++) {
        u32 l = (t + turn) % 32;  // which of several lanes comes last is not defined
        if (!(mask >> l & 1)) continue;
        u64 address = address_of(w, i, l);
        u8 data[16];
        for (s32 k = 0; k < i.count; k++) {
            u64 value = get(w, i.x[k], l, width_of(i));
            std::memcpy(data + k * size, &value, size);
        }
        if (i.flags & SHARED) {
            if (!shared_in_bounds(w, l, u32(address), whole, i.line)) continue;
            shadow_shared(w, l, u32(address), whole, i.line, true, data, i.flags & STRONG);
            std::memcpy(&p.shared[address], data, whole);
        } else if (Region* region = checked(w, i, l, address, whole)) {
            if (address % whole) continue;
            if (i.flags & RELEASE) synchronize(p, address, i.flags);
            shadow_global(w, i, l, region, address, whole, true, data, i.flags & STRONG);
            if (i.flags & STRONG) {
                drain_sector(p, address);
                std::memcpy(reinterpret_cast<void*>(address), data, whole);
            } else
                poke(p, address, data, whole);
            p.launch->written += whole;
            p.launch->spins = 0;
        }
    }
}

namespace {

// The kinds of atomics; the order is that of ATOMICS in translate.py.
enum Atomic { ADD, EXCH, OR, AND, XOR, MIN_U, MAX_U, MIN_S, MAX_S, CAS, ADD_F32, ADD_F64, INC };

u64 combined(int kind, u64 old, u64 value, u64 other, u32 size) {
    auto wide = [&](u64 x) { return size == 4 ? s64(s32(x)) : s64(x); };
    auto in_float = [](u64 x) { float f; u32 b = u32(x); std::memcpy(&f, &b, 4); return f; };
    auto in_double = [](u64 x) { double f; std::memcpy(&f, &x, 8); return f; };
    switch (kind) {
        case ADD: return old + value;
        case EXCH: return value;
        case OR: return old | value;
        case AND: return old & value;
        case XOR: return old ^ value;
        case MIN_U: return std::min(old, value);
        case MAX_U: return std::max(old, value);
        case MIN_S: return wide(old) < wide(value) ? old : value;
        case MAX_S: return wide(old) > wide(value) ? old : value;
        case CAS: return old == value ? other : old;
        case INC: return old >= value ? 0 : old + 1;
        case ADD_F32: {
            float sum = in_float(old) + in_float(value);
            u32 bits;
            std::memcpy(&bits, &sum, 4);
            return bits;
        }
        default: {
            double sum = in_double(old) + in_double(value);
            u64 bits;
            std::memcpy(&bits, &sum, 8);
            return bits;
        }
    }
}

}  // namespace

void atomic(Warp& w, const Instruction& i, u32 mask, int kind) {
    Program& p = *w.program;
    u32 size = size_of(i), turn = u32(p.launch->random() % 32);
    for (u32 t = 0; t < 32; t++) {
        u32 l = (t + turn) % 32;  // the order of lanes is not defined
        if (!(mask >> l & 1)) continue;
        u64 address = address_of(w, i, l), old = 0;
        u64 value = get(w, i.x[1], l, size), other = i.x[2] < 0 ? 0 : get(w, i.x[2], l, size);
        u8* at = nullptr;
        if (i.flags & SHARED) {
            if (!shared_in_bounds(w, l, u32(address), size, i.line)) continue;
            shadow_shared(w, l, u32(address), size, i.line, false, nullptr, true);
            at = &p.shared[address];
        } else {
            Region* region = checked(w, i, l, address, size);
            if (!region || address % size) continue;
            synchronize(p, address, i.flags);
            drain_sector(p, address);
            shadow_global(w, i, l, region, address, size, false, nullptr, true);
            shadow_global(w, i, l, region, address, size, true, nullptr, true);
            at = reinterpret_cast<u8*>(address);
            p.launch->atomics++;
        }
        std::memcpy(&old, at, size);
        u64 next = combined(kind, old, value, other, size);
        p.launch->spins = next == old ? p.launch->spins + 1 : 0;
        if (i.flags & SHARED) shadow_shared(w, l, u32(address), size, i.line, true, nullptr, true);
        std::memcpy(at, &next, size);
        if (i.x[0] >= 0) put(w, i.x[0], l, reinterpret_cast<u8*>(&old), size, size, false);
    }
}

u32 load_shared(Warp& w, u32 lane, u32 address, u32 bytes, s32 line) {
    u32 value = 0xEEEEEEEE;
    if (!shared_in_bounds(w, lane, address, bytes, line)) return value;
    shadow_shared(w, lane, address, bytes, line, false, nullptr, false);
    std::memcpy(&value, &w.program->shared[address], bytes);
    return value;
}

}  // namespace ptx
