// The kernels' C interface: writing keys and values by slot, and attention over the paged cache.
//
// Knows the layout of the tensors and how work is shared among threads. The cache of one layer is
// [num_blocks, num_kv_heads, kBlockSize, head_dim], contiguous. Strides are in elements; the last dimension
// is always contiguous. Nothing here checks its arguments: the caller in Python does.
#include <memory>

#include "plan.h"

namespace headrace {

// Results of single tiles that wait for their neighbours: entry = (item's partials) + tile * rows + row.
struct Partials {
    std::vector<RowState> states;
    std::unique_ptr<float[]> values;  // [entries, padded_dim]
};

template <class Products>
class Attention {
    using Element = typename Products::Stored::Element;
    using Tiles = TileAttention<Products>;

   public:
    explicit Attention(const Call& call)
        : call_(call),
          group_(call.num_heads / call.num_kv_heads),
          padded_dim_(Tiles::pad(call.head_dim)),
          plan_(make_plan(call)) {
        partials_.states.resize(plan_.num_partials);
        partials_.values.reset(new float[plan_.num_partials * padded_dim_]);
    }

    void run() {
        int64_t num_tasks = plan_.tasks.size(), num_items = plan_.items.size();
        if (num_tasks == 0) return;
        int num_threads = (int)std::min<int64_t>(call_.num_threads, num_tasks);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            static thread_local Workspace workspace;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_tasks; ++i) run_task(i, workspace);
            if (plan_.num_partials) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t i = 0; i < num_items; ++i)
                    if (plan_.items[i].partials >= 0) merge_item(plan_.items[i]);
            }
        }
    }

   private:
    void run_task(int64_t task_index, Workspace& workspace) {
        const Task& task = plan_.tasks[task_index];
        const Item& item = plan_.items[task.item];
        int num_rows = item.num_tokens * group_;
        Tiles tiles(workspace, num_rows, call_.head_dim, call_.scale);
        for (int row = 0; row < num_rows; ++row) tiles.take_query(row, query(item, row));
        int64_t head_elements = (int64_t)kBlockSize * call_.head_dim;
        const Element* key_cache = (const Element*)call_.key_cache + item.kv_head * head_elements;
        const Element* value_cache = (const Element*)call_.value_cache + item.kv_head * head_elements;
        const int32_t* blocks = call_.block_tables + item.sequence * call_.max_blocks;
        Lookahead lookahead(call_, plan_, task_index, sizeof(Element));
        for (int tile = task.first_tile; tile < task.last_tile; ++tile) {
            int start = tile * kTileTokens;
            tiles.pack(key_cache, value_cache, blocks + start / kBlockSize,
                       head_elements * call_.num_kv_heads,
                       std::min(kTileTokens, item.num_visible - start), [&] { lookahead.advance(); });
            int first_visible = item.num_visible - item.num_tokens + 1 - start;  // tokens that row 0 sees
            auto visible = [&](int row) { return std::min(kTileTokens, first_visible + row / group_); };
            auto take = [&](int row, RowState state, const float* values) {
                if (item.partials < 0) return tiles.merge_row(row, state, values);
                int64_t entry = item.partials + (int64_t)tile * num_rows + row;
                partials_.states[entry] = state;
                std::memcpy(&partials_.values[entry * padded_dim_], values, padded_dim_ * sizeof *values);
            };
            for (int row = 0; row < num_rows; row += kGroupRows)
                tiles.attend_group(row, std::min(kGroupRows, num_rows - row), visible, take);
        }
        if (item.partials >= 0) return;
        for (int row = 0; row < num_rows; ++row)
            finish(item, row, tiles.row_states[row], tiles.row_values + (int64_t)row * padded_dim_);
    }

    // Rows of partial results that no tile filled kept the sum 0 they were made with: out of their sight.
    void merge_item(const Item& item) {
        int num_rows = item.num_tokens * group_;
        for (int row = 0; row < num_rows; ++row) {
            int64_t first = item.partials + row;
            for (int tile = 1; tile < item.num_tiles(); ++tile) {
                int64_t entry = first + (int64_t)tile * num_rows;
                if (partials_.states[entry].sum == 0) break;
                merge(partials_.states[first], &partials_.values[first * padded_dim_],
                      partials_.states[entry], &partials_.values[entry * padded_dim_], padded_dim_);
            }
            finish(item, row, partials_.states[first], &partials_.values[first * padded_dim_]);
        }
    }

    const Element* query(const Item& item, int row) const {
        return (const Element*)call_.queries + token_of(item, row) * call_.query_token_stride +
               head_of(item, row) * call_.query_head_stride;
    }

    int64_t token_of(const Item& item, int row) const {
        return call_.query_starts[item.sequence] + item.first_token + row / group_;
    }

    int64_t head_of(const Item& item, int row) const { return item.kv_head * group_ + row % group_; }

    void finish(const Item& item, int row, RowState state, float* values) {
        int64_t index = token_of(item, row) * call_.num_heads + head_of(item, row);
        finish_row<typename Products::Stored>(state, values, call_.head_dim,
                                              (Element*)call_.output + index * call_.head_dim);
    }

    const Call& call_;
    const int group_;
    const int padded_dim_;
    const Plan plan_;
    Partials partials_;
};

}  // namespace headrace

extern "C" {

__attribute__((visibility("default"))) const char* headrace_instructions() {
    return headrace::kInstructions;
}

// Strides and row in bytes; slot = block * kBlockSize + offset.
__attribute__((visibility("default"))) void headrace_write(
    const char* keys, int64_t key_token_stride, int64_t key_head_stride, const char* values,
    int64_t value_token_stride, int64_t value_head_stride, char* key_cache, char* value_cache,
    const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads, int64_t row_bytes, int num_threads) {
    using headrace::kBlockSize;
    constexpr int64_t kMinShared = 1 << 18;  // bytes below which waking threads costs more than copying
    bool is_shared = num_threads > 1 && num_tokens * num_kv_heads * row_bytes >= kMinShared;
#pragma omp parallel for num_threads(num_threads) if (is_shared)
    for (int64_t token = 0; token < num_tokens; ++token) {
        int64_t block = slots[token] / kBlockSize, offset = slots[token] % kBlockSize;
        for (int64_t head = 0; head < num_kv_heads; ++head) {
            int64_t target = ((block * num_kv_heads + head) * kBlockSize + offset) * row_bytes;
            const char* key = keys + token * key_token_stride + head * key_head_stride;
            const char* value = values + token * value_token_stride + head * value_head_stride;
            std::memcpy(key_cache + target, key, row_bytes);
            std::memcpy(value_cache + target, value, row_bytes);
        }
    }
}

__attribute__((visibility("default"))) void headrace_attend(
    int format, const void* queries, int64_t query_token_stride, int64_t query_head_stride, void* output,
    const void* key_cache, const void* value_cache, const int32_t* query_starts, const int32_t* context_lens,
    const int32_t* block_tables, int64_t max_blocks, int64_t num_sequences, int num_heads, int num_kv_heads,
    int head_dim, float scale, int num_threads) {
    using namespace headrace;
    Call call{queries,      query_token_stride, query_head_stride, output,        key_cache, value_cache,
              query_starts, context_lens,       block_tables,      max_blocks,    num_sequences,
              num_heads,    num_kv_heads,       head_dim,          scale,         num_threads};
    switch (static_cast<Format>(format)) {
        case Format::float32: return Attention<FloatProducts<Float32>>(call).run();
        case Format::bfloat16: return Attention<BFloat16Products>(call).run();
        case Format::float16: return Attention<FloatProducts<Float16>>(call).run();
    }
}

}  // extern "C"
