"""The blocks of the KV cache: which are free, which a sequence holds, and which are kept for later ones.

    FREE ──grow──► HELD ──commit, close──► CACHED ──open──► HELD
      ▲             │                        │
      └close, discard────────grow────────────┘

FREE    never used, or given back: holds nothing of worth
HELD    in the `blocks` of at least one open holding; several share what they found in the cache
CACHED  computed, found by whoever has the same prefix, held by nobody: `grow` takes it when none is free

Every block is in exactly one of these states. Knows no sequence, no step and no device. A shard executes
steps in their order, so a block may change hands here while an earlier step still writes into it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_router.scheduling.prefix_cache import Claim, PrefixCache


@dataclass(slots=True, kw_only=True, eq=False)
class Holding(Claim):
    """The blocks of one sequence, in the order of its tokens: `blocks`, which only `KVBlocks` changes."""

    num_shared: int = 0
    """Leading blocks that were found in the cache at `open`."""


class KVBlocks:
    """Blocks 0 to `num_blocks - 1` of `block_size` tokens each, and the prefixes that are in them."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        """Blocks that left the cache because others were needed, since the start."""
        # A stack: what was given back last is taken first, while the processor's caches may know it.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()
        self.prefix_caching = prefix_caching
        """Whether anything is ever cached."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Computed blocks that nobody holds."""
        return self._cache.num_unlocked

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - self._cache.num_unlocked

    @property
    def num_available(self) -> int:
        """What `grow` can give."""
        return len(self._free) + self._cache.num_unlocked

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, namespace: str, keys: list[bytes], max_blocks: int) -> int:
        """How many of the first `max_blocks` blocks `open` would find. Changes nothing, not even what is
        evicted first."""
        return self._cache.match(namespace, keys, max_blocks)

    def open(self, namespace: str, keys: list[bytes], max_blocks: int) -> Holding:
        """Holds the longest cached prefix of `keys`, at most `max_blocks` blocks: leave out the block that
        the last token is in, which has to be computed for the next one to be sampled."""
        holding = Holding(namespace=namespace)
        self._cache.claim(holding, keys, max_blocks)
        holding.num_shared = len(holding.blocks)
        return holding

    def grow(self, holding: Holding, count: int) -> list[int]:
        """Appends so many blocks and gives them; takes free ones while there are any, then evicts.

        Raises `ValueError` when fewer are available: the scheduler looks first.
        """
        free = self._free
        if count > len(free):
            self._evict(count - len(free))
        if count <= 0:
            return []
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        holding.blocks += taken
        return taken

    def _evict(self, count: int) -> None:
        if count > self._cache.num_unlocked:
            raise ValueError(
                f"{count + len(self._free)} blocks wanted, {len(self._free)} are free and "
                f"{self._cache.num_unlocked} can be evicted"
            )
        self._free += self._cache.evict(count)
        self.num_evicted += count

    def commit(self, holding: Holding, keys: list[bytes], num_blocks: int) -> None:
        """The first `num_blocks` blocks are computed for good, by steps that were answered: they enter the
        cache under their keys, and whoever opens the same prefix shares them.

        `keys` begins with the keys of all earlier calls for this holding, `open` included; what was committed
        before costs nothing. Raises `ValueError` when there are fewer blocks or keys.
        """
        if num_blocks > min(len(keys), len(holding.blocks)):
            raise ValueError(
                f"{num_blocks} blocks to be committed, {len(holding.blocks)} are held, {len(keys)} have keys"
            )
        if self.prefix_caching:
            self._free += self._cache.extend(holding, keys, num_blocks)

    def close(self, holding: Holding) -> None:
        """Empties a holding: what was committed stays cached, the other blocks become free."""
        outside = self._cache.release(holding)
        outside.reverse()
        self._free += outside

    def discard(self, holding: Holding) -> None:
        """Empties a holding whose KV may be wrong: whatever nobody else holds of it becomes free, what it
        found in the cache included, and with it all that is cached upon it."""
        outside = self._cache.forget(holding)
        outside.reverse()
        self._free += outside

    def clear(self) -> None:
        """The device has lost what the blocks held: nothing is cached any more.

        Raises `ValueError` while a holding has blocks.
        """
        if self.num_held:
            raise ValueError(f"{self.num_held} blocks are still held: close their holdings first")
        self._free += self._cache.evict(self._cache.num_unlocked)


def block_keys(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """A key for each whole block: its token ids as unsigned 32-bit numbers. What follows the last whole block
    has none."""
    data = array("I", token_ids).tobytes()
    num_bytes = block_size * 4
    return [data[start : start + num_bytes] for start in range(0, len(data) - num_bytes + 1, num_bytes)]
