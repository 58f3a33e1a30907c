"""Damaged and hostile variants of files, drawn from a seed: other bytes, other values, or no file in their place."""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "../../../etc/passwd", "/dev/zero", "*" * 5000, "é☃", "{x}", "http://[", "s3://", "a:b", "***"),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3], {"x": {"y": []}}, [0] * 200, "1e999", "-0", "!!python/object:x"),
]
DEEP = 60_000  # more levels than Python's recursion has


# ---- bytes


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 3, 40))):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def without_middle(content: bytes, draw: random.Random) -> bytes:
    first, last = sorted((draw.randrange(len(content) + 1), draw.randrange(len(content) + 1)))
    return content[:first] + content[last:]


def with_junk(content: bytes, draw: random.Random) -> bytes:
    junk = [b"\0", b"\0" * 300, b"\xff\xfe", b"\xc3", b"[" * DEEP, b'{"a":' * DEEP]
    junk += [b"9" * 6000, b"1e999", b"NaN", b"\n\n"]
    at = draw.choice((0, draw.randrange(len(content) + 1), len(content)))
    return content[:at] + draw.choice(junk) + content[at:]


def with_other_number(content: bytes, draw: random.Random) -> bytes:
    digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
    if not digits:
        return content
    at = draw.choice(digits)
    other = draw.choice((b"-1", b"99999999999999999999", b"1e308", b"0x", b"", b'"a"'))
    return content[:at] + other + content[at + 1 :]


def other_lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    one = draw.choice(lines)
    kind = draw.randrange(4)
    if kind == 0:
        lines.insert(draw.randrange(len(lines) + 1), one)
    elif kind == 1:
        lines.remove(one)
    elif kind == 2:
        draw.shuffle(lines)
    else:
        lines[draw.randrange(len(lines))] = flipped(one, draw)
    return b"".join(lines)


BYTES: list[Callable[[bytes, random.Random], bytes]] = [
    *(flipped, cut, without_middle, with_junk, with_other_number, other_lines, lambda content, draw: b"")
]


def other_bytes(content: bytes, draw: random.Random) -> bytes:
    return draw.choice(BYTES)(content, draw)


# ---- values


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in _places(one, (*at, key)))]


def other_value(value: Any, draw: random.Random) -> Any:
    """The JSON value with one to three values in it replaced, left out, added, or named otherwise."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 3))):
        place = draw.choice(_places(value))
        new = copy.deepcopy(draw.choice(VALUES))
        if not place:
            if draw.random() < 0.1:
                return new
            continue
        *path, last = place
        container = value
        for key in path:
            container = container[key]
        kind = draw.randrange(4)
        if kind < 2 or isinstance(container, list):
            container[last] = new
        elif kind == 2:
            del container[last]
        else:
            container[draw.choice(("", "x", "__class__", f"{last}s", "../x"))] = new
    return value


def other_json(content: bytes, draw: random.Random) -> bytes:
    """A mutant of a JSON file: of its values, or of its bytes."""
    if draw.random() < 0.4:
        return other_bytes(content, draw)
    return json.dumps(other_value(json.loads(content), draw)).encode()


def other_json_lines(content: bytes, draw: random.Random) -> bytes:
    """A mutant of a file of JSON lines."""
    lines = content.splitlines(keepends=True)
    if draw.random() < 0.4 or not lines:
        return other_bytes(content, draw)
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(other_value(json.loads(lines[at]), draw)).encode() + b"\n"
    return b"".join(lines)


# ---- what is in the place of a file


def put_something_else(path: Path, draw: random.Random) -> None:
    """A folder, a link to nowhere, to itself, to a file of the system or to a device in the place of a file."""
    path.unlink(missing_ok=True)
    kind = draw.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to("nowhere")
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.symlink_to("/etc/passwd")
    elif kind == 4:
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
