// Writing keys and values by slot, and attention over them, in the model's format, for a team and for Python.
#include "attention.h"
#include "choice.h"
#include "interface.h"

namespace headrace {

template <class Products>
void write_tokens(const Write& call, int64_t first, int64_t last) {
    using Element = typename Products::Element;
    int64_t head_elements = block_elements(call.head_dim);
    for (int64_t token = first; token < last; ++token) {
        int64_t block = call.slots[token] / kBlockSize;
        for (int64_t head = 0; head < call.num_kv_heads; ++head) {
            int64_t target = (block * call.num_kv_heads + head) * head_elements;
            write_token<Products>(
                (const Element*)call.keys + token * call.key_token_stride + head * call.key_head_stride,
                (const Element*)call.values + token * call.value_token_stride + head * call.value_head_stride,
                call.head_dim, (int)(call.slots[token] % kBlockSize), (Element*)call.key_cache + target,
                (Element*)call.value_cache + target);
        }
    }
}

template <class Products>
void write_shared(Team::Member& member, const Write& call) {
    // By many tokens at once, for neighbours share lines of a block, and threads that write to the same line wait
    // for each other.
    int64_t fair = call.num_tokens / (4 * member.size()) / kBlockSize * kBlockSize;
    member.share(call.num_tokens, std::max<int64_t>(fair, kBlockSize), [&](int64_t first, int64_t last) {
        write_tokens<Products>(call, first, last);
    });
}

void write(Team::Member& member, Format format, const Write& call) {
    with_products(format, [&](auto products) { write_shared<decltype(products)>(member, call); });
}

void attend(Team::Member& member, Format format, const Attend& call, const Plan& plan, float* partials) {
    with_products(format, [&](auto products) {
        Attention<decltype(products)>(call, plan, partials).run(member);
    });
}

}  // namespace headrace

using namespace headrace;

const char* headrace_instructions() {
    return instructions();
}

void headrace_write(
    int format, const void* keys, int64_t key_token_stride, int64_t key_head_stride, const void* values,
    int64_t value_token_stride, int64_t value_head_stride, void* key_cache, void* value_cache,
    const int64_t* slots, int64_t num_tokens, int num_kv_heads, int head_dim, int num_threads) {
    Write call{keys,  key_token_stride, key_head_stride, values,     value_token_stride, value_head_stride,
               key_cache, value_cache,  slots,           num_tokens, num_kv_heads,       head_dim};
    if (num_tokens * num_kv_heads * head_dim < kMinWoken) num_threads = 1;
    Team::run(num_threads, [&](Team::Member& member) { write(member, static_cast<Format>(format), call); });
}

void headrace_attend(
    int format, const void* queries, int64_t query_token_stride, int64_t query_head_stride, void* output,
    const void* key_cache, const void* value_cache, const int32_t* query_starts, const int32_t* context_lens,
    const int32_t* block_tables, int64_t max_blocks, int64_t num_sequences, int num_heads, int num_kv_heads,
    int head_dim, float scale, int num_threads) {
    Attend call{queries,      query_token_stride, query_head_stride, output,     key_cache,
                value_cache,  query_starts,       context_lens,      block_tables, max_blocks,
                num_sequences, num_heads,         num_kv_heads,      head_dim,   scale};
    Plan plan = make_plan(call, num_threads);
    static thread_local Workspace workspace;
    float* partials;
    workspace.divide(std::pair<float*&, int64_t>(partials, plan.partial_bytes(head_dim)));
    Team::run(num_threads, [&](Team::Member& member) {
        attend(member, static_cast<Format>(format), call, plan, partials);
    });
}
