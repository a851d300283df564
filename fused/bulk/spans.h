// Check whether ranges of memory overlap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace keyedopt {

struct Span { uintptr_t begin; uintptr_t end; };

// Radix-sort spans by their distance from the lowest start, eleven bits at a time.
inline void sort_spans(std::vector<Span>& spans) {
    uintptr_t least = UINTPTR_MAX, most = 0;
    for (const Span& span : spans) {
        least = std::min(least, span.begin);
        most = std::max(most, span.begin);
    }
    std::vector<Span> other(spans.size());
    for (int shift = 0; shift < 64 && ((most - least) >> shift) != 0; shift += 11) {
        size_t place[2049] = {0};
        for (const Span& span : spans) ++place[(((span.begin - least) >> shift) & 2047) + 1];
        for (int digit = 0; digit < 2048; ++digit) place[digit + 1] += place[digit];
        for (const Span& span : spans) other[place[((span.begin - least) >> shift) & 2047]++] = span;
        spans.swap(other);
    }
}

// Return whether spans overlap; sorts them. Spans must not be empty.
inline bool any_overlap(std::vector<Span>& spans) {
    sort_spans(spans);
    uintptr_t end = 0;
    for (const Span& span : spans) {
        if (span.begin < end) return true;
        end = std::max(end, span.end);
    }
    return false;
}

}  // namespace keyedopt
