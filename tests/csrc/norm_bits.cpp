// Prints the bits of the CPU kernels' results on fixed input, for all dtypes, sizes around a chunk and a block,
// unaligned pointers and shared memory: the test compares them between instruction sets, and runs them under
// sanitizers.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "norm_cpu.h"

using zclip::Dtype;
using zclip::Segment;

namespace {

// A small generator of its own, so that the input is the same everywhere.
uint64_t state = 1;
uint64_t next_bits() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

void print_bits(const char* what, double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    std::printf("%s %016" PRIx64 "\n", what, bits);
}

// Random bit patterns of all magnitudes, without inf and NaN unless asked for.
void fill(std::vector<unsigned char>* bytes, Dtype dtype, bool specials) {
    for (unsigned char& byte : *bytes) byte = static_cast<unsigned char>(next_bits());
    if (specials) return;
    const size_t width = dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
    // Clears the top bit of the exponent: a magnitude under 2.
    for (size_t i = width - 1; i < bytes->size(); i += width) (*bytes)[i] &= 0xbf;
}

}  // namespace

int main() {
    const Dtype dtypes[] = {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32, Dtype::kFloat64};
    const int64_t sizes[] = {1, 2, 63, 64, 65, 2047, 2048, 2049, 131072, 131073, 300001};
    for (const Dtype dtype : dtypes) {
        const int64_t width = dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
        for (const int64_t size : sizes) {
            for (const bool specials : {false, true}) {
                std::vector<unsigned char> bytes(static_cast<size_t>(size * width));
                fill(&bytes, dtype, specials);
                const std::vector<Segment> segments = {{bytes.data(), size, dtype}};
                const zclip::SumOfSquares total = zclip::sum_of_squares_cpu(segments, 2);
                if (!specials) print_bits("sum", total.sum);
                print_bits("nonfinite", total.nonfinite);
                if (specials) continue;
                zclip::scale_cpu(segments, 1.0 / 3.0, 2);
                uint64_t hash = 14695981039346656037u;
                for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
                std::printf("scaled %016" PRIx64 "\n", hash);
            }
        }
    }
    // Elements that don't start at a multiple of their size's alignment, and segments that overlap.
    std::vector<float> floats(5000, 3.0f);
    zclip::scale_cpu({{floats.data() + 1, 3000, Dtype::kFloat32}, {floats.data() + 2001, 2999, Dtype::kFloat32}}, 0.5,
                     2);
    print_bits("overlap", zclip::sum_of_squares_cpu({{floats.data() + 1, 4999, Dtype::kFloat32}}, 1).sum);
    print_bits("empty", zclip::sum_of_squares_cpu({}, 2).sum);
    zclip::scale_cpu({}, 0.5, 2);
    return 0;
}
