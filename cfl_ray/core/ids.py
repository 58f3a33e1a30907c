"""Ids of clients as people write them: `3 5-9`."""

import re
from collections.abc import Iterable, Sequence

from cfl_ray.core.errors import ConfigError

_MOST = 10_000_000  # ids in one range: more is a slip of the finger


def parse_ids(words: Iterable[str]) -> list[int]:
    """The ids that `7` and `0-9` name, in that order; one that is named twice is there twice. Raises ConfigError."""
    ids: list[int] = []
    for word in words:
        found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", word)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not 0 <= last - first < _MOST:
            raise ConfigError(f"{word!r} is not a client: write an id or a range of ids, e.g. 7 or 0-9")
        ids.extend(range(first, last + 1))
    return ids


def spans(ids: Sequence[int], limit: int = 8) -> str:
    """Ids in short: `3, 5-9`; at most `limit` ranges, and how many more there are."""
    runs: list[list[int]] = []
    for client in sorted(ids):
        if runs and client == runs[-1][1] + 1:
            runs[-1][1] = client
        else:
            runs.append([client, client])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit])
    return shown + (f" and {sum(last - first + 1 for first, last in runs[limit:])} more" if len(runs) > limit else "")


def shorten(ids: Sequence[int]) -> list[int | str]:
    """The same ids in the same order, three and more in a row as a range: what `parse_ids` reads back."""
    found: list[int | str] = []
    at = 0
    while at < len(ids):
        end = at
        while end + 1 < len(ids) and ids[end + 1] == ids[end] + 1:
            end += 1
        found += [f"{ids[at]}-{ids[end]}"] if end - at >= 2 else ids[at : end + 1]
        at = end + 1
    return found
