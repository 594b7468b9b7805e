// Gradients as the kernels see them, pieces of memory, and the order in which every kernel adds up their squares.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "element.h"

namespace zclip {

// Elements that lie side by side in memory. A complex tensor is a segment of twice as many real elements.
struct Segment {
    void* data;
    int64_t size;
    Dtype dtype;
};

struct SumOfSquares {
    double sum;        // of the squares of all elements; inf or NaN where an element is
    double nonfinite;  // how many elements are inf or NaN
};

// A chunk is kRows rows of kLanes elements. The squares of a lane are added up in float32, row by row, and the lanes of
// the chunk in float64: 32 roundings in float32 at most, which keeps the relative error of the norm under 1e-6 for any
// values, and near 1e-8 for usual ones.
constexpr int kLanes = 64;
constexpr int kRows = 32;
constexpr int kChunk = kRows * kLanes;
// A block is the unit of work of a thread, on a CUDA device of a thread block; its chunk sums and then all block sums
// are folded in float64.
constexpr int kChunksPerBlock = 64;
constexpr int64_t kBlock = int64_t{kChunk} * kChunksPerBlock;
// A float32 sum outside this range may have lost squares to underflow or overflow and is taken again in float64.
constexpr double kSmallestSafeSum = 1e-25;
constexpr double kLargestSafeSum = 1e30;

ZCLIP_INLINE char* at(const Segment& segment, int64_t element) {
    return static_cast<char*>(segment.data) + element * bytes_per_element(segment.dtype);
}

// Sorts by address and cuts from each segment what an earlier one covers.
inline void drop_shared_memory(std::vector<Segment>* segments) {
    std::sort(segments->begin(), segments->end(), [](const Segment& a, const Segment& b) { return a.data < b.data; });
    char* covered = nullptr;
    for (Segment& segment : *segments) {
        char* const end = at(segment, segment.size);
        const int64_t bytes = bytes_per_element(segment.dtype);
        const int64_t shared = covered > at(segment, 0) ? (covered - at(segment, 0) + bytes - 1) / bytes : 0;
        const int64_t cut = std::min(shared, segment.size);
        segment.data = at(segment, cut);
        segment.size -= cut;
        covered = std::max(covered, end);
    }
}

}  // namespace zclip
