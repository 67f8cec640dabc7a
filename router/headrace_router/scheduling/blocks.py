"""The pool of KV blocks: which are free. Who holds the others is written in the sequences.

A block is FREE (in the pool) or HELD (in exactly one sequence's `blocks`); `take` and `give` move it.
"""


class BlockPool:
    """Blocks 0 to `num_blocks - 1` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: what was given back last is taken first, while the processor's caches may know it.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """So many free blocks. Raises `ValueError` when there are fewer: the scheduler looks first."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def give(self, blocks: list[int]) -> None:
        """Blocks come back; their holder has forgotten them."""
        self._free.extend(reversed(blocks))
