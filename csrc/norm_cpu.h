// Sum of squares and scaling of gradients in the CPU's memory. No torch headers: pointers, sizes, a dtype.
#pragma once

#include <cstdint>
#include <vector>

namespace zclip {

enum class Dtype { kFloat16, kBFloat16, kFloat32, kFloat64 };

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

// The result depends on the segments and their order alone, not on the number of threads.
SumOfSquares sum_of_squares_cpu(const std::vector<Segment>& segments, int threads);

// Multiplies every element by `factor` in double and rounds once to float, then to the segment's dtype. Memory that two
// segments share is multiplied once.
void scale_cpu(std::vector<Segment> segments, double factor, int threads);

}  // namespace zclip
