"""Small JSON files that a crash leaves whole: the old content or the new one, never a part."""

import json
import os
from pathlib import Path
from typing import Any

from cfl_ray.core.errors import DataError


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces `path` in one step; what was there stays until the new content is on disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in `path`, None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); restore it, or remove it to start its part afresh") from error
