// Tiles: the attention of a few query rows over at most kTileTokens cached tokens, and how tiles are merged.
//
// Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), arranged so that a row's result depends on
// its query and its context alone. Tiles start at multiples of kTileTokens of the sequence, each is computed
// by itself, and tiles are merged in the order of the context. So it changes nothing, not even in the last
// bit, whether a row is computed in a decode step or in a chunk of a prompt, beside which sequences, on how
// many threads, and whether one thread walks the context or several share it.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "cache.h"
#include "workspace.h"

namespace headrace {

constexpr int kTileTokens = 512;

// Where rows stand: their scores' maxima in units of log2, the sums of the weights under these maxima, and
// the weighted values, [rows, padded_dim].
struct RowStates {
    float* maxima;
    float* sums;  // 0 for a row that has seen nothing
    float* values;
    int padded_dim;

    RowStates from(int64_t row) const {
        return {maxima + row, sums + row, values + row * padded_dim, padded_dim};
    }
};

constexpr int kMaxMerged = 32;  // rows that are merged at once

// Adds to at most kMaxMerged rows what they see of one tile. Compiled once, so that all callers round alike.
__attribute__((noinline)) inline void merge(RowStates rows, RowStates tile, int num_rows) {
    constexpr int kLanes = (kMaxMerged + kWidth - 1) / kWidth * kWidth;
    float keep[kLanes], take[kLanes];
    for (int lane = 0; lane < num_rows; lane += kWidth) {
        int count = num_rows - lane < kWidth ? num_rows - lane : kWidth;
        Floats before = load_some<Float32>(rows.maxima + lane, count);
        Floats now = load_some<Float32>(tile.maxima + lane, count);
        Floats sums = load_some<Float32>(tile.sums + lane, count);
        Floats highest = sums != 0.0f ? maximum(now, before) : before;
        Floats kept = exp2(before - highest), taken = exp2(now - highest);
        store(keep + lane, kept);
        store(take + lane, taken);
        store_some<Float32>(rows.maxima + lane, highest, count);
        Floats total = load_some<Float32>(rows.sums + lane, count);
        total = sums != 0.0f ? total * kept + sums * taken : total;
        store_some<Float32>(rows.sums + lane, total, count);
    }
    for (int row = 0; row < num_rows; ++row) {
        if (tile.sums[row] == 0) continue;
        float* values = rows.values + row * rows.padded_dim;
        const float* added = tile.values + row * rows.padded_dim;
        for (int dim = 0; dim < rows.padded_dim; dim += kWidth)
            store(values + dim,
                  load<Floats>(values + dim) * keep[row] + load<Floats>(added + dim) * take[row]);
    }
}

constexpr int kAtOnce = 4;  // vectors of a row, so that none waits for the one before

// The largest of scores[0 .. num_visible - 1], NaN aside.
inline float highest(const float* scores, int num_visible) {
    int whole = num_visible / kWidth * kWidth, column = 0;
    Floats found[kAtOnce] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    for (; column + kAtOnce * kWidth <= whole; column += kAtOnce * kWidth)
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i)
            found[i] = maximum(load<Floats>(scores + column + i * kWidth), found[i]);
    for (; column < whole; column += kWidth) found[0] = maximum(load<Floats>(scores + column), found[0]);
    if (whole < num_visible) {
        Ints rest = first_lanes(num_visible - whole);
        found[1] = maximum(rest ? load<Floats>(scores + whole) : splat(-INFINITY), found[1]);
    }
    return largest(maximum(maximum(found[0], found[1]), maximum(found[2], found[3])));
}

// Softmax of one row: scores[0 .. num_visible - 1] -> weights, zeros up to num_columns (a multiple of kWidth).
// `scale` is not negative and includes log2(e), `top` is the largest score times scale. NaN scores make the sum
// NaN. Gives the sum.
template <class Products>
float weigh(const float* scores, int num_visible, int num_columns, float scale, float top,
            typename Products::Packed* weights) {
    int whole = num_visible / kWidth * kWidth, column = 0;
    Ints rest = first_lanes(num_visible - whole);
    Floats totals[kAtOnce] = {};
    auto weight_of = [&](int column) { return Products::weight(load<Floats>(scores + column) * scale - top); };
    for (; column + kAtOnce * kWidth <= whole; column += kAtOnce * kWidth) {
        Floats some[kAtOnce];
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i) totals[i] += some[i] = weight_of(column + i * kWidth);
        Products::store_packed(weights + column, some[0], some[1]);
        Products::store_packed(weights + column + 2 * kWidth, some[2], some[3]);
    }
    for (; column < num_columns; column += kWidth) {
        Floats weight = weight_of(column);
        if (column >= whole) {
            weight = rest ? weight : Floats{};
            rest = Ints{};
        }
        totals[0] += weight;
        Products::store_packed(weights + column, weight);
    }
    return sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

// A query as words: head_dim numbers, zeros up to padded_dim.
template <class Products>
void take_row(const typename Products::Element* source, int head_dim, int padded_dim,
              typename Products::Packed* target) {
    using Storage = typename Products::Stored;
    if constexpr (sizeof(typename Products::Element) == sizeof(typename Products::Packed)) {
        std::memcpy(target, source, head_dim * sizeof *target);
        std::memset(target + head_dim, 0, (padded_dim - head_dim) * sizeof *target);
    } else {
        for (int dim = 0; dim < padded_dim; dim += kWidth)
            store(target + dim, load_some<Storage>(source + dim, std::clamp(head_dim - dim, 0, kWidth)));
    }
}

// The query rows of one task and what is needed to attend with them, tile by tile.
template <class Products>
struct TileAttention {
    using Packed = typename Products::Packed;
    using Element = typename Products::Element;
    static constexpr int kGroupRows = Multiplier<Products>::kGroupRows;
    static constexpr int kTileBlocks = kTileTokens / kBlockSize;
    // Whether the values of a tile are copied, so that words all over it are the same distance apart.
    static constexpr bool kGathers = Multiplier<Products>::kMatrixWords > 1;
    // Of the values that are multiplied the blocks are whole matrices: how many there are depends on the group,
    // and the cut of the depth, and with it the bits, must not.
    static constexpr int kMatrixBlocks =
        std::max(1, Multiplier<Products>::kMatrixWords * Products::kPerWord / kBlockSize);
    // From one row of scores or weights to the next: not a power of two, or the rows would all want the same few
    // lines of the processor's cache.
    static constexpr int kRowTokens = kTileTokens + 32;
    static constexpr int kBlocksAtOnce = std::max(1, kColumnsAtOnce / kBlockSize);

    int head_dim;
    int padded_dim;
    float scale;      // times log2(e)
    Packed* queries;  // [rows, padded_dim]
    Element* copied;  // values: of a block of which not all tokens count, or of all blocks
    float* scores;    // [kGroupRows, kRowTokens]
    Packed* weights;  // [kGroupRows, kRowTokens]
    RowStates rows;
    RowStates tile;  // of one group
    const Element* keys[kTileBlocks + kBlocksAtOnce];  // the tile's own, and behind them what is read next
    const Element* values[kTileBlocks];
    // Of the next tile.
    const Element* keys_ahead[kTileBlocks];
    const Element* values_ahead[kTileBlocks];

    TileAttention(Workspace& workspace, int num_rows, int head_dim_, float scale_)
        : head_dim(head_dim_), padded_dim(padded(head_dim_)), scale(scale_ * 1.44269504f), num_rows_(num_rows) {
        int64_t dim = padded_dim;
        int64_t packed = sizeof(Packed), num_copied = kGathers ? kTileBlocks : 1;
        workspace.divide(std::pair<Packed*&, int64_t>(queries, num_rows * dim * packed),
                         std::pair<Element*&, int64_t>(copied, num_copied * kBlockSize * dim * sizeof(Element)),
                         std::pair<float*&, int64_t>(scores, kGroupRows * kRowTokens * 4),
                         std::pair<Packed*&, int64_t>(weights, kGroupRows * kRowTokens * packed),
                         std::pair<float*&, int64_t>(rows.maxima, num_rows * 4),
                         std::pair<float*&, int64_t>(rows.sums, num_rows * 4),
                         std::pair<float*&, int64_t>(rows.values, num_rows * dim * 4),
                         std::pair<float*&, int64_t>(tile.maxima, kGroupRows * 4),
                         std::pair<float*&, int64_t>(tile.sums, kGroupRows * 4),
                         std::pair<float*&, int64_t>(tile.values, kGroupRows * dim * 4));
        rows.padded_dim = tile.padded_dim = padded_dim;
    }

    void take_query(int row, const Element* query) {
        take_row<Products>(query, head_dim, padded_dim, queries + (int64_t)row * padded_dim);
    }

    // blocks: the tile's entries of the block table; num_tokens: how many of the tile's tokens count.
    // block_stride: elements from one block of this head to the next.
    void open(const Element* key_cache, const Element* value_cache, const int32_t* blocks,
              int64_t block_stride, int num_tokens) {
        int num_whole = num_tokens / kBlockSize, rest = num_tokens % kBlockSize;
        num_blocks_ = num_whole + (rest > 0);
        for (int i = 0; i < num_blocks_; ++i) {
            keys[i] = key_cache + blocks[i] * block_stride;
            values[i] = value_cache + blocks[i] * block_stride;
        }
        if constexpr (kGathers) return gather(num_whole, rest);
        if (rest) {
            copy_values(values[num_whole], rest, Products::kPerWord, head_dim, copied);
            values[num_whole] = copied;
        }
    }

    // After the tile, these blocks will be read.
    void expect(const Element* key_cache, const Element* value_cache, const int32_t* blocks,
                int64_t block_stride, int num_blocks) {
        for (int i = 0; i < kTileBlocks; ++i) {
            bool is_there = i >= num_blocks;  // nothing more to expect: what is in the cache anyway
            keys_ahead[i] = is_there ? keys[num_blocks_ - 1] : key_cache + blocks[i] * block_stride;
            values_ahead[i] = is_there ? keys[num_blocks_ - 1] : value_cache + blocks[i] * block_stride;
        }
        for (int i = 0; i < kBlocksAtOnce; ++i) keys[num_blocks_ + i] = keys_ahead[i];
    }

    // Attends with one group, rows first .. first + num_rows - 1, over the open tile. Row i of the group sees
    // the tile's first seen[i] tokens, growing with the row; where it sees none its result has the sum 0.
    void attend_group(int first, int num_rows, const int* seen, RowStates result) {
        int num_blocks = (std::max(seen[num_rows - 1], 0) + kBlockSize - 1) / kBlockSize;
        int num_mixed = whole_matrices(num_blocks);
        if (kGathers || first == 0)
            score<2>(first, num_rows, num_blocks);
        else
            score<0>(first, num_rows, num_blocks);
        // First all maxima: while one row waits for its own, the next is looked through.
        for (int i = 0; i < num_rows; ++i)
            result.maxima[i] = highest(scores + i * kRowTokens, std::max(seen[i], 0)) * scale;
        for (int i = 0; i < num_rows; ++i)
            result.sums[i] = weigh<Products>(scores + i * kRowTokens, std::max(seen[i], 0),
                                             num_mixed * kBlockSize, scale, result.maxima[i],
                                             weights + i * kRowTokens);
        if (first == 0 && !kGathers)
            mix<true>(num_rows, num_mixed, result);
        else
            mix<false>(num_rows, num_mixed, result);
    }

   private:
    static int whole_matrices(int num_blocks) {
        return (num_blocks + kMatrixBlocks - 1) / kMatrixBlocks * kMatrixBlocks;
    }

    // The tile's values, with zeros behind them up to whole matrices.
    void gather(int num_whole, int rest) {
        int64_t elements = block_elements(head_dim);
        for (int i = 0; i < num_whole; ++i) {
            for (int64_t line = 0; line < elements; line += kLineBytes / (int64_t)sizeof(Element))
                __builtin_prefetch(keys[i] + line, 0, 2);
            std::memcpy(copied + i * elements, values[i], elements * sizeof(Element));
        }
        if (rest)
            copy_values(values[num_whole], rest, Products::kPerWord, head_dim, copied + num_whole * elements);
        int num_missing = whole_matrices(num_blocks_) - num_blocks_;
        std::memset(copied + num_blocks_ * elements, 0, num_missing * elements * sizeof(Element));
        values[0] = copied;
    }

    // scores[row][token] of the group over the tile's first num_blocks blocks. What is read later comes in beside
    // the products: for vectors the next panel's keys and this one's values, and the tile's first group alone finds
    // them in memory; for matrices the next tile's keys and values, every group a part.
    template <int num_ahead>
    void score(int first, int num_rows, int num_blocks) {
        constexpr int kBlockVectors = kBlockSize / kWidth;
        const uint32_t* words = (const uint32_t*)(queries + (int64_t)first * padded_dim);
        int64_t depth = (head_dim + Products::kPerWord - 1) / Products::kPerWord;
        int64_t num_groups = (num_rows_ + kGroupRows - 1) / kGroupRows;
        int64_t ahead_word_bytes =
            (block_elements(head_dim) * sizeof(Element) + depth * num_groups - 1) / (depth * num_groups);
        int64_t called_in = first / kGroupRows * depth * ahead_word_bytes / sizeof(Element);
        int num_all = num_blocks * kBlockVectors;
        for (int vector = 0; vector < num_all; vector += kVectorsAtOnce) {
            int num_vectors = std::min(num_all - vector, kVectorsAtOnce);
            KeyColumns<Products, num_ahead> columns;
            for (int j = 0; j < num_vectors; ++j) {
                int token = (vector + j) * kWidth;
                int block = token / kBlockSize, offset = token % kBlockSize * Products::kPerWord;
                columns.vectors[j] = keys[block] + offset;
                if constexpr (kGathers) {
                    columns.ahead[2 * j] = keys_ahead[block] + called_in;
                    columns.ahead[2 * j + 1] = values_ahead[block] + called_in;
                } else if constexpr (num_ahead > 0) {
                    columns.ahead[2 * j] = keys[block + kBlocksAtOnce] + offset;
                    columns.ahead[2 * j + 1] = values[block] + offset;
                }
            }
            columns.ahead_word_bytes = ahead_word_bytes;
            multiply_(num_rows, num_vectors, words, padded_dim / Products::kPerWord, columns,
                      scores + vector * kWidth, kRowTokens, depth);
        }
    }

    // result.values: the values of the tile's first num_blocks blocks, by the weights. The first group calls in
    // the keys that are read after the tile, unless that was done when the values were copied.
    template <bool is_first>
    void mix(int num_rows, int num_blocks, RowStates result) {
        using Columns = ValueColumns<Products, is_first>;
        for (int dim = 0; dim < padded_dim; dim += kColumnsAtOnce) {
            int num_vectors = std::min(padded_dim - dim, kColumnsAtOnce) / kWidth;
            Columns columns(values, keys_ahead, padded_dim, dim);
            multiply_(num_rows, num_vectors, (const uint32_t*)weights, kRowTokens / Products::kPerWord, columns,
                      result.values + dim, padded_dim, num_blocks * Columns::kBlockWords);
        }
    }

    const int num_rows_;
    int num_blocks_ = 0;
    Multiplier<Products> multiply_;
};

// Divides by the sum of the weights and stores head_dim numbers in the model's format.
template <class Storage>
void finish_row(float sum, const float* values, int head_dim, typename Storage::Element* output) {
    float factor = 1.0f / sum;
    for (int dim = 0; dim < head_dim; dim += kWidth)
        store_some<Storage>(output + dim, load<Floats>(values + dim) * factor,
                            std::min(kWidth, head_dim - dim));
}

}  // namespace headrace
