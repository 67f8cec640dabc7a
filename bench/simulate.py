"""`python -m bench.simulate`: replays a trace against policies, prints figures side by side, draws them."""

import argparse
import gc
import sys
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.screen import screen
from bench.simulation import plot, policies
from bench.simulation.cost import BLOCK_SIZE, DEVICES, MODELS, Gpu
from bench.simulation.failure import Refused
from bench.simulation.figures import Figures, as_json, figures
from bench.simulation.jobs import Machine
from bench.simulation.mixes import MIXES, synthesize
from bench.simulation.record import Record
from bench.simulation.replay import Replay
from bench.simulation.table import table
from bench.simulation.traces import EOS_ID, VOCAB_SIZE, Trace, read

DEFAULT_POLICIES = ("headrace", "tgi")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description="Replays arrivals against scheduling policies and a model of a GPU, and compares them.",
    )
    _add_trace(parser.add_argument_group("what arrives"))
    _add_machine(parser.add_argument_group("what computes"))
    add = parser.add_argument
    add(
        "--policy",
        type=_policy,
        action="append",
        metavar="NAME[:KNOB=VALUE,...]",
        help=f"may be repeated; the others are compared with the first ({', '.join(DEFAULT_POLICIES)}). "
        + "; ".join(f"{name} has {', '.join(policies.knob_names(name))}" for name in DEFAULT_POLICIES),
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add("--plot", type=_picture, metavar="FILE", help="draw waits, gaps and states there: .png or .svg")
    return parser


def _add_trace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--trace",
        default="chat",
        metavar="MIX|FILE",
        help=f"{', '.join(MIXES)}, or a recorded trace, .csv or .jsonl (%(default)s)",
    )
    add("--requests", type=_count, help="how many; if not given, 2000 of a mix and all of a file")
    add(
        "--rate",
        type=_rates,
        default="10",
        metavar="R,R,...",
        help="requests a second of a mix, one comparison for each (%(default)s)",
    )
    add("--bursty", action="store_true", help="sessions of a mix come in bursts")
    add("--speed", type=_positive, default=1.0, help="plays a file so many times as fast (%(default)s)")
    add(
        "--max-new-tokens",
        type=_count,
        default=1024,
        help="what the clients of a file asked for; what they got where that is more (%(default)s)",
    )
    add("--seed", type=int, default=0, help="chooses the requests of a mix (%(default)s)")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", choices=tuple(DEVICES), default="h100", help="(%(default)s)")
    add("--model", choices=tuple(MODELS), default="llama-3-8b", help="(%(default)s)")
    add("--tensor-parallel", type=_count, default=1, metavar="N", help="devices of one replica (%(default)s)")
    add(
        "--cache-tokens",
        type=_count,
        help="tokens of the KV pool; if not given, what fits beside the weights",
    )
    add("--max-step-tokens", type=_count, default=4096, help="tokens of a step (%(default)s)")
    add("--max-running", type=_count, default=256, help="requests that run at once (%(default)s)")
    add("--max-total-tokens", type=_count, help="of prompt and answer; if not given, the model's context")
    add(
        "--max-concurrent-requests",
        type=_count,
        help="requests under way beyond which others are turned away; if not given, nobody is",
    )


def _policy(text: str) -> policies.PolicySpec:
    try:
        return policies.parse(text)
    except Refused as refused:
        raise argparse.ArgumentTypeError(str(refused)) from refused


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in plot.FORMATS:
        raise argparse.ArgumentTypeError(f"{text} ends with neither of {', '.join(plot.FORMATS)}")
    return path


def _traces(arguments: argparse.Namespace) -> list[Trace]:
    """What to replay: a mix at each rate, or a file."""
    if arguments.trace in MIXES:
        return [
            synthesize(
                arguments.trace,
                num_requests=arguments.requests or 2000,
                rate=rate,
                seed=arguments.seed,
                is_bursty=arguments.bursty,
            )
            for rate in arguments.rate
        ]
    path = Path(arguments.trace)
    if not path.exists():
        raise Refused(f"--trace {path}: neither a file nor one of {', '.join(MIXES)}")
    return [
        read(
            path,
            max_new_tokens=arguments.max_new_tokens,
            num_requests=arguments.requests,
            speed=arguments.speed,
        )
    ]


def _machine(arguments: argparse.Namespace, gpu: Gpu) -> Machine:
    num_slots = min(arguments.cache_tokens or gpu.num_slots, gpu.num_slots)
    longest = min(arguments.max_total_tokens or gpu.model.max_positions, gpu.model.max_positions)
    return Machine(
        num_blocks=num_slots // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_total_tokens=min(longest, num_slots // BLOCK_SIZE * BLOCK_SIZE),
        max_step_tokens=arguments.max_step_tokens,
        max_running=arguments.max_running,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS_ID,
        step_costs=gpu.step_costs(arguments.max_step_tokens),
    )


def _replay(
    arguments: argparse.Namespace, machine: Machine, gpu: Gpu, trace: Trace, progress: Progress
) -> list[tuple[str, Record, Figures]]:
    """Every policy on one trace."""
    results = []
    for spec in arguments.policy:
        task = progress.add_task(f"{trace.name}: {spec.text}", total=len(trace.arrivals))
        policy = spec.make(machine, trace)
        replay = Replay(
            policy,
            trace,
            gpu,
            num_slots=machine.num_blocks * BLOCK_SIZE,
            max_concurrent=arguments.max_concurrent_requests,
        )
        record = replay.run(partial(progress.advance, task))
        results.append((spec.text, record, figures(record, policy.counters)))
    return results


def _run(arguments: argparse.Namespace, console: Console) -> list[tuple[str, str, Figures]]:
    gpu = Gpu(DEVICES[arguments.device], MODELS[arguments.model], arguments.tensor_parallel)
    machine = _machine(arguments, gpu)
    traces = _traces(arguments)
    if arguments.plot is not None and len(traces) > 1:
        raise Refused("--plot draws one comparison: give one --rate")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    collected = []
    about = (
        f"{arguments.tensor_parallel} x {arguments.device}, {arguments.model}, KV for "
        f"{machine.num_blocks * BLOCK_SIZE:,} tokens"
    )
    for trace in traces:
        with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
            results = _replay(arguments, machine, gpu, trace, progress)
        title = f"{trace.name}, {len(trace.arrivals):,} requests; {about}"
        console.print(title, style="bold", highlight=False, soft_wrap=True)
        console.print(table([(policy, values) for policy, _, values in results]))
        if arguments.plot is not None:
            plot.draw(arguments.plot, title, [(policy, record) for policy, record, _ in results])
        collected += [(trace.name, policy, values) for policy, _, values in results]
    return collected


def main() -> int:
    """Exit status: 0 every request of every replay came to its end, 1 some did not, or there is no replay."""
    arguments = _parser().parse_args()
    arguments.policy = arguments.policy or [policies.parse(name) for name in DEFAULT_POLICIES]
    # Nothing here makes cycles by the thousand, and a collection walks millions of tokens.
    gc.disable()
    try:
        results = _run(arguments, screen())
    except Refused as refused:
        print(f"simulate: {refused}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json is not None:
        asked = {
            name: [spec.text for spec in value] if name == "policy" else value
            for name, value in vars(arguments).items()
            if name not in ("json", "plot")
        }
        told = {"asked": asked, "results": as_json(results)}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    return 1 if any(values.num_stuck for _, _, values in results) else 0


if __name__ == "__main__":
    sys.exit(main())
