"""`python -m bench`: reads the arguments, runs level after level, prints a table, writes figures."""

import argparse
import asyncio
import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from bench.client import Failed, Reply, Target, ask
from bench.load import Level, Prompts, run_level
from bench.screen import screen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Puts load on an inference server that runs, and prints how it answers.",
    )
    add = parser.add_argument
    add(
        "--base-url",
        type=_url,
        default="http://127.0.0.1:3000",
        help="where the server listens (%(default)s)",
    )
    add(
        "--face",
        choices=("openai", "tgi"),
        default="openai",
        help="openai (default): /v1/completions with ignore_eos; tgi: /generate_stream, which may end early",
    )
    add("--model", default="", help="model to ask for; if empty, the first of /v1/models")
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="sent with every request")
    add(
        "--concurrency",
        type=_counts,
        default="1,8,32",
        metavar="N,N,...",
        help="clients of each level (%(default)s)",
    )
    add("--requests", type=_count, help="requests of each level; if not given, 4 per client and at least 8")
    add("--input-tokens", type=_count, default=256, help="tokens of a prompt (%(default)s)")
    add("--output-tokens", type=_count, default=128, help="tokens of an answer (%(default)s)")
    add("--seed", type=int, default=0, help="chooses the prompts (%(default)s)")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="when a request has failed (%(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser


def _url(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no http:// or https:// address")
    return text.rstrip("/")


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


async def _measure(arguments: argparse.Namespace, console: Console) -> list[Level]:
    target = Target(
        base_url=arguments.base_url,
        face=arguments.face,
        model=arguments.model,
        headers=tuple(arguments.header),
        timeout_seconds=arguments.timeout,
    )
    if target.face == "openai" and not target.model:
        target = replace(target, model=await _first_model(target))
    prompts = Prompts(arguments.input_tokens, arguments.seed)
    await prompts.calibrate(target)
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    levels = []
    # Drawn twice a second at most, for drawing takes the core from the server.
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        for concurrency in arguments.concurrency:
            num_requests = arguments.requests or max(8, 4 * concurrency)
            task = progress.add_task(f"{concurrency} at once", total=num_requests, note="")
            level = await run_level(
                target,
                prompts,
                concurrency=concurrency,
                num_requests=num_requests,
                num_output_tokens=arguments.output_tokens,
                on_reply=_advance(progress, task),
            )
            progress.update(task, note=f"{level.output_tokens_per_second:.0f} tok/s")
            levels.append(level)
    return levels


async def _first_model(target: Target) -> str:
    answer = await ask(target, "GET", "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise Failed(f"{target.base_url}/v1/models lists no model; give --model") from error


def _advance(progress: Progress, task: TaskID) -> Callable[[Reply], None]:
    num_errors = 0

    def on_reply(reply: Reply) -> None:
        nonlocal num_errors
        if reply.error:
            num_errors += 1
            progress.update(task, note=f"{num_errors} failed")
        progress.advance(task)

    return on_reply


def _table(levels: list[Level]) -> Table:
    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.1f}"

    table = Table(box=box.SIMPLE_HEAD, caption="times in ms", padding=(0, 1, 0, 0))
    counts = ("at\nonce", "\nrequests", "\nerrors", "output\ntok/s", "tok/\nevent")
    times = ("TTFT\np50", "TTFT\np99", "gap\np50", "gap\np99", "gap\nmax")
    for title in (*counts, *times):
        table.add_column(title, justify="right", no_wrap=True)
    for level in levels:
        per_event = level.tokens_per_event
        table.add_row(
            str(level.concurrency),
            str(level.num_requests),
            f"[red]{level.num_errors}[/red]" if level.num_errors else "0",
            f"{level.output_tokens_per_second:.1f}",
            "-" if per_event is None else f"{per_event:.2f}",
            milliseconds(level.ttft_p50_seconds),
            milliseconds(level.ttft_p99_seconds),
            milliseconds(level.gap_p50_seconds),
            milliseconds(level.gap_p99_seconds),
            milliseconds(level.gap_max_seconds),
        )
    return table


def main() -> int:
    """Exit status: 0 every request was answered, 1 some were not or the server cannot be measured."""
    arguments = _parser().parse_args()
    console = screen()
    gc.disable()  # a collection in the middle of a stream would look like a gap of the server's
    try:
        levels = uvloop.run(_measure(arguments, console))
    except Failed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    console.print(_table(levels))
    for level in levels:
        for message in level.first_errors:
            console.print(f"at {level.concurrency}: {message}", style="red", markup=False, highlight=False)
    if arguments.json is not None:
        figures = {
            "base_url": arguments.base_url,
            "face": arguments.face,
            "input_tokens": arguments.input_tokens,
            "output_tokens": arguments.output_tokens,
            "levels": levels,
        }
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    return 1 if any(level.num_errors for level in levels) else 0


if __name__ == "__main__":
    sys.exit(main())
