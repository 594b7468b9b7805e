// How kernels are launched: on the device and stream that were asked for, with errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "zclip_cuda.h"

namespace zclip {

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // or the next call of anybody would report it once more
    throw std::runtime_error(std::string("zclip_ext: ") + what + ": " + cudaGetErrorString(error));
}

// Makes a device the current one, and the one before it again at the end.
class OnDevice {
   public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (device == before_) return;
        check(cudaSetDevice(device), "cudaSetDevice");
        changed_ = true;
    }
    ~OnDevice() {
        if (changed_) (void)cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

   private:
    int before_ = 0;
    bool changed_ = false;
};

inline cudaStream_t stream_of(const Queue& queue) { return static_cast<cudaStream_t>(queue.stream); }

template <class... Parameters, class... Arguments>
void launch(const Queue& queue, unsigned blocks, unsigned threads, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream_of(queue);
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "a kernel could not be launched");
}

}  // namespace zclip
