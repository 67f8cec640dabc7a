"""/tokenize, /chat_tokenize and /detokenize: texts and tokens, without an answer to them.

A list of tokens may be a hundred times as large as the text, so it is written in a thread, a part at a time:
meanwhile the streams of others go on.
"""

import msgspec

from headrace_router.api.exchange import Exchange, Service, encoder
from headrace_router.schemas import tgi
from headrace_router.schemas.decode import decode
from headrace_router.schemas.openai import ChatRequest
from headrace_router.text.tokenizer import Encoding

TOKENS_AT_ONCE = 2048
"""Written without a chance for another thread in between, which takes less than a millisecond."""


async def tokenize(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /tokenize: the tokens of `inputs`, special ones that the tokenizer adds included."""
    text = decode(body, tgi.TokenizeRequest).inputs
    encoding = await service.validator.tokenize(text)
    await exchange.answer(200, await service.validator.in_pool(lambda: token_list(text, encoding)))


async def chat_tokenize(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /chat_tokenize: the prompt that a chat would be answered from, and its tokens."""
    text, encoding = await service.validator.chat_tokenize(decode(body, ChatRequest))
    tokens = msgspec.Raw(await service.validator.in_pool(lambda: token_list(text, encoding)))
    await exchange.answer_json(tgi.ChatTokenizeResponse(tokenize_response=tokens, templated_text=text))


async def detokenize(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /detokenize: the text of `ids`, special tokens left out."""
    ids = decode(body, tgi.DetokenizeRequest).ids
    await exchange.answer_json(tgi.DetokenizeResponse(text=await service.validator.detokenize(ids)))


def token_list(text: str, encoding: Encoding) -> bytes:
    """The tokens as JSON, with their places in bytes, as TGI gives them; the tokenizer counts characters."""
    starts = [0]
    for character in text:
        starts.append(starts[-1] + len(character.encode()))
    parts: list[bytes] = []
    for first in range(0, len(encoding.ids), TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        tokens = [
            tgi.SimpleToken(id=token_id, text=text[start:stop], start=starts[start], stop=starts[stop])
            for token_id, (start, stop) in zip(encoding.ids[part], encoding.offsets[part], strict=True)
        ]
        parts.append(encoder.encode(tokens)[1:-1])
    return b"[" + b",".join(parts) + b"]"
