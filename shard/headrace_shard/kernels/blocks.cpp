// Decoder blocks one after the other in one call: attention and a gated feed-forward part, each behind a norm
// and beside the residual.
//
// Knows the order of the kernels and where their results lie; computes nothing by itself. The same kernels
// called one by one give the same bits: this saves the way through Python, nine times a block.
#include "interface.h"
#include "formats.h"
#include "workspace.h"

namespace headrace {

// What a block computes on its way, [num_tokens, ...] each.
struct Results {
    char* normed;
    char* qkv;
    char* mixed;
    char* gated;
};

void attention(const HeadraceShape& shape, const HeadraceBlock& block, const HeadraceStep& step,
               const Results& results, int64_t number_bytes, void* hidden) {
    int num_turned = shape.num_heads + shape.num_kv_heads;
    int64_t query_size = (int64_t)shape.num_heads * shape.head_dim;
    int64_t key_size = (int64_t)shape.num_kv_heads * shape.head_dim;
    int64_t qkv_size = query_size + 2 * key_size;
    headrace_normalise(shape.format, hidden, shape.hidden_size, block.attention_norm, results.normed,
                       step.num_tokens, shape.hidden_size, shape.epsilon, step.num_threads);
    headrace_multiply(shape.format, results.normed, shape.hidden_size, block.qkv, block.qkv_bias, nullptr,
                      results.qkv, step.num_tokens, shape.hidden_size, qkv_size, 0, step.num_threads);
    // Queries and keys lie side by side, so one rotation turns both.
    headrace_rotate(shape.format, results.qkv, qkv_size, step.num_tokens, num_turned, shape.head_dim,
                    step.cos, step.sin, step.num_threads);
    int64_t token_bytes = qkv_size * number_bytes, head_bytes = shape.head_dim * number_bytes;
    const char* keys = results.qkv + query_size * number_bytes;
    headrace_write(keys, token_bytes, head_bytes, keys + key_size * number_bytes, token_bytes, head_bytes,
                   (char*)block.key_cache, (char*)block.value_cache, step.slots, step.num_tokens,
                   shape.num_kv_heads, head_bytes, step.num_threads);
    headrace_attend(shape.format, results.qkv, qkv_size, shape.head_dim, results.mixed, block.key_cache,
                    block.value_cache, step.query_starts, step.context_lens, step.block_tables,
                    step.max_blocks, step.num_sequences, shape.num_heads, shape.num_kv_heads, shape.head_dim,
                    shape.scale, step.num_threads);
    headrace_multiply(shape.format, results.mixed, query_size, block.output, block.output_bias, hidden,
                      hidden, step.num_tokens, query_size, shape.hidden_size, 0, step.num_threads);
}

void feed_forward(const HeadraceShape& shape, const HeadraceBlock& block, const HeadraceStep& step,
                  const Results& results, void* hidden) {
    headrace_normalise(shape.format, hidden, shape.hidden_size, block.mlp_norm, results.normed,
                       step.num_tokens, shape.hidden_size, shape.epsilon, step.num_threads);
    headrace_multiply(shape.format, results.normed, shape.hidden_size, block.gate_up, nullptr, nullptr,
                      results.gated, step.num_tokens, shape.hidden_size, shape.intermediate_size, 1,
                      step.num_threads);
    headrace_multiply(shape.format, results.gated, shape.intermediate_size, block.down, block.down_bias,
                      hidden, hidden, step.num_tokens, shape.intermediate_size, shape.hidden_size, 0,
                      step.num_threads);
}

}  // namespace headrace

void headrace_run_blocks(const HeadraceShape* shape, const HeadraceBlock* blocks, int64_t num_blocks,
                         const HeadraceStep* step, void* hidden) {
    using namespace headrace;
    static thread_local Workspace workspace;
    int64_t number_bytes = static_cast<Format>(shape->format) == Format::float32 ? 4 : 2;
    int64_t column_bytes = step->num_tokens * number_bytes;
    int64_t num_qkv_heads = shape->num_heads + 2 * shape->num_kv_heads;
    Results results;
    workspace.divide(
        std::pair<char*&, int64_t>(results.normed, shape->hidden_size * column_bytes),
        std::pair<char*&, int64_t>(results.qkv, num_qkv_heads * shape->head_dim * column_bytes),
        std::pair<char*&, int64_t>(results.mixed, shape->num_heads * shape->head_dim * column_bytes),
        std::pair<char*&, int64_t>(results.gated, shape->intermediate_size * column_bytes));
    for (int64_t i = 0; i < num_blocks; ++i) {
        attention(*shape, blocks[i], *step, results, number_bytes, hidden);
        feed_forward(*shape, blocks[i], *step, results, hidden);
    }
}
