// Attention over the paged cache, task by task of a plan.
//
// Knows how rows of queries and tokens of context are found in the tensors; tiles.h computes.
#pragma once

#include "computations.h"
#include "plan.h"

namespace headrace {

template <class Products>
class Attention {
    using Element = typename Products::Element;
    using Tiles = TileAttention<Products>;
    static constexpr int kGroupRows = Tiles::kGroupRows;
    static_assert(kGroupRows <= kMaxMerged);

   public:
    Attention(const Attend& call, const Plan& plan, float* partials)
        : call_(call),
          plan_(plan),
          group_(call.num_heads / call.num_kv_heads),
          padded_dim_(padded(call.head_dim)),
          partials_{partials, partials + plan.num_partials, partials + 2 * plan.num_partials, padded_dim_} {}

    void run(Team::Member& member) {
        member.share_stretches(plan_.tasks.size(), [&](int64_t task, int64_t next) {
            static thread_local Workspace workspace;
            run_task(plan_.tasks[task], next == task ? nullptr : &plan_.tasks[next], workspace);
        });
        if (plan_.num_partials == 0) return;
        member.share(plan_.items.size(), 1, [&](int64_t first, int64_t last) {
            for (int64_t item = first; item < last; ++item)
                if (plan_.items[item].partials >= 0) merge_item(plan_.items[item]);
        });
    }

   private:
    // `next` is the task that this thread will probably take after this one, or null.
    void run_task(const Task& task, const Task* next, Workspace& workspace) {
        const Item& item = plan_.items[task.item];
        int num_rows = item.num_tokens * group_;
        Tiles tiles(workspace, num_rows, call_.head_dim, call_.scale);
        for (int row = 0; row < num_rows; ++row) tiles.take_query(row, query(item, row));
        int64_t head_elements = block_elements(call_.head_dim);
        int64_t block_stride = head_elements * call_.num_kv_heads;
        const Element* key_cache = (const Element*)call_.key_cache + item.kv_head * head_elements;
        const Element* value_cache = (const Element*)call_.value_cache + item.kv_head * head_elements;
        for (int tile = task.first_tile; tile < task.last_tile; ++tile) {
            int start = tile * kTileTokens;
            tiles.open(key_cache, value_cache, blocks(item, tile), block_stride,
                       std::min(kTileTokens, item.num_visible - start));
            if (tile + 1 < task.last_tile)
                tiles.expect(key_cache, value_cache, blocks(item, tile + 1), block_stride,
                             num_blocks(item, tile + 1));
            else
                expect_task(tiles, next);
            int first_visible = item.num_visible - item.num_tokens + 1 - start;  // tokens that row 0 sees
            for (int row = 0; row < num_rows; row += kGroupRows)
                attend_group(tiles, item, tile, row, std::min(kGroupRows, num_rows - row), first_visible);
        }
        if (item.partials < 0) finish(item, num_rows, tiles.rows);
    }

    void expect_task(Tiles& tiles, const Task* task) const {
        int64_t head_elements = block_elements(call_.head_dim), stride = head_elements * call_.num_kv_heads;
        if (!task) return tiles.expect(nullptr, nullptr, nullptr, stride, 0);
        const Item& item = plan_.items[task->item];
        tiles.expect((const Element*)call_.key_cache + item.kv_head * head_elements,
                     (const Element*)call_.value_cache + item.kv_head * head_elements,
                     blocks(item, task->first_tile), stride, num_blocks(item, task->first_tile));
    }

    const int32_t* blocks(const Item& item, int tile) const {
        return call_.block_tables + item.sequence * call_.max_blocks + tile * Tiles::kTileBlocks;
    }

    // Blocks of the item from the tile's first one on.
    static int num_blocks(const Item& item, int tile) {
        return (item.num_visible + kBlockSize - 1) / kBlockSize - tile * Tiles::kTileBlocks;
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

    const Attend& call_;
    const Plan& plan_;
    const int group_;
    const int padded_dim_;
    const RowStates partials_;  // results of single tiles that wait for their neighbours
};

}  // namespace headrace
