"""The KV cache of the scripted shard: what would be read, token for token, if it were a real one.

What attention reads at a position depends on the token there and all before it. So a slot holds a digest of
these, or None when nothing good has been computed there. Whoever reads must find the digests of its own
tokens.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace_proto import shard_pb2 as pb


class Violation(Exception):
    """The router broke the contract."""


def digests_of(token_ids: Iterable[int], before: int = 0) -> list[int]:
    """One for each token; `before` is that of the token ahead of them."""
    chained = itertools.accumulate(
        token_ids, lambda d, t: zlib.crc32(t.to_bytes(4, "little"), d), initial=before
    )
    return list(chained)[1:]


@dataclass
class FakeSequence:
    """What a shard keeps of a sequence."""

    id: int
    new: pb.NewSequence
    token_ids: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    """Of the tokens; see `FakeCache`."""

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.digests += digests_of(token_ids, self.digests[-1] if self.digests else 0)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.new.num_prompt_tokens


class FakeCache:
    """Blocks 0 to `num_blocks - 1`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._slots: dict[int, list[int | None]] = {}
        """Of blocks that were written to."""

    def _block(self, block: int) -> list[int | None]:
        if not 0 <= block < self.num_blocks:
            raise Violation(f"block {block} of {self.num_blocks}")
        return self._slots.setdefault(block, [None] * self.block_size)

    def holds(self, blocks: Sequence[int], digests: Sequence[int], count: int) -> bool:
        """Whether the first `count` slots of the blocks hold the first `count` digests."""
        for index, start in enumerate(range(0, count, self.block_size)):
            wanted = digests[start : min(start + self.block_size, count)]
            if self._block(blocks[index])[: len(wanted)] != wanted:
                return False
        return True

    def write(self, blocks: Sequence[int], digests: Sequence[int | None], start: int) -> None:
        """Puts digests into the slots from `start` on."""
        for position, digest in enumerate(digests, start):
            index, offset = divmod(position, self.block_size)
            self._block(blocks[index])[offset] = digest

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """All at once. Raises `Violation` when a block is copied to twice, or both to and from."""
        if len(sources) != len(targets) or len(set(targets)) != len(targets) or set(sources) & set(targets):
            raise Violation(f"copies from {list(sources)} to {list(targets)}")
        for source, target in zip(sources, targets, strict=True):
            self._block(target)[:] = self._block(source)

    def compute(
        self,
        chunks: Sequence[tuple[FakeSequence, int]],
        sequences: Iterable[FakeSequence],
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """A step: copies, then each of `chunks` computes so many tokens. `sequences` are all who hold blocks.

        Raises `Violation` when somebody writes where another one may read, or reads what is not its own: only
        what was there before the step counts, and what each has written itself.
        """
        written = list(targets)
        for sequence, num_tokens in chunks:
            start, end = sequence.num_computed, sequence.num_computed + num_tokens
            if not start < end <= len(sequence.token_ids):
                raise Violation(
                    f"sequence {sequence.id}: tokens {start} to {end} of {len(sequence.token_ids)}"
                )
            if end > len(sequence.blocks) * self.block_size:
                raise Violation(f"sequence {sequence.id}: {end} tokens in {len(sequence.blocks)} blocks")
            written += sequence.blocks[start // self.block_size : -(-end // self.block_size)]
        holders = Counter(itertools.chain.from_iterable(sequence.blocks for sequence in sequences))
        for block in written:
            if holders[block] != 1:
                raise Violation(f"block {block} is written to and held {holders[block]} times")
        self.copy(sources, targets)
        for sequence, _ in chunks:
            if not self.holds(sequence.blocks, sequence.digests, sequence.num_computed):
                raise Violation(f"sequence {sequence.id}: its KV is not what it was")
        for sequence, num_tokens in chunks:
            start = sequence.num_computed
            self.write(sequence.blocks, sequence.digests[start : start + num_tokens], start)
