"""What of a sequence's output may be shown, token by token: detokenising and stop strings together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How a request wants its text."""

    stop: tuple[str, ...] = ()
    """Strings that end the text, matched on characters, anywhere, across tokens."""
    keeps_stop: bool = False
    """Native face: the matched text stays in the output and nothing is held back. OpenAI face: the match
    and all after it is removed, and nothing of it is ever shown."""


@dataclass(slots=True, kw_only=True)
class TokenText:
    """What one generated token shows."""

    index: int
    """Of the token in the output, from 0."""
    raw: str
    """Incremental text, special tokens kept; empty while a character is unfinished."""
    text: str
    """Visible text: `raw`, empty for a special token, cut at a stop string."""
    is_special: bool
