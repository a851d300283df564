// Find row numbers outside a table.
#pragma once

#include <algorithm>
#include <cstdint>

namespace keyedopt {

// Return the first number outside [0, size), or null.
inline const int64_t* first_outside(const int64_t* numbers, int64_t count, int64_t size) {
    constexpr int64_t kStretch = 1024;
    const uint64_t last = static_cast<uint64_t>(size) - 1;
    const int64_t* const end = numbers + count;
    for (; numbers < end; numbers += std::min<int64_t>(kStretch, end - numbers)) {
        const int64_t stretch = std::min<int64_t>(kStretch, end - numbers);
        uint64_t signs = 0;  // the sign bit is set if a number is negative or greater than the last row
        for (int64_t i = 0; i < stretch; ++i)
            signs |= static_cast<uint64_t>(numbers[i]) | (last - static_cast<uint64_t>(numbers[i]));
        if (!(signs >> 63)) continue;
        return std::find_if(numbers, end, [&](int64_t number) { return number < 0 || number >= size; });
    }
    return nullptr;
}

}  // namespace keyedopt
