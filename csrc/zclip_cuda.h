// What runs on a CUDA device: the sum of squares, the rule, the scaling. Each function puts its work on a stream and
// returns; nothing is copied to the host and nothing is waited for. No torch and no CUDA headers: pointers, sizes, a
// stream.
#pragma once

#include <vector>

#include "segment.h"
#include "zclip_rule.h"

namespace zclip {

// Where the work goes: the index of the device that all pointers are of, and a cudaStream_t of it.
struct Queue {
    int device;
    void* stream;
};

// How many doubles sum_of_squares_cuda wants as its workspace.
int64_t cuda_workspace(const std::vector<Segment>& segments);

// Writes the sum of squares to out[0] and the number of elements that are inf or NaN to out[1]: the bits that
// sum_of_squares_cpu gives. `ticket` is a zero before and after; no other stream may use it meanwhile.
void sum_of_squares_cuda(const std::vector<Segment>& segments, double* workspace, unsigned* ticket, double* out,
                         const Queue& queue);

// One step of the rule; see decide(). `sums` is sum_of_squares_cuda's out. Where `left_out` is not null it becomes 1.0
// if the optimizer must not step, else 0.0.
void decide_cuda(const double* sums, const Config* config, State* state, double* buffer, Record* record,
                 float* left_out, const Queue& queue);

// Multiplies every element by *factor in double and rounds once to float, then to the segment's dtype; at 1.0 no
// gradient is read. Memory that two segments share is multiplied once.
void scale_cuda(std::vector<Segment> segments, const double* factor, const Queue& queue);

}  // namespace zclip
