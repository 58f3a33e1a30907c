"""Client ids as text, in the form `3 5-9`."""

import re
from collections.abc import Iterable, Sequence

from cfl_ray.errors import ConfigError

MAX_RANGE = 10_000_000  # ids in a range; a longer range is a typing error


def parse_ids(words: Iterable[str]) -> list[int]:
    """The ids that words like `7` and `0-9` name, in their order and with repetitions. Raises ConfigError."""
    ids: list[int] = []
    for word in words:
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= last - first < MAX_RANGE:
            raise ConfigError(f"{word!r} is not a client: write an id or a range of ids, e.g. 7 or 0-9")
        ids.extend(range(first, last + 1))
    return ids


def clients_in_words(ids: Iterable[int], limit: int = 8) -> str:
    """Clients as text, `client 3` or `clients 3, 5-9`, ascending: at most `limit` ranges, then the number of others."""
    runs = _ranges(sorted(ids))
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit])
    hidden = sum(last - first + 1 for first, last in runs[limit:])
    return f"client{'s' * (not shown.isdecimal())} {shown}" + (f" and {hidden} more" if hidden else "")


def compress_ids(ids: Sequence[int]) -> list[int | str]:
    """The same ids in the same order, three and more in a row as a range; the inverse of `parse_ids`."""
    entries: list[int | str] = []
    for first, last in _ranges(ids):
        entries += [f"{first}-{last}"] if last - first >= 2 else range(first, last + 1)
    return entries


def _ranges(ids: Iterable[int]) -> list[list[int]]:
    """[first, last] of each range of consecutive ids, in the given order."""
    ranges: list[list[int]] = []
    for client in ids:
        if ranges and client == ranges[-1][1] + 1:
            ranges[-1][1] = client
        else:
            ranges.append([client, client])
    return ranges
