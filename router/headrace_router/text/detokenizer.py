"""Token ids to text as they come, never half a character.

Works on bytes: each token's are known to the tokenizer, and an incremental UTF-8 decoder keeps what is not
yet a whole character. So the work for a token is bounded by its own length, whatever came before, and a real
U+FFFD differs from an unfinished character. Bytes that cannot become a character show as U+FFFD, as in any
UTF-8 decoder; bytes that still may are held back, and dropped if the output or the run of text ends.
"""

import codecs

from headrace_router.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = b""
        """At most three bytes: the beginning of a character."""

    def add(self, token_id: int) -> str:
        """What the token adds: empty while its character is unfinished; special tokens are spelled out."""
        if self._tokenizer.is_special(token_id):
            self._pending = b""
            return self._tokenizer.token_text(token_id)
        data = self._pending + self._tokenizer.token_bytes(token_id)
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_read:]
        return text
