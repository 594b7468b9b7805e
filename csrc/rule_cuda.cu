#include "launch_cuda.h"
#include "zclip_cuda.h"

namespace zclip {
namespace {

__global__ void decide_once(const double* sums, const Config* config, State* state, double* buffer, Record* record,
                            float* left_out) {
    State after = *state;
    Record made;
    decide(sums[0], sums[1], *config, &after, buffer, &made);
    *state = after;
    *record = made;
    if (left_out != nullptr) *left_out = made.verdict != kStep ? 1.0f : 0.0f;
}

}  // namespace

void decide_cuda(const double* sums, const Config* config, State* state, double* buffer, Record* record,
                 float* left_out, const Queue& queue) {
    const OnDevice device(queue.device);
    launch(queue, 1, 1, decide_once, sums, config, state, buffer, record, left_out);
}

}  // namespace zclip
