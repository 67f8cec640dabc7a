// Products with weights: Y[rows, columns] = X[rows, depth] x W^T, and what follows a product at once.
//
// Knows packed weights and number formats; knows nothing of layers. W lies packed as panels of some columns of Y,
// [panel][depth in words][columns][numbers in a word], in the model's own format: one pass over W in the order of
// memory. Where matrices are multiplied a panel is cut into them: [panel][depth in matrices][matrices side by side]
// [words of a matrix][its columns][numbers in a word]. Every number of Y is summed along the depth in one order,
// whatever rows stand beside it and on how many threads: a row's result never depends on its neighbours.
#pragma once

#include <algorithm>
#include <vector>

#include "computations.h"
#include "products.h"

namespace headrace {

constexpr int kAhead = 8192;  // bytes of a panel that are on their way to the second-level cache

// x / (1 + e^-x)
inline Floats silu(Floats x) {
    Floats power = x * -1.44269504f;
    return x / (exp2(power < 126.0f ? power : splat(126.0f)) + 1.0f);
}

// Columns of a packed weight, from `panel` on.
template <class Products>
struct PanelColumns {
    static constexpr int kPanelColumns = Multiplier<Products>::kPanelColumns;
    using Element = typename Products::Element;
    const Element* panel;
    int num_words;                // of a matrix
    const char* ahead = nullptr;  // what the thread will read next: matrices call in some of it with every word
    int64_t ahead_word_bytes = 0;

    Words operator()(int64_t k, int j) const {
        const Element* words = panel + (k * kPanelColumns + j * kWidth) * Products::kPerWord;
        __builtin_prefetch((const char*)words + kAhead, 0, 2);
        return Products::load_columns(words);
    }

    static constexpr int64_t word_bytes() { return kWidth * 4; }
    const Element* matrix(int64_t k, int j) const {
        if (j == 0) {
            int64_t end = (k + num_words) * ahead_word_bytes;
            for (int64_t byte = k * ahead_word_bytes; byte < end; byte += kLineBytes)
                __builtin_prefetch(ahead + byte, 0, 2);
        }
        return panel + (k * kPanelColumns + j * num_words * kWidth) * Products::kPerWord;
    }
};

template <class Products>
class WeightProduct {
    using Storage = typename Products::Stored;
    using Element = typename Products::Element;
    static constexpr int kPerWord = Products::kPerWord;
    static constexpr int kGroupRows = Multiplier<Products>::kGroupRows;
    static constexpr int kPanelVectors = Multiplier<Products>::kPanelVectors;
    static constexpr int kPanelColumns = Multiplier<Products>::kPanelColumns;
    // Whether rows of x are widened to floats before they are multiplied.
    static constexpr bool kIsWidened = sizeof(Element) != sizeof(typename Products::Packed);

   public:
    explicit WeightProduct(const Product& call)
        : call_(call),
          depth_(call.depth / kPerWord),
          num_panels_((call.num_results * (call.is_gated ? 2 : 1) + kPanelColumns - 1) / kPanelColumns),
          num_groups_((call.num_rows + kGroupRows - 1) / kGroupRows) {}

    // A unit is a piece of the rows by a panel or a part of one.
    void run(Team::Member& member) {
        if constexpr (Multiplier<Products>::kMatrixWords > 1)
            multiply_matrices(member);
        else
            multiply_vectors(member);
    }

   private:
    void multiply_vectors(Team::Member& member) {
        int num_vectors = call_.is_gated ? kPanelVectors : Multiplier<Products>::unit_vectors(num_groups_);
        int64_t per_panel = kPanelVectors / num_vectors * num_groups_;
        member.share(num_panels_ * per_panel, [&](int64_t first, int64_t last) {
            Multiplier<Products> multiply;
            for (int64_t unit = first; unit < last; ++unit) {
                int64_t vector =
                    unit / per_panel * kPanelVectors + unit % per_panel / num_groups_ * num_vectors;
                int64_t place = vector % kPanelVectors * kWidth * kPerWord;
                PanelColumns<Products> columns{panel(vector / kPanelVectors) + place, 1};
                multiply_group(multiply, columns, unit % num_groups_, vector, num_vectors);
            }
        });
    }

    // Panel after panel for the same rows, so long as there is enough for everybody. Beside the products the
    // next panel comes in from memory.
    void multiply_matrices(Team::Member& member) {
        constexpr int64_t kUnitsEach = 4;
        int64_t fair = num_panels_ * num_groups_ / (kUnitsEach * member.size());
        int64_t most = std::clamp<int64_t>(fair, 1, Multiplier<Products>::unit_groups(depth_));
        int64_t num_pieces = (num_groups_ + most - 1) / most;
        Multiplier<Products> multiply;
        member.share_stretches(num_pieces * num_panels_, [&](int64_t unit, int64_t next) {
            int64_t piece = unit / num_panels_, first = num_groups_ * piece / num_pieces;
            multiply_unit(multiply, unit % num_panels_, first, num_groups_ * (piece + 1) / num_pieces,
                          next % num_panels_);
        });
    }

    // Groups of rows by one panel, before the thread goes to panel `next`.
    void multiply_unit(Multiplier<Products>& multiply, int64_t number, int64_t first_group, int64_t last_group,
                       int64_t next) {
        int64_t num_words = depth_ * (last_group - first_group);
        PanelColumns<Products> columns{panel(number), Multiplier<Products>::matrix_words(depth_)};
        columns.ahead = (const char*)panel(next);
        if (next != number) columns.ahead_word_bytes = (depth_ * kPanelColumns * 4 + num_words - 1) / num_words;
        for (int64_t group = first_group; group < last_group; ++group) {
            multiply_group(multiply, columns, group, number * kPanelVectors, kPanelVectors);
            columns.ahead += depth_ * columns.ahead_word_bytes;
        }
    }

    const Element* panel(int64_t number) const {
        return (const Element*)call_.weight + number * depth_ * kPanelColumns * kPerWord;
    }

    void multiply_group(Multiplier<Products>& multiply, const PanelColumns<Products>& columns, int64_t group,
                        int64_t vector, int num_vectors) {
        int64_t first_row = group * kGroupRows;
        int num_rows = (int)std::min<int64_t>(kGroupRows, call_.num_rows - first_row);
        const Element* x = (const Element*)call_.x + first_row * call_.x_stride;
        const uint32_t* words = (const uint32_t*)x;
        int64_t stride = call_.x_stride / kPerWord;
        if constexpr (kIsWidened) {
            words = widen(x, call_.x_stride, num_rows, depth_);
            stride = (depth_ + kWidth - 1) / kWidth * kWidth;
        }
        alignas(64) float totals[kGroupRows * kPanelColumns];
        multiply(num_rows, num_vectors, words, stride, columns, totals, kPanelColumns, depth_);
        for (int row = 0; row < num_rows; ++row)
            finish_row(first_row + row, vector, num_vectors, totals + row * kPanelColumns);
    }

    void finish_row(int64_t row, int64_t vector, int num_vectors, const float* totals) {
        if (call_.is_gated) {
            // The first half of a panel's vectors are gates of the values in the second half.
            constexpr int half = kPanelVectors / 2;
            for (int i = 0; i < half; ++i)
                finish(row, (vector / 2 + i) * kWidth,
                       silu(load<Floats>(totals + i * kWidth)) * load<Floats>(totals + (half + i) * kWidth));
            return;
        }
        for (int i = 0; i < num_vectors; ++i)
            finish(row, (vector + i) * kWidth, load<Floats>(totals + i * kWidth));
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
