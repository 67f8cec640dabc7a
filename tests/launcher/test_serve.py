"""The private folder of a run: there is one, it goes, and no killed launcher's stays."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace_launcher.claims import claim
from headrace_launcher.errors import StartError
from headrace_launcher.serve import PRIVATE_FOLDER, private_folder, sole_use


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What stands for /tmp, with a name as short as it needs to be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_private_folder_is_private_and_goes(temporary: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == temporary and PRIVATE_FOLDER.fullmatch(folder.name)
        assert folder.stat().st_mode & 0o077 == 0
        with private_folder() as other:
            assert folder != other and folder.is_dir() and other.is_dir()
    assert list(temporary.iterdir()) == []


def test_only_what_dead_launchers_left_is_cleared_away(temporary: Path) -> None:
    dead, living = temporary / "headrace-17-abcdefgh", temporary / "headrace-18-abcdefgh"
    others = [temporary / name for name in ("headrace-notes", "headrace-17", "headrace-17-abcdefgh-old")]
    for folder in (dead, living, *others):
        folder.mkdir()
    (dead / "shard-0").touch()
    assert claim(living) is not None
    with private_folder() as folder:
        assert set(temporary.iterdir()) == {living, *others, folder}


def test_a_temporary_folder_that_is_too_deep_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/" + "x" * 90)
    with private_folder() as folder:
        assert folder.parent == Path("/tmp")


def test_without_a_temporary_folder_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(StartError, match=r"no folder for the socket can be made: .*TMPDIR"), private_folder():
        pass


def test_one_launcher_at_a_time_has_a_socket_prefix(tmp_path: Path) -> None:
    prefix = str(tmp_path / "socket")
    with (
        sole_use(prefix),
        sole_use(str(tmp_path / "other")),
        sole_use(None),
        pytest.raises(StartError, match="another server uses it"),
        sole_use(prefix),
    ):
        pass
    with sole_use(prefix):
        assert list(tmp_path.iterdir()) == []
