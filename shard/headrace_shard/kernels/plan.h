// Plan: how one call is cut into tasks for the threads.
//
// Knows shapes and costs; touches no tensor but the three that describe the step. A plan changes who computes
// what and when, never a result (see tiles.h).
#pragma once

#include <algorithm>
#include <vector>

#include "computations.h"
#include "tiles.h"

namespace headrace {

constexpr int kTaskRows = 288;  // query rows that find a tile in the processor's cache
constexpr int kTileRows = 6;    // rows that cost as much as to bring a tile in

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

    // Maximum, sum and values of each partial row.
    int64_t partial_bytes(int head_dim) const { return num_partials * (2 + padded(head_dim)) * 4; }
};

// Tasks in the order of `share_stretches`: everybody's own ones in turn, as cards are dealt.
inline std::vector<Task> dealt(const std::vector<Task>& tasks, int num_threads) {
    std::vector<Task> stretches;
    for (int thread = 0; thread < num_threads; ++thread)
        for (size_t i = thread; i < tasks.size(); i += num_threads) stretches.push_back(tasks[i]);
    return stretches;
}

// Cuts the step into tasks. Items that would keep one thread busy while others have nothing left are cut
// along the context as well; that costs a second pass and changes no result.
inline Plan make_plan(const Attend& call, int num_threads) {
    Plan plan;
    int group = call.num_heads / call.num_kv_heads;
    int task_tokens = std::max(1, kTaskRows / group);
    int64_t total_cost = 0;
    for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
        int num_tokens = call.query_starts[sequence + 1] - call.query_starts[sequence];
        int num_cached = call.context_lens[sequence] - num_tokens;
        // In parts of like size: a small rest would read its tiles for a few rows.
        int num_parts = (num_tokens + task_tokens - 1) / task_tokens;
        for (int part = 0; part < num_parts; ++part) {
            int first = (int)((int64_t)num_tokens * part / num_parts);
            int count = (int)((int64_t)num_tokens * (part + 1) / num_parts) - first;
            for (int kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
                plan.items.push_back({sequence, kv_head, first, count, num_cached + first + count, -1});
                total_cost += (count * group + kTileRows) * (int64_t)plan.items.back().num_visible;
            }
        }
    }
    // An item is cut when it is more than half of what one thread has to do, and then into small tasks: once
    // tiles have to be merged, a cut more costs next to nothing and the threads end closer together.
    int64_t large_cost = std::max<int64_t>(total_cost / (2 * num_threads), 1);
    int64_t small_cost = std::max<int64_t>(total_cost / (16 * num_threads), 1);
    for (int index = 0; index < (int)plan.items.size(); ++index) {
        Item& item = plan.items[index];
        int num_rows = item.num_tokens * group, num_tiles = item.num_tiles();
        int64_t token_cost = num_rows + kTileRows, cost = token_cost * item.num_visible;
        int num_tasks = 1;
        if (num_threads > 1 && num_tiles > 1 && cost > large_cost) {
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
    plan.tasks = dealt(plan.tasks, num_threads);
    return plan;
}

}  // namespace headrace
