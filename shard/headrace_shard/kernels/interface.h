// The C interface: what Python calls, and the kernels one another.
//
// Formats are those of formats.h. Strides are in elements where nothing else is said; the last dimension is
// always contiguous. Nothing here checks its arguments: the caller in Python does.
#pragma once

#include <cstdint>

#define HEADRACE_EXPORT extern "C" __attribute__((visibility("default")))

HEADRACE_EXPORT const char* headrace_instructions();
// How weights are packed (dense.h); `depth` in words.
HEADRACE_EXPORT int headrace_panel_columns(int format);
HEADRACE_EXPORT int headrace_matrix_columns(int format);
HEADRACE_EXPORT int headrace_matrix_words(int format, int64_t depth);
HEADRACE_EXPORT int headrace_numbers_per_word(int format);

// Keys and values [num_tokens, num_kv_heads, head_dim] to their slots (block * kBlockSize + offset) in the
// caches, which lie as in cache.h.
HEADRACE_EXPORT void headrace_write(int format, const void* keys, int64_t key_token_stride,
                                    int64_t key_head_stride, const void* values, int64_t value_token_stride,
                                    int64_t value_head_stride, void* key_cache, void* value_cache,
                                    const int64_t* slots, int64_t num_tokens, int num_kv_heads, int head_dim,
                                    int num_threads);

// queries and output: [num_tokens, num_heads, head_dim].
HEADRACE_EXPORT void headrace_attend(int format, const void* queries, int64_t query_token_stride,
                                     int64_t query_head_stride, void* output, const void* key_cache,
                                     const void* value_cache, const int32_t* query_starts,
                                     const int32_t* context_lens, const int32_t* block_tables,
                                     int64_t max_blocks, int64_t num_sequences, int num_heads,
                                     int num_kv_heads, int head_dim, float scale, int num_threads);

// `weight` is packed (dense.h); `bias` and `addend` may be null, `addend` may be `y`.
HEADRACE_EXPORT void headrace_multiply(int format, const void* x, int64_t x_stride, const void* weight,
                                       const void* bias, const void* addend, void* y, int64_t num_rows,
                                       int64_t depth, int64_t num_results, int is_gated, int num_threads);

HEADRACE_EXPORT void headrace_normalise(int format, const void* x, int64_t x_stride, const void* weight,
                                        void* y, int64_t num_rows, int64_t size, float epsilon,
                                        int num_threads);

// Turns the first num_heads heads of each token where they lie.
HEADRACE_EXPORT void headrace_rotate(int format, void* heads, int64_t token_stride, int64_t num_tokens,
                                     int num_heads, int head_dim, const float* cos, const float* sin,
                                     int num_threads);

extern "C" {

// The decoder blocks of one network, all alike.
struct HeadraceShape {
    int format;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int64_t hidden_size;
    int64_t intermediate_size;
    float epsilon;
    float scale;
};

// One block's weights, packed or as they are, and its cache. Biases may be null.
struct HeadraceBlock {
    const void* attention_norm;
    const void* qkv;
    const void* qkv_bias;
    const void* output;
    const void* output_bias;
    const void* mlp_norm;
    const void* gate_up;
    const void* down;
    const void* down_bias;
    void* key_cache;
    void* value_cache;
};

struct HeadraceStep {
    int64_t num_tokens;
    const float* cos;
    const float* sin;
    const int64_t* slots;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t max_blocks;
    int64_t num_sequences;
    int num_threads;
    int64_t min_tokens;   // the first so many are computed at whatever cost
    double max_seconds;   // 0: no limit
};
}

// hidden [num_tokens, hidden_size] through all blocks, in place. Gives how many tokens came through: when it
// looks as if all would take longer than max_seconds, the last ones are left behind, but for the first
// min_tokens.
HEADRACE_EXPORT int64_t headrace_run_blocks(const HeadraceShape* shape, const HeadraceBlock* blocks,
                                         int64_t num_blocks, const HeadraceStep* step, void* hidden);
