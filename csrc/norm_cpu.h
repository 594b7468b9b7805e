// Sum of squares and scaling of gradients in the CPU's memory. No torch headers: pointers, sizes, a dtype.
#pragma once

#include <vector>

#include "segment.h"

namespace zclip {

// The result depends on the segments and their order alone, not on the number of threads.
SumOfSquares sum_of_squares_cpu(const std::vector<Segment>& segments, int threads);

// Multiplies every element by `factor` in double and rounds once to float, then to the segment's dtype. Memory that two
// segments share is multiplied once.
void scale_cpu(std::vector<Segment> segments, double factor, int threads);

}  // namespace zclip
