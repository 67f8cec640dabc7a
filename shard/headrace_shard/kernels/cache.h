// The paged cache of one layer's keys, and of its values: where each number lies.
//
// [num_blocks, num_kv_heads, block], and a block holds kBlockSize tokens of one head in the order in which the
// products of products.h read them, so that a step reads what it attends to and packs nothing:
//
//   keys    [words of the head][token][numbers in a word]     a word: neighbouring numbers of one token
//   values  [words of tokens][number][numbers in a word]      a word: one number of neighbouring tokens
//
// Both have room for padded_dim numbers a token, whole vectors. What lies behind a sequence's last token, and
// behind head_dim, may be anything.
#pragma once

#include "products.h"

namespace headrace {

constexpr int kBlockSize = HEADRACE_BLOCK_SIZE;  // tokens in a block of the cache
static_assert(kBlockSize == 16 && kBlockSize % kWidth == 0, "a vector never crosses blocks");

inline int padded(int head_dim) { return (head_dim + kBlockSize - 1) / kBlockSize * kBlockSize; }

// Elements of a block of one head.
inline int64_t block_elements(int head_dim) { return (int64_t)kBlockSize * padded(head_dim); }

// Stores one token's key and value of one head at `offset` within the head's block.
template <class Products>
void write_token(const typename Products::Element* key, const typename Products::Element* value, int head_dim,
                 int offset, typename Products::Element* key_block,
                 typename Products::Element* value_block) {
    constexpr int kPerWord = Products::kPerWord;
    using Element = typename Products::Element;
    Element* target = key_block + offset * kPerWord;
    int whole = head_dim / kPerWord * kPerWord;
    for (int dim = 0; dim < whole; dim += kPerWord, target += kBlockSize * kPerWord)
        std::memcpy(target, key + dim, kPerWord * sizeof *key);
    if (whole < head_dim) {
        Element rest[kPerWord] = {};  // the word is multiplied as a whole
        std::memcpy(rest, key + whole, (head_dim - whole) * sizeof *key);
        std::memcpy(target, rest, sizeof rest);
    }
    target = value_block + offset / kPerWord * (int64_t)padded(head_dim) * kPerWord + offset % kPerWord;
    for (int dim = 0; dim < head_dim; ++dim) target[dim * kPerWord] = value[dim];
}

// A copy of a block of values with zeros behind its first num_tokens: 0 times what lies there may be NaN.
template <class Element>
void copy_values(const Element* block, int num_tokens, int numbers_per_word, int head_dim, Element* target) {
    int64_t row = (int64_t)padded(head_dim) * numbers_per_word;
    int whole = num_tokens / numbers_per_word, rest = num_tokens % numbers_per_word;
    std::memcpy(target, block, whole * row * sizeof *block);
    std::memset(target + whole * row, 0, (block_elements(head_dim) - whole * row) * sizeof *block);
    if (rest)
        for (int64_t i = whole * row; i < (whole + 1) * row; i += numbers_per_word)
            std::memcpy(target + i, block + i, rest * sizeof *block);
}

// Keys of the blocks as columns, a token each. Blocks `ahead`, num_ahead for each vector, are called in meanwhile:
// what lies all over the memory gives the processor's own prefetching nothing to guess from. Vectors call in as
// many lines as they read, matrices ahead_word_bytes with every word.
template <class Products, int num_ahead>
struct KeyColumns {
    using Element = typename Products::Element;
    const Element* vectors[kVectorsAtOnce];
    const Element* ahead[kVectorsAtOnce * num_ahead + 1];
    int64_t ahead_word_bytes = 0;

    Words operator()(int64_t k, int j) const {
        int64_t offset = k * kBlockSize * Products::kPerWord;
#pragma GCC unroll 2
        for (int i = 0; i < num_ahead; ++i)
            __builtin_prefetch(ahead[j * num_ahead + i] + offset, 0, 2);
        return Products::load_columns(vectors[j] + offset);
    }

    static constexpr int64_t word_bytes() { return kBlockSize * 4; }
    const Element* matrix(int64_t k, int j) const {
        int64_t begin = k * ahead_word_bytes;
        int64_t end = begin + Multiplier<Products>::kMatrixWords * ahead_word_bytes;
        for (int i = 0; i < num_ahead; ++i)
            for (int64_t byte = begin; byte < end; byte += kLineBytes)
                __builtin_prefetch((const char*)ahead[j * num_ahead + i] + byte, 0, 2);
        return vectors[j] + k * kBlockSize * Products::kPerWord;
    }
};

// Values of the blocks, a number each, from number `first` on; the depth runs through the blocks. Blocks `ahead`
// are called in meanwhile, line by line.
template <class Products, bool has_ahead>
struct ValueColumns {
    using Element = typename Products::Element;
    static constexpr int kBlockWords = kBlockSize / Products::kPerWord;
    const Element* const* blocks;
    const Element* const* ahead;
    int64_t row;
    int64_t first;

    ValueColumns(const Element* const* blocks_, const Element* const* ahead_, int padded_dim, int first_number)
        : blocks(blocks_),
          ahead(ahead_),
          row(padded_dim * Products::kPerWord),
          first(first_number * Products::kPerWord) {}
    Words operator()(int64_t k, int j) const {
        int64_t offset = k % kBlockWords * row + first + j * kWidth * Products::kPerWord;
        if constexpr (has_ahead) __builtin_prefetch(ahead[k / kBlockWords] + offset, 0, 2);
        return Products::load_columns(blocks[k / kBlockWords] + offset);
    }

    // For matrices the blocks lie one behind the other.
    int64_t word_bytes() const { return row * (int64_t)sizeof(Element); }
    const Element* matrix(int64_t k, int j) const {
        return blocks[0] + k * row + first + j * kWidth * Products::kPerWord;
    }
};

}  // namespace headrace
