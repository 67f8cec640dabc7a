"""The fakes, fresh for each test."""

from pathlib import Path

import pytest

from tests.launcher.fakes import Fakes


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model to the launcher."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder
