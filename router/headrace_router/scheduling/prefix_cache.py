"""Which computed blocks are kept, and whose prefix they are: a radix tree over the keys of blocks.

A node is a stretch of blocks, each with its key; below it stand the continuations that were seen. One root
for each namespace; two namespaces never share. A node's blocks hold the KV of exactly the keys from the root
down to them: keys are compared whole, so nothing is ever taken for something else.

A holder's `Claim` is a path from the root; it locks every node on it and ends where a node ends (a node it
would end within is split). The locks of a node are thus those of its children and of the claims that end at
it, and never fewer than a child's. What nobody locks may be evicted: the least recently released first, from
the far end.

Whoever computes what is in the tree already has duplicates, because its sequence goes on with the blocks it
wrote. If nobody locks the tree's blocks, its own take their place. Otherwise the claim casts a *shadow* on
the node: it keeps its duplicates beside the tree, and when the last one that uses the tree's blocks leaves, a
shadow's duplicates take their place. So every locked block is one of a claim that locks it, and a holder
alone can always have all other blocks.

Knows nothing of free blocks: what leaves the tree is handed to the caller. Called when somebody who waits is
looked at, when a chunk of a prompt is answered, when somebody ends or is preempted, and when the free blocks
are used up; never for a mere decode. Whoever opens a prefix only to look at it and closes it again makes it
the most recently released. The tree is that of Zheng et al. 2024, "SGLang: Efficient Execution of Structured
Language Model Programs", which has neither shadows nor joins.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Optional


class _Node:
    """A stretch of at least one block; `keys` and `blocks` are of one length."""

    __slots__ = ("blocks", "children", "keys", "num_locks", "parent", "shadows")

    def __init__(
        self, parent: Optional["_Node"], keys: list[bytes], blocks: list[int], num_locks: int
    ) -> None:
        self.parent = parent
        """None for a root alone."""
        self.keys = keys
        self.blocks = blocks
        self.num_locks = num_locks
        """Claims whose paths lead through here, those in `shadows` included."""
        self.shadows: list[Claim] = []
        """Those of them that have duplicates of `blocks`. Never all of them."""
        self.children: dict[bytes, _Node] = {}
        """By their first keys."""


class _Root(_Node):
    """The empty prefix of a namespace; there only while it has children, and locked by nobody."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, [], [], 0)
        self.namespace = namespace


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """What one holder has of the tree."""

    namespace: str
    blocks: list[int] = field(default_factory=list)
    """All blocks of the holder, one for each key; the first `num_claimed` are in the tree, or have duplicates
    there."""
    num_claimed: int = 0
    node: _Node | None = None
    """Where its path ends; None when it is empty."""


class PrefixCache:
    """The tree, and the order in which it may be evicted."""

    def __init__(self) -> None:
        self.num_unlocked = 0
        """Blocks that nobody locks."""
        self._roots: dict[str, _Node] = {}
        self._unlocked: OrderedDict[_Node, None] = OrderedDict()
        """Nodes without locks, the least recently released first. A path is released from its end upwards, so
        that a node comes before its parent and the first of all has no children."""

    def match(self, namespace: str, keys: list[bytes], max_blocks: int) -> int:
        """Leading keys that are in the tree, at most `max_blocks`."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        return sum(num_equal for _, num_equal in _walk(root, keys, 0, min(max_blocks, len(keys))))

    def claim(self, claim: Claim, keys: list[bytes], max_blocks: int) -> None:
        """Gives an empty claim the blocks of all that `match` finds, and locks them."""
        root = self._roots.get(claim.namespace)
        if root is None:
            return
        for found, num_equal in _walk(root, keys, 0, min(max_blocks, len(keys))):
            node = _head(found, num_equal)
            self._lock(node)
            claim.blocks += node.blocks
            claim.node = node
        claim.num_claimed = len(claim.blocks)

    def extend(self, claim: Claim, keys: list[bytes], num_blocks: int) -> list[int]:
        """Puts the first `num_blocks` blocks of a claim into the tree. Gives the blocks that they replace."""
        position, replaced = claim.num_claimed, list[int]()
        if num_blocks <= position:
            return replaced
        node = claim.node or self._roots.get(claim.namespace)
        if node is None:
            node = self._roots[claim.namespace] = _Root(claim.namespace)
        for found, num_equal in _walk(node, keys, position, num_blocks):
            node = _head(found, num_equal)
            if node.num_locks:
                node.shadows.append(claim)
            else:
                replaced += node.blocks
                node.blocks = claim.blocks[position : position + num_equal]
            self._lock(node)
            position += num_equal
        if position < num_blocks:
            new_keys, new_blocks = keys[position:num_blocks], claim.blocks[position:num_blocks]
            # A claim alone at its end goes on in the same node, so that a prompt computed in small chunks, or
            # a conversation in many turns, is one stretch. A root has no lock.
            if node.num_locks == 1 and not node.children:
                node.keys += new_keys
                node.blocks += new_blocks
            else:
                child = _Node(node, new_keys, new_blocks, 1)
                node.children[new_keys[0]] = child
                node = child
        claim.node, claim.num_claimed = node, num_blocks
        return replaced

    def release(self, claim: Claim) -> list[int]:
        """Unlocks the path of a claim and gives those of its blocks that are not in the tree; empties it."""
        outside, stop = claim.blocks[claim.num_claimed :], claim.num_claimed
        node, released = claim.node, list[_Node]()
        while node is not None and node.parent is not None:
            start = stop - len(node.keys)
            node.num_locks -= 1
            if claim in node.shadows:
                node.shadows.remove(claim)
                outside += claim.blocks[start:stop]
            elif node.num_locks and node.num_locks == len(node.shadows):
                outside += node.blocks
                node.blocks = node.shadows.pop(0).blocks[start:stop]
            if not node.num_locks:
                if released and len(node.children) > 1:
                    self._join(released)
                    released = []
                released.append(node)
                self._unlocked[node] = None
                self.num_unlocked += len(node.blocks)
            node, stop = node.parent, start
        self._join(released)
        claim.blocks, claim.num_claimed, claim.node = [], 0, None
        return outside

    def forget(self, claim: Claim) -> list[int]:
        """Releases a claim and takes out of the tree whatever nobody else locks of its path, found there or
        put there, with all that was computed upon it. Gives these blocks too."""
        top, node = None, claim.node
        while node is not None and node.parent is not None and node.num_locks == 1:
            top, node = node, node.parent
        outside = self.release(claim)
        if top is None or node is None:
            return outside
        # The release may have joined nodes; the one that begins here is in their place.
        doomed = [node.children[top.keys[0]]]
        self._cut(doomed[0])
        num_outside = len(outside)
        while doomed:
            lost = doomed.pop()
            doomed += lost.children.values()
            lost.children = {}
            del self._unlocked[lost]
            outside += lost.blocks
        self.num_unlocked -= len(outside) - num_outside
        return outside

    def evict(self, num_blocks: int) -> list[int]:
        """Takes so many blocks out of the tree, at most `num_unlocked`."""
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            leaf = next(iter(self._unlocked))
            num_kept = max(len(leaf.blocks) - (num_blocks - len(evicted)), 0)
            evicted += leaf.blocks[num_kept:]
            if num_kept:
                del leaf.keys[num_kept:], leaf.blocks[num_kept:]
            else:
                del self._unlocked[leaf]
                self._cut(leaf)
        self.num_unlocked -= len(evicted)
        return evicted

    def _lock(self, node: _Node) -> None:
        if not node.num_locks:
            # One that was split off a moment ago is not among them.
            self._unlocked.pop(node, None)
            self.num_unlocked -= len(node.blocks)
        node.num_locks += 1

    def _cut(self, node: _Node) -> None:
        """Takes a node off its parent."""
        parent = node.parent
        if parent is None:
            raise ValueError("a root cannot leave the tree")
        del parent.children[node.keys[0]]
        if isinstance(parent, _Root) and not parent.children:
            # Else every salt that was ever sent would leave something behind.
            del self._roots[parent.namespace]

    def _join(self, nodes: list[_Node]) -> None:
        """Makes one node of a path, given from its end upwards, of which each but the first has one child.

        They were released together: what was used at different times stays apart, and is evicted apart.
        """
        if len(nodes) < 2:
            return
        end, top = nodes[0], nodes[-1]
        keys, blocks = list[bytes](), list[int]()
        for node in reversed(nodes):
            keys += node.keys
            blocks += node.blocks
        end.keys, end.blocks, end.parent = keys, blocks, top.parent
        if top.parent is not None:
            top.parent.children[keys[0]] = end
        for node in nodes[1:]:
            del self._unlocked[node]
            # Parent and child would keep each other alive until the garbage collector comes by.
            node.children = {}


def _walk(node: _Node, keys: list[bytes], start: int, stop: int) -> Iterator[tuple[_Node, int]]:
    """The nodes below `node` along `keys[start:stop]`, and how many leading keys of each agree, at least one.
    The caller may split a node that it was given."""
    while start < stop:
        child = node.children.get(keys[start])
        if child is None:
            return
        wanted = keys[start : min(start + len(child.keys), stop)]
        num_equal = next(compress(count(), map(ne, child.keys, wanted)), len(wanted))
        is_whole = num_equal == len(child.keys)
        yield child, num_equal
        if not is_whole:
            return
        node, start = child, start + num_equal


def _head(node: _Node, num_blocks: int) -> _Node:
    """The first blocks of a node as a node of their own. The rest stays the node it was: claims end there,
    and it keeps its place in the order of eviction. The caller locks the head, so that it needs no place."""
    if num_blocks == len(node.keys):
        return node
    head = _Node(node.parent, node.keys[:num_blocks], node.blocks[:num_blocks], node.num_locks)
    head.shadows = list(node.shadows)
    if head.parent is not None:
        head.parent.children[head.keys[0]] = head
    del node.keys[:num_blocks], node.blocks[:num_blocks]
    head.children[node.keys[0]] = node
    node.parent = head
    return head
