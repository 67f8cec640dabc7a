"""What the user may decide about scheduling. Knows no flags' parsing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The knobs of the scheduler; defaults are those of the flags."""

    waiting_served_ratio: float = 0.0
    """While some run, waiting ones are admitted once they number this share of the running ones."""
    max_waiting_tokens: int = 20
    """Steps after which waiting ones are admitted, whatever `waiting_served_ratio` says."""
    prefix_caching: bool = True
    """Whether computed blocks are kept and shared."""
    max_step_slowdown: float = 3.0
    """How many times as long as a step of the running decodes alone a step may take that computes prompts
    beside them; 0: no bound."""
