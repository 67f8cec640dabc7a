// What a team computes: every member calls the same function with the same arguments, and finds the result
// complete when it returns. Numbers are in the model's format; strides are in elements, the last dimension is
// always contiguous, and nothing checks its arguments.
#pragma once

#include "formats.h"
#include "team.h"

namespace headrace {

struct Plan;

// Y = X x W^T, see dense.h.
struct Product {
    const void* x;     // [num_rows, depth], rows x_stride elements apart: whole words, see products.h
    int64_t x_stride;
    const void* weight;  // packed
    const void* bias;    // [num_results], or null
    const void* addend;  // [num_rows, num_results], contiguous, or null: added before rounding
    void* y;             // [num_rows, num_results], contiguous; may be the addend
    int64_t num_rows;
    int64_t depth;
    int64_t num_results;
    bool is_gated;  // each panel holds gates, then as many values; a result is silu(gate) * value
};

struct Norm {
    const void* x;  // [num_rows, size]
    int64_t x_stride;
    const void* weight;  // [size]
    void* y;             // [num_rows, size], contiguous
    int64_t num_rows;
    int64_t size;
    float epsilon;
};

// Turns the first num_heads heads of each token where they lie.
struct Turn {
    void* heads;
    int64_t token_stride;
    int64_t num_tokens;
    int num_heads;
    int head_dim;
    const float* cos;  // [num_tokens, head_dim], as sin
    const float* sin;
};

// Keys and values of tokens to their slots (block * kBlockSize + offset) in the caches, see cache.h.
struct Write {
    const void* keys;  // [num_tokens, num_kv_heads, head_dim]
    int64_t key_token_stride;
    int64_t key_head_stride;
    const void* values;  // as keys
    int64_t value_token_stride;
    int64_t value_head_stride;
    void* key_cache;
    void* value_cache;
    const int64_t* slots;  // [num_tokens]
    int64_t num_tokens;
    int num_kv_heads;
    int head_dim;
};

// Causal attention of each sequence's last tokens over its cached ones.
struct Attend {
    const void* queries;  // [num_tokens, num_heads, head_dim]
    int64_t query_token_stride;
    int64_t query_head_stride;
    void* output;  // [num_tokens, num_heads, head_dim], contiguous
    const void* key_cache;
    const void* value_cache;
    const int32_t* query_starts;  // [num_sequences + 1]
    const int32_t* context_lens;  // [num_sequences]
    const int32_t* block_tables;  // [num_sequences, max_blocks]
    int64_t max_blocks;
    int64_t num_sequences;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    float scale;
};

void multiply(Team::Member& member, Format format, const Product& call);
void normalise(Team::Member& member, Format format, const Norm& call);
void rotate(Team::Member& member, Format format, const Turn& call);
void write(Team::Member& member, Format format, const Write& call);

// `plan` is that of make_plan for this call, `partials` memory for plan.partial_bytes(head_dim).
void attend(Team::Member& member, Format format, const Attend& call, const Plan& plan, float* partials);

}  // namespace headrace
