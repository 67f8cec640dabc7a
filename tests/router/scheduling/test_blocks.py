"""KVBlocks: every block is free, held or cached, and holds what whoever shares it believes it holds."""

from itertools import product

import pytest
from headrace_router.scheduling.blocks import Holding, KVBlocks, block_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.router.scheduling.tree import Prefix, check_tree, contents

NUM_BLOCKS = 14
A, B, C, D = b"a", b"b", b"c", b"d"
ALL_KEYS = [(namespace, list(keys)) for namespace in ("", "salt") for keys in product([A, B], repeat=5)]


def compute(blocks: KVBlocks, keys: list[bytes], namespace: str = "", max_blocks: int = 99) -> Holding:
    """A holding with all of `keys` computed and committed."""
    holding = blocks.open(namespace, keys, max_blocks)
    blocks.grow(holding, len(keys) - len(holding.blocks))
    blocks.commit(holding, keys, len(keys))
    return holding


def counts(blocks: KVBlocks) -> tuple[int, int, int]:
    return blocks.num_free, blocks.num_held, blocks.num_cached


# ---- a life


def test_grows_by_the_lowest_first_and_refuses_more_than_there_are() -> None:
    blocks = KVBlocks(4, 16)
    holding = blocks.open("", [], 0)
    assert blocks.grow(holding, 3) == [0, 1, 2]
    assert blocks.grow(holding, 0) == []
    with pytest.raises(ValueError, match="2 blocks wanted, 1 are free and 0 can be evicted"):
        blocks.grow(holding, 2)
    assert holding.blocks == [0, 1, 2]
    assert counts(blocks) == (1, 3, 0)


def test_counts_blocks_for_tokens() -> None:
    blocks = KVBlocks(4, 16)
    assert [blocks.num_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_what_was_committed_is_found_and_shared_and_the_rest_is_free() -> None:
    blocks = KVBlocks(8, 16)
    first = blocks.open("", [A, B, C], 3)
    blocks.grow(first, 4)
    assert blocks.lookup("", [A, B, C], 3) == 0
    blocks.commit(first, [A, B, C], 2)
    assert [blocks.lookup("", [A, B, C], most) for most in (0, 1, 2, 3)] == [0, 1, 2, 2]
    second = blocks.open("", [A, B, D], 3)
    assert second.num_shared == 2
    assert second.blocks == first.blocks[:2]
    assert counts(blocks) == (4, 4, 0)
    blocks.close(first)
    assert counts(blocks) == (6, 2, 0)
    assert first.blocks == []
    blocks.close(second)
    blocks.close(second)
    assert counts(blocks) == (6, 0, 2)


def test_namespaces_never_share() -> None:
    blocks = KVBlocks(8, 16)
    blocks.close(compute(blocks, [A, B], "one"))
    assert [blocks.lookup(namespace, [A, B], 2) for namespace in ("one", "two", "")] == [2, 0, 0]
    blocks.close(compute(blocks, [A, B], "two"))
    assert counts(blocks) == (4, 0, 4)


def test_commit_refuses_blocks_that_are_not_held_or_have_no_key() -> None:
    blocks = KVBlocks(8, 16)
    holding = blocks.open("", [], 0)
    blocks.grow(holding, 2)
    with pytest.raises(ValueError, match="3 blocks to be committed, 2 are held, 3 have keys"):
        blocks.commit(holding, [A, B, C], 3)
    with pytest.raises(ValueError, match="2 blocks to be committed, 2 are held, 1 have keys"):
        blocks.commit(holding, [A], 2)
    assert blocks.lookup("", [A, B], 2) == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = KVBlocks(8, 16, prefix_caching=False)
    holding = compute(blocks, [A, B])
    assert blocks.lookup("", [A, B], 2) == 0
    blocks.close(holding)
    assert counts(blocks) == (8, 0, 0)


def test_clear_forgets_what_is_cached_when_nobody_holds_anything() -> None:
    blocks = KVBlocks(8, 16)
    holding = compute(blocks, [A, B])
    with pytest.raises(ValueError, match="2 blocks are still held"):
        blocks.clear()
    blocks.close(holding)
    blocks.clear()
    assert counts(blocks) == (8, 0, 0)
    assert blocks.lookup("", [A, B], 2) == 0
    assert blocks.num_evicted == 0


# ---- eviction


def test_free_blocks_go_first_then_the_least_recently_closed_from_its_end() -> None:
    blocks = KVBlocks(7, 16)
    old, new = compute(blocks, [A, B, C]), compute(blocks, [D, C, B])
    blocks.close(old)
    blocks.close(new)
    holding = blocks.open("", [], 0)
    blocks.grow(holding, 1)
    assert blocks.num_evicted == 0
    blocks.grow(holding, 1)
    assert [blocks.lookup("", keys, 3) for keys in ([A, B, C], [D, C, B])] == [2, 3]
    blocks.close(blocks.open("", [A], 1))
    blocks.grow(holding, 3)
    # [A, B] was never opened whole again, so B went first; then all of [D, C, B] is older than A.
    assert [blocks.lookup("", keys, 3) for keys in ([A, B, C], [D, C, B])] == [1, 1]
    assert blocks.num_evicted == 4


def test_what_is_held_is_not_evicted_and_what_hangs_on_it_is() -> None:
    blocks = KVBlocks(4, 16)
    blocks.close(compute(blocks, [A, B, C, D]))
    holding = blocks.open("", [A, B], 2)
    shared = list(holding.blocks)
    assert blocks.num_available == 2
    blocks.grow(holding, 2)
    assert holding.blocks[:2] == shared
    assert blocks.lookup("", [A, B, C, D], 4) == 2
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free and 0 can be evicted"):
        blocks.grow(holding, 1)


# ---- duplicates


def test_duplicates_of_what_nobody_holds_replace_it_at_once() -> None:
    blocks = KVBlocks(4, 16)
    blocks.close(compute(blocks, [A, B]))
    holding = compute(blocks, [A, B, C], max_blocks=0)
    assert counts(blocks) == (1, 3, 0)
    other = blocks.open("", [A, B, C], 3)
    assert other.blocks == holding.blocks


def test_duplicates_of_what_another_holds_live_on_when_it_leaves() -> None:
    blocks = KVBlocks(8, 16)
    first, second = compute(blocks, [A, B]), compute(blocks, [A, B, C], max_blocks=0)
    assert counts(blocks) == (3, 5, 0)
    third = blocks.open("", [A, B, C], 3)
    assert third.blocks == [*first.blocks, second.blocks[2]]
    blocks.commit(second, [A, B, C], 3)
    blocks.close(first)
    blocks.close(third)
    assert counts(blocks) == (5, 3, 0)
    assert blocks.open("", [A, B, C], 3).blocks == second.blocks


def test_duplicates_become_free_when_their_holder_leaves_first() -> None:
    blocks = KVBlocks(8, 16)
    first, second = compute(blocks, [A, B]), compute(blocks, [A, B, C], max_blocks=0)
    blocks.close(second)
    # C stays, cached behind the blocks of the first.
    assert counts(blocks) == (5, 2, 1)
    blocks.close(first)
    assert counts(blocks) == (5, 0, 3)
    assert blocks.lookup("", [A, B, C], 3) == 3


# ---- keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_keys_are_those_of_whole_blocks_and_tell_all_their_tokens(token_ids: list[int], size: int) -> None:
    keys = block_keys(token_ids, size)
    assert len(keys) == len(token_ids) // size
    told = [
        int.from_bytes(key[start : start + 4], "little") for key in keys for start in range(0, size * 4, 4)
    ]
    assert told == token_ids[: len(told)]


# ---- anything, in any order


class Model(RuleBasedStateMachine):
    """Drives `KVBlocks` beside a set of prefixes and their times, which know nothing of trees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = KVBlocks(NUM_BLOCKS, 1)
        self.holdings: list[tuple[Holding, list[bytes]]] = []
        self.cached: dict[Prefix, int] = {}
        """Every prefix in the cache, with the time at which it was last given up."""
        self.computed: dict[int, Prefix] = {}
        """What each block holds that was committed."""
        self.time = 0

    def held(self) -> set[Prefix]:
        return {
            (holding.namespace, tuple(keys[:number]))
            for holding, keys in self.holdings
            for number in range(1, holding.num_claimed + 1)
        }

    def match(self, namespace: str, keys: list[bytes]) -> int:
        """The longest common prefix, the long way."""
        return sum((namespace, tuple(keys[:number])) in self.cached for number in range(1, len(keys) + 1))

    @rule(
        namespace=st.sampled_from(["", "salt"]),
        keys=st.lists(st.sampled_from([A, B]), max_size=7),
        max_blocks=st.integers(0, 7),
    )
    def open(self, namespace: str, keys: list[bytes], max_blocks: int) -> None:
        expected = min(self.match(namespace, keys), max_blocks)
        assert self.blocks.lookup(namespace, keys, max_blocks) == expected
        holding = self.blocks.open(namespace, keys, max_blocks)
        assert holding.num_shared == len(holding.blocks) == expected
        for number, block in enumerate(holding.blocks, 1):
            assert self.computed[block] == (namespace, tuple(keys[:number]))
        self.holdings.append((holding, keys))

    @rule(
        namespace=st.sampled_from(["", "salt"]),
        keys=st.lists(st.sampled_from([A, B]), min_size=2, max_size=5),
        is_closed=st.booleans(),
    )
    def compute(self, namespace: str, keys: list[bytes], is_closed: bool) -> None:
        if len(keys) <= self.blocks.num_available:
            self.open(namespace, keys, len(keys) - 1)
            self.grow(-1, min(len(keys) - len(self.holdings[-1][0].blocks), self.blocks.num_available))
            self.commit(-1, len(keys), [])
            if is_closed:
                self.close(-1)

    @precondition(lambda self: self.holdings)
    @rule(which=st.integers(0, 99), count=st.integers(0, 6))
    def grow(self, which: int, count: int) -> None:
        holding, _ = self.holdings[which % len(self.holdings)]
        if count > self.blocks.num_available:
            with pytest.raises(ValueError, match="blocks wanted"):
                self.blocks.grow(holding, count)
            return
        self.evict(count - self.blocks.num_free)
        before = list(holding.blocks)
        new = self.blocks.grow(holding, count)
        assert holding.blocks == before + new
        for block in new:
            self.computed.pop(block, None)

    def evict(self, count: int) -> None:
        for _ in range(count):
            parents = {(namespace, keys[:-1]) for namespace, keys in self.cached}
            leaves = [prefix for prefix in self.cached.keys() - self.held() if prefix not in parents]
            del self.cached[min(leaves, key=self.cached.__getitem__)]

    @precondition(lambda self: self.holdings)
    @rule(
        which=st.integers(0, 99), count=st.integers(0, 7), more=st.lists(st.sampled_from([A, B]), max_size=3)
    )
    def commit(self, which: int, count: int, more: list[bytes]) -> None:
        holding, keys = self.holdings[which % len(self.holdings)]
        keys += more
        count = min(count, len(keys), len(holding.blocks))
        for number in range(holding.num_claimed + 1, count + 1):
            prefix = holding.namespace, tuple(keys[:number])
            self.cached[prefix] = self.time
            self.computed[holding.blocks[number - 1]] = prefix
        self.blocks.commit(holding, list(keys), count)
        assert self.blocks.lookup(holding.namespace, keys, count) == count

    @precondition(lambda self: self.holdings)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        before, self.time = self.held(), self.time + 1
        holding, _ = self.holdings.pop(which % len(self.holdings))
        self.blocks.close(holding)
        assert holding.blocks == []
        self.cached |= dict.fromkeys(before - self.held(), self.time)

    @precondition(lambda self: self.holdings)
    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        before, self.time = self.held(), self.time + 1
        holding, _ = self.holdings.pop(which % len(self.holdings))
        self.blocks.discard(holding)
        assert holding.blocks == []
        lost = before - self.held()
        for namespace, keys in list(self.cached):
            if any((namespace, keys[:number]) in lost for number in range(1, len(keys) + 1)):
                del self.cached[namespace, keys]

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        cache = self.blocks._cache
        check_tree(cache, [holding for holding, _ in self.holdings])
        in_tree, held_prefixes = contents(cache), self.held()
        assert in_tree.keys() == self.cached.keys()
        assert all(self.computed[block] == prefix for prefix, block in in_tree.items())
        for namespace, keys in ALL_KEYS:
            assert self.blocks.lookup(namespace, keys, 5) == self.match(namespace, keys)
        free = self.blocks._free
        held = {block for holding, _ in self.holdings for block in holding.blocks}
        cached = {block for prefix, block in in_tree.items() if prefix not in held_prefixes}
        assert sorted([*free, *held, *cached]) == list(range(NUM_BLOCKS))
        assert counts(self.blocks) == (len(free), len(held), len(cached))

    def teardown(self) -> None:
        """A holder alone can have all that is not its own; then nothing is left of anybody."""
        while len(self.holdings) > 1:
            self.close(0)
        for holding, _ in self.holdings:
            assert self.blocks.num_available == NUM_BLOCKS - len(holding.blocks)
            self.blocks.grow(holding, self.blocks.num_available)
            assert self.blocks.num_held == len(set(holding.blocks)) == NUM_BLOCKS
            self.blocks.close(holding)
        assert self.blocks.num_held == 0
        self.blocks.grow(self.blocks.open("", [], 0), NUM_BLOCKS)
        assert not self.blocks._cache._roots
        super().teardown()


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestModel = Model.TestCase
