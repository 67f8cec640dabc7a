"""Finds stop strings in a text that comes in pieces, as if it came character by character.

The first stop string to be complete wins; of those complete at the same character, the longest. The answer
therefore does not depend on where the pieces are cut. Knows nothing of tokens.

Knuth, Morris, Pratt: Fast pattern matching in strings, SIAM J. Comput. 6 (1977). A pattern's state is the
length of its longest prefix that the text ends with: so it says at once whether there is a match and how much
of the text may still become one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """Where a stop string was found, in characters of the whole text."""

    start: int
    end: int


class _Pattern:
    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        """Of the longest prefix of `string` that is a suffix of the text."""
        # failure[i]: length of the longest proper prefix of string[:i + 1] that is also its suffix.
        self._failure = [0] * len(string)
        length = 0
        for index in range(1, len(string)):
            while length and string[index] != string[length]:
                length = self._failure[length - 1]
            if string[index] == string[length]:
                length += 1
            self._failure[index] = length

    def advance(self, char: str) -> bool:
        """Read a character; whether the text now ends with the string. Not to be called after that."""
        length = self.length
        while length and char != self.string[length]:
            length = self._failure[length - 1]
        if char == self.string[length]:
            length += 1
        self.length = length
        return length == len(self.string)


class StopStrings:
    """A search for any of some strings. `strings` are not empty."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        # Longest first, so that the first to match at a character is the longest.
        self._patterns = [_Pattern(string) for string in sorted(set(strings), key=len, reverse=True)]
        self._position = 0

    def feed(self, text: str) -> Match | None:
        """Read a piece; the match that ends in it. After a match the search is over."""
        if not self._patterns:
            self._position += len(text)
            return None
        for char in text:
            self._position += 1
            match: Match | None = None
            for pattern in self._patterns:
                if pattern.advance(char):
                    match = Match(self._position - len(pattern.string), self._position)
                    break
            if match:
                return match
        return None

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a match."""
        return max((pattern.length for pattern in self._patterns), default=0)
