"""Figures of several policies side by side, for a terminal. Knows no replay."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from bench.simulation.figures import Figures, Spread

_Read = Callable[[Figures], float | None]


def _of_spread(
    name: str, of: Callable[[Figures], Spread], parts: Sequence[str]
) -> list[tuple[str, str, _Read]]:
    def reader(part: str) -> _Read:
        def read(figures: Figures) -> float | None:
            value: float | None = getattr(of(figures), part)
            return value

        return read

    return [(f"{name} {part}", "seconds", reader(part)) for part in parts]


_ALL = ("p50", "p90", "p99", "max")

_SECTIONS: tuple[tuple[tuple[str, str, _Read], ...], ...] = (
    (
        ("requests answered", "count", lambda f: f.num_answered),
        ("refused: too long", "failures", lambda f: f.num_refused),
        ("turned away: too many", "failures", lambda f: f.num_turned_away),
        ("never started", "failures", lambda f: f.num_stuck),
        ("duration", "seconds", lambda f: f.duration),
        ("steps", "count", lambda f: f.num_steps),
    ),
    (
        ("device busy", "share", lambda f: f.busy_share),
        ("of peak FLOP/s", "share", lambda f: f.flops_share),
        ("output tokens/s", "count", lambda f: f.output_tokens_per_second),
        ("useful of computed tokens", "share", lambda f: f.useful_share),
    ),
    tuple(_of_spread("queueing", lambda f: f.queueing, _ALL)),
    (
        *_of_spread("TTFT", lambda f: f.ttft, _ALL),
        *_of_spread("TTFT, shortest quarter,", lambda f: f.ttft_short, ("p99",)),
        *_of_spread("TTFT, longest twentieth,", lambda f: f.ttft_long, ("p50", "p99")),
    ),
    (*_of_spread("gap", lambda f: f.gap, _ALL), *_of_spread("latency", lambda f: f.latency, ("p50", "p99"))),
    (
        ("KV held", "share", lambda f: f.held_share),
        ("KV unused of held", "share", lambda f: f.unused_share),
        ("preemptions", "count", lambda f: f.num_preemptions),
        ("prompt tokens cached", "share", lambda f: f.hit_share),
        ("tokens recomputed", "count", lambda f: f.num_recomputed_tokens),
        ("rows wasted", "count", lambda f: f.num_wasted_rows),
        ("running at once, most", "count", lambda f: f.max_running),
        ("waiting at once, most", "count", lambda f: f.max_waiting),
    ),
)


def table(results: Sequence[tuple[str, Figures]]) -> Table:
    """A row for each figure, a column for each policy; all but the first also as a multiple of the first."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("", no_wrap=True)
    for index, (policy, _) in enumerate(results):
        made.add_column(policy.replace(":", "\n").replace(",", "\n"), justify="right", no_wrap=True)
        if index:
            made.add_column("", justify="right", style="dim", no_wrap=True)
    for section in _SECTIONS:
        for name, unit, read in section:
            values = [read(figures) for _, figures in results]
            if unit == "failures" and not any(values):
                continue
            cells = [name, _spelled(values[0], unit)]
            for value in values[1:]:
                cells += [_spelled(value, unit), _ratio(value, values[0])]
            made.add_row(*cells, end_section=name == section[-1][0])
    return made


def _ratio(value: float | None, first: float | None) -> str:
    if value is None or not first:
        return ""
    ratio = value / first
    return f"x{ratio:.2f}" if ratio < 100 else f"x{ratio:.0f}"


def _spelled(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "seconds":
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    if unit == "share":
        return f"{value:.1%}"
    text = f"{value:,.0f}"
    return f"[red]{text}[/red]" if unit == "failures" and value else text
