"""What one sequence asks of sampling, as plain values. Knows ranges; knows no tensor and no wire."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; the defaults leave the model's distribution as it is.

    Raises ValueError for a value outside its range, naming the field, the value and the range.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off, more than the vocabulary has keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with this mass; 1 is off, 0 leaves one token."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 is off."""
    typical_p: float = 1.0
    """Keep the smallest set with this mass whose surprise is nearest to the entropy; 1 is off."""
    repetition_penalty: float = 1.0
    """Divides a positive and multiplies a negative logit of any token of prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of any token of the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output; 0 is off."""
    seed: int = 0
    """Key of the sequence's own random numbers, an unsigned 64-bit number."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its raw logit); each id at most once."""
    min_new_tokens: int = 0
    """Until so many tokens are generated, none of `suppressed_token_ids` can be chosen."""
    suppressed_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, math.inf)
        _check("top_k", self.top_k, 0, math.inf)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("typical_p", self.typical_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        _check("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _check("seed", self.seed, 0, 2**64 - 1)
        _check("min_new_tokens", self.min_new_tokens, 0, math.inf)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty is 0; it must be above 0, 1 switches it off")
        for token_id, value in self.logit_bias:
            _check(f"logit_bias of token {token_id}", value, -math.inf, math.inf)
        ids = [token_id for token_id, _ in self.logit_bias]
        if len(set(ids)) < len(ids):
            raise ValueError(f"logit_bias names a token twice among {len(ids)} entries; name each id once")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken whatever the random number: nothing else can remain."""
        only_top = self.top_p == 0 and self.typical_p == 1
        return self.temperature == 0 or self.top_k == 1 or only_top

    @property
    def uses_history(self) -> bool:
        """Whether any token of prompt or output changes the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _check(name: str, value: float, minimum: float, maximum: float) -> None:
    """Raises ValueError unless the value is finite and within the range, both ends included."""
    if not (math.isfinite(value) and minimum <= value <= maximum):
        low = "any" if minimum == -math.inf else f"at least {minimum:g}"
        high = "finite" if maximum == math.inf else f"at most {maximum:g}"
        raise ValueError(f"{name} is {value}; it must be {low} and {high}")
