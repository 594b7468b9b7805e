// The part of CUDA that csrc/*.cu use, on the CPU, so that the kernels' own sources run and are tested without a
// device.
//
// A thread block is as many threads of the system, one block after another. Barriers and shuffles are waits for the
// threads that take part: one that is left out hangs the test, or is a race that the thread sanitizer reports. A launch
// returns when its work is done. What this does not show: the memory model between blocks, and speed.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // the blocks run one after another

struct dim3 {
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = struct Stream*;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

namespace host_cuda {

// What a test sets: the driver's version, the seed of the order of blocks (0: as they are numbered), a failing launch.
struct Settings {
    int driver = 13000;
    unsigned seed = 0;
    bool fails = false;
};
inline Settings settings;
inline int launches = 0;

class Barrier {
   public:
    void wait(unsigned threads) {
        const unsigned now = round_.load();
        if (arrived_.fetch_add(1) + 1 == threads) {
            arrived_.store(0);
            round_.fetch_add(1);
            round_.notify_all();
        } else {
            while (round_.load() == now) round_.wait(now);
        }
    }

   private:
    std::atomic<unsigned> arrived_{0}, round_{0};
};

constexpr unsigned kMostThreads = 1024;
inline Barrier block_barrier;
inline Barrier team_barriers[6][kMostThreads];  // by the binary logarithm of the team's size, and its first thread
inline double exchanged[kMostThreads];

[[noreturn]] inline void stop(const char* why) {
    std::fprintf(stderr, "host_cuda: %s\n", why);
    std::abort();
}

inline std::vector<unsigned> order_of(unsigned blocks) {
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; ++i) order[i] = i;
    std::mt19937 random(settings.seed);
    for (unsigned i = blocks; settings.seed != 0 && i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    return order;
}

template <class Body>
void run_grid(const cudaLaunchConfig_t& config, const Body& body) {
    const std::vector<unsigned> order = order_of(config.gridDim.x);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < config.blockDim.x; ++i) {
        threads.emplace_back([&, i] {
            threadIdx = dim3(i);
            blockDim = config.blockDim;
            gridDim = config.gridDim;
            for (const unsigned block : order) {
                blockIdx = dim3(block);
                body();
                block_barrier.wait(config.blockDim.x);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace host_cuda

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    const size_t most = host_cuda::settings.driver >= 12010 ? 32764 : 4096;
    const bool fits = (sizeof(Parameters) + ... + 0) <= most && config->blockDim.x <= host_cuda::kMostThreads;
    if (!fits || config->gridDim.x == 0 || host_cuda::settings.fails) return cudaErrorInvalidValue;
    ++host_cuda::launches;
    host_cuda::run_grid(*config, [&] { kernel(arguments...); });
    return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = host_cuda::settings.driver, cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    return std::memset(to, value, bytes), cudaSuccess;
}

inline void __syncthreads() { host_cuda::block_barrier.wait(blockDim.x); }
// Not a fence of the language, of which the thread sanitizer knows nothing.
inline void __threadfence() {
    static std::atomic<int> all;
    all.fetch_add(0);
}
inline unsigned atomicAdd(unsigned* to, unsigned value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
inline double __ldcg(const double* from) { return *from; }

inline unsigned __brev(unsigned bits) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (bits >> i & 1u) << (31 - i);
    return reversed;
}

// The team: the threads of the mask, side by side in one warp.
inline double __shfl_xor_sync(unsigned mask, double value, int apart) {
    const unsigned size = static_cast<unsigned>(std::popcount(mask));
    const unsigned lane = threadIdx.x % 32, partner = lane ^ static_cast<unsigned>(apart);
    const bool side_by_side = std::has_single_bit(size) && mask >> std::countr_zero(mask) == ~0u >> (32 - size);
    if (!side_by_side || (mask >> lane & 1u) == 0 || (mask >> partner & 1u) == 0) host_cuda::stop("a bad shuffle");
    const unsigned warp = threadIdx.x - lane;
    const unsigned first = warp + static_cast<unsigned>(std::countr_zero(mask));
    host_cuda::Barrier& barrier = host_cuda::team_barriers[std::countr_zero(size)][first];
    host_cuda::exchanged[threadIdx.x] = value;
    barrier.wait(size);
    const double received = host_cuda::exchanged[warp + partner];
    barrier.wait(size);
    return received;
}
