// Packing: one block of cached keys or values becomes columns of the panels that products.h reads.
//
// A panel is [depth in words][kPanelColumns]. Keys: the depth is the head's dimension, a column is a token,
// so a block is transposed. Values: the depth is the token (pairs of them when a word holds two), a column
// is a dimension. Rows past the last token that counts become zeros: their memory may hold anything.
#pragma once

#include "products.h"

namespace headrace {

constexpr int kBlockSize = HEADRACE_BLOCK_SIZE;  // tokens in a block of the cache
static_assert(kBlockSize == 16, "the packing below is written for blocks of 16 tokens");

// Swaps the off-diagonal groups of `step` lanes of two vectors: one butterfly of a transposition.
template <int step, int... lane>
inline void exchange(Words& a, Words& b, std::integer_sequence<int, lane...>) {
    Words low = __builtin_shuffle(a, b, Ints{(lane & step ? kWidth + lane - step : lane)...});
    Words high = __builtin_shuffle(a, b, Ints{(lane & step ? kWidth + lane : lane + step)...});
    a = low;
    b = high;
}

template <int step>
inline void exchange_all(Words (&rows)[kWidth]) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i)
        if (!(i & step)) exchange<step>(rows[i], rows[i | step], std::make_integer_sequence<int, kWidth>{});
}

inline void transpose(Words (&rows)[kWidth]) {
    exchange_all<1>(rows);
    exchange_all<2>(rows);
    if constexpr (kWidth > 4) exchange_all<4>(rows);
    if constexpr (kWidth > 8) exchange_all<8>(rows);
}

// source: kBlockSize rows of num_words words. target: column 0 of the block's first token in its panel.
inline void transpose_block(const uint32_t* source, int64_t num_words, uint32_t* panels, int64_t panel_words,
                            int first_column) {
    for (int token = 0; token < kBlockSize; token += kWidth) {
        int column = first_column + token;
        uint32_t* target = panels + column / kPanelColumns * panel_words + column % kPanelColumns;
        for (int64_t word = 0; word < num_words; word += kWidth) {
            Words rows[kWidth];
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i) rows[i] = load<Words>(source + (token + i) * num_words + word);
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i) store(target + (word + i) * kPanelColumns, rows[i]);
        }
    }
}

// One row of head_dim stored elements as padded_dim packed ones, zeros behind.
template <class Products>
inline void widen_row(const typename Products::Stored::Element* source, int head_dim, int padded_dim,
                      typename Products::Packed* target) {
    using Storage = typename Products::Stored;
    if constexpr (sizeof(typename Storage::Element) == sizeof(typename Products::Packed)) {
        std::memcpy(target, source, head_dim * sizeof *target);
        std::memset(target + head_dim, 0, (padded_dim - head_dim) * sizeof *target);
    } else {
        int dim = 0;
        for (; dim + kWidth <= head_dim; dim += kWidth) store(target + dim, Storage::load(source + dim));
        if (dim < padded_dim) {
            typename Storage::Element rest[kWidth] = {};
            std::memcpy(rest, source + dim, (head_dim - dim) * sizeof *rest);
            store(target + dim, Storage::load(rest));
        }
    }
}

// A block's first num_tokens rows, widened; zeros for the others.
template <class Products>
inline void widen_block(const typename Products::Stored::Element* block, int num_tokens, int head_dim,
                        int padded_dim, typename Products::Packed* target) {
    for (int token = 0; token < num_tokens; ++token)
        widen_row<Products>(block + token * head_dim, head_dim, padded_dim, target + token * padded_dim);
    std::memset(target + num_tokens * padded_dim, 0, (kBlockSize - num_tokens) * padded_dim * sizeof *target);
}

// True when a whole block can be packed from where it lies, without widen_block.
template <class Products>
inline bool is_packable(int num_tokens, int head_dim, int padded_dim) {
    return sizeof(typename Products::Stored::Element) == sizeof(typename Products::Packed) &&
           num_tokens == kBlockSize && head_dim == padded_dim;
}

template <class Products>
void pack_keys(const typename Products::Stored::Element* block, int num_tokens, int head_dim, int padded_dim,
               typename Products::Packed* spare, uint32_t* panels, int first_column) {
    int64_t num_words = padded_dim / Products::kPerWord;
    const void* rows = block;
    if (!is_packable<Products>(num_tokens, head_dim, padded_dim)) {
        widen_block<Products>(block, num_tokens, head_dim, padded_dim, spare);
        rows = spare;
    }
    transpose_block((const uint32_t*)rows, num_words, panels, num_words * kPanelColumns, first_column);
}

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
using Pairs = uint16_t __attribute__((vector_size(64)));

template <int first, int... lane>
inline Pairs interleave(Pairs a, Pairs b, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(a, b, Pairs{(first + lane / 2 + lane % 2 * 32)...});
}
#endif

// Depth of a panel of values is max_depth words; `token` is the block's first token within the tile.
template <class Products>
void pack_values(const typename Products::Stored::Element* block, int num_tokens, int head_dim,
                 int padded_dim, typename Products::Packed* spare, uint32_t* panels, int64_t panel_words,
                 int first_token) {
    const typename Products::Packed* rows = (const typename Products::Packed*)block;
    if (!is_packable<Products>(num_tokens, head_dim, padded_dim)) {
        widen_block<Products>(block, num_tokens, head_dim, padded_dim, spare);
        rows = spare;
    }
    panels += first_token / Products::kPerWord * kPanelColumns;
    for (int dim = 0; dim < padded_dim; dim += Products::kPerWord * kWidth) {
        uint32_t* target = panels + dim / kPanelColumns * panel_words + dim % kPanelColumns;
        if constexpr (Products::kPerWord == 1) {
            for (int token = 0; token < kBlockSize; ++token)
                store(target + token * kPanelColumns, load<Words>(rows + token * padded_dim + dim));
        } else {
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
            constexpr auto lanes = std::make_integer_sequence<int, 32>{};
            for (int token = 0; token < kBlockSize; token += 2) {
                Pairs even = load<Pairs>(rows + token * padded_dim + dim);
                Pairs odd = load<Pairs>(rows + (token + 1) * padded_dim + dim);
                store(target, interleave<0>(even, odd, lanes));
                store(target + kWidth, interleave<16>(even, odd, lanes));
                target += kPanelColumns;
            }
#endif
        }
    }
}

}  // namespace headrace
