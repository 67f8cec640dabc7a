"""What must hold of a prefix cache's tree, whatever was done to it; and its contents as plain values."""

from collections.abc import Iterator, Sequence

from headrace_router.scheduling.prefix_cache import Claim, PrefixCache, _Node

Prefix = tuple[str, tuple[bytes, ...]]
"""(namespace, keys from the root on)."""


def nodes_of(cache: PrefixCache) -> Iterator[tuple[Prefix, _Node]]:
    """Every node but roots, with the prefix that ends where it ends; parents first."""
    stack: list[tuple[Prefix, _Node]] = [((namespace, ()), root) for namespace, root in cache._roots.items()]
    while stack:
        (namespace, keys), node = stack.pop()
        if node.parent is not None:
            yield (namespace, keys), node
        stack += [((namespace, keys + tuple(child.keys)), child) for child in node.children.values()]


def contents(cache: PrefixCache) -> dict[Prefix, int]:
    """The block of every prefix in the tree."""
    blocks: dict[Prefix, int] = {}
    for (namespace, keys), node in nodes_of(cache):
        start = len(keys) - len(node.keys)
        for number, block in enumerate(node.blocks, start + 1):
            blocks[namespace, keys[:number]] = block
    return blocks


def check_tree(cache: PrefixCache, claims: Sequence[Claim]) -> None:
    """Shape, locks, shadows and the order of eviction; `claims` are all that were not released."""
    paths: dict[_Node, list[Claim]] = {}
    for claim in claims:
        node, num_blocks = claim.node, 0
        while node is not None and node.parent is not None:
            paths.setdefault(node, []).append(claim)
            num_blocks += len(node.keys)
            node = node.parent
        assert num_blocks == claim.num_claimed
    for root in cache._roots.values():
        assert root.children
        assert (root.num_locks, root.keys, root.parent) == (0, [], None)
    order = {node: place for place, node in enumerate(cache._unlocked)}
    num_unlocked = 0
    for (_, keys), node in nodes_of(cache):
        assert node.parent is not None
        assert node.parent.children[node.keys[0]] is node
        assert len(node.keys) == len(node.blocks) > 0
        passing = paths.pop(node, [])
        assert node.num_locks == len(passing)
        assert (node in order) == (not passing)
        stop = len(keys)
        for claim in passing:
            own = claim.blocks[stop - len(node.keys) : stop]
            assert set(own).isdisjoint(node.blocks) if claim in node.shadows else own == node.blocks
        assert set(node.shadows) <= set(passing)
        assert len(node.shadows) == len(set(node.shadows)) < max(len(passing), 1)
        if not passing:
            num_unlocked += len(node.blocks)
            assert order[node] < order.get(node.parent, len(order))
    assert not paths, "a claim ends at a node that is not in the tree"
    assert num_unlocked == cache.num_unlocked
