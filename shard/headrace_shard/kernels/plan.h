// Plan: how one call is cut into tasks for the threads.
//
// Knows shapes and costs; touches no tensor but the three that describe the step. A plan changes who computes
// what and when, never a result (see tiles.h).
#pragma once

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace headrace {

constexpr int kTaskRows = 288;  // query rows that share the packing of a tile

struct Call {
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
    int num_threads;
};

// Rows of one sequence that share one key-value head: row = token * group + head within the group.
struct Item {
    int sequence;
    int kv_head;
    int first_token;  // within the sequence's tokens of this step
    int num_tokens;
    int num_visible;   // tokens of context that the item's last row sees
    int64_t partials;  // index of its first row of partial results, or -1 when one task takes all tiles
    int num_tiles() const { return (num_visible + kTileTokens - 1) / kTileTokens; }
};

struct Task {
    int item;
    int first_tile;
    int last_tile;  // exclusive
    int64_t cost;
};

struct Plan {
    std::vector<Item> items;
    std::vector<Task> tasks;
    int64_t num_partials = 0;
};

// Cuts the step into tasks. Items that would keep one thread busy while others have nothing left are cut
// along the context as well; that costs a second pass and changes no result.
Plan make_plan(const Call& call) {
    Plan plan;
    int group = call.num_heads / call.num_kv_heads;
    int task_tokens = std::max(1, kTaskRows / group);
    int64_t total_cost = 0;
    for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
        int num_tokens = call.query_starts[sequence + 1] - call.query_starts[sequence];
        int num_cached = call.context_lens[sequence] - num_tokens;
        // In parts of like size: a small rest would pack its tiles for a few rows.
        int num_parts = (num_tokens + task_tokens - 1) / task_tokens;
        for (int part = 0; part < num_parts; ++part) {
            int first = (int)((int64_t)num_tokens * part / num_parts);
            int count = (int)((int64_t)num_tokens * (part + 1) / num_parts) - first;
            for (int kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
                plan.items.push_back({sequence, kv_head, first, count, num_cached + first + count, -1});
                total_cost += (count * group + kGroupRows) * (int64_t)plan.items.back().num_visible;
            }
        }
    }
    // An item is cut when it is more than half of what one thread has to do, and then into small tasks: once
    // tiles have to be merged, a cut more costs next to nothing and the threads end closer together.
    int64_t large_cost = std::max<int64_t>(total_cost / (2 * call.num_threads), 1);
    int64_t small_cost = std::max<int64_t>(total_cost / (16 * call.num_threads), 1);
    for (int index = 0; index < (int)plan.items.size(); ++index) {
        Item& item = plan.items[index];
        int num_rows = item.num_tokens * group, num_tiles = item.num_tiles();
        int64_t token_cost = num_rows + kGroupRows, cost = token_cost * item.num_visible;
        int num_tasks = 1;
        if (call.num_threads > 1 && num_tiles > 1 && cost > large_cost) {
            num_tasks = (int)std::min<int64_t>(num_tiles, (cost + small_cost - 1) / small_cost);
            item.partials = plan.num_partials;
            plan.num_partials += (int64_t)num_tiles * num_rows;
        }
        for (int task = 0; task < num_tasks; ++task) {
            int first = (int)((int64_t)num_tiles * task / num_tasks);
            int last = (int)((int64_t)num_tiles * (task + 1) / num_tasks);
            int num_tokens = std::min(item.num_visible, last * kTileTokens) - first * kTileTokens;
            plan.tasks.push_back({index, first, last, token_cost * num_tokens});
        }
    }
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
    return plan;
}

// What a thread will read next, block by block: the rest of its own task, then the beginning of the task it
// is likely to take after it. Blocks lie anywhere in the cache, where the processor's own prefetching has
// nothing to guess from, so they are called into the second-level cache a few blocks early.
class Lookahead {
   public:
    static constexpr int kDistance = 6;  // blocks

    Lookahead(const Call& call, const Plan& plan, int64_t task_index, int64_t element_bytes)
        : call_(call),
          plan_(plan),
          next_task_(task_index + call.num_threads),
          head_bytes_((int64_t)kBlockSize * call.head_dim * element_bytes) {
        follow(plan.tasks[task_index]);
        for (int i = 0; i < kDistance; ++i) advance();
    }

    void advance() {
        if (position_ == end_) {
            if (next_task_ >= (int64_t)plan_.tasks.size()) return;
            follow(plan_.tasks[next_task_]);
            end_ = std::min(end_, position_ + kDistance);
            next_task_ = plan_.tasks.size();
        }
        int64_t offset = (blocks_[position_++] * (int64_t)call_.num_kv_heads + kv_head_) * head_bytes_;
        prefetch((const char*)call_.key_cache + offset);
        prefetch((const char*)call_.value_cache + offset);
    }

   private:
    void prefetch(const char* block) const {
        for (int64_t line = 0; line < head_bytes_; line += 64) __builtin_prefetch(block + line, 0, 2);
    }

    void follow(const Task& task) {
        const Item& item = plan_.items[task.item];
        constexpr int kTileBlocks = kTileTokens / kBlockSize;
        blocks_ = call_.block_tables + item.sequence * call_.max_blocks;
        kv_head_ = item.kv_head;
        position_ = task.first_tile * kTileBlocks;
        end_ = std::min((item.num_visible + kBlockSize - 1) / kBlockSize, task.last_tile * kTileBlocks);
    }

    const Call& call_;
    const Plan& plan_;
    int64_t next_task_;
    int64_t head_bytes_;
    const int32_t* blocks_ = nullptr;
    int kv_head_ = 0;
    int position_ = 0;
    int end_ = 0;
};

}  // namespace headrace
