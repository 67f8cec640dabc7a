// The kernels' C interface: writing keys and values by slot, and attention over the paged cache.
//
// Knows the layout of the tensors and how work is shared among threads. The cache of one layer is
// [num_blocks, num_kv_heads, kBlockSize, head_dim], contiguous. Strides are in elements; the last dimension
// is always contiguous. Nothing here checks its arguments: the caller in Python does.
#include "interface.h"
#include "plan.h"

namespace headrace {

template <class Products>
class Attention {
    using Element = typename Products::Stored::Element;
    using Tiles = TileAttention<Products>;

   public:
    explicit Attention(const Call& call)
        : call_(call),
          group_(call.num_heads / call.num_kv_heads),
          padded_dim_(Tiles::pad(call.head_dim)),
          plan_(make_plan(call)) {}

    void run() {
        int64_t num_tasks = plan_.tasks.size(), num_items = plan_.items.size();
        if (num_tasks == 0) return;
        static thread_local Workspace memory;
        memory.divide(std::pair<float*&, int64_t>(partials_.maxima, plan_.num_partials * 4),
                      std::pair<float*&, int64_t>(partials_.sums, plan_.num_partials * 4),
                      std::pair<float*&, int64_t>(partials_.values, plan_.num_partials * padded_dim_ * 4));
        partials_.padded_dim = padded_dim_;
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
            for (int row = 0; row < num_rows; row += kGroupRows)
                attend_group(tiles, item, tile, row, std::min(kGroupRows, num_rows - row), first_visible);
        }
        if (item.partials < 0) finish(item, num_rows, tiles.rows);
    }

    // One group of an item's rows over one tile; row 0 of the item sees first_visible of the tile's tokens.
    void attend_group(Tiles& tiles, const Item& item, int tile, int row, int count, int first_visible) {
        int seen[kGroupRows];
        for (int i = 0; i < count; ++i) seen[i] = std::min(kTileTokens, first_visible + (row + i) / group_);
        if (seen[count - 1] <= 0) {
            // Nothing of this tile; merge_item has to find that written.
            if (item.partials >= 0) std::fill_n(partial(item, tile, row).sums, count, 0.0f);
        } else if (item.partials >= 0) {
            tiles.attend_group(row, count, seen, partial(item, tile, row));
        } else if (tile == 0) {
            tiles.attend_group(row, count, seen, tiles.rows.from(row));
        } else {
            tiles.attend_group(row, count, seen, tiles.tile);
            merge(tiles.rows.from(row), tiles.tile, count);
        }
    }

    void merge_item(const Item& item) {
        int num_rows = item.num_tokens * group_;
        for (int row = 0; row < num_rows; row += kGroupRows)
            for (int tile = 1; tile < item.num_tiles(); ++tile)
                merge(partial(item, 0, row), partial(item, tile, row), std::min(kGroupRows, num_rows - row));
        finish(item, num_rows, partial(item, 0, 0));
    }

    RowStates partial(const Item& item, int tile, int row) const {
        return partials_.from(item.partials + (int64_t)tile * item.num_tokens * group_ + row);
    }

    const Element* query(const Item& item, int row) const {
        return (const Element*)call_.queries + token_of(item, row) * call_.query_token_stride +
               head_of(item, row) * call_.query_head_stride;
    }

    int64_t token_of(const Item& item, int row) const {
        return call_.query_starts[item.sequence] + item.first_token + row / group_;
    }

    int64_t head_of(const Item& item, int row) const { return item.kv_head * group_ + row % group_; }

    void finish(const Item& item, int num_rows, RowStates states) {
        for (int row = 0; row < num_rows; ++row) {
            int64_t index = token_of(item, row) * call_.num_heads + head_of(item, row);
            finish_row<typename Products::Stored>(
                states.sums[row], states.values + (int64_t)row * padded_dim_, call_.head_dim,
                (Element*)call_.output + index * call_.head_dim);
        }
    }

    const Call& call_;
    const int group_;
    const int padded_dim_;
    const Plan plan_;
    RowStates partials_;  // results of single tiles that wait for their neighbours
};

}  // namespace headrace

extern "C" {

const char* headrace_instructions() {
    return headrace::kInstructions;
}

void headrace_write(
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

void headrace_attend(
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
