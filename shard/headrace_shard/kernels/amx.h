// Products of bfloat16 in matrix registers (Intel AMX, TDPBF16PS): sixteen rows of A by sixteen columns of B.
//
// A matrix register holds up to sixteen rows of 64 bytes: rows of A, of at most sixteen words each, or words of
// B, for sixteen columns each, or sixteen sums of C each. The words of B have to be the same distance apart, as
// they are in packed weights and within a block of the cache. A row of C depends on its row of A alone, and on
// how the depth is cut into matrices: that is settled by the depth, never by the rows.
#pragma once

#include "products.h"

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
    defined(__linux__)
#define HEADRACE_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace headrace {

// Whether this process may use matrix registers. The kernel wants to be asked, since they make what it keeps of
// a thread 8 KB larger; a sandbox may refuse.
inline bool has_matrix_registers() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_permitted;
}

struct MatrixProducts : PairProducts {};

// The compiler knows nothing of what is in these registers, and its own intrinsics do not say that they read
// and write memory.
template <int number>
inline void load_matrix(const void* source, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(source), "r"(row_bytes), "i"(number) : "memory");
}

template <int number>
inline void store_matrix(void* target, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(target), "r"(row_bytes), "i"(number) : "memory");
}

template <int number>
inline void clear_matrix() {
    asm volatile("tilezero %%tmm%c0" : : "i"(number));
}

template <int c, int a, int b>
inline void add_matrix_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

template <>
class Multiplier<MatrixProducts> {
    static constexpr int kRows = 16;

   public:
    static constexpr int kGroupRows = 2 * kRows;
    static constexpr int kPanelVectors = 2;
    static constexpr int kPanelColumns = kPanelVectors * kWidth;
    // So fast that what counts is where the numbers come from: all rows that stay in the second-level cache
    // while panel after panel is read.
    static int64_t unit_groups(int64_t depth) {
        constexpr int64_t kUnitBytes = 512 * 1024;
        return std::max<int64_t>(1, kUnitBytes / (kGroupRows * depth * 4));
    }
    static int unit_vectors(int64_t) { return kPanelVectors; }
    static constexpr int kMatrixWords = kRows;
    static constexpr int kMatrixColumns = kWidth;

    // As many as fit that divide the depth.
    static int matrix_words(int64_t depth) {
        int num_words = kMatrixWords;
        while (depth % num_words) --num_words;
        return num_words;
    }

    Multiplier() = default;
    Multiplier(const Multiplier&) = delete;
    ~Multiplier() {
        if (num_rows_ > 0) asm volatile("tilerelease");
    }

    template <class Columns>
    void operator()(int num_rows, int num_vectors, const uint32_t* a, int64_t a_stride, const Columns& columns,
                    float* c, int64_t c_stride, int64_t depth) {
        int num_words = matrix_words(depth);
        if (num_rows != num_rows_ || num_words != num_words_) configure(num_rows, num_words);
        a_stride *= 4;
        c_stride *= 4;
        int vector = 0;
        if (num_rows > kRows) {
            for (; vector + 1 < num_vectors; vector += 2)
                two_by<2>(a, a_stride, columns, vector, c, c_stride, depth);
            if (vector < num_vectors) two_by<1>(a, a_stride, columns, vector, c, c_stride, depth);
        } else {
            for (; vector + 3 < num_vectors; vector += 4)
                one_by<4>(a, a_stride, columns, vector, c, c_stride, depth);
            for (; vector + 1 < num_vectors; vector += 2)
                one_by<2>(a, a_stride, columns, vector, c, c_stride, depth);
            if (vector < num_vectors) one_by<1>(a, a_stride, columns, vector, c, c_stride, depth);
        }
    }

   private:
    // Registers 0 to 3 are of C; 4 and 5 of A, unless a second one is not needed; the others of B.
    void configure(int num_rows, int num_words) {
        num_rows_ = num_rows;
        num_words_ = num_words;
        struct alignas(64) {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t num_rows[16] = {};
        } settings;
        auto set = [&](int number, int rows, int row_bytes) {
            settings.num_rows[number] = rows;
            settings.row_bytes[number] = row_bytes;
        };
        bool is_double = num_rows > kRows;
        int first = is_double ? kRows : num_rows;
        for (int number = 0; number < 4; ++number)
            set(number, number < 2 || !is_double ? first : num_rows - kRows, kWidth * 4);
        set(4, first, num_words_ * 4);
        if (is_double)
            set(5, num_rows - kRows, num_words_ * 4);
        else
            set(5, num_words_, kWidth * 4);
        set(6, num_words_, kWidth * 4);
        set(7, num_words_, kWidth * 4);
        asm volatile("ldtilecfg %0" : : "m"(settings));
    }

    template <int num_vectors, class Columns>
    void two_by(const uint32_t* a, int64_t a_stride, const Columns& columns, int vector, float* c,
                int64_t c_stride, int64_t depth) const {
        const char* first = (const char*)a;
        const char* second = first + kRows * a_stride;
        clear_matrix<0>();
        clear_matrix<2>();
        if constexpr (num_vectors > 1) {
            clear_matrix<1>();
            clear_matrix<3>();
        }
        for (int64_t k = 0; k < depth; k += num_words_, first += num_words_ * 4, second += num_words_ * 4) {
            load_matrix<4>(first, a_stride);
            load_matrix<6>(columns.matrix(k, vector), columns.word_bytes());
            add_matrix_product<0, 4, 6>();
            load_matrix<5>(second, a_stride);
            add_matrix_product<2, 5, 6>();
            if constexpr (num_vectors > 1) {
                load_matrix<7>(columns.matrix(k, vector + 1), columns.word_bytes());
                add_matrix_product<1, 4, 7>();
                add_matrix_product<3, 5, 7>();
            }
        }
        char* target = (char*)(c + vector * kWidth);
        store_matrix<0>(target, c_stride);
        store_matrix<2>(target + kRows * c_stride, c_stride);
        if constexpr (num_vectors > 1) {
            store_matrix<1>(target + kWidth * 4, c_stride);
            store_matrix<3>(target + kWidth * 4 + kRows * c_stride, c_stride);
        }
    }

    template <int num_vectors, class Columns>
    void one_by(const uint32_t* a, int64_t a_stride, const Columns& columns, int vector, float* c,
                int64_t c_stride, int64_t depth) const {
        const char* rows = (const char*)a;
        clear_matrix<0>();
        if constexpr (num_vectors > 1) clear_matrix<1>();
        if constexpr (num_vectors > 2) clear_matrix<2>();
        if constexpr (num_vectors > 3) clear_matrix<3>();
        for (int64_t k = 0; k < depth; k += num_words_, rows += num_words_ * 4) {
            load_matrix<4>(rows, a_stride);
            add_one<0, 5>(columns, k, vector);
            if constexpr (num_vectors > 1) add_one<1, 6>(columns, k, vector);
            if constexpr (num_vectors > 2) add_one<2, 7>(columns, k, vector);
            if constexpr (num_vectors > 3) add_one<3, 5>(columns, k, vector);
        }
        char* target = (char*)(c + vector * kWidth);
        store_matrix<0>(target, c_stride);
        if constexpr (num_vectors > 1) store_matrix<1>(target + kWidth * 4, c_stride);
        if constexpr (num_vectors > 2) store_matrix<2>(target + 2 * kWidth * 4, c_stride);
        if constexpr (num_vectors > 3) store_matrix<3>(target + 3 * kWidth * 4, c_stride);
    }

    template <int c, int b, class Columns>
    static void add_one(const Columns& columns, int64_t k, int vector) {
        load_matrix<b>(columns.matrix(k, vector + c), columns.word_bytes());
        add_matrix_product<c, 4, b>();
    }

    // What the registers are set for: rows of A and words of a matrix.
    int num_rows_ = 0;
    int num_words_ = 0;
};

}  // namespace headrace

#endif
