// Tiles: the attention of a few query rows over at most kTileTokens cached tokens, and how tiles are merged.
//
// Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), arranged so that a row's result depends on
// its query and its context alone. Tiles start at multiples of kTileTokens of the sequence, each is computed
// by itself, and tiles are merged in the order of the context. So it changes nothing, not even in the last
// bit, whether a row is computed in a decode step or in a chunk of a prompt, beside which sequences, on how
// many threads, and whether one thread walks the context or several share it.
#pragma once

#include <cmath>
#include <new>

#include "packing.h"

namespace headrace {

constexpr int kTileTokens = 256;

// Where one row stands: the scores' maximum in units of log2, the sum of the weights under that maximum.
// A row that has seen nothing has sum 0. The weighted values [padded_dim] lie beside it.
struct RowState {
    float maximum;
    float sum;
};

// Adds a tile to what the row has seen before it.
inline void merge(RowState& row, float* values, RowState tile, const float* tile_values, int padded_dim) {
    if (row.sum == 0) {
        row = tile;
        std::memcpy(values, tile_values, padded_dim * sizeof *values);
        return;
    }
    float maximum = row.maximum > tile.maximum ? row.maximum : tile.maximum;
    float keep = exp2(row.maximum - maximum);
    float take = exp2(tile.maximum - maximum);
    row = {maximum, row.sum * keep + tile.sum * take};
    for (int dim = 0; dim < padded_dim; dim += kWidth)
        store(values + dim, load<Floats>(values + dim) * keep + load<Floats>(tile_values + dim) * take);
}

// Softmax of one row: scores[0 .. num_visible - 1] -> weights under their own maximum, zeros up to
// num_columns (a multiple of kWidth). `scale` includes log2(e). NaN scores make the sum NaN.
template <class Products>
RowState weigh(const float* scores, int num_visible, int num_columns, float scale,
               typename Products::Packed* weights) {
    int whole = num_visible / kWidth * kWidth;
    Ints rest = first_lanes(num_visible - whole);
    Floats highest = splat(-INFINITY);
    for (int column = 0; column < whole; column += kWidth)
        highest = maximum(load<Floats>(scores + column) * scale, highest);
    if (whole < num_visible) {
        Floats last = load<Floats>(scores + whole) * scale;
        highest = maximum(rest ? last : splat(-INFINITY), highest);
    }
    float top = largest(highest);
    Floats total = {};
    for (int column = 0; column < whole; column += kWidth) {
        Floats weight = exp2(load<Floats>(scores + column) * scale - top);
        total += weight;
        Products::store_packed(weights + column, weight);
    }
    for (int column = whole; column < num_columns; column += kWidth) {
        Floats weight = exp2(load<Floats>(scores + column) * scale - top);
        weight = rest ? weight : Floats{};
        rest = Ints{};
        total += weight;
        Products::store_packed(weights + column, weight);
    }
    return {top, sum(total)};
}

// One thread's memory, grown to the largest head and number of rows seen.
class Workspace {
   public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    ~Workspace() { release(); }

    // Sizes in bytes of every part; each part starts on a cache line.
    template <class... Part>
    void divide(std::pair<Part*&, int64_t>... parts) {
        int64_t total = (aligned(parts.second) + ...);
        if (total > num_bytes_) {
            release();
            memory_ = static_cast<char*>(::operator new(total, std::align_val_t{64}));
            num_bytes_ = total;
        }
        char* next = memory_;
        ((parts.first = reinterpret_cast<Part*>(next), next += aligned(parts.second)), ...);
    }

   private:
    static int64_t aligned(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }
    void release() {
        if (memory_) ::operator delete(memory_, std::align_val_t{64});
        memory_ = nullptr;
        num_bytes_ = 0;
    }

    char* memory_ = nullptr;
    int64_t num_bytes_ = 0;
};

// The query rows of one task and what is needed to attend with them, tile by tile.
template <class Products>
struct TileAttention {
    using Packed = typename Products::Packed;
    using Element = typename Products::Stored::Element;

    int head_dim;
    int padded_dim;      // head_dim rounded up to whole vectors of words
    float scale;         // times log2(e)
    Packed* queries;     // [rows, padded_dim]
    uint32_t* keys;      // panels over tokens, depth padded_dim
    uint32_t* values;    // panels over dimensions, depth kTileTokens
    Packed* spare;       // [kBlockSize, padded_dim]
    float* scores;       // [kGroupRows, kTileTokens]
    Packed* weights;     // [kGroupRows, kTileTokens]
    float* tile_values;  // [kGroupRows, padded_dim]
    float* row_values;   // [rows, padded_dim]
    RowState* row_states;  // [rows]

    static int pad(int head_dim) {
        constexpr int multiple = Products::kPerWord * kWidth;
        return (head_dim + multiple - 1) / multiple * multiple;
    }

    TileAttention(Workspace& workspace, int num_rows, int head_dim_, float scale_)
        : head_dim(head_dim_), padded_dim(pad(head_dim_)), scale(scale_ * 1.44269504f) {
        int64_t dim = padded_dim;
        int64_t panelled_dim = (dim + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
        int64_t packed = sizeof(Packed);
        workspace.divide(std::pair<Packed*&, int64_t>(queries, num_rows * dim * packed),
                         std::pair<uint32_t*&, int64_t>(keys, kTileTokens * dim * packed),
                         std::pair<uint32_t*&, int64_t>(values, kTileTokens * panelled_dim * packed),
                         std::pair<Packed*&, int64_t>(spare, kBlockSize * dim * packed),
                         std::pair<float*&, int64_t>(scores, kGroupRows * kTileTokens * 4),
                         std::pair<Packed*&, int64_t>(weights, kGroupRows * kTileTokens * packed),
                         std::pair<float*&, int64_t>(tile_values, kGroupRows * dim * 4),
                         std::pair<float*&, int64_t>(row_values, num_rows * dim * 4),
                         std::pair<RowState*&, int64_t>(row_states, num_rows * (int64_t)sizeof(RowState)));
    }

    int64_t key_panel_words() const { return padded_dim / Products::kPerWord * kPanelColumns; }
    static int64_t value_panel_words() { return kTileTokens / Products::kPerWord * kPanelColumns; }

    void take_query(int row, const Element* query) {
        Packed* target = queries + (int64_t)row * padded_dim;
        widen_row<Products>(query, head_dim, padded_dim, target);
        row_states[row] = {-INFINITY, 0};
    }

    // blocks: the tile's entries of the block table; num_tokens: how many of the tile's tokens count.
    // block_stride: elements from one block of this head to the next. `lookahead()` runs before each block.
    template <class Lookahead>
    void pack(const Element* key_cache, const Element* value_cache, const int32_t* blocks,
              int64_t block_stride, int num_tokens, Lookahead lookahead) {
        for (int token = 0; token < num_tokens; token += kBlockSize) {
            int64_t block = blocks[token / kBlockSize] * block_stride;
            lookahead();
            int count = num_tokens - token < kBlockSize ? num_tokens - token : kBlockSize;
            pack_keys<Products>(key_cache + block, count, head_dim, padded_dim, spare, keys, token);
            pack_values<Products>(value_cache + block, count, head_dim, padded_dim, spare, values,
                                  value_panel_words(), token);
        }
    }

    // Attends with rows first .. first + num_rows - 1 (one group) over the packed tile. `visible(row)` tells
    // how many of the tile's tokens a row sees, growing with the row; `take(row, state, values)` receives
    // the result of each row that sees any.
    template <class Visible, class Take>
    void attend_group(int first, int num_rows, Visible visible, Take take) {
        int most = visible(first + num_rows - 1);
        if (most <= 0) return;
        int num_columns = (most + kBlockSize - 1) / kBlockSize * kBlockSize;
        int64_t row_words = padded_dim / Products::kPerWord;
        const uint32_t* rows = (const uint32_t*)(queries + (int64_t)first * padded_dim);
        multiply_group<Products>(num_rows, rows, row_words, keys, key_panel_words(), scores, kTileTokens,
                                 row_words, num_columns);
        RowState states[kGroupRows];
        for (int i = 0; i < num_rows; ++i) {
            int seen = visible(first + i);
            states[i] = weigh<Products>(scores + i * kTileTokens, seen > 0 ? seen : 0, num_columns, scale,
                                        weights + i * kTileTokens);
        }
        multiply_group<Products>(num_rows, (const uint32_t*)weights, kTileTokens / Products::kPerWord, values,
                                 value_panel_words(), tile_values, padded_dim,
                                 num_columns / Products::kPerWord, padded_dim);
        for (int i = 0; i < num_rows; ++i)
            if (visible(first + i) > 0) take(first + i, states[i], tile_values + i * padded_dim);
    }

    void merge_row(int row, RowState state, const float* values_of_tile) {
        merge(row_states[row], row_values + (int64_t)row * padded_dim, state, values_of_tile, padded_dim);
    }
};

// Divides by the sum of the weights and stores head_dim numbers in the model's format.
template <class Storage>
void finish_row(RowState state, float* values, int head_dim, typename Storage::Element* output) {
    float factor = 1.0f / state.sum;
    int dim = 0;
    for (; dim + kWidth <= head_dim; dim += kWidth)
        Storage::store(output + dim, load<Floats>(values + dim) * factor);
    if (dim < head_dim) {
        typename Storage::Element rest[kWidth];
        Storage::store(rest, load<Floats>(values + dim) * factor);
        std::memcpy(output + dim, rest, (head_dim - dim) * sizeof *rest);
    }
}

}  // namespace headrace
