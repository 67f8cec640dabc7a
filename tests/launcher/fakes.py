"""A shard and a router that do nothing but live: real processes for the launcher to look after.

`packages` puts them in front of the real ones, so that `python -m headrace_shard` runs the fake while
`headrace_shard.config` stays the real module. Each appends what happens to it to the file `events`.
What they do is set by variables: FAKE_SHARD (`fails`, `refuses`, `slow`, `orphans`, `numb`: its device does
not compute) and FAKE_ROUTER (`fails-router`, `stubborn`, `warming`: it says that nobody is served); a file
with such words at FAKE_MOOD wins, for a change of mind.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

EXTEND = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"

COMMON = """
import contextlib, json, os, pathlib, signal, socket, sys, threading, time
from headrace_proto.process import die_with_parent

die_with_parent(os.environ)
events = pathlib.Path(os.environ["FAKE_EVENTS"])

def note(what):
    with events.open("a") as file:
        file.write(f"{name} {what} {os.getpid()}\\n")

def option(flag):
    return next(arg.split("=", 1)[1] for arg in sys.argv[1:] if arg.startswith(flag + "="))

def mood(variable):
    path = os.environ.get("FAKE_MOOD")
    words = pathlib.Path(path).read_text().split() if path and os.path.exists(path) else []
    return words or [os.environ.get(variable, "")]

def log(level, message):
    line = {"timestamp": "2026-01-01T00:00:00Z", "level": level, "target": name, "message": message}
    print(json.dumps(line))
"""

SHARD = (
    'name = "shard"'
    + COMMON
    + """
if sys.argv[1:2] == ["convert"]:
    note("converts")
    print("reading", sys.argv[2])
    if "slow" in mood("FAKE_SHARD"):
        time.sleep(60)
    if "fails" in mood("FAKE_SHARD"):
        sys.exit("this file is broken")
    target = pathlib.Path(sys.argv[3])
    making = target.with_name(f".{target.name}.making")
    making.mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (making / file).write_text("{}")
    making.rename(target)
    sys.exit()
note("starts")
log("INFO", "loading")
print("a bare line on standard error", file=sys.stderr)
with events.with_name("shard-seen.json").open("w") as file:
    json.dump({"argv": sys.argv, "environment": dict(os.environ)}, file)
if "refuses" in mood("FAKE_SHARD"):
    sys.exit("headrace-shard: error: no such weights")
if "fails" in mood("FAKE_SHARD"):
    log("ERROR", "the weights are upside down")
    sys.exit(3)
if "slow" in mood("FAKE_SHARD"):
    time.sleep(60)
def on_term(*_):
    note("told to end")
    os._exit(0)
signal.signal(signal.SIGTERM, on_term)
if "orphans" in mood("FAKE_SHARD"):
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            time.sleep(0.2)
            note("orphan ends")
        os._exit(0)
    os.waitpid(parent, 0)
import grpc
from concurrent.futures import ThreadPoolExecutor
from headrace_proto import shard_pb2, shard_pb2_grpc

class Shard(shard_pb2_grpc.ShardServicer):
    def Health(self, request, context):
        if "numb" in mood("FAKE_SHARD"):
            context.abort(grpc.StatusCode.INTERNAL, "an illegal memory access")
        return shard_pb2.HealthResponse()

server = grpc.server(ThreadPoolExecutor(2))
shard_pb2_grpc.add_ShardServicer_to_server(Shard(), server)
server.add_insecure_port(option("--listen"))
server.start()
note("serves")
while True:
    signal.pause()
"""
)

ROUTER = (
    'name = "router"'
    + COMMON
    + """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

note("starts")
with events.with_name("router-seen.json").open("w") as file:
    json.dump({"argv": sys.argv, "environment": dict(os.environ)}, file)
if "fails-router" in mood("FAKE_ROUTER"):
    log("ERROR", "the tokenizer is inside out")
    sys.exit(1)
shard = option("--shard").removeprefix("unix://")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(0.2)
                connection.connect(shard)
                status = 200 if connection.recv(2) and "warming" not in mood("FAKE_ROUTER") else 503
        except OSError:
            status = 503
        self.send_response(status)
        self.end_headers()
    def log_message(self, *_):
        pass

def drain():
    note("told to end")
    if "stubborn" in mood("FAKE_ROUTER"):
        time.sleep(60)
    time.sleep(0.3)
    note("drained")
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
server = ThreadingHTTPServer((option("--hostname"), int(option("--port"))), Handler)
note("serves")
server.serve_forever()
"""
)


class Fakes:
    """The two programs in a folder, and what they have noted."""

    def __init__(self, folder: Path) -> None:
        self.events_path = folder / "events"
        self.mood_path = folder / "mood"
        self.packages = folder / "packages"
        for name, text in (("headrace_shard", SHARD), ("headrace_router", ROUTER)):
            (self.packages / name).mkdir(parents=True)
            (self.packages / name / "__init__.py").write_text(EXTEND)
            (self.packages / name / "__main__.py").write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        """For a launcher, or for the programs themselves."""
        return os.environ | {
            "PYTHONPATH": str(self.packages),
            "FAKE_EVENTS": str(self.events_path),
            "FAKE_MOOD": str(self.mood_path),
            **more,
        }

    def events(self) -> list[str]:
        """`shard starts`, `router drained`, ... in their order, without process ids."""
        return [line.rsplit(" ", 1)[0] for line in self._lines()]

    def pids(self, event: str) -> list[int]:
        """The processes that have noted an event."""
        return [int(pid) for what, pid in (line.rsplit(" ", 1) for line in self._lines()) if what == event]

    def wait_for(self, event: str, times: int = 1) -> None:
        """Returns once an event was noted that often."""
        wait_until(lambda: self.events().count(event) >= times, f"{event} {times} times")

    def _lines(self) -> list[str]:
        return self.events_path.read_text().splitlines() if self.events_path.exists() else []


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
    """Raises AssertionError when the condition does not come true."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
