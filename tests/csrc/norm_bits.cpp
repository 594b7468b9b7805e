// Prints the bits of the kernels' results on fixed input, for all dtypes, sizes around a chunk and a block, unaligned
// pointers and shared memory: the tests compare them between instruction sets and with the CUDA kernels
// (-DZCLIP_HOST_CUDA), and run them under sanitizers. An argument: two sizes are enough.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#if defined(ZCLIP_HOST_CUDA)
#include "zclip_cuda.h"
#else
#include "norm_cpu.h"
#endif

using zclip::Dtype;
using zclip::Segment;
using zclip::SumOfSquares;

namespace {

#if defined(ZCLIP_HOST_CUDA)
constexpr zclip::Queue kQueue = {0, nullptr};

SumOfSquares sum_of_squares(const std::vector<Segment>& segments) {
    static unsigned ticket = 0;
    double out[2];
    std::vector<double> workspace(static_cast<size_t>(zclip::cuda_workspace(segments)));
    zclip::sum_of_squares_cuda(segments, workspace.data(), &ticket, out, kQueue);
    return {out[0], out[1]};
}

void scale(const std::vector<Segment>& segments, double factor) { zclip::scale_cuda(segments, &factor, kQueue); }
#else
SumOfSquares sum_of_squares(const std::vector<Segment>& segments) { return zclip::sum_of_squares_cpu(segments, 2); }

void scale(const std::vector<Segment>& segments, double factor) { zclip::scale_cpu(segments, factor, 2); }
#endif

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

int main(int arguments, char**) {
    const Dtype dtypes[] = {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32, Dtype::kFloat64};
    const int64_t sizes[] = {1, 2, 63, 64, 65, 2047, 2048, 2049, 131072, 131073, 300001};
    for (const Dtype dtype : dtypes) {
        const int64_t width = zclip::bytes_per_element(dtype);
        for (const int64_t size : sizes) {
            if (arguments > 1 && size != 65 && size != 2049) continue;
            // An element further on, 16 bytes at a time can't be read.
            for (const int64_t start : {0, 1}) {
                for (const bool specials : {false, true}) {
                    std::vector<unsigned char> bytes(static_cast<size_t>((start + size) * width));
                    fill(&bytes, dtype, specials);
                    const std::vector<Segment> segments = {{bytes.data() + start * width, size, dtype}};
                    const SumOfSquares total = sum_of_squares(segments);
                    if (!specials) print_bits("sum", total.sum);
                    print_bits("nonfinite", total.nonfinite);
                    if (specials) continue;
                    scale(segments, 1.0 / 3.0);
                    uint64_t hash = 14695981039346656037u;
                    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
                    std::printf("scaled %016" PRIx64 "\n", hash);
                }
            }
        }
    }
    // Segments that overlap, and none.
    std::vector<float> floats(5000, 3.0f);
    scale({{floats.data() + 1, 3000, Dtype::kFloat32}, {floats.data() + 2001, 2999, Dtype::kFloat32}}, 0.5);
    print_bits("overlap", sum_of_squares({{floats.data() + 1, 4999, Dtype::kFloat32}}).sum);
    print_bits("empty", sum_of_squares({}).sum);
    scale({}, 0.5);
    if (arguments > 1) return 0;
    // Many, some of them empty.
    std::vector<float> numbers(4 * 600);
    std::vector<Segment> many;
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1.0f / static_cast<float>(i + 1);
    for (size_t i = 0; i < 600; ++i) many.push_back({&numbers[4 * i], i % 3 ? 4 : 0, Dtype::kFloat32});
    print_bits("many", sum_of_squares(many).sum);
    return 0;
}
