"""From the inputs of a step to hidden states and logits, and how long the device took. Knows no sequences."""

import time

import torch
from torch import Tensor

from headrace_shard.inputs import ForwardInputs
from headrace_shard.models import CausalLM


class Runner:
    """Runs a model whose KV cache is bound."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def forward(self, inputs: ForwardInputs) -> tuple[Tensor, int]:
        """Hidden states [R, hidden] of `inputs.logit_rows`; writes the step's keys and values. Gives also how
        many tokens were computed, which are all of them but for `inputs.max_seconds`."""
        hidden: Tensor = self._model(inputs)
        return hidden.index_select(0, inputs.logit_rows), len(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits [R, vocabulary] in float32 for hidden states [R, hidden]."""
        return self._model.compute_logits(hidden).float()


class Stopwatch:
    """Measures stretches of device time; on a GPU, where calls return early, by events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """One stretch ends here and the next begins."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Length of each stretch between two marks; on a GPU waits for the last mark."""
        if not self._is_cuda:
            return [end - start for start, end in zip(self._times, self._times[1:], strict=False)]
        self._events[-1].synchronize()
        return [
            start.elapsed_time(end) / 1000 for start, end in zip(self._events, self._events[1:], strict=False)
        ]
