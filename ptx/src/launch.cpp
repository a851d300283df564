// A launch: which programs are resident, whose turn it is, barriers, deadlocks; and the functions for Python.
#include <algorithm>
#include <numeric>
#include <string>

#include "machine.h"

namespace ptx {
namespace {

struct Input {
    const s64* constants;  // pairs: slot, value of every lane
    s64 constant_count;
    const s64* special;  // slots of tid, ctaid.x, ctaid.y, ctaid.z, laneid, warpid; -1 if not used
    s64 slots, warps, shared, grid[3];
};

std::unique_ptr<Program> begin(Launch& launch, const Input& in, u32 id) {
    auto p = std::make_unique<Program>();
    u32 gx = u32(in.grid[0]), gy = u32(in.grid[1]);
    p->launch = &launch, p->id = id, p->x = id % gx, p->y = id / gx % gy, p->z = id / gx / gy;
    p->shared.assign(in.shared, 0xCD);
    p->shared_cells.resize(in.shared);
    p->warps.resize(in.warps);
    for (u32 k = 0; k < p->warps.size(); k++) {
        Warp& w = p->warps[k];
        w.program = p.get(), w.index = k;
        w.slots.resize(in.slots);
        for (s64 c = 0; c < in.constant_count; c++) {
            // every width reads its own layout of lanes: a constant has one, see translate.py
            s64 slot = in.constants[3 * c], width = in.constants[3 * c + 1], value = in.constants[3 * c + 2];
            for (u32 l = 0; l < 32; l++)
                if (width == 8) w.at<s64>(s32(slot))[l] = value;
                else if (width == 4) w.at<s32>(s32(slot))[l] = s32(value);
                else if (width == 2) w.at<s16>(s32(slot))[l] = s16(value);
                else w.at<u8>(s32(slot))[l] = value != 0;
        }
        const u32 fixed[] = {0, p->x, p->y, p->z, 0, k};
        for (int s = 0; s < 6; s++)
            if (in.special[s] >= 0)
                for (u32 l = 0; l < 32; l++)
                    w.at<u32>(s32(in.special[s]))[l] = s == 0 ? k * 32 + l : s == 4 ? l : fixed[s];
    }
    return p;
}

// Let a program pass its barrier once all warps are there.
bool pass_barrier(Program& p) {
    s32 where = -1;
    bool together = true;
    for (Warp& w : p.warps)
        for (u32 l = 0; l < 32; l++) {
            if (w.state[l] == Lane::BARRIER) {
                if (where >= 0 && w.pc[l] != where) together = false;
                where = w.pc[l];
            } else if (w.state[l] == Lane::DONE)
                together = false;
            else
                return false;
        }
    if (where < 0) return false;
    if (!together) p.launch->note(DIVERGED, p.launch->code[where].line, 0, 0, p, 0, -1, 0);
    p.barrier++;
    for (Warp& w : p.warps) {
        w.epoch++;
        for (u32 l = 0; l < 32; l++)
            if (w.state[l] == Lane::BARRIER) w.state[l] = Lane::RUN, w.pc[l]++;
    }
    return true;
}

// So many strong reads in a row change nothing: programs wait for what does not come.
constexpr u64 SPINS = 4'000'000;

bool done(Program& p) {
    return std::all_of(p.warps.begin(), p.warps.end(), [](Warp& w) { return w.lanes(Lane::DONE) == ALL; });
}

void execute(Launch& launch, const Input& in) {
    const Schedule& how = launch.schedule;
    std::vector<u32> order(in.grid[0] * in.grid[1] * in.grid[2]);
    std::iota(order.begin(), order.end(), 0);
    if (how.order == 1) std::reverse(order.begin(), order.end());
    if (how.order == 2) std::shuffle(order.begin(), order.end(), launch.random);
    std::vector<std::unique_ptr<Program>> live;
    size_t next = 0, victim = 0;
    while ((next < order.size() || !live.empty()) && !launch.stopped) {
        while (live.size() < how.resident && next < order.size()) live.push_back(begin(launch, in, order[next++]));
        if (launch.random() % 256 == 0) victim = launch.random();
        size_t chosen = launch.random() % live.size();
        if (how.starve && live.size() > 1 && chosen == victim % live.size() && launch.random() % 64) continue;
        Program& p = *live[chosen];
        std::vector<Warp*> ready;
        for (Warp& w : p.warps)
            if (runnable(w)) ready.push_back(&w);
        if (!ready.empty()) run(*ready[launch.random() % ready.size()], 1 + u32(launch.random() % how.slice));
        if (how.drain == 2 && launch.random() % 8 == 0) drain_some(p);
        bool spins = launch.spins > SPINS;
        if (!ready.empty() && launch.instructions < how.limit && !spins) {
            bool waits = std::none_of(p.warps.begin(), p.warps.end(), runnable);
            if (!waits) continue;
        }
        if (done(p)) {
            drain(p);
            live.erase(live.begin() + chosen);
        } else
            pass_barrier(p);
        if (launch.instructions >= how.limit || spins) {
            Warp* where = ready.empty() ? &p.warps[0] : ready[0];
            launch.note(spins ? DEADLOCK : LIMIT, launch.code[where->pc[0]].line, 0, 0, p, 0, -1, 0);
            launch.stopped = true;
        }
    }
}

}  // namespace
}  // namespace ptx

extern "C" {

// The names of the instructions whose lanes do not interact, in the order of their numbers.
const char* ptx_operations() {
    static const std::string names = [] {
        std::string all;
        auto add = [&](const ptx::Operation* operations, int count) {
            for (int k = 0; k < count; k++) all += std::string(operations[k].name) + "\n";
        };
        add(ptx::INTEGERS, ptx::INTEGER_COUNT);
        add(ptx::FLOATS, ptx::FLOAT_COUNT);
        add(ptx::CONVERSIONS, ptx::CONVERSION_COUNT);
        return all;
    }();
    return names.c_str();
}

// Run a launch; return the number of findings, of which `found` receives the first `room`, eight numbers each.
int64_t ptx_launch(const int32_t* code, int64_t length, const int64_t* constants, int64_t constant_count,
                   const int64_t* special, const int64_t* shape, const int64_t* regions, int64_t region_count,
                   const int64_t* schedule, int64_t* found, int64_t room, int64_t* counters) {
    using namespace ptx;
    Launch launch;
    launch.code = reinterpret_cast<const Instruction*>(code);
    launch.length = u32(length);
    launch.schedule = {u64(schedule[0]), u32(schedule[1]), u32(schedule[2]), u32(schedule[3]),
                       u32(schedule[4]), u32(schedule[5]), u64(schedule[6])};
    launch.random.seed(launch.schedule.seed);
    for (int64_t k = 0; k < region_count; k++) {
        Region one{u64(regions[3 * k]), u64(regions[3 * k + 1]), u64(regions[3 * k + 2]), {}};
        one.pages.resize((one.end - one.begin) / one.granule / 512 + 1);
        launch.regions.push_back(std::move(one));
    }
    Input in{constants, constant_count, special, shape[0], shape[1], shape[2], {shape[3], shape[4], shape[5]}};
    execute(launch, in);
    const u64 counted[] = {launch.instructions, launch.read, launch.written, launch.atomics};
    std::copy(counted, counted + 4, counters);
    int64_t k = 0;
    for (auto& [key, one] : launch.findings) {
        if (k++ >= room) break;
        const s64 row[] = {key.first, key.second.first, key.second.second, one.count, s64(one.address), one.program,
                           one.thread, s32(one.other_program), one.other_thread};
        std::copy(row, row + 9, found + 9 * (k - 1));
    }
    return int64_t(launch.findings.size());
}

}  // extern "C"
