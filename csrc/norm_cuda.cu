// The same sums in the same order as norm_cpu.cpp, hence the same bits.
//
// A thread block takes a block of elements. The threads that together load one row of a chunk, 16 bytes each, are its
// team: each adds up the squares of its lanes down the rows, then the team folds the lanes. The last thread block to
// end folds what all have written. No sum depends on which comes when.
#include <cuda_runtime.h>
#include <math.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "element.h"
#include "launch_cuda.h"
#include "zclip_cuda.h"

namespace zclip {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Of a scaling: enough to fill any device, and few enough that to find out that there is nothing to do costs little.
constexpr int64_t kMostScalingBlocks = 1024;

template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));  // elements of one load
template <class T>
constexpr int kTeam = kLanes / kPack<T>;  // threads

// Segments for one launch. They are passed by value, with the kernel: no copy to the device goes ahead of it.
template <int kSlots>
struct Table {
    static constexpr int kSize = kSlots;
    char* data[kSlots];
    int64_t size[kSlots];
    int first_block[kSlots];
    uint8_t dtype[kSlots];
    int segments = 0;
    int blocks = 0;
};
// A kernel takes 32764 bytes of parameters since CUDA 12.1, 4096 before.
constexpr int kManySlots = 1536;
constexpr int kFewSlots = 184;

__device__ SumOfSquares operator+(const SumOfSquares& a, const SumOfSquares& b) {
    return {a.sum + b.sum, a.nonfinite + b.nonfinite};
}

template <class T>
struct Pack {
    T x[kPack<T>];
};

// `address` is a multiple of 16.
template <class T>
__device__ uint4 load_words(const T* address) {
    return *reinterpret_cast<const uint4*>(address);
}

template <class T>
__device__ Pack<T> load(const T* address) {
    const uint4 words = load_words(address);
    Pack<T> pack;
    memcpy(&pack, &words, sizeof pack);
    return pack;
}

template <class T>
__device__ void store(const Pack<T>& pack, T* address) {
    uint4 words;
    memcpy(&words, &pack, sizeof words);
    *reinterpret_cast<uint4*>(address) = words;
}

__device__ bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// One thread's place in the team that sums up a chunk.
struct Member {
    int index;
    unsigned team;  // its threads within the warp
};

template <class T>
__device__ Member member() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int index = lane % kTeam<T>;
    return {index, (~0u >> (kWarp - kTeam<T>)) << (lane - index)};
}

// Each member holds kPack lanes that lie side by side: lane i and the one half of all lanes further on come together
// first. All members get the sum.
template <class T>
__device__ double fold_lanes(double* lanes, const Member& me) {
#pragma unroll
    for (int apart = kTeam<T> / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) lanes[i] += __shfl_xor_sync(me.team, lanes[i], apart);
    }
#pragma unroll
    for (int half = kPack<T> / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

template <class T>
__device__ double fold_over_team(double value, const Member& me) {
    for (int apart = kTeam<T> / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(me.team, value, apart);
    return value;
}

// What folding kRows values leaves at `first` when `width` are left: value(first) and the like, added up in that order.
template <int width, class Value>
__device__ double fold_rows(int first, const Value& value) {
    if constexpr (width == kRows) {
        return value(first);
    } else {
        const double a = fold_rows<2 * width>(first, value);
        return a + fold_rows<2 * width>(first + width, value);
    }
}

template <class T>
__device__ SumOfSquares careful_chunk(const T* x, int n, const Member& me) {
    double lanes[kPack<T>];
    double nonfinite = 0.0;
    for (int i = 0; i < kPack<T>; ++i) {
        const int lane = me.index * kPack<T> + i;
        lanes[i] = fold_rows<1>(0, [&](int row) {
            if (row * kLanes + lane >= n) return 0.0;
            const double value = widen(x[row * kLanes + lane]);
            if (!isfinite(value)) nonfinite += 1.0;
            return value * value;
        });
    }
    return {fold_lanes<T>(lanes, me), fold_over_team<T>(nonfinite, me)};
}

// kWhole, here and below: n is kChunk, and x is a multiple of 16.
//
// Whether all elements of a chunk are 0, as those of an embedding often are, and not just too small to be squared. It
// was read a moment ago.
template <bool kWhole, class T>
__device__ bool is_zero(const T* x, int n, const Member& me) {
    unsigned found = 0;
    const int first = me.index * kPack<T>;
    if constexpr (kWhole) {
#pragma unroll 8
        for (int row = 0; row < kRows; ++row) {
            const uint4 words = load_words(x + row * kLanes + first);
            found |= words.x | words.y | words.z | words.w;
        }
        found &= sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;  // all but the signs
    } else {
        for (int i = me.index; i < n; i += kTeam<T>) found |= magnitude(x[i]);
    }
    return fold_over_team<T>(found != 0 ? 1.0 : 0.0, me) == 0.0;
}

template <bool kWhole, class T>
__device__ SumOfSquares sum_chunk(const T* x, int n, const Member& me) {
    if constexpr (!std::is_same_v<T, double>) {
        const int first = me.index * kPack<T>;
        float lanes[kPack<T>] = {};
        if constexpr (kWhole) {
#pragma unroll 8
            for (int row = 0; row < kRows; ++row) {
                const Pack<T> pack = load(x + row * kLanes + first);
#pragma unroll
                for (int i = 0; i < kPack<T>; ++i) lanes[i] += widen(pack.x[i]) * widen(pack.x[i]);
            }
        } else {
            for (int begin = first; begin < n; begin += kLanes) {
#pragma unroll
                for (int i = 0; i < kPack<T>; ++i) {
                    const float value = begin + i < n ? widen(x[begin + i]) : 0.0f;
                    lanes[i] += value * value;
                }
            }
        }
        double sums[kPack<T>];
        for (int i = 0; i < kPack<T>; ++i) sums[i] = lanes[i];
        const double sum = fold_lanes<T>(sums, me);
        if (sum >= kSmallestSafeSum && sum <= kLargestSafeSum) return {sum, 0.0};
        if (sum == 0.0 && is_zero<kWhole>(x, n, me)) return {0.0, 0.0};
    }
    return careful_chunk(x, n, me);
}

template <class T>
__device__ void sum_chunks(const T* x, int size, SumOfSquares* sums) {
    const Member me = member<T>();
    const bool aligned = is_aligned(x);
    for (int chunk = static_cast<int>(threadIdx.x) / kTeam<T>; chunk < kChunksPerBlock; chunk += kThreads / kTeam<T>) {
        const int begin = chunk * kChunk;
        SumOfSquares sum = {0.0, 0.0};
        if (aligned && size - begin >= kChunk) {
            sum = sum_chunk<true>(x + begin, kChunk, me);
        } else if (size > begin) {
            sum = sum_chunk<false>(x + begin, size - begin < kChunk ? size - begin : kChunk, me);
        }
        if (me.index == 0) sums[chunk] = sum;
    }
}

// Adds the second half of x, in shared memory, to the first until one is left. For all threads of a block together.
__device__ void fold(SumOfSquares* x, int width) {
    const int i = static_cast<int>(threadIdx.x);
    for (int half = width / 2; half > 0; half /= 2) {
        __syncthreads();
        if (i < half) x[i] = x[i] + x[i + half];
    }
    __syncthreads();
}

// What folding all blocks' sums leaves for this thread when kThreads are left. Depth first: the bits of the number of a
// sum, reversed, are how often and when it moves.
__device__ SumOfSquares fold_to_thread(const SumOfSquares* sums, int64_t count) {
    int levels = 0;
    while ((int64_t{kThreads} << levels) < count) ++levels;
    SumOfSquares waiting[32];
    int depth = 0;
    for (unsigned k = 0; k < 1u << levels; ++k) {
        const unsigned reversed = levels == 0 ? 0u : __brev(k) >> (32 - levels);
        const int64_t i = int64_t{kThreads} * reversed + threadIdx.x;
        SumOfSquares sum = {0.0, 0.0};
        // Past the first cache, which may hold what was there before other processors wrote.
        if (i < count) sum = {__ldcg(&sums[i].sum), __ldcg(&sums[i].nonfinite)};
        for (unsigned bit = 1; (k & bit) != 0; bit <<= 1) sum = waiting[--depth] + sum;
        waiting[depth++] = sum;
    }
    return waiting[0];
}

template <int kSlots>
__device__ Segment block_of(const Table<kSlots>& table, int block) {
    int slot = 0;
    int end = table.segments;
    while (end - slot > 1) {
        const int middle = (slot + end) / 2;
        (table.first_block[middle] <= block ? slot : end) = middle;
    }
    const Segment whole = {table.data[slot], table.size[slot], static_cast<Dtype>(table.dtype[slot])};
    const int64_t begin = (block - table.first_block[slot]) * kBlock;
    const int64_t left = whole.size - begin;
    return {at(whole, begin), left < kBlock ? left : kBlock, whole.dtype};
}

// Of several launches, `first` is the number of this one's first block, `count` that of all their blocks.
template <int kSlots>
__global__ void __launch_bounds__(kThreads) sum_blocks(const __grid_constant__ Table<kSlots> table, SumOfSquares* sums,
                                                       int64_t first, int64_t count, unsigned* ticket, double* out) {
    __shared__ SumOfSquares shared[kThreads];
    __shared__ bool is_last;
    const Segment block = block_of(table, static_cast<int>(blockIdx.x));
    const int size = static_cast<int>(block.size);
    switch (block.dtype) {
        case Dtype::kFloat16:
            sum_chunks(static_cast<const Half*>(block.data), size, shared);
            break;
        case Dtype::kBFloat16:
            sum_chunks(static_cast<const BFloat16*>(block.data), size, shared);
            break;
        case Dtype::kFloat32:
            sum_chunks(static_cast<const float*>(block.data), size, shared);
            break;
        default:
            sum_chunks(static_cast<const double*>(block.data), size, shared);
    }
    fold(shared, kChunksPerBlock);
    if (threadIdx.x == 0) {
        sums[first + blockIdx.x] = shared[0];
        __threadfence();  // whoever sees the ticket counted sees the sum
        is_last = atomicAdd(ticket, 1u) == static_cast<unsigned>(count - 1);
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    shared[threadIdx.x] = fold_to_thread(sums, count);
    fold(shared, kThreads);
    if (threadIdx.x == 0) {
        out[0] = shared[0].sum;
        out[1] = shared[0].nonfinite;
        *ticket = 0;
    }
}

template <class T>
__device__ void scale_elements(T* x, int64_t size, double factor) {
    int64_t done = 0;
    if (is_aligned(x)) {
        done = size / kPack<T> * kPack<T>;
        for (int64_t i = int64_t{threadIdx.x} * kPack<T>; i < done; i += kThreads * kPack<T>) {
            Pack<T> pack = load(x + i);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) narrow(widen(pack.x[j]) * factor, &pack.x[j]);
            store(pack, x + i);
        }
    }
    for (int64_t i = done + threadIdx.x; i < size; i += kThreads) narrow(widen(x[i]) * factor, &x[i]);
}

template <int kSlots>
__global__ void __launch_bounds__(kThreads)
    scale_blocks(const __grid_constant__ Table<kSlots> table, const double* factor) {
    const double by = *factor;
    if (by == 1.0) return;
    for (int i = static_cast<int>(blockIdx.x); i < table.blocks; i += static_cast<int>(gridDim.x)) {
        const Segment block = block_of(table, i);
        switch (block.dtype) {
            case Dtype::kFloat16:
                scale_elements(static_cast<Half*>(block.data), block.size, by);
                break;
            case Dtype::kBFloat16:
                scale_elements(static_cast<BFloat16*>(block.data), block.size, by);
                break;
            case Dtype::kFloat32:
                scale_elements(static_cast<float*>(block.data), block.size, by);
                break;
            default:
                scale_elements(static_cast<double*>(block.data), block.size, by);
        }
    }
}

int64_t blocks_of(const Segment& segment) { return (segment.size + kBlock - 1) / kBlock; }

int64_t blocks_of(const std::vector<Segment>& segments) {
    int64_t blocks = 0;
    for (const Segment& segment : segments) blocks += blocks_of(segment);
    return blocks;
}

template <int kSlots, class Use>
void fill_tables(const std::vector<Segment>& segments, const Use& use) {
    Table<kSlots> table;
    for (const Segment& segment : segments) {
        if (segment.size == 0) continue;
        if (table.segments == kSlots) {
            use(std::as_const(table));
            table.segments = 0;
            table.blocks = 0;
        }
        const int slot = table.segments++;
        table.data[slot] = static_cast<char*>(segment.data);
        table.size[slot] = segment.size;
        table.first_block[slot] = table.blocks;
        table.dtype[slot] = static_cast<uint8_t>(segment.dtype);
        table.blocks += static_cast<int>(blocks_of(segment));
    }
    if (table.segments > 0) use(std::as_const(table));
}

// Runs use(table) for one table after another. Both the toolkit that this was compiled with and the driver must know of
// large parameters.
template <class Use>
void for_each_table(const std::vector<Segment>& segments, const Use& use) {
#if CUDART_VERSION >= 12010
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    if (driver >= 12010) return fill_tables<kManySlots>(segments, use);
#endif
    fill_tables<kFewSlots>(segments, use);
}

}  // namespace

int64_t cuda_workspace(const std::vector<Segment>& segments) {
    return blocks_of(segments) * static_cast<int64_t>(sizeof(SumOfSquares) / sizeof(double));
}

void sum_of_squares_cuda(const std::vector<Segment>& segments, double* workspace, unsigned* ticket, double* out,
                         const Queue& queue) {
    const OnDevice device(queue.device);
    auto* const sums = reinterpret_cast<SumOfSquares*>(workspace);
    const int64_t count = blocks_of(segments);
    if (count == 0) {
        check(cudaMemsetAsync(out, 0, 2 * sizeof(double), stream_of(queue)), "cudaMemsetAsync");
        return;
    }
    int64_t first = 0;
    for_each_table(segments, [&](const auto& table) {
        launch(queue, static_cast<unsigned>(table.blocks), kThreads, sum_blocks<std::decay_t<decltype(table)>::kSize>,
               table, sums, first, count, ticket, out);
        first += table.blocks;
    });
}

void scale_cuda(std::vector<Segment> segments, const double* factor, const Queue& queue) {
    const OnDevice device(queue.device);
    drop_shared_memory(&segments);
    for_each_table(segments, [&](const auto& table) {
        const int64_t blocks = table.blocks < kMostScalingBlocks ? table.blocks : kMostScalingBlocks;
        launch(queue, static_cast<unsigned>(blocks), kThreads, scale_blocks<std::decay_t<decltype(table)>::kSize>,
               table, factor);
    });
}

}  // namespace zclip
