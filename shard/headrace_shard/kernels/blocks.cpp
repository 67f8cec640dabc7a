// Decoder blocks one after the other in one call: attention and a gated feed-forward part, each behind a norm
// and beside the residual.
//
// Knows the order of the computations and where their results lie; computes nothing by itself. The same
// computations called one by one give the same bits: this saves the way through Python, nine times a block,
// and keeps one team of threads from the first block to the last.
//
// It is also the one place that sees a step fall behind while it still can be helped. Others wait for a step's
// decodes, and what it will cost is known only as well as the machine is steady; so between two blocks the last
// tokens, the end of a prompt's chunk, are left behind when time runs short. No token depends on a later one.
#include <chrono>
#include <vector>

#include "computations.h"
#include "interface.h"
#include "plan.h"

namespace headrace {

class DecoderBlocks {
   public:
    DecoderBlocks(const HeadraceShape& shape, const HeadraceStep& step, void* hidden, Workspace& workspace)
        : shape_(shape),
          step_(step),
          workspace_(workspace),
          num_tokens_(step.num_tokens),
          query_starts_(step.query_starts, step.query_starts + step.num_sequences + 1),
          context_lens_(step.context_lens, step.context_lens + step.num_sequences),
          format_(static_cast<Format>(shape.format)),
          number_bytes_(format_ == Format::float32 ? 4 : 2),
          query_size_((int64_t)shape.num_heads * shape.head_dim),
          key_size_((int64_t)shape.num_kv_heads * shape.head_dim),
          qkv_size_(query_size_ + 2 * key_size_),
          hidden_(hidden) {}

    // Gives the number of tokens that came through.
    int64_t run(const HeadraceBlock* blocks, int64_t num_blocks) {
        auto began = std::chrono::steady_clock::now();
        lay_out();
        Team::run(step_.num_threads, [&](Team::Member& member) {
            for (int64_t i = 0; i < num_blocks; ++i) {
                if (i > 0 && step_.max_seconds > 0)
                    member.once([&] {
                        std::chrono::duration<double> passed = std::chrono::steady_clock::now() - began;
                        keep_pace(passed.count(), i, num_blocks);
                    });
                run_attention(member, blocks[i]);
                run_feed_forward(member, blocks[i]);
            }
        });
        return num_tokens_;
    }

   private:
    // Which rows attend to what, the same in all blocks, and memory for what a block computes on its way.
    void lay_out() {
        plan_ = make_plan(attend_call(nullptr, nullptr), step_.num_threads);
        int64_t column_bytes = num_tokens_ * number_bytes_;
        workspace_.divide(std::pair<char*&, int64_t>(normed_, shape_.hidden_size * column_bytes),
                         std::pair<char*&, int64_t>(qkv_, qkv_size_ * column_bytes),
                         std::pair<char*&, int64_t>(mixed_, query_size_ * column_bytes),
                         std::pair<char*&, int64_t>(gated_, shape_.intermediate_size * column_bytes),
                         std::pair<float*&, int64_t>(partials_, plan_.partial_bytes(shape_.head_dim)));
    }

    // Leaves the last tokens behind when the blocks that are left would take too long with them.
    void keep_pace(double seconds, int64_t num_done, int64_t num_blocks) {
        // Part of a block's time that is the same for any number of tokens: reading its weights.
        constexpr double kFixed = 0.25;
        if (num_done * 5 < num_blocks) return;  // the first blocks tell too little
        double expected = seconds / num_done * (num_blocks - num_done);
        double share = (step_.max_seconds - seconds) / expected;
        if (share >= 1) return;
        auto fitting = (int64_t)(num_tokens_ * (share - kFixed) / (1 - kFixed));
        int64_t kept = std::min(num_tokens_, std::max(fitting, step_.min_tokens));
        if (kept == num_tokens_) return;
        query_starts_.back() = (int32_t)kept;
        context_lens_.back() -= (int32_t)(num_tokens_ - kept);
        num_tokens_ = kept;
        lay_out();
    }

    void run_attention(Team::Member& member, const HeadraceBlock& block) const {
        normalise(member, block.attention_norm);
        multiply(member, normed_, shape_.hidden_size, block.qkv, block.qkv_bias, nullptr, qkv_, qkv_size_);
        // Queries and keys lie side by side, so one rotation turns both.
        rotate(member, format_,
               Turn{qkv_, qkv_size_, num_tokens_, shape_.num_heads + shape_.num_kv_heads,
                    shape_.head_dim, step_.cos, step_.sin});
        const char* keys = qkv_ + query_size_ * number_bytes_;
        write(member, format_,
              Write{keys, qkv_size_, shape_.head_dim, keys + key_size_ * number_bytes_, qkv_size_,
                    shape_.head_dim, block.key_cache, block.value_cache, step_.slots, num_tokens_,
                    shape_.num_kv_heads, shape_.head_dim});
        attend(member, format_, attend_call(block.key_cache, block.value_cache), plan_, partials_);
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
                            Norm{hidden_, shape_.hidden_size, weight, normed_, num_tokens_,
                                 shape_.hidden_size, shape_.epsilon});
    }

    void multiply(Team::Member& member, const void* x, int64_t depth, const void* weight, const void* bias,
                  const void* addend, void* y, int64_t num_results, bool is_gated = false) const {
        headrace::multiply(member, format_,
                           Product{x, depth, weight, bias, addend, y, num_tokens_, depth, num_results,
                                   is_gated});
    }

    Attend attend_call(const void* key_cache, const void* value_cache) const {
        return {qkv_, qkv_size_, shape_.head_dim, mixed_, key_cache, value_cache,
                query_starts_.data(), context_lens_.data(), step_.block_tables, step_.max_blocks,
                step_.num_sequences, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, shape_.scale};
    }

    const HeadraceShape& shape_;
    const HeadraceStep& step_;
    Workspace& workspace_;
    // Those of the step, less what was left behind.
    int64_t num_tokens_;
    std::vector<int32_t> query_starts_;
    std::vector<int32_t> context_lens_;
    Plan plan_;
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

int64_t headrace_run_blocks(const HeadraceShape* shape, const HeadraceBlock* blocks, int64_t num_blocks,
                            const HeadraceStep* step, void* hidden) {
    static thread_local headrace::Workspace workspace;
    return headrace::DecoderBlocks(*shape, *step, hidden, workspace).run(blocks, num_blocks);
}
