"""Plays the router for the tests of engine and service: names sequences, deals out blocks, makes messages.

Blocks are dealt from both ends of the pool in turn, so that no sequence holds them in one piece.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from headrace_proto import shard_pb2 as pb
from headrace_shard.config import ShardSettings
from headrace_shard.convert import from_step_request, to_step_response
from headrace_shard.engine import Engine
from headrace_shard.loading import LoadedModel, load

GREEDY = pb.SamplingParams(temperature=0.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0)


def sampling(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    bias: dict[int, float] | None = None,
    suppressed: Iterable[int] = (),
) -> pb.SamplingParams:
    """Parameters with neutral values for all that is not given."""
    return pb.SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        typical_p=1.0,
        seed=seed,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        bias_token_ids=(bias or {}).keys(),
        bias_values=(bias or {}).values(),
        suppressed_token_ids=suppressed,
    )


LONG = [(7 * number) % 300 + 3 for number in range(70)]
SHORT = [11, 12, 13]
"""Prompts; ids below 303."""

VARIED = sampling(
    temperature=1.2, top_k=40, top_p=0.95, seed=5, repetition_penalty=1.2, frequency_penalty=0.3
)


def load_tiny(folder: Path, *, dtype: str = "auto", attention: str = "sdpa") -> LoadedModel:
    """A checkpoint of `tests.tiny` on the CPU, by default with the reference attention."""
    return load(folder, ShardSettings(dtype=dtype, device="cpu", attention=attention, num_threads=1))


def make_engine(loaded: LoadedModel, *, num_blocks: int = 64, max_step_tokens: int = 128) -> Engine:
    """A warm engine of `num_blocks`."""
    engine = Engine(loaded, kv_cache_memory=0.25, cuda_memory_fraction=0.9)
    capacity = engine.warm_up(
        max_step_tokens=max_step_tokens,
        max_step_sequences=32,
        max_total_tokens=num_blocks * loaded.backend.block_size,
    )
    assert capacity.num_blocks == num_blocks
    return engine


def execute_on(engine: Engine) -> Callable[[pb.StepRequest, bool], pb.StepResponse]:
    """Sends a step to an engine without a wire in between."""

    def execute(request: pb.StepRequest, is_decode: bool) -> pb.StepResponse:
        step = from_step_request(request, is_decode=is_decode)
        return to_step_response(engine.step(step))

    return execute


@dataclass
class Known:
    """What the router knows of a sequence."""

    prompt: list[int]
    sampling: pb.SamplingParams
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    prompt_top_n_tokens: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_parts: list[pb.PromptLogprobs] = field(default_factory=list)
    num_promised: int = 0
    """Tokens of steps that were sent and have not answered."""
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_new: bool = True

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_pending(self) -> int:
        return len(self.tokens) + self.num_promised - self.num_computed


class SmallRouter:
    """Sequences by id, and the blocks they hold."""

    def __init__(
        self,
        execute: Callable[[pb.StepRequest, bool], pb.StepResponse],
        *,
        num_blocks: int = 64,
        block_size: int = 16,
    ) -> None:
        self.execute = execute
        self._block_size = block_size
        self._free = list(range(num_blocks))
        self._next_step_id = 0
        self.sequences: dict[int, Known] = {}
        self._dropped: list[int] = []
        self._copies: list[tuple[int, int]] = []

    def add(self, sequence_id: int, prompt: Iterable[int], parameters: pb.SamplingParams = GREEDY) -> Known:
        """A new sequence; further wishes are set on what comes back, before its first step."""
        self.sequences[sequence_id] = Known(list(prompt), parameters)
        return self.sequences[sequence_id]

    def drop(self, sequence_id: int) -> Known:
        """The next step tells the shard to forget it."""
        known = self.sequences.pop(sequence_id)
        held = {block for other in self.sequences.values() for block in other.blocks}
        self._free += [block for block in known.blocks if block not in held]
        self._dropped.append(sequence_id)
        return known

    def share(self, sequence_id: int, *, of: int, num_computed: int) -> None:
        """A new sequence will find its first tokens computed by `of`, in whole blocks that both then hold.

        What is left of them is in a block that is copied.
        """
        known, other = self.sequences[sequence_id], self.sequences[of]
        assert known.is_new and num_computed <= other.num_computed
        for mine, theirs in zip(known.tokens[:num_computed], other.tokens[:num_computed], strict=True):
            assert mine == theirs
        whole, rest = divmod(num_computed, self._block_size)
        known.num_computed, known.blocks = num_computed, other.blocks[:whole]
        if rest:
            known.blocks.append(self._free.pop())
            self._copies.append((other.blocks[whole], known.blocks[whole]))

    def reuse_last_blocks(self) -> None:
        """The blocks that were given back last are the next to be dealt out."""
        self._free.reverse()

    def preempt(self, sequence_id: int) -> None:
        """Dropped, and sent again in full with the next step it is part of."""
        known = self.drop(sequence_id)
        known.blocks, known.num_computed, known.is_new = [], 0, True
        self.sequences[sequence_id] = known

    def request(self, plan: dict[int, int]) -> tuple[pb.StepRequest, bool]:
        """The message for a step {sequence: number of tokens}, which counts as sent; is it a decode?"""
        request = pb.StepRequest(
            step_id=self._next_step_id,
            dropped_ids=self._dropped,
            copied_from=[source for source, _ in self._copies],
            copied_to=[target for _, target in self._copies],
        )
        self._next_step_id += 1
        self._dropped, self._copies = [], []
        for sequence_id, count in plan.items():
            known = self.sequences[sequence_id]
            end = known.num_computed + count
            num_new = max(0, -(-end // self._block_size) - len(known.blocks))
            new = [self._free.pop(-(index % 2)) for index in range(num_new)]
            known.blocks += new
            gained = known.blocks if known.is_new else new
            request.ids.append(sequence_id)
            request.num_tokens.append(count)
            request.num_new_blocks.append(len(gained))
            request.new_blocks.extend(gained)
            if known.is_new:
                request.new_sequences.append(self._new(sequence_id, known))
                known.is_new = False
            known.num_promised += count == known.num_pending
            known.num_computed = end
        return request, not request.new_sequences and all(count == 1 for count in plan.values())

    def _new(self, sequence_id: int, known: Known) -> pb.NewSequence:
        return pb.NewSequence(
            id=sequence_id,
            token_ids=known.tokens,
            num_prompt_tokens=len(known.prompt),
            num_computed_tokens=known.num_computed,
            sampling=known.sampling,
            top_n_tokens=known.top_n_tokens,
            prompt_logprobs=known.prompt_logprobs,
            prompt_top_n_tokens=known.prompt_top_n_tokens,
        )

    def note(self, response: pb.StepResponse) -> pb.StepResponse:
        """Enter what a step gave."""
        tops = list(zip(response.top_token_ids, response.top_logprobs, strict=True))
        for index, sequence_id in enumerate(response.ids):
            count = response.top_counts[index]
            mine, tops = tops[:count], tops[count:]
            if sequence_id in self.sequences:
                known = self.sequences[sequence_id]
                known.output.append(response.token_ids[index])
                known.logprobs.append(response.logprobs[index])
                known.tops.append(mine)
                known.num_promised -= 1
        for part in response.prompt_logprobs:
            if part.id in self.sequences:
                self.sequences[part.id].prompt_parts.append(part)
        if response.num_left:
            self.sequences[response.shortened_id].num_computed -= response.num_left
        return response

    def step(self, plan: dict[int, int], *, max_seconds: float = 0.0) -> pb.StepResponse:
        """Send a step and enter its answer."""
        request, is_decode = self.request(plan)
        request.max_seconds = max_seconds
        return self.note(self.execute(request, is_decode))

    def plan(self, chunk: int) -> dict[int, int]:
        """Every sequence computes what it has to, at most `chunk` tokens."""
        return {number: min(chunk, known.num_pending) for number, known in self.sequences.items()}

    def run(self, num_tokens: int, *, chunk: int = 128) -> dict[int, list[int]]:
        """Step until every sequence has `num_tokens` output tokens or more; gives the outputs."""
        while any(len(known.output) < num_tokens for known in self.sequences.values()):
            self.step(self.plan(chunk))
        return {number: known.output[:num_tokens] for number, known in self.sequences.items()}


def transformers_greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What a plain loop over transformers' own model gives, without any cache."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def transformers_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [len(ids), V] of the next token after each of `ids`, by transformers' own model."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)
