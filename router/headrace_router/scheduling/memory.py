"""Which blocks each sequence holds: found in the cache, taken, confirmed, given back. Knows no step.

A sequence's blocks enter the cache when steps that computed them were answered, never before: those of its
prefill with each answer, those of what it generated when it ends or is preempted; they leave it when it
fails. The last token it has generated is in no block yet: its KV is computed by the step that follows.
"""

from headrace_router.scheduling.blocks import KVBlocks, block_keys
from headrace_router.scheduling.request import Request, Sequence, Status


class Memory:
    """Moves blocks between `KVBlocks` and sequences."""

    def __init__(self, blocks: KVBlocks) -> None:
        self.blocks = blocks
        self._shares = blocks.prefix_caching
        self.block_size = blocks.block_size
        self._num_slots = 0
        self._num_filled = 0
        self._siblings: dict[tuple[int, str], Sequence] = {}
        """A running sequence whose prompt is confirmed, for each prompt that has one."""

    @property
    def num_unused_slots(self) -> int:
        """Token slots in blocks that sequences hold and no step has filled."""
        return self._num_slots - self._num_filled

    def filled(self, num_tokens: int) -> None:
        """A step fills so many slots."""
        self._num_filled += num_tokens

    def left(self, sequence: Sequence, num_tokens: int) -> None:
        """A step has left so many tokens of a running sequence's prefill, and the steps behind it will."""
        self._num_filled -= num_tokens
        sequence.num_computed -= num_tokens
        sequence.num_ready = 0

    # ---- looking for a prefix

    def reusable_blocks(self, sequence: Sequence) -> int:
        """The most leading blocks that a waiting sequence may find instead of computing them. Its last token
        has to be computed, so that the next one can be sampled; and log-probabilities need every position."""
        if not self._shares or sequence.wants_prompt_logprobs:
            return 0
        return (sequence.num_tokens - 1) // self.block_size

    def keys_of(self, sequence: Sequence) -> list[bytes]:
        """The keys of all its whole blocks of known tokens; none if nothing is shared."""
        keys, block_size = sequence.keys, self.block_size
        if self._shares and len(keys) < sequence.num_tokens // block_size:
            prompt_ids, start = sequence.request.prompt_ids, len(keys) * block_size
            if start >= len(prompt_ids):
                keys += block_keys(sequence.output_ids[start - len(prompt_ids) :], block_size)
            else:
                keys += block_keys([*prompt_ids[start:], *sequence.output_ids], block_size)
        return keys

    def lookup(self, sequence: Sequence) -> int:
        """Leading blocks of a waiting sequence that are computed and cached."""
        max_blocks = self.reusable_blocks(sequence)
        if not max_blocks:
            return 0
        return self.blocks.lookup(sequence.request.cache_salt, self.keys_of(sequence), max_blocks)

    # ---- a sequence's blocks

    def num_lacking(self, sequence: Sequence) -> int:
        """Blocks that an opened sequence needs for the rest of its prefill."""
        return self.blocks.num_for(sequence.num_prefill) - len(sequence.blocks)

    def open(self, sequence: Sequence, *, copies: bool = True) -> None:
        """A waiting sequence takes hold of what the cache has of it, as the first part of its prefill; with
        `copies` also of what a sibling has."""
        max_blocks, num_tokens = self.reusable_blocks(sequence), sequence.num_tokens
        keys = self.keys_of(sequence) if max_blocks else []
        holding = self.blocks.open(sequence.request.cache_salt, keys, max_blocks)
        num_shared = len(holding.blocks)
        sequence.holding, sequence.num_prefill = holding, num_tokens
        sequence.num_computed = sequence.num_confirmed = num_shared * self.block_size
        self._num_slots += sequence.num_computed
        self._num_filled += sequence.num_computed
        if copies and self._shares and num_shared == max_blocks and not sequence.output_ids:
            self._copy_sibling(sequence, num_shared)

    def _copy_sibling(self, sequence: Sequence, num_shared: int) -> None:
        """What the cache cannot give, the last part of a prompt that ends within a block, is copied."""
        request = sequence.request
        num_copied = len(request.prompt_ids) - 1 - sequence.num_computed
        sibling = self._siblings.get(_prompt_of(request))
        if num_copied and sibling is not None and not request.prompt_logprobs:
            sequence.copied_block = sibling.blocks[num_shared]
            sequence.num_computed += num_copied
            self._num_filled += num_copied

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Takes the blocks that `sequence` lacks to hold so many tokens; gives their number. Raises
        `ValueError` when there are fewer."""
        holding = sequence.holding
        if holding is None:
            raise ValueError(f"sequence {sequence.id} was not opened")
        num_new = self.blocks.num_for(num_tokens) - len(holding.blocks)
        if num_new <= 0:
            return 0
        self.blocks.grow(holding, num_new)
        self._num_slots += num_new * self.block_size
        return num_new

    def confirm(self, sequence: Sequence, num_tokens: int) -> None:
        """A step that computed the prefill of a running sequence so far was answered."""
        sequence.num_confirmed = num_tokens
        if self._shares and sequence.holding is not None:
            num_blocks = num_tokens // self.block_size
            self.blocks.commit(sequence.holding, self.keys_of(sequence), num_blocks)
            if num_tokens >= len(sequence.request.prompt_ids):
                self._siblings[_prompt_of(sequence.request)] = sequence

    def num_certain(self, sequence: Sequence) -> int:
        """Leading tokens of a sequence whose KV is in its blocks for certain."""
        if sequence.status is not Status.RUNNING:
            return 0
        if sequence.num_confirmed < sequence.num_prefill:
            return sequence.num_confirmed
        return max(sequence.num_confirmed, sequence.num_tokens - 1)

    def close(self, sequence: Sequence) -> None:
        """Gives up all its blocks. Those that are computed for certain stay in the cache."""
        holding = sequence.holding
        if holding is None:
            return
        if self._shares and (num_blocks := self.num_certain(sequence) // self.block_size):
            self.blocks.commit(holding, self.keys_of(sequence), num_blocks)
        self._let_go(sequence)
        self.blocks.close(holding)

    def discard(self, sequence: Sequence) -> None:
        """Gives up all its blocks, and what the cache has of a sequence that failed: its KV may be what is
        wrong, and whoever found it would fail as well. What others hold stays, for they compute with it
        already; if they fail, the last of them takes it along."""
        holding = sequence.holding
        if holding is not None:
            self._let_go(sequence)
        elif self._shares and sequence.admitted_at is not None:
            keys = self.keys_of(sequence)
            holding = self.blocks.open(sequence.request.cache_salt, keys, len(keys))
        if holding is not None:
            self.blocks.discard(holding)

    def _let_go(self, sequence: Sequence) -> None:
        """A sequence is about to lose its blocks."""
        prompt = _prompt_of(sequence.request)
        if self._siblings.get(prompt) is sequence:
            del self._siblings[prompt]
        self._num_slots -= len(sequence.blocks) * self.block_size
        self._num_filled -= sequence.num_computed
        sequence.holding = sequence.copied_block = None
        sequence.num_computed = sequence.num_confirmed = sequence.num_prefill = sequence.num_ready = 0


def _prompt_of(request: Request) -> tuple[int, str]:
    """Equal for requests whose prompt is the same object, which those of one asker are."""
    return id(request.prompt_ids), request.cache_salt
