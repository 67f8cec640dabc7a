// Number formats: how a row of float32, bfloat16 or float16 becomes floats and back.
//
// Knows bit patterns; knows nothing of layers. Rounding is to nearest even, NaN stays NaN.
#pragma once

#include "vectors.h"

namespace headrace {

enum class Format : int { float32 = 0, bfloat16 = 1, float16 = 2 };  // the numbers are part of the C ABI

struct Float32 {
    using Element = float;
    static Floats load(const Element* source) { return headrace::load<Floats>(source); }
    static void store(Element* target, Floats values) { headrace::store(target, values); }
};

struct BFloat16 {
    using Element = uint16_t;
    static Floats load(const Element* source) {
        return (Floats)(__builtin_convertvector(headrace::load<Shorts>(source), Words) << 16);
    }
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
    // Subnormal numbers become zero, as they do in products of pairs.
    static void store(Element* target, Floats values) {
        _mm256_storeu_si256((__m256i*)target, (__m256i)_mm512_cvtneps_pbh((__m512)values));
    }
#else
    static void store(Element* target, Floats values) {
        Words bits = (Words)values;
        Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        Words quiet_nan = (bits >> 16) | 0x40u;
        headrace::store(target, __builtin_convertvector(values == values ? rounded : quiet_nan, Shorts));
    }
#endif
};

struct Float16 {
    using Element = uint16_t;
#if defined(HEADRACE_AVX512)
    static Floats load(const Element* source) {
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
    }
    static void store(Element* target, Floats values) {
        _mm256_storeu_si256((__m256i*)target, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__AVX2__) && defined(__F16C__)
    static Floats load(const Element* source) {
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
    }
    static void store(Element* target, Floats values) {
        _mm_storeu_si128((__m128i*)target, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    // Without an instruction for it: shift the fields into place and let a float operation do the rest.
    static Floats load(const Element* source) {
        Words half = __builtin_convertvector(headrace::load<Shorts>(source), Words);
        Words magnitude = (half & 0x7fffu) << 13;
        Words sign = (half & 0x8000u) << 16;
        Floats scaled = (Floats)magnitude * 0x1p112f;  // moves the exponent's bias; subnormals become normal
        Words bits = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000u) : (Words)scaled;
        return (Floats)(bits | sign);
    }
    static void store(Element* target, Floats values) {
        Words bits = (Words)values;
        Words sign = (bits >> 16) & 0x8000u;
        Floats magnitude = (Floats)(bits & 0x7fffffffu);
        // Normal halves: round the 13 bits away. Subnormal ones: the addition aligns and rounds them.
        Words plain = (Words)magnitude;
        Words normal = (plain + 0xfffu + ((plain >> 13) & 1u) - (112u << 23)) >> 13;
        Words subnormal = (Words)(magnitude + 0.5f) - 0x3f000000u;
        Words half = magnitude < 0x1p-14f ? subnormal : normal;
        half = magnitude >= 65520.0f ? (Words{} + 0x7c00u) : half;
        half = magnitude == magnitude ? half : (Words{} + 0x7e00u);
        headrace::store(target, __builtin_convertvector(half | sign, Shorts));
    }
#endif
};

// The first `count` numbers, zeros behind; `count` is at most kWidth.
template <class Storage>
inline Floats load_some(const typename Storage::Element* source, int count) {
    if (count == kWidth) return Storage::load(source);
    typename Storage::Element numbers[kWidth] = {};
    std::memcpy(numbers, source, count * sizeof *numbers);
    return Storage::load(numbers);
}

template <class Storage>
inline void store_some(typename Storage::Element* target, Floats values, int count) {
    if (count == kWidth) return Storage::store(target, values);
    typename Storage::Element numbers[kWidth];
    Storage::store(numbers, values);
    std::memcpy(target, numbers, count * sizeof *numbers);
}

}  // namespace headrace
