#include "norm_cpu.h"

#include <algorithm>
#include <cmath>
#include <utility>

// One binary for every x86-64 machine: the loops are compiled for each level and the loader picks. The order of every
// sum is written out below, so all levels give the same bits.
#if defined(ZCLIP_ISA)
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#if __GNUC__ >= 12
#define ZCLIP_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ZCLIP_ISA __attribute__((target_clones("avx2", "default")))
#endif
#else
#define ZCLIP_ISA
#endif

namespace zclip {
namespace {

// Below this much work, an element or a tensor's overhead of about 64 elements, threads cost more than they save.
constexpr int64_t kWorthThreads = 1 << 16;
constexpr int64_t kBlockOverhead = 64;

ZCLIP_INLINE int power_of_two(int n) {
    int width = 1;
    while (width < n) width *= 2;
    return width;
}

// Adds the second half of x to the first until `To` sums are left. The loops have constant bounds, or the compiler
// would not know that the halves are apart and leave them scalar. `width` is a power of two up to Width; x beyond it is
// not read.
template <int To, int Width, class T>
ZCLIP_INLINE void fold(T* x, int width) {
    if constexpr (Width > To) {
        if (width >= Width) {
            for (int i = 0; i < Width / 2; ++i) x[i] += x[i + Width / 2];
        }
        fold<To, Width / 2>(x, width);
    }
}

template <class T>
ZCLIP_INLINE SumOfSquares careful_chunk(const T* x, int n) {
    alignas(64) double squares[kChunk];
    const int width = power_of_two(n);
    double nonfinite = 0.0;
    for (int i = 0; i < n; ++i) {
        const double value = widen(x[i]);
        squares[i] = value * value;
        nonfinite += std::isfinite(value) ? 0.0 : 1.0;
    }
    for (int i = n; i < width; ++i) squares[i] = 0.0;
    fold<1, kChunk>(squares, width);
    return {squares[0], nonfinite};
}

ZCLIP_INLINE const float* as_floats(const float* x, int, float*) { return x; }
template <class T>
ZCLIP_INLINE const float* as_floats(const T* x, int n, float* scratch) {
    for (int i = 0; i < n; ++i) scratch[i] = widen(x[i]);
    return scratch;
}

// Whether all elements of a chunk are 0, as those of an embedding often are, and not just too small to be squared.
template <class T>
ZCLIP_INLINE bool is_zero(const T* x, int n) {
    bool found = false;
    for (int i = 0; i < n; ++i) found |= magnitude(x[i]) != 0;
    return !found;
}

template <class T>
ZCLIP_INLINE SumOfSquares sum_chunk(const T* x, int n) {
    alignas(64) float scratch[kChunk];
    const float* const values = as_floats(x, n, scratch);
    float lanes[kLanes] = {};
    const int rows = n / kLanes;
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < kLanes; ++i) lanes[i] += values[row * kLanes + i] * values[row * kLanes + i];
    }
    for (int i = 0; i < n - rows * kLanes; ++i) lanes[i] += values[rows * kLanes + i] * values[rows * kLanes + i];
    double sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = lanes[i];
    fold<1, kLanes>(sums, kLanes);
    if (sums[0] >= kSmallestSafeSum && sums[0] <= kLargestSafeSum) return {sums[0], 0.0};
    if (sums[0] == 0.0 && is_zero(x, n)) return {0.0, 0.0};
    return careful_chunk(x, n);
}

template <>
ZCLIP_INLINE SumOfSquares sum_chunk<double>(const double* x, int n) {
    return careful_chunk(x, n);
}

template <class T>
ZCLIP_INLINE SumOfSquares sum_block_of(const T* x, int64_t size) {
    double sums[kChunksPerBlock] = {};
    double nonfinite = 0.0;
    for (int chunk = 0; chunk * int64_t{kChunk} < size; ++chunk) {
        const int64_t begin = chunk * int64_t{kChunk};
        const SumOfSquares part = sum_chunk(x + begin, static_cast<int>(std::min<int64_t>(kChunk, size - begin)));
        sums[chunk] = part.sum;
        nonfinite += part.nonfinite;
    }
    fold<1, kChunksPerBlock>(sums, kChunksPerBlock);
    return {sums[0], nonfinite};
}

template <class T>
ZCLIP_INLINE void scale_block_of(T* x, int64_t size, double factor) {
    for (int64_t i = 0; i < size; ++i) narrow(widen(x[i]) * factor, &x[i]);
}

ZCLIP_ISA SumOfSquares sum_block(const Segment& block) {
    switch (block.dtype) {
        case Dtype::kFloat16:
            return sum_block_of(static_cast<const Half*>(block.data), block.size);
        case Dtype::kBFloat16:
            return sum_block_of(static_cast<const BFloat16*>(block.data), block.size);
        case Dtype::kFloat32:
            return sum_block_of(static_cast<const float*>(block.data), block.size);
        default:
            return sum_block_of(static_cast<const double*>(block.data), block.size);
    }
}

ZCLIP_ISA void scale_block(const Segment& block, double factor) {
    switch (block.dtype) {
        case Dtype::kFloat16:
            return scale_block_of(static_cast<Half*>(block.data), block.size, factor);
        case Dtype::kBFloat16:
            return scale_block_of(static_cast<BFloat16*>(block.data), block.size, factor);
        case Dtype::kFloat32:
            return scale_block_of(static_cast<float*>(block.data), block.size, factor);
        default:
            return scale_block_of(static_cast<double*>(block.data), block.size, factor);
    }
}

std::vector<Segment> blocks_of(const std::vector<Segment>& segments) {
    std::vector<Segment> blocks;
    blocks.reserve(segments.size());
    for (const Segment& segment : segments) {
        for (int64_t begin = 0; begin < segment.size; begin += kBlock) {
            blocks.push_back({at(segment, begin), std::min(kBlock, segment.size - begin), segment.dtype});
        }
    }
    return blocks;
}

// The same order of sums as fold(), for any number of values.
double fold_all(std::vector<double> values) {
    size_t width = 1;
    while (width < values.size()) width *= 2;
    values.resize(width, 0.0);
    for (size_t half = width / 2; half >= 1; half /= 2) {
        for (size_t i = 0; i < half; ++i) values[i] += values[i + half];
    }
    return values[0];
}

// Runs body(i) for the index of every block.
template <class Body>
void for_each(const std::vector<Segment>& blocks, int threads, const Body& body) {
    const int64_t n = static_cast<int64_t>(blocks.size());
    int64_t work = n * kBlockOverhead;
    for (const Segment& block : blocks) work += block.size;
    const bool parallel = threads > 1 && work >= kWorthThreads;
    (void)parallel;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace

SumOfSquares sum_of_squares_cpu(const std::vector<Segment>& segments, int threads) {
    const std::vector<Segment> blocks = blocks_of(segments);
    std::vector<double> sums(blocks.size());
    std::vector<double> nonfinite(blocks.size());
    for_each(blocks, threads, [&](int64_t i) {
        const SumOfSquares part = sum_block(blocks[i]);
        sums[i] = part.sum;
        nonfinite[i] = part.nonfinite;
    });
    return {fold_all(std::move(sums)), fold_all(std::move(nonfinite))};
}

void scale_cpu(std::vector<Segment> segments, double factor, int threads) {
    drop_shared_memory(&segments);
    const std::vector<Segment> blocks = blocks_of(segments);
    for_each(blocks, threads, [&](int64_t i) { scale_block(blocks[i], factor); });
}

}  // namespace zclip
