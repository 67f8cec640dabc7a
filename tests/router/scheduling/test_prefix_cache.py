"""PrefixCache: how its tree grows, splits, joins and shrinks. `test_blocks.py` tests what it answers."""

import gc

from headrace_router.scheduling.prefix_cache import Claim, PrefixCache, _Node, _Root

from tests.router.scheduling.tree import check_tree, nodes_of


def keys_of(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


class Tree:
    """A cache whose blocks are numbered as they come."""

    def __init__(self) -> None:
        self.cache = PrefixCache()
        self.claims: list[Claim] = []
        self.num_blocks = 0

    def open(self, text: str, max_blocks: int = 99, namespace: str = "") -> Claim:
        claim = Claim(namespace=namespace)
        self.cache.claim(claim, keys_of(text), max_blocks)
        self.claims.append(claim)
        self.check()
        return claim

    def extend(self, claim: Claim, text: str) -> list[int]:
        """Commits as many blocks as `text` has letters; gives the blocks that were replaced."""
        missing = len(text) - len(claim.blocks)
        claim.blocks += range(self.num_blocks, self.num_blocks + missing)
        self.num_blocks += max(missing, 0)
        replaced = self.cache.extend(claim, keys_of(text), len(text))
        self.check()
        return replaced

    def close(self, claim: Claim) -> list[int]:
        self.claims.remove(claim)
        outside = self.cache.release(claim)
        self.check()
        return outside

    def forget(self, claim: Claim) -> list[int]:
        self.claims.remove(claim)
        outside = self.cache.forget(claim)
        self.check()
        return outside

    def keep(self, text: str, namespace: str = "") -> None:
        claim = self.open(text, namespace=namespace)
        self.extend(claim, text)
        self.close(claim)

    def evict(self, count: int) -> None:
        assert len(set(self.cache.evict(count))) == count
        self.check()

    def check(self) -> None:
        check_tree(self.cache, self.claims)

    @property
    def shape(self) -> dict[str, str]:
        """The stretch of every node, by the whole prefix that ends there."""
        return {
            b"".join(keys).decode(): b"".join(node.keys).decode() for (_, keys), node in nodes_of(self.cache)
        }


# ---- growing


def test_a_prompt_in_small_chunks_is_one_stretch() -> None:
    tree = Tree()
    claim = tree.open("abcdefgh")
    for length in range(1, 9):
        tree.extend(claim, "abcdefgh"[:length])
    assert tree.shape == {"abcdefgh": "abcdefgh"}


def test_a_conversation_of_many_turns_is_one_stretch() -> None:
    tree = Tree()
    for length in range(1, 9):
        tree.keep("abcdefgh"[:length])
    assert tree.shape == {"abcdefgh": "abcdefgh"}


def test_one_who_goes_on_where_another_ends_does_not_lengthen_what_the_other_holds() -> None:
    tree = Tree()
    first = tree.open("ab")
    tree.extend(first, "ab")
    second = tree.open("abcd")
    tree.extend(second, "abc")
    tree.extend(second, "abcd")
    assert tree.shape == {"ab": "ab", "abcd": "cd"}
    tree.close(second)
    assert tree.cache.num_unlocked == 2


def test_keys_that_come_later_continue_those_that_came_before() -> None:
    tree = Tree()
    tree.keep("abx")
    claim = tree.open("ab", max_blocks=1)
    for text in ("ab", "abc", "abcd"):
        assert len(tree.extend(claim, text)) == (text == "ab")
    assert tree.extend(claim, "abc") == []
    assert tree.shape == {"ab": "b", "a": "a", "abx": "x", "abcd": "cd"}


# ---- splitting and joining


def test_a_split_above_what_is_locked_keeps_both_locked() -> None:
    tree = Tree()
    long = tree.open("abcd")
    tree.extend(long, "abcd")
    short = tree.open("ab")
    assert tree.shape == {"ab": "ab", "abcd": "cd"}
    assert short.blocks == long.blocks[:2]
    tree.extend(long, "abcde")
    assert tree.close(short) == []
    assert tree.cache.num_unlocked == 0
    assert tree.close(long) == []
    assert tree.cache.num_unlocked == 5
    # Both parts were given up at once, so they are one again.
    assert tree.shape == {"abcde": "abcde"}


def test_a_split_under_a_shadow_keeps_the_shadow_on_both_parts() -> None:
    tree = Tree()
    first, second = tree.open("abcd"), tree.open("abcd")
    tree.extend(first, "abcd")
    tree.extend(second, "abcde")
    third = tree.open("ab")
    own, shared = list(second.blocks), list(first.blocks)
    assert tree.close(first) == shared[2:]
    assert third.blocks == shared[:2]
    assert tree.close(third) == shared[:2]
    assert tree.cache.num_unlocked == 0
    assert tree.open("abcde").blocks == own


def test_what_was_used_at_different_times_stays_apart() -> None:
    tree = Tree()
    tree.keep("abcd")
    tree.close(tree.open("ab"))
    assert tree.shape == {"ab": "ab", "abcd": "cd"}
    tree.close(tree.open("abcd"))
    assert tree.shape == {"abcd": "abcd"}


def test_a_fork_is_not_joined() -> None:
    tree = Tree()
    tree.keep("abcd")
    tree.keep("abxy")
    tree.close(tree.open("abcd"))
    assert tree.shape == {"ab": "ab", "abcd": "cd", "abxy": "xy"}


def test_the_ends_below_a_join_hang_on_what_became_of_it() -> None:
    tree = Tree()
    tree.keep("abcd")
    tree.keep("abce")
    tree.close(tree.open("a"))
    assert tree.shape == {"a": "a", "abc": "bc", "abcd": "d", "abce": "e"}
    tree.close(tree.open("abc"))
    assert tree.shape == {"abc": "abc", "abcd": "d", "abce": "e"}
    assert tree.cache.match("", keys_of("abce"), 4) == 4


def test_a_way_that_leaves_a_stretch_within_it_does_not_come_back_below_it() -> None:
    tree = Tree()
    tree.keep("abcd")
    tree.keep("abce")
    assert tree.shape == {"abc": "abc", "abcd": "d", "abce": "e"}
    assert [tree.cache.match("", keys_of(text), 9) for text in ("abd", "ade", "abcex")] == [2, 1, 4]
    tree.keep("ade")
    assert tree.shape == {"a": "a", "abc": "bc", "abcd": "d", "abce": "e", "ade": "de"}


# ---- duplicates


def test_commits_behind_duplicates_go_on_in_one_stretch() -> None:
    tree = Tree()
    first = tree.open("abc")
    second = tree.open("abc")
    tree.extend(first, "abc")
    for text in ("a", "ab", "abx", "abxy", "abxyz"):
        assert tree.extend(second, text) == []
    assert tree.shape == {"a": "a", "ab": "b", "abc": "c", "abxyz": "xyz"}
    own = list(second.blocks)
    assert tree.close(second) == own[:2][::-1]


def test_of_several_duplicates_the_oldest_takes_the_place() -> None:
    tree = Tree()
    claims = [tree.open("ab") for _ in range(3)]
    for claim in claims:
        tree.extend(claim, "ab")
    own = [list(claim.blocks) for claim in claims]
    assert tree.close(claims[0]) == own[0]
    assert tree.open("ab").blocks == own[1]
    assert tree.close(claims[2]) == own[2]


def test_a_prefix_that_was_evicted_meanwhile_is_put_back() -> None:
    tree = Tree()
    tree.keep("abc")
    claim = tree.open("abc", max_blocks=1)
    tree.evict(2)
    assert tree.extend(claim, "abc") == []
    assert tree.shape == {"abc": "abc"}


# ---- shrinking


def test_a_leaf_is_trimmed_from_its_end_and_then_its_parent_is_one() -> None:
    tree = Tree()
    tree.keep("abcd")
    tree.close(tree.open("ab"))
    shapes = []
    for _ in range(4):
        tree.evict(1)
        shapes.append(tree.shape)
    assert shapes == [{"ab": "ab", "abc": "c"}, {"ab": "ab"}, {"a": "a"}, {}]


def test_what_one_holder_alone_locks_is_forgotten_with_all_upon_it() -> None:
    tree = Tree()
    tree.keep("abx")
    claim = tree.open("abcd")
    tree.extend(claim, "abcd")
    tree.keep("abcdef")
    tree.keep("abcz")
    other = tree.open("ab", max_blocks=1)
    assert sorted(tree.forget(claim)) == [1, 2, 3, 4, 5, 6, 7]
    assert tree.shape == {"a": "a"}
    assert tree.forget(other) == [0]
    assert not tree.cache._roots
    assert tree.forget(tree.open("abc")) == []


def test_who_forgets_leaves_duplicates_to_those_who_have_them() -> None:
    tree = Tree()
    claims = [tree.open("abc"), tree.open("abc")]
    for claim in claims:
        tree.extend(claim, "abc")
    assert tree.forget(claims[0]) == [0, 1, 2]
    assert tree.open("abc").blocks == claims[1].blocks == [3, 4, 5]


def test_many_namespaces_leave_nothing_behind() -> None:
    tree = Tree()
    for number in range(100):
        tree.keep("ab", namespace=f"salt {number}")
        tree.evict(tree.cache.num_unlocked)
        assert not tree.cache._roots
    tree.close(tree.open("ab", namespace="another"))
    claim = tree.open("ab", namespace="another")
    tree.extend(claim, "")
    assert not tree.cache._roots


def test_a_claim_on_a_namespace_that_vanished_meanwhile_begins_it_anew() -> None:
    tree = Tree()
    tree.keep("ab")
    claim = tree.open("xyz")
    tree.evict(2)
    tree.extend(claim, "xyz")
    assert tree.shape == {"xyz": "xyz"}


def test_nodes_are_gone_without_the_garbage_collector() -> None:
    def num_nodes() -> int:
        return sum(type(thing) in (_Node, _Root) for thing in gc.get_objects())

    tree = Tree()
    gc.collect()
    gc.disable()
    try:
        before = num_nodes()
        tree.keep("abcd")
        for text in ("abc", "ab", "a"):
            tree.close(tree.open(text))
        assert num_nodes() == before + 5
        tree.close(tree.open("abcd"))
        assert num_nodes() == before + 2
        tree.evict(4)
        assert num_nodes() == before
        tree.keep("abcd")
        for text in ("abc", "ab", "a"):
            tree.close(tree.open(text))
        claim = tree.open("abc")
        tree.forget(claim)
        assert num_nodes() == before
    finally:
        gc.enable()
