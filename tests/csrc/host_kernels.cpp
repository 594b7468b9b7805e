// The CUDA kernels on the CPU (host_cuda/), by plain C calls for Python.
#include <cuda_runtime.h>

#include <exception>
#include <vector>

#include "zclip_cuda.h"

namespace {

constexpr zclip::Queue kQueue = {0, nullptr};

std::vector<zclip::Segment> segments_of(int count, void* const* data, const int64_t* sizes, const int* dtypes) {
    std::vector<zclip::Segment> segments;
    for (int i = 0; i < count; ++i) segments.push_back({data[i], sizes[i], static_cast<zclip::Dtype>(dtypes[i])});
    return segments;
}

}  // namespace

extern "C" {

void host_cuda_set(int driver, unsigned seed, int fails) { host_cuda::settings = {driver, seed, fails != 0}; }
int host_cuda_launches() { return std::exchange(host_cuda::launches, 0); }

int64_t host_workspace(int count, void* const* data, const int64_t* sizes, const int* dtypes) {
    return zclip::cuda_workspace(segments_of(count, data, sizes, dtypes));
}

// Each returns whether the launches went well.
bool host_sum_of_squares(int count, void* const* data, const int64_t* sizes, const int* dtypes, double* workspace,
                         unsigned* ticket, double* out) try {
    zclip::sum_of_squares_cuda(segments_of(count, data, sizes, dtypes), workspace, ticket, out, kQueue);
    return true;
} catch (const std::exception&) {
    return false;
}

bool host_scale(int count, void* const* data, const int64_t* sizes, const int* dtypes, const double* factor) try {
    zclip::scale_cuda(segments_of(count, data, sizes, dtypes), factor, kQueue);
    return true;
} catch (const std::exception&) {
    return false;
}

bool host_decide(const double* sums, const double* config, double* state, double* record, float* left_out) try {
    constexpr int64_t kState = sizeof(zclip::State) / sizeof(double);
    zclip::decide_cuda(sums, reinterpret_cast<const zclip::Config*>(config), reinterpret_cast<zclip::State*>(state),
                       state + kState, reinterpret_cast<zclip::Record*>(record), left_out, kQueue);
    return true;
} catch (const std::exception&) {
    return false;
}

}  // extern "C"
