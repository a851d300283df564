// Make many copies in one call. No copy may write to the source of another one.
#pragma once

#include <cstring>

#include "spans.h"

namespace keyedopt {

struct Copy { char* to; const char* from; int64_t bytes; };

// Return whether the memory of two copies, sources included, overlaps.
inline bool overlap(const std::vector<Copy>& copies) {
    std::vector<Span> spans;
    spans.reserve(2 * copies.size());
    for (const Copy& copy : copies) {
        const auto to = reinterpret_cast<uintptr_t>(copy.to), from = reinterpret_cast<uintptr_t>(copy.from);
        spans.push_back({to, to + static_cast<uintptr_t>(copy.bytes)});
        spans.push_back({from, from + static_cast<uintptr_t>(copy.bytes)});
    }
    return any_overlap(spans);
}

inline void make(const std::vector<Copy>& copies) {
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < copies.size(); ++i) {
        if (i + kAhead < copies.size()) {
            __builtin_prefetch(copies[i + kAhead].from);
            __builtin_prefetch(copies[i + kAhead].to, 1);
        }
        std::memcpy(copies[i].to, copies[i].from, static_cast<size_t>(copies[i].bytes));
    }
}

}  // namespace keyedopt
