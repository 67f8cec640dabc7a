"""What arrives: when, which prompt, which answer. Values and token ids only; knows no policy and no GPU.

A prompt is a sequence of segments, and segments are shared: two prompts that begin with the same segments
begin with the same token ids, so a prefix cache finds what it would find in earnest. Ids are made when a
request arrives and dropped when it ends, so that a trace of 100,000 requests stays small.
"""

import csv
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.simulation.failure import Refused

VOCAB_SIZE = 1 << 15
"""Ids in use; the last one is the end of a sequence."""

EOS_ID = VOCAB_SIZE - 1

_TEXT = tuple(random.Random(20240229).choices(range(EOS_ID), k=1 << 17))
"""Segments are slices of it; slices share the integers, so a long prompt costs 8 bytes a token."""

_LEADING_IDS = 2
"""Ids that tell a segment from every other: EOS_ID squared of them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """So many tokens of text; segments with different keys differ in their first two tokens."""

    key: int
    num_tokens: int

    def ids(self) -> tuple[int, ...]:
        """Its token ids, `num_tokens` of them."""
        leading = (self.key % EOS_ID, self.key // EOS_ID % EOS_ID)
        num_tokens = self.num_tokens - _LEADING_IDS
        if num_tokens <= 0:
            return leading[: self.num_tokens]
        start = self.key * 40503 % (len(_TEXT) // 2)
        text = _TEXT[start : start + num_tokens]
        while len(text) < num_tokens:
            text += _TEXT[: num_tokens - len(text)]
        return leading + text


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request to come. Times in seconds from the trace's begin."""

    at: float
    """When it comes, or would come if the answer it follows had taken no time."""
    prompt: tuple[Segment, ...]
    output: Segment
    """The answer; whoever follows has it in the prompt."""
    max_new_tokens: int
    """What the client asks for; the answer may end before."""
    follows: int = -1
    """Index of the request whose answer has to be there first; -1: none."""
    pause_seconds: float = 0.0
    """From that answer to this request: reading and typing, or a tool's run."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(segment.num_tokens for segment in self.prompt)

    def prompt_ids(self) -> tuple[int, ...]:
        """The whole prompt, made anew."""
        if len(self.prompt) == 1:
            return self.prompt[0].ids()
        ids: list[int] = []
        for segment in self.prompt:
            ids += segment.ids()
        return tuple(ids)

    def output_ids(self) -> tuple[int, ...]:
        """The answer; one that ends before `max_new_tokens` ends with EOS_ID."""
        ids = self.output.ids()
        return ids if len(ids) >= self.max_new_tokens else (*ids[:-1], EOS_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrivals in the order of time; whoever follows another stands behind it."""

    name: str
    arrivals: tuple[Arrival, ...]


class Segments:
    """Gives every segment of a trace a key of its own."""

    def __init__(self) -> None:
        self._next_key = 0

    def new(self, num_tokens: int) -> Segment:
        """Text that nobody else has."""
        self._next_key += 1
        return Segment(self._next_key, num_tokens)


def ordered(name: str, arrivals: Sequence[Arrival]) -> Trace:
    """A trace from arrivals in any order in which nobody stands before the one it follows."""
    order = sorted(range(len(arrivals)), key=lambda index: (arrivals[index].at, index))
    place = {old: new for new, old in enumerate(order)}
    place[-1] = -1
    return Trace(
        name=name,
        arrivals=tuple(_moved(arrivals[old], place) for old in order),
    )


def _moved(arrival: Arrival, place: Mapping[int, int]) -> Arrival:
    if arrival.follows < 0:
        return arrival
    return Arrival(
        at=arrival.at,
        prompt=arrival.prompt,
        output=arrival.output,
        max_new_tokens=arrival.max_new_tokens,
        follows=place[arrival.follows],
        pause_seconds=arrival.pause_seconds,
    )


_ARRIVAL_COLUMNS = ("timestamp", "arrival", "arrived_at", "arrival_seconds")
_PROMPT_COLUMNS = ("contexttokens", "prompt_tokens", "num_prefill_tokens", "input_tokens")
_OUTPUT_COLUMNS = ("generatedtokens", "output_tokens", "num_decode_tokens")
_PREFIX_COLUMNS = ("prefix_id", "prefix")
_PREFIX_LENGTH_COLUMNS = ("prefix_tokens",)


def read(path: Path, *, max_new_tokens: int, num_requests: int | None = None, speed: float = 1.0) -> Trace:
    """A recorded trace: .csv with a line of names, or .jsonl with an object a line; names in any case.

    arrival         TIMESTAMP or arrival: seconds, or a date and time (ISO 8601)
    prompt_tokens   or ContextTokens
    output_tokens   or GeneratedTokens
    prefix_id       optional; prompts of one prefix begin with the same text, of `prefix_tokens` tokens, else
                    of half the shortest of these prompts

    The names in capitals are those of the public Azure LLM inference traces (Patel et al. 2024, "Splitwise").
    Clients are taken to ask for `max_new_tokens`, or for what they got where that is more. `speed` 2 halves
    all times. Raises `Refused` for a file that cannot be read so.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {error}") from error
    if path.suffix == ".jsonl":
        rows = _json_rows(path, text.splitlines())
    elif path.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
    else:
        raise Refused(f"{path}: a trace is a .csv or a .jsonl file")
    if not rows:
        raise Refused(f"{path}: no requests in it")
    parsed = [_parse(path, number, row) for number, row in enumerate(rows[:num_requests], start=1)]
    begin = min(row[0] for row in parsed)
    prefixes = _prefixes(parsed)
    segments = Segments()
    shared = {name: segments.new(length) for name, length in prefixes.items()}
    arrivals = []
    for at, num_prompt, num_output, prefix_id, _ in parsed:
        prefix = shared.get(prefix_id)
        num_own = num_prompt - (prefix.num_tokens if prefix else 0)
        own = (segments.new(num_own),)
        arrivals.append(
            Arrival(
                at=(at - begin) / speed,
                prompt=own if prefix is None else (prefix, *own),
                output=segments.new(num_output),
                max_new_tokens=max(num_output, max_new_tokens),
            )
        )
    return ordered(path.stem, arrivals)


def _json_rows(path: Path, lines: Iterable[str]) -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise Refused(f"{path}: line {number}: {error}") from error
        if not isinstance(row, dict):
            raise Refused(f"{path}: line {number}: an object is wanted, got {line[:40]!r}")
        rows.append(row)
    return rows


_Row = tuple[float, int, int, str, int]


def _parse(path: Path, number: int, row: Mapping[str, object]) -> _Row:
    """Arrival in seconds, tokens of prompt and output, prefix and its tokens (0: not told)."""
    named = {str(name).strip().lower(): value for name, value in row.items()}

    def first(names: tuple[str, ...]) -> str:
        return next((str(named[name]).strip() for name in names if named.get(name) not in (None, "")), "")

    try:
        at = _seconds(first(_ARRIVAL_COLUMNS))
        num_prompt, num_output = int(first(_PROMPT_COLUMNS)), int(first(_OUTPUT_COLUMNS))
        num_prefix = int(first(_PREFIX_LENGTH_COLUMNS) or 0)
    except ValueError as error:
        raise Refused(
            f"{path}: request {number}: {error}; it needs arrival (or TIMESTAMP), prompt_tokens (or "
            f"ContextTokens) and output_tokens (or GeneratedTokens), and has {', '.join(named)}"
        ) from error
    # A request without a prompt or an answer still had a token of each.
    return at, max(num_prompt, 1), max(num_output, 1), first(_PREFIX_COLUMNS), num_prefix


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _prefixes(rows: Sequence[_Row]) -> dict[str, int]:
    """Tokens of each prefix; every prompt keeps at least one token of its own."""
    shortest: dict[str, int] = {}
    told: dict[str, int] = {}
    for _, num_prompt, _, name, num_prefix in rows:
        if name:
            shortest[name] = min(num_prompt, shortest.get(name, num_prompt))
            told[name] = max(num_prefix, told.get(name, 0))
    lengths = {
        name: min(told[name], length - 1) if told[name] else length // 2 for name, length in shortest.items()
    }
    return {name: length for name, length in lengths.items() if length}
