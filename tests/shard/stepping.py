"""Drives a network or an attention backend without engine or router: hand-made blocks and inputs.

Blocks are dealt out shuffled, so that no sequence lies in the cache in one piece or in order.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from headrace_shard.inputs import ForwardInputs
from headrace_shard.models import CausalLM
from torch import Tensor


@dataclass
class Paged:
    """Some sequences and the blocks they hold."""

    block_size: int
    num_blocks: int
    seed: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_computed: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def add(self, name: str, tokens: list[int]) -> None:
        """A new sequence with nothing computed."""
        self.tokens[name], self.num_computed[name], self.blocks[name] = list(tokens), 0, []

    def drop(self, name: str) -> None:
        """Forget a sequence; its blocks keep what they hold and may go to others."""
        self.free = self.blocks.pop(name) + self.free
        del self.tokens[name], self.num_computed[name]

    def inputs(self, step: dict[str, int]) -> ForwardInputs:
        """Inputs for a step {sequence: number of tokens}, which count as computed from now on."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lens: list[int] = []
        for name, count in step.items():
            start, end = self.num_computed[name], self.num_computed[name] + count
            while len(self.blocks[name]) * self.block_size < end:
                self.blocks[name].append(self.free.pop())
            ids += self.tokens[name][start:end]
            positions += range(start, end)
            slots += [
                self.blocks[name][position // self.block_size] * self.block_size + position % self.block_size
                for position in range(start, end)
            ]
            lens.append(end)
            self.num_computed[name] = end
        counts = list(step.values())
        width = max(len(self.blocks[name]) for name in step)
        # What stands behind a sequence's blocks is nobody's to read; here it is block 0.
        tables = [self.blocks[name] + [0] * (width - len(self.blocks[name])) for name in step]
        starts = np.cumsum([0, *counts])
        return ForwardInputs(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            logit_rows=torch.tensor(starts[1:] - 1),
            host_query_lens=np.array(counts),
            host_context_lens=np.array(lens),
        )

    def run(self, model: CausalLM, step: dict[str, int]) -> dict[str, Tensor]:
        """Logits [num_tokens, vocab_size] of every token of the step, by sequence."""
        inputs = self.inputs(step)
        with torch.inference_mode():
            logits = model.compute_logits(model(inputs))
        return dict(zip(step, logits.split(list(step.values())), strict=True))  # type: ignore[no-untyped-call]
