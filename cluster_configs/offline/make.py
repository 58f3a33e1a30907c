"""Makes a folder from which cfl_ray is installed on machines without internet.

    pip list --format=freeze > have.txt                            on the cluster: what is there already
    python cluster_configs/offline/make.py FOLDER --have have.txt  on a machine with internet
    bash FOLDER/install.sh                                         on the cluster, after copying FOLDER there

FOLDER gets the wheels of cfl_ray and of all that it needs, but for the packages in --have and what only they need, with
checksums and install.sh. Versions are chosen that fit those in --have. Files larger than --part are split, for
transfers with a limit, and joined by install.sh.

Further arguments are passed to pip; for another system or Python than those of this machine:

    ... --platform manylinux_2_28_x86_64 --python-version 3.12 --only-binary=:all:
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError:  # of a bare environment; pip has a copy
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = "cfl-ray"
UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def size(text: str) -> int:
    """Bytes of a size such as 60M."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 60M, got {text!r}")
    return int(found[1]) * UNITS.get(found[2], 1)


def versions(file: Path) -> dict[str, str]:
    """Version by package of a file with lines NAME==VERSION, without local labels such as +cu128: no index has them."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    for line in filter(None, lines):
        if not re.fullmatch(r"[\w.\[\]-]+==[^\s=]+", line):
            raise SystemExit(f"error: {file}: expected NAME==VERSION, as of `pip list --format=freeze`, got {line!r}")
    pairs = (line.split("==") for line in lines if line)
    return {str(canonicalize_name(name)): version.partition("+")[0] for name, version in pairs}


def missing(report: dict[str, Any], have: set[str]) -> Iterator[str]:
    """NAME==VERSION of all that the project needs and that is not there, from pip's report of an installation."""
    packages = {str(canonicalize_name(item["metadata"]["name"])): item["metadata"] for item in report["install"]}
    waiting, seen = [(PROJECT, "")], set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name not in packages:
            continue
        if name not in have and name != PROJECT and not any(name == known for known, _ in seen):
            yield f"{name}=={packages[name]['version']}"
        seen.add((name, extra))
        for text in packages[name].get("requires_dist", []):
            need, environment = Requirement(text), {**report["environment"], "extra": extra}
            wanted = need.marker is None or need.marker.evaluate(environment)
            of_extra = need.marker is not None and extra and not need.marker.evaluate({**environment, "extra": ""})
            if wanted and (of_extra or name not in have):  # what is there has its own needs, but not those of extras
                waiting += [(str(canonicalize_name(need.name)), part) for part in ("", *need.extras)]


def split(file: Path, part: int) -> None:
    """Replaces a file that is larger than this by FILE.part000, FILE.part001 and so on."""
    if file.stat().st_size <= part:
        return
    with file.open("rb") as whole:
        for number, at in enumerate(range(0, file.stat().st_size, part)):
            whole.seek(at)
            file.with_name(f"{file.name}.part{number:03}").write_bytes(whole.read(part))
    file.unlink()


def main() -> None:
    """Makes the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--have", type=Path, help="packages that are there, as of `pip list --format=freeze`")
    parser.add_argument("--part", type=size, help="largest size of a file, e.g. 60M; default: no limit")
    parser.add_argument("--project", type=Path, default=ROOT, help="folder of cfl_ray; default: this one")
    args, for_pip = parser.parse_known_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        raise SystemExit(f"error: {args.folder} is not empty; name a new folder")
    have = versions(args.have) if args.have else {}
    have.pop(PROJECT, None)

    def pip(*arguments: object) -> None:
        done = subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)])
        if done.returncode:
            raise SystemExit(f"error: pip {arguments[0]} failed, see above")

    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", args.folder, args.project.absolute())
    (wheel,) = args.folder.glob("*.whl")
    with TemporaryDirectory() as scratch:
        constraints, found = Path(scratch) / "have.txt", Path(scratch) / "report.json"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in have.items()))
        resolve = ("install", "--quiet", "--dry-run", "--ignore-installed", "--target", scratch, "--report", found)
        pip(*resolve, "--constraint", constraints, *for_pip, wheel)
        names = sorted(missing(json.loads(found.read_text()), set(have)))
    if names:
        pip("download", "--quiet", "--no-deps", "--dest", args.folder, *for_pip, *names)
    if args.part:
        for file in sorted(args.folder.iterdir()):
            split(file, args.part)
    shutil.copy(Path(__file__).with_name("install.sh"), args.folder)
    files = sorted(file for file in args.folder.iterdir() if file.name != "install.sh")
    sums = [f"{hashlib.file_digest(file.open('rb'), 'sha256').hexdigest()}  {file.name}\n" for file in files]
    (args.folder / "SHA256SUMS").write_text("".join(sums))
    total = sum(file.stat().st_size for file in files)
    print(f"{args.folder}: {len(names) + 1} packages in {len(files)} files, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
