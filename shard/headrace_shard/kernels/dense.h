// Products with weights: Y[rows, columns] = X[rows, depth] x W^T, and what follows a product at once.
//
// Knows packed weights and number formats; knows nothing of layers. W lies packed as panels of kPanelColumns
// columns of Y, [panel][depth in words][kPanelColumns][numbers in a word], in the model's own format: one
// pass over W in the order of memory. Every number of Y is summed along the depth in one order, whatever rows
// stand beside it and on how many threads: a row's result never depends on its neighbours.
#pragma once

#include <algorithm>
#include <vector>

#include "products.h"

namespace headrace {

// Numbers are widened to floats when they are read.
template <class Storage>
struct WideOperands : FloatProducts<Storage> {
    using Element = typename Storage::Element;
    static constexpr bool kIsWidened = sizeof(Element) != sizeof(float);
    static Words load_columns(const Element* source) { return (Words)Storage::load(source); }
};

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
struct PairOperands : PairProducts {
    using Element = uint16_t;
    static constexpr bool kIsWidened = false;
    static Words load_columns(const Element* source) { return load<Words>(source); }
};
using BFloat16Operands = PairOperands;
#else
using BFloat16Operands = WideOperands<BFloat16>;
#endif

constexpr int kAhead = 8192;  // bytes of a panel that are on their way to the second-level cache

struct Product {
    const void* x;     // [num_rows, depth], rows x_stride elements apart: whole words, see kPerWord
    int64_t x_stride;
    const void* weight;  // packed
    const void* bias;    // [num_results], or null
    const void* addend;  // [num_rows, num_results], contiguous, or null: added before rounding
    void* y;             // [num_rows, num_results], contiguous
    int64_t num_rows;
    int64_t depth;
    int64_t num_results;
    bool is_gated;  // each panel holds gates, then as many values; a result is silu(gate) * value
    int num_threads;
};

// x / (1 + e^-x)
inline Floats silu(Floats x) {
    Floats power = x * -1.44269504f;
    return x / (exp2(power < 126.0f ? power : splat(126.0f)) + 1.0f);
}

template <class Operands>
class WeightProduct {
    using Storage = typename Operands::Stored;
    using Element = typename Operands::Element;
    static constexpr int kPerWord = Operands::kPerWord;
    using Multiply = void (*)(const uint32_t* x, int64_t x_stride, const Element* panel, float* totals,
                              int64_t depth);

   public:
    explicit WeightProduct(const Product& call)
        : call_(call),
          depth_(call.depth / kPerWord),
          num_panels_((call.num_results * (call.is_gated ? 2 : 1) + kPanelColumns - 1) / kPanelColumns),
          num_groups_((call.num_rows + kGroupRows - 1) / kGroupRows) {}

    void run() {
        // A unit is a group of rows and a panel, or one vector of a panel where one group is all there is.
        bool is_by_vector = num_groups_ == 1 && !call_.is_gated;
        int64_t per_panel = is_by_vector ? kPanelVectors : num_groups_;
        int64_t num_units = num_panels_ * per_panel;
        int64_t num_chunks = std::min<int64_t>(call_.num_threads, num_units);
#pragma omp parallel for num_threads(call_.num_threads) schedule(static, 1) if (num_chunks > 1)
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            int64_t unit = num_units * chunk / num_chunks, last = num_units * (chunk + 1) / num_chunks;
            while (unit < last) {
                int64_t panel = unit / per_panel, begin = unit % per_panel;
                int64_t end = std::min(per_panel, begin + last - unit);
                if (is_by_vector)
                    multiply_group(panel, 0, (int)begin, (int)end);
                else
                    for (int64_t group = begin; group < end; ++group)
                        multiply_group(panel, group, 0, kPanelVectors);
                unit += end - begin;
            }
        }
    }

   private:
    template <int num_rows, int num_vectors>
    static void multiply(const uint32_t* x, int64_t x_stride, const Element* panel, float* totals,
                         int64_t depth) {
        Floats sums[num_rows][num_vectors] = {};
        for (int64_t k = 0; k < depth; ++k) {
            Words columns[num_vectors];
#pragma GCC unroll 8
            for (int j = 0; j < num_vectors; ++j) {
                columns[j] = Operands::load_columns(panel + j * kWidth * kPerWord);
                __builtin_prefetch((const char*)(panel + j * kWidth * kPerWord) + kAhead, 0, 2);
            }
#pragma GCC unroll 8
            for (int i = 0; i < num_rows; ++i) {
                Words row = Words{} + x[i * x_stride + k];
#pragma GCC unroll 8
                for (int j = 0; j < num_vectors; ++j)
                    sums[i][j] = Operands::add_product(sums[i][j], row, columns[j]);
            }
            panel += kPanelColumns * kPerWord;
        }
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < num_vectors; ++j)
                store(totals + i * kPanelColumns + j * kWidth, sums[i][j]);
    }

    template <int... index>
    static Multiply pick(int num_rows, int num_vectors, std::integer_sequence<int, index...>) {
        static constexpr Multiply table[] = {
            &multiply<index / kPanelVectors + 1, index % kPanelVectors + 1>...};
        return table[(num_rows - 1) * kPanelVectors + num_vectors - 1];
    }

    void multiply_group(int64_t panel, int64_t group, int first_vector, int last_vector) {
        int64_t first_row = group * kGroupRows;
        int num_rows = (int)std::min<int64_t>(kGroupRows, call_.num_rows - first_row);
        const Element* x = (const Element*)call_.x + first_row * call_.x_stride;
        const uint32_t* words = (const uint32_t*)x;
        int64_t stride = call_.x_stride / kPerWord;
        if constexpr (Operands::kIsWidened) {
            words = widen(x, call_.x_stride, num_rows, depth_);
            stride = (depth_ + kWidth - 1) / kWidth * kWidth;
        }
        const Element* weight = (const Element*)call_.weight + panel * depth_ * kPanelColumns * kPerWord;
        alignas(64) float totals[kGroupRows * kPanelColumns];
        constexpr auto shapes = std::make_integer_sequence<int, kGroupRows * kPanelVectors>{};
        pick(num_rows, last_vector - first_vector, shapes)(
            words, stride, weight + first_vector * kWidth * kPerWord, totals + first_vector * kWidth, depth_);
        finish_rows(first_row, num_rows, panel, first_vector, last_vector, totals);
    }

    void finish_rows(int64_t first_row, int num_rows, int64_t panel, int first_vector, int last_vector,
                     const float* totals) {
        if (call_.is_gated) {
            // The first half of a panel's vectors are gates of the values in the second half.
            constexpr int half = kPanelVectors / 2;
            for (int row = 0; row < num_rows; ++row)
                for (int vector = 0; vector < half; ++vector) {
                    const float* gates = totals + row * kPanelColumns + vector * kWidth;
                    finish(first_row + row, (panel * half + vector) * kWidth,
                           silu(load<Floats>(gates)) * load<Floats>(gates + half * kWidth));
                }
            return;
        }
        for (int row = 0; row < num_rows; ++row)
            for (int vector = first_vector; vector < last_vector; ++vector)
                finish(first_row + row, (panel * kPanelVectors + vector) * kWidth,
                       load<Floats>(totals + row * kPanelColumns + vector * kWidth));
    }

    // Adds bias and addend, rounds once and stores those of kWidth results that are within the row.
    void finish(int64_t row, int64_t column, Floats total) {
        int64_t num_left = call_.num_results - column;
        if (num_left <= 0) return;
        int count = (int)std::min<int64_t>(num_left, kWidth);
        int64_t place = row * call_.num_results + column;
        if (call_.bias) total += load_some<Storage>((const Element*)call_.bias + column, count);
        if (call_.addend) total += load_some<Storage>((const Element*)call_.addend + place, count);
        store_some<Storage>((Element*)call_.y + place, total, count);
    }

    // The group's rows as floats, in this thread's memory.
    static const uint32_t* widen(const Element* x, int64_t x_stride, int num_rows, int64_t depth) {
        static thread_local std::vector<float> floats;
        int64_t padded = (depth + kWidth - 1) / kWidth * kWidth;
        if ((int64_t)floats.size() < kGroupRows * padded) floats.resize(kGroupRows * padded);
        for (int row = 0; row < num_rows; ++row)
            for (int64_t k = 0; k < depth; k += kWidth)
                store(floats.data() + row * padded + k,
                      load_some<Storage>(x + row * x_stride + k, (int)std::min<int64_t>(kWidth, depth - k)));
        return (const uint32_t*)floats.data();
    }

    const Product& call_;
    const int64_t depth_;  // in words
    const int64_t num_panels_;
    const int64_t num_groups_;
};

}  // namespace headrace
