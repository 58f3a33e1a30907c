"""Empty packages, for tests of installations."""

import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, *extras: str, requires: Sequence[str] = (), content: bytes = b""
) -> Path:
    """A package without modules, and its page of an index. content: of a file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in requires]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
        if content:
            wheel.writestr(f"{stem}.data/data/{name}.bin", content)
    (folder / "index.html").write_text(f'<a href="{stem}-py3-none-any.whl">{stem}-py3-none-any.whl</a>')
    return folder / f"{stem}-py3-none-any.whl"


def make_project(folder: Path, version: str, requires: Sequence[str]) -> None:
    """A folder from which pip installs an empty cfl-ray with these needs, without a package that builds it."""
    made = make_wheel(folder, "cfl-ray", version, requires=requires)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(
        "import shutil\n\n\ndef build_wheel(to, settings=None, metadata=None):\n"
        f"    return shutil.copy({made.name!r}, to) and {made.name!r}\n"
    )
