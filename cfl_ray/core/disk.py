"""Files that are surely on disk, and what they hold in one number."""

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Brings a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """Of its content, in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
