"""What of a sequence's output may be shown, token by token: detokenising and stop strings together.

The visible text is that of all tokens but the special ones. On the native face (`keeps_stop`) every token is
released at once, and the text ends right behind a match. On the OpenAI face a token is released once its
characters are whole and none of them can belong to a match any more, and the text ends right before the
match: tokens that begin in it or behind it are never released. Either way the texts of the released tokens,
joined, are the whole text, and it does not depend on how the text is cut into tokens.
"""

from collections import deque
from dataclasses import dataclass

from headrace_router.text.detokenizer import Detokenizer
from headrace_router.text.stop_strings import StopStrings
from headrace_router.text.tokenizer import Tokenizer


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


class OutputText:
    """The text of one sequence.

    add … add, is_stopped becomes true     a stop string ended the text: what may be shown is released
    add … add, flush                       the sequence ended otherwise: what was held back is released
    """

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self._tokenizer = tokenizer
        self._keeps_stop = options.keeps_stop
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_strings = StopStrings(options.stop)
        self._unfinished: list[TokenText] = []
        """Tokens since the last whole character: they share the fate of the one that completes theirs."""
        self._held: deque[list[TokenText]] = deque()
        """Such groups, closed by a token with text or by a special one; only the last token has text."""
        self._num_tokens = 0
        self._num_chars = 0
        """Of the visible text, held back or not."""
        self._num_released = 0
        """Characters of the visible text that stand before the first group held back."""
        self._pieces: list[str] = []
        self.is_stopped = False
        """Whether a stop string was found; nothing is released after that."""

    @property
    def text(self) -> str:
        """All visible text released so far."""
        return "".join(self._pieces)

    def add(self, token_id: int) -> list[TokenText]:
        """The tokens released by this one; with `keeps_stop` exactly one. None once it is stopped."""
        if self.is_stopped:
            return []
        is_special = self._tokenizer.is_special(token_id)
        raw = self._detokenizer.add(token_id)
        text = "" if is_special else raw
        token = TokenText(index=self._num_tokens, raw=raw, text=text, is_special=is_special)
        self._num_tokens += 1
        match = self._stop_strings.feed(text)
        self.is_stopped = match is not None
        if self._keeps_stop:
            if match:
                token.text = text[: match.end - self._num_chars]
            self._num_chars += len(text)
            self._pieces.append(token.text)
            return [token]
        self._num_chars += len(text)
        self._unfinished.append(token)
        if text or is_special:
            self._held.append(self._unfinished)
            self._unfinished = []
        if match:
            return self._release_cut(match.start)
        return self._release(self._num_chars - self._stop_strings.num_held)

    def flush(self) -> list[TokenText]:
        """The tokens still held back, when the sequence has ended without a stop string."""
        if self.is_stopped:
            return []
        released = self._release(self._num_chars) + self._unfinished
        self._unfinished = []
        return released

    def _release(self, end: int) -> list[TokenText]:
        """The held tokens whose characters all stand before `end`."""
        released: list[TokenText] = []
        while self._held and self._num_released + len(self._held[0][-1].text) <= end:
            released += self._release_first()
        return released

    def _release_cut(self, end: int) -> list[TokenText]:
        """The held tokens that begin before `end`, the last one cut there; the others are dropped."""
        released: list[TokenText] = []
        while self._held and self._num_released <= end:
            last = self._held[0][-1]
            if self._num_released == end and last.text:
                break
            last.text = last.text[: end - self._num_released]
            released += self._release_first()
        self._held.clear()
        return released

    def _release_first(self) -> list[TokenText]:
        group = self._held.popleft()
        self._num_released += len(group[-1].text)
        self._pieces.append(group[-1].text)
        return group
