"""From the bytes of a body to a struct, or to an error that names the field.

Everything a body can be wrong in by itself ends here: syntax, encoding, depth, missing fields, wrong types.
Unknown keys are ignored, `null` stands for an absent optional field, integers are never read from floats.
Ranges, and what depends on the model or on settings, are the business of `validation/`.
"""

import functools
import itertools
import json
import re
from typing import Any, TypeVar, cast

import msgspec

from headrace_router.errors import NATIVE_PREFIX, BadRequest, ValidationError

MAX_DEPTH = 128
"""Arrays and objects inside each other, the outermost included."""

T = TypeVar("T")

# Never tries twice: a string that does not end is taken to the end of the body.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
_OTHER_THAN_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r"(?P<problem>.*) - at `(?P<place>(?:key in )?\$.*)`", re.DOTALL)


def invalid(message: str, param: str | None = None) -> ValidationError:
    """An error in the words of both faces: the native one has a prefix."""
    return ValidationError(NATIVE_PREFIX + message, param=param, openai_message=message)


def decode(body: bytes, type: type[T]) -> T:
    """The body as a `type`.

    Raises `BadRequest` for what is not JSON in UTF-8 and for JSON nested deeper than `MAX_DEPTH`;
    `ValidationError`, with the path of the field, for JSON of another shape and for half surrogate pairs.
    """
    _check_depth(body)
    decoder: msgspec.json.Decoder[T] = _decoder(cast(Any, type))
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # The shape is looked at while reading, so what follows the field may still be broken.
        _check_syntax(body)
        raise _shape_error(str(error)) from None
    except msgspec.DecodeError as error:
        if _holds_half_pair(body):
            raise invalid("the body holds half of a surrogate pair (`\\ud800` to `\\udfff` alone)") from None
        raise BadRequest(f"Failed to parse the request body as JSON: {error}") from None


@functools.cache
def _decoder(type: Any) -> Any:
    # Building one takes far longer than using it.
    return msgspec.json.Decoder(type)


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(None, _OTHER_THAN_BRACKETS)
    if max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise BadRequest(f"The request body is nested too deeply: at most {MAX_DEPTH} levels are read")


def _check_syntax(body: bytes) -> None:
    try:
        _decoder(msgspec.Raw).decode(body)
    except msgspec.DecodeError as error:
        if not _holds_half_pair(body):
            raise BadRequest(f"Failed to parse the request body as JSON: {error}") from None


def _holds_half_pair(body: bytes) -> bool:
    """Whether the body would be JSON but for surrogates (which Python's own reader lets pass)."""
    if not _SURROGATE.search(body):
        return False
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _shape_error(text: str) -> ValidationError:
    """msgspec's "Expected `int`, got `str` - at `$.parameters.top_k`" in our words."""
    found = _PLACE.fullmatch(text)
    problem = (found["problem"] if found else text).replace(" | null`", "`")
    path = found["place"].removeprefix("key in ").removeprefix("$").removeprefix(".") if found else ""
    missing = re.fullmatch(r"Object missing required field `(.*)`", problem)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(f"`{path}` is required", path)
    problem = problem[:1].lower() + problem[1:]
    if not path:
        return invalid(f"the body is of the wrong shape: {problem}")
    return invalid(f"`{path}` is of the wrong type: {problem}", path)
