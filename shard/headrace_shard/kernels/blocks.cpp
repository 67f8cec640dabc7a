// Decoder blocks one after the other in one call: attention and a gated feed-forward part, each behind a norm
// and beside the residual.
//
// Knows the order of the computations and where their results lie; computes nothing by itself. The same
// computations called one by one give the same bits: this saves the way through Python, nine times a block,
// and keeps one team of threads from the first block to the last.
#include "computations.h"
#include "interface.h"
#include "plan.h"

namespace headrace {

class DecoderBlocks {
   public:
    DecoderBlocks(const HeadraceShape& shape, const HeadraceStep& step, void* hidden)
        : shape_(shape),
          step_(step),
          format_(static_cast<Format>(shape.format)),
          number_bytes_(format_ == Format::float32 ? 4 : 2),
          query_size_((int64_t)shape.num_heads * shape.head_dim),
          key_size_((int64_t)shape.num_kv_heads * shape.head_dim),
          qkv_size_(query_size_ + 2 * key_size_),
          hidden_(hidden) {}

    void run(const HeadraceBlock* blocks, int64_t num_blocks) {
        // Which rows attend to what is the same in all blocks.
        Plan plan = make_plan(attend_call(blocks[0]), step_.num_threads);
        static thread_local Workspace workspace;
        int64_t column_bytes = step_.num_tokens * number_bytes_;
        workspace.divide(std::pair<char*&, int64_t>(normed_, shape_.hidden_size * column_bytes),
                         std::pair<char*&, int64_t>(qkv_, qkv_size_ * column_bytes),
                         std::pair<char*&, int64_t>(mixed_, query_size_ * column_bytes),
                         std::pair<char*&, int64_t>(gated_, shape_.intermediate_size * column_bytes),
                         std::pair<float*&, int64_t>(partials_, plan.partial_bytes(shape_.head_dim)));
        Team::run(step_.num_threads, [&](Team::Member& member) {
            for (int64_t i = 0; i < num_blocks; ++i) {
                run_attention(member, blocks[i], plan);
                run_feed_forward(member, blocks[i]);
            }
        });
    }

   private:
    void run_attention(Team::Member& member, const HeadraceBlock& block, const Plan& plan) const {
        normalise(member, block.attention_norm);
        multiply(member, normed_, shape_.hidden_size, block.qkv, block.qkv_bias, nullptr, qkv_, qkv_size_);
        // Queries and keys lie side by side, so one rotation turns both.
        rotate(member, format_,
               Turn{qkv_, qkv_size_, step_.num_tokens, shape_.num_heads + shape_.num_kv_heads,
                    shape_.head_dim, step_.cos, step_.sin});
        const char* keys = qkv_ + query_size_ * number_bytes_;
        write(member, format_,
              Write{keys, qkv_size_, shape_.head_dim, keys + key_size_ * number_bytes_, qkv_size_,
                    shape_.head_dim, block.key_cache, block.value_cache, step_.slots, step_.num_tokens,
                    shape_.num_kv_heads, shape_.head_dim});
        attend(member, format_, attend_call(block), plan, partials_);
        multiply(member, mixed_, query_size_, block.output, block.output_bias, hidden_, hidden_,
                 shape_.hidden_size);
    }

    void run_feed_forward(Team::Member& member, const HeadraceBlock& block) const {
        normalise(member, block.mlp_norm);
        multiply(member, normed_, shape_.hidden_size, block.gate_up, nullptr, nullptr, gated_,
                 shape_.intermediate_size, true);
        multiply(member, gated_, shape_.intermediate_size, block.down, block.down_bias, hidden_, hidden_,
                 shape_.hidden_size);
    }

    void normalise(Team::Member& member, const void* weight) const {
        headrace::normalise(member, format_,
                            Norm{hidden_, shape_.hidden_size, weight, normed_, step_.num_tokens,
                                 shape_.hidden_size, shape_.epsilon});
    }

    void multiply(Team::Member& member, const void* x, int64_t depth, const void* weight, const void* bias,
                  const void* addend, void* y, int64_t num_results, bool is_gated = false) const {
        headrace::multiply(member, format_,
                           Product{x, depth, weight, bias, addend, y, step_.num_tokens, depth, num_results,
                                   is_gated});
    }

    Attend attend_call(const HeadraceBlock& block) const {
        return {qkv_, qkv_size_, shape_.head_dim, mixed_, block.key_cache, block.value_cache,
                step_.query_starts, step_.context_lens, step_.block_tables, step_.max_blocks,
                step_.num_sequences, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, shape_.scale};
    }

    const HeadraceShape& shape_;
    const HeadraceStep& step_;
    const Format format_;
    const int64_t number_bytes_;
    const int64_t query_size_;
    const int64_t key_size_;
    const int64_t qkv_size_;
    void* const hidden_;
    // What a block computes on its way, [num_tokens, ...] each.
    char* normed_ = nullptr;
    char* qkv_ = nullptr;
    char* mixed_ = nullptr;
    char* gated_ = nullptr;
    float* partials_ = nullptr;
};

}  // namespace headrace

void headrace_run_blocks(const HeadraceShape* shape, const HeadraceBlock* blocks, int64_t num_blocks,
                         const HeadraceStep* step, void* hidden) {
    headrace::DecoderBlocks(*shape, *step, hidden).run(blocks, num_blocks);
}
