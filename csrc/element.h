// The elements of gradients: how they become float or double, and how a double becomes one of them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define ZCLIP_INLINE __host__ __device__ inline __attribute__((always_inline))
#else
// Helpers of a loop that is compiled for several instruction sets must be inlined into it, or they would be compiled
// for the lowest one only.
#define ZCLIP_INLINE inline __attribute__((always_inline))
#endif

namespace zclip {

enum class Dtype { kFloat16, kBFloat16, kFloat32, kFloat64 };

ZCLIP_INLINE int64_t bytes_per_element(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32:
            return 4;
        case Dtype::kFloat64:
            return 8;
        default:
            return 2;
    }
}

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

template <class To, class From>
ZCLIP_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

ZCLIP_INLINE float widen(float x) { return x; }
ZCLIP_INLINE double widen(double x) { return x; }
ZCLIP_INLINE float widen(BFloat16 x) { return bits_as<float>(uint32_t{x.bits} << 16); }
// Shifts the exponent into place and corrects its bias. No float32 on the way is subnormal, so that a processor told to
// flush those to zero gives the same.
ZCLIP_INLINE float widen(Half x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x.bits));  // one instruction
#else
    const uint32_t magnitude = uint32_t{x.bits} & 0x7fffu;
    const uint32_t shifted = magnitude << 13;
    const uint32_t rebias = 112u << 23;
    const uint32_t smallest = 113u << 23;  // 2^-14, the smallest normal float16
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(smallest + shifted) - bits_as<float>(smallest));
    const uint32_t normal = shifted + rebias + (magnitude >= 0x7c00u ? rebias : 0u);
    return bits_as<float>((magnitude < 0x400u ? subnormal : normal) | (uint32_t{x.bits} & 0x8000u) << 16);
#endif
}

// 0 for zeros alone, also where the processor takes subnormal numbers for zeros.
ZCLIP_INLINE uint32_t magnitude(float x) { return bits_as<uint32_t>(x) & 0x7fffffffu; }
ZCLIP_INLINE uint32_t magnitude(Half x) { return x.bits & 0x7fffu; }
ZCLIP_INLINE uint32_t magnitude(BFloat16 x) { return x.bits & 0x7fffu; }

ZCLIP_INLINE void narrow(double value, double* out) { *out = value; }
ZCLIP_INLINE void narrow(double value, float* out) { *out = static_cast<float>(value); }
ZCLIP_INLINE void narrow(double value, BFloat16* out) {
    const uint32_t bits = bits_as<uint32_t>(static_cast<float>(value));
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Rounds to nearest, ties to even. Only finite values come here.
ZCLIP_INLINE void narrow(double value, Half* out) {
    const uint32_t bits = bits_as<uint32_t>(static_cast<float>(value));
    const uint32_t sign = bits & 0x80000000u;
    const uint32_t magnitude = bits ^ sign;
    const uint32_t overflow = 0x7c00u;
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t small = magnitude < 0x38800000u ? subnormal : normal;
    out->bits = static_cast<uint16_t>((magnitude >= 0x47800000u ? overflow : small) | sign >> 16);
}

}  // namespace zclip
