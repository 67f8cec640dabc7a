// Vectors of the machine's own width, and what the attention kernels do with them.
//
// Knows instruction sets (through the compiler's macros) and number formats; knows nothing of attention.
// GCC's vector extensions carry the arithmetic, so that AVX-512, AVX2, SSE and NEON share one source; an
// intrinsic appears only where the extensions cannot say it (half precision, bfloat16 dot products).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HEADRACE_AVX512 1
constexpr int kWidth = 16;        // floats in a vector
constexpr int kVectorsAtOnce = 4;  // that are multiplied: 6 x 4 accumulators leave 8 of 32 registers
constexpr const char* kInstructions =
#if defined(__AVX512BF16__)
    "AVX512-BF16";
#else
    "AVX512";
#endif
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kWidth = 8;
constexpr int kVectorsAtOnce = 2;  // 6 x 2 accumulators leave 4 of 16 registers
constexpr const char* kInstructions = "AVX2";
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kVectorsAtOnce = 4;
constexpr const char* kInstructions = "NEON";
#else
constexpr int kWidth = 4;
constexpr int kVectorsAtOnce = 2;
constexpr const char* kInstructions = "128-bit vectors";
#endif

using Floats = float __attribute__((vector_size(kWidth * 4)));
using Words = uint32_t __attribute__((vector_size(kWidth * 4)));
using Ints = int32_t __attribute__((vector_size(kWidth * 4)));
using Shorts = uint16_t __attribute__((vector_size(kWidth * 2)));

template <class Vector>
inline Vector load(const void* source) {
    Vector result;
    std::memcpy(&result, source, sizeof result);
    return result;
}

template <class Vector>
inline void store(void* target, Vector vector) {
    std::memcpy(target, &vector, sizeof vector);
}

inline Floats splat(float value) { return Floats{} + value; }

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

template <int... lane>
inline Ints lane_numbers(std::integer_sequence<int, lane...>) {
    return Ints{lane...};
}

// True (all ones) in lanes 0 .. count - 1.
inline Ints first_lanes(int count) {
    return lane_numbers(std::make_integer_sequence<int, kWidth>{}) < (Ints{} + count);
}

// Folds a vector's upper lanes onto its lower ones until one lane is left.
template <int step, class Fold>
inline float fold(Floats vector, Fold combine) {
    if constexpr (step == 0) {
        return vector[0];
    } else {
        constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
        Floats moved = __builtin_shuffle(vector, lane_numbers(lanes) + step);
        return fold<step / 2>(combine(vector, moved), combine);
    }
}

inline float sum(Floats vector) {
    return fold<kWidth / 2>(vector, [](Floats a, Floats b) { return a + b; });
}

inline float largest(Floats vector) { return fold<kWidth / 2>(vector, maximum); }

// 2^x for x <= 126, relative error below 3e-7. Below -126 the answer stays at 2^-126.
// The nearest integer goes to the exponent, a minimax polynomial takes the rest in [-1/2, 1/2].
inline Floats exp2(Floats x) {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
    x = maximum(splat(-126.0f), x);  // in this order a NaN survives
    Floats shifted = x + kRounder;
    Floats rest = x - (shifted - kRounder);
    Floats power = splat(0.0013276472f);
    power = power * rest + 0.00967554133f;
    power = power * rest + 0.0555071327f;
    power = power * rest + 0.240221197f;
    power = power * rest + 0.693146967f;
    power = power * rest + 1.00000007f;
    return (Floats)((Ints)power + ((Ints)shifted << 23));
}

}  // namespace headrace
