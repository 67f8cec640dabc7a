// Matrix products in registers: C[rows, columns] = A[rows, depth] x B[depth, columns], float32 sums.
//
// A `word` is what one lane multiplies at once: one number, or (with bfloat16 dot products) two neighbouring
// bfloat16 along the depth. In vectors, A is read one word at a time and broadcast; B is asked for one vector of
// columns at a time and may lie in any order. Every element of C is summed along the depth in one order, whatever the
// shape of the product around it: a row's result never depends on its neighbours.
#pragma once

#include "formats.h"

namespace headrace {

constexpr int kColumnsAtOnce = kVectorsAtOnce * kWidth;
constexpr int kLineBytes = 64;  // of the processor's caches

// Products of floats: A is widened beforehand, B when it is read.
template <class Storage>
struct FloatProducts {
    using Stored = Storage;
    using Element = typename Storage::Element;
    using Packed = float;  // numbers of A
    static constexpr int kPerWord = 1;
    static Words load_columns(const Element* source) { return (Words)Storage::load(source); }
    static Floats add_product(Floats total, Words a, Words b) { return total + (Floats)a * (Floats)b; }
    static void store_packed(Packed* target, Floats values) { store(target, values); }
    static void store_packed(Packed* target, Floats first, Floats second) {
        store(target, first);
        store(target + kWidth, second);
    }
    static Floats weight(Floats x) { return exp2(x); }
};

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
// Products of bfloat16 pairs (VDPBF16PS), twice as many a cycle. The softmax weights are rounded to
// bfloat16 as well, which is what Dao et al. do on tensor cores.
struct PairProducts {
    using Stored = BFloat16;
    using Element = uint16_t;
    using Packed = uint16_t;
    static constexpr int kPerWord = 2;
    static Words load_columns(const Element* source) { return load<Words>(source); }
    static Floats add_product(Floats total, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
    }
    static void store_packed(Packed* target, Floats values) {
        _mm256_storeu_si256((__m256i*)target, (__m256i)_mm512_cvtneps_pbh((__m512)values));
    }
    // In half the time that two take one by one.
    static void store_packed(Packed* target, Floats first, Floats second) {
        _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
    // 2^x with a relative error below 1.1e-4: bfloat16 is rounded twenty times as much.
    static Floats weight(Floats x) {
        Floats rest = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Floats power = splat(0.0780245226f);
        power = power * rest + 0.226067155f;
        power = power * rest + 0.69583354f;
        power = power * rest + 0.999925219f;
        return (Floats)_mm512_scalef_ps((__m512)power, (__m512)x);
    }
};
using BFloat16Products = PairProducts;
#else
using BFloat16Products = FloatProducts<BFloat16>;
#endif

// Columns: columns(k, j) is vector j of B's words number k. Strides in words (A) and floats (C).
template <class Products, class Columns>
using Multiply = void (*)(const uint32_t* a, int64_t a_stride, const Columns& columns, float* c,
                          int64_t c_stride, int64_t depth);

template <class Products, class Columns, int num_rows, int num_vectors>
void multiply(const uint32_t* a, int64_t a_stride, const Columns& columns, float* c, int64_t c_stride,
              int64_t depth) {
    const Columns own = columns;  // in registers
    Floats totals[num_rows][num_vectors] = {};
    for (int64_t k = 0; k < depth; ++k) {
        Words vectors[num_vectors];
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; ++j) vectors[j] = own(k, j);
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; ++i) {
            Words row = Words{} + a[i * a_stride + k];
#pragma GCC unroll 8
            for (int j = 0; j < num_vectors; ++j)
                totals[i][j] = Products::add_product(totals[i][j], row, vectors[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; ++j) store(c + i * c_stride + j * kWidth, totals[i][j]);
}

template <class Products, class Columns, int... index>
Multiply<Products, Columns> pick_multiply(int num_rows, int num_vectors,
                                          std::integer_sequence<int, index...>) {
    static constexpr Multiply<Products, Columns> table[] = {
        &multiply<Products, Columns, index / kVectorsAtOnce + 1, index % kVectorsAtOnce + 1>...};
    return table[(num_rows - 1) * kVectorsAtOnce + num_vectors - 1];
}

// One thread's way to multiply, at most kGroupRows rows by at most kVectorsAtOnce vectors at a time: here in
// vectors, in amx.h in matrices.
template <class Products>
class Multiplier {
   public:
    static constexpr int kGroupRows = 6;  // with kVectorsAtOnce fills the registers
    static constexpr int kPanelVectors = kVectorsAtOnce;  // of a packed weight
    static constexpr int kPanelColumns = kPanelVectors * kWidth;
    // What a thread takes on at once: groups of rows, by vectors of a panel.
    static int64_t unit_groups(int64_t) { return 1; }
    static int unit_vectors(int64_t num_groups) { return num_groups == 1 ? 1 : kPanelVectors; }
    // Words that have to be the same distance apart, and columns that they have: what a panel is cut into.
    static constexpr int kMatrixWords = 1;
    static constexpr int kMatrixColumns = kPanelColumns;
    static int matrix_words(int64_t) { return kMatrixWords; }

    template <class Columns>
    void operator()(int num_rows, int num_vectors, const uint32_t* a, int64_t a_stride, const Columns& columns,
                    float* c, int64_t c_stride, int64_t depth) const {
        pick_multiply<Products, Columns>(
            num_rows, num_vectors, std::make_integer_sequence<int, kGroupRows * kVectorsAtOnce>{})(
            a, a_stride, columns, c, c_stride, depth);
    }
};

}  // namespace headrace
