"""Programs of a cluster that this machine lacks, replaced by stand-ins on PATH."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "cluster_configs"


@pytest.fixture
def stand_in(tmp_path):
    """Returns a function that writes an executable of this name to a folder, and the folder: for PATH."""
    folder = tmp_path / "stand_ins"
    folder.mkdir()

    def write(name: str, source: str) -> Path:
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
        return folder

    return write
