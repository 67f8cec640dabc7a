"""What a replay measures: waits and gaps of requests, what device and KV pool did. Knows no policy."""

from array import array
from dataclasses import dataclass, field

from bench.simulation.cost import Gpu, Work
from bench.simulation.jobs import Job, Policy

MAX_SAMPLES = 4096
"""Points of the timeline that are kept; when there are more, every second one goes."""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """States as of the makings of steps, evenly thinned; columns of one length. Times in seconds."""

    at: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    held_share: list[float] = field(default_factory=list)
    """Of the pool, held by those that run."""
    unused_share: list[float] = field(default_factory=list)
    """Of the pool, held and not filled."""
    cached_share: list[float] = field(default_factory=list)
    """Of the pool, held by the prefix cache alone."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Of one policy on one trace. Times in seconds."""

    gpu: Gpu
    pool_slots: int
    """Tokens of KV that fit."""
    num_answered: int = 0
    num_refused: int = 0
    """Could never run, or one they follow could not."""
    num_turned_away: int = 0
    """Came while `--max-concurrent-requests` were under way."""
    num_stuck: int = 0
    """Waited when nothing ran any more and nobody else came: the policy never starts them."""
    num_steps: int = 0
    max_running: int = 0
    max_waiting: int = 0
    begin: float = 0.0
    end: float = 0.0
    busy_seconds: float = 0.0
    flops: float = 0.0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when a request first ran."""
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    """From arrival to first token, by the order of first tokens."""
    queueing: "array[float]" = field(default_factory=lambda: array("d"))
    """From arrival to the making of the first step with it, in the order of `ttft`."""
    prompt_lengths: "array[int]" = field(default_factory=lambda: array("q"))
    """In the order of `ttft`."""
    latency: "array[float]" = field(default_factory=lambda: array("d"))
    """From arrival to last token, by the order of last tokens."""
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    """Times between two tokens of a request, and how often each occurred:"""
    gap_counts: "array[int]" = field(default_factory=lambda: array("q"))
    timeline: Timeline = field(default_factory=Timeline)
    held_seconds: float = 0.0
    """Integral of the share of the pool held by those that run, over the device's busy time."""
    unused_seconds: float = 0.0
    """The same of what is held and not filled."""
    _stride: int = 1

    def step(self, work: Work, begin: float, seconds: float, policy: Policy) -> None:
        """A step was made; the device begins it at `begin`."""
        self.busy_seconds += seconds
        self.flops += self.gpu.flops(work)
        held, unused = policy.num_held_slots / self.pool_slots, policy.num_unused_slots / self.pool_slots
        self.held_seconds += held * seconds
        self.unused_seconds += unused * seconds
        num_running, num_waiting = policy.num_running, policy.num_waiting
        self.max_running = max(self.max_running, num_running)
        self.max_waiting = max(self.max_waiting, num_waiting)
        if self.num_steps % self._stride == 0:
            line = self.timeline
            line.at.append(begin)
            line.num_running.append(num_running)
            line.num_waiting.append(num_waiting)
            line.held_share.append(held)
            line.unused_share.append(unused)
            line.cached_share.append(policy.num_cached_slots / self.pool_slots)
            if len(line.at) >= MAX_SAMPLES:
                self._thin()
        self.num_steps += 1

    def _thin(self) -> None:
        line = self.timeline
        for column in (
            line.at,
            line.num_running,
            line.num_waiting,
            line.held_share,
            line.unused_share,
            line.cached_share,
        ):
            del column[1::2]
        self._stride *= 2

    def tokens(self, jobs: list[Job], now: float) -> list[Job]:
        """Each of the jobs has a token more; gives those that have ended."""
        # A few different gaps a step: almost everybody had the last token a step ago.
        counts: dict[float, int] = {}
        ended = []
        for job in jobs:
            last = job.last_token_at
            job.last_token_at = now
            if last >= 0:
                counts[last] = counts.get(last, 0) + 1
            else:
                self._first_token(job, now)
            if not job.num_left:
                self.latency.append(now - job.arrived_at)
                ended.append(job)
        for last, count in counts.items():
            self.gaps.append(now - last)
            self.gap_counts.append(count)
        self.num_output_tokens += len(jobs)
        self.num_answered += len(ended)
        self.end = now
        return ended

    def _first_token(self, job: Job, now: float) -> None:
        num_prompt_tokens = job.arrival.num_prompt_tokens
        self.ttft.append(now - job.arrived_at)
        self.queueing.append(job.started_at - job.arrived_at)
        self.prompt_lengths.append(num_prompt_tokens)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += job.num_cached
