"""Who claims a folder keeps it; what nobody claims, or a dead process did, can be cleared away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from headrace_launcher.claims import claim, clear_away

CLAIMS = """
import sys, time
from pathlib import Path
from headrace_launcher.claims import claim
print(claim(Path(sys.argv[1])), flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    (path / "below").mkdir(parents=True)
    return path


def test_what_nobody_claims_is_cleared_away(folder: Path) -> None:
    assert clear_away(folder)
    assert list(folder.parent.iterdir()) == []
    assert claim(folder) is None
    assert not clear_away(folder)


def test_a_claim_ends_with_its_process(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CLAIMS, folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline().strip().isdigit()
        assert not clear_away(folder)
        assert (folder / "below").is_dir()
        process.kill()
    assert clear_away(folder)


def test_several_may_claim_it(folder: Path) -> None:
    first, second = claim(folder), claim(folder)
    assert first is not None and second is not None
    os.close(first)
    assert not clear_away(folder)
    os.close(second)
    assert clear_away(folder)


def test_neither_files_nor_links_are_cleared_away(folder: Path) -> None:
    link, file = folder.with_name("link"), folder.with_name("file")
    link.symlink_to(folder)
    file.touch()
    assert not clear_away(link) and not clear_away(file)
    assert folder.is_dir() and file.exists()
