"""A shard with a fault: every step that computes the tokens `POISON_IDS` side by side fails as a whole.

Run as a program in the place of `headrace-shard`, with its arguments.
"""

from headrace_shard import __main__ as shard
from headrace_shard.inputs import ForwardInputs
from headrace_shard.runner import Runner
from torch import Tensor

POISON_IDS = (300, 299)
"""Descending: a warm-up computes ascending ids."""


def main() -> None:
    forward = Runner.forward

    def forward_or_fail(runner: Runner, inputs: ForwardInputs) -> tuple[Tensor, int]:
        computed = forward(runner, inputs)
        # Behind the forward pass, so that the keys and values of everybody in the step are written by then.
        first, second = inputs.token_ids[:-1] == POISON_IDS[0], inputs.token_ids[1:] == POISON_IDS[1]
        if bool((first & second).any()):
            raise RuntimeError("the injected fault")
        return computed

    Runner.forward = forward_or_fail  # type: ignore[method-assign, assignment]
    shard.main()


if __name__ == "__main__":
    main()
