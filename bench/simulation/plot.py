"""One picture of a comparison: how waits and gaps are distributed, and the states over time."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bench.simulation.figures import Floats
from bench.simulation.record import Record

FORMATS = (".png", ".svg")


def draw(path: Path, title: str, results: Sequence[tuple[str, Record]]) -> None:
    """Writes the picture in the format that the file's name ends with."""
    # No display, and the same bytes for the same figures.
    with matplotlib.rc_context({"svg.hashsalt": "headrace", "axes.grid": True, "grid.alpha": 0.3}):
        picture = Figure(figsize=(13, 8), layout="constrained")
        picture.suptitle(title)
        (waits, gaps), (states, pool) = picture.subplots(2, 2)
        for index, (policy, record) in enumerate(results):
            color = f"C{index}"
            ttft = np.sort(np.asarray(record.ttft))
            _draw_tail(waits, ttft, np.ones(len(ttft), np.int64), policy, color)
            order = np.argsort(np.asarray(record.gaps))
            _draw_tail(
                gaps, np.asarray(record.gaps)[order], np.asarray(record.gap_counts)[order], policy, color
            )
            line = record.timeline
            states.plot(line.at, line.num_running, color=color, label=f"{policy}: running")
            states.plot(line.at, line.num_waiting, color=color, linestyle=":", label=f"{policy}: waiting")
            pool.plot(line.at, line.held_share, color=color, label=f"{policy}: held")
            pool.plot(line.at, line.unused_share, color=color, linestyle=":", label=f"{policy}: held, unused")
        _name(waits, "time to first token", "seconds", "share of requests that wait longer")
        _name(gaps, "gap between tokens", "seconds", "share of gaps that are longer")
        _name(states, "requests", "seconds", "requests")
        _name(pool, "KV pool", "seconds", "share of the pool")
        pool.yaxis.set_major_formatter(PercentFormatter(1.0))
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        picture.savefig(path, dpi=120, metadata=metadata)


def _draw_tail(
    axes: Axes, values: Floats, counts: np.typing.NDArray[np.int64], label: str, color: str
) -> None:
    """Share of all that is greater, both axes logarithmic: the tail is what people complain about."""
    if not len(values):
        return
    greater = 1.0 - (np.cumsum(counts) - counts) / counts.sum()
    # Millions of points look like some thousands; the last ones stand far apart and stay.
    last = len(values) - 1
    chosen = np.unique(np.r_[np.linspace(0, last, 3000).astype(np.int64), max(0, last - 1000) : last + 1])
    axes.loglog(np.maximum(values, 1e-4)[chosen], greater[chosen], color=color, label=label)


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
