"""FEMNIST in LEAF's own layout: train/*.json and test/*.json, {"users": [...], "num_samples": [...], "user_data": {user: {"x", "y"}}}."""

import json
from pathlib import Path

import numpy as np

from cfl_ray.core.errors import DataError
from cfl_ray.data.images import Images, Progress

SIDE = 28
CLASSES = 62


def read(train: list[Path], test: list[Path], progress: Progress | None) -> Images:
    """LEAF's images as uint8, which is exact: LEAF divided 8-bit pixels by 255."""
    train_x, train_y, client = _part(train, progress)
    test_x, test_y, _ = _part(test, progress) if test else (None, None, None)
    return Images(train_x, train_y, test_x, test_y, num_classes=CLASSES, client=client)


def _part(files: list[Path], progress: Progress | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    xs, ys, names = [], [], []
    for done, file in enumerate(files, 1):
        for user, x, y in _users(file):
            xs.append(x)
            ys.append(y)
            names += [user] * len(y)
        if progress:
            progress("reading LEAF files", done, len(files))
    if not names:
        raise DataError(f"{files[0].parent}: no user of its {len(files)} JSON files has a sample; run LEAF's preprocess.sh again")
    return np.concatenate(xs), np.concatenate(ys), np.asarray(names, dtype=np.str_)


def _users(file: Path):
    """Yields (user, x uint8 (n, 1, 28, 28), y int16 (n,)) for every user of one file."""
    try:
        content = json.loads(file.read_bytes())
        users, counts, user_data = content["users"], content["num_samples"], content["user_data"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{file} is not a LEAF file (users, num_samples, user_data): {error!r}") from error
    for user, count in zip(users, counts):
        try:
            x, y = np.asarray(user_data[user]["x"], np.float64), np.asarray(user_data[user]["y"], np.int64)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}: data of user {user!r} cannot be read: {error!r}") from error
        if count == 0:
            continue
        _check(file, user, count, x, y)
        yield str(user), np.rint(x * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), y.astype(np.int16)


def _check(file: Path, user: str, count: int, x: np.ndarray, y: np.ndarray) -> None:
    if x.shape != (count, SIDE * SIDE) or y.shape != (count,):
        raise DataError(f"{file}: user {user!r} needs x of shape ({count}, {SIDE * SIDE}) and y of ({count},), got {x.shape} and {y.shape}")
    if not (x.min() >= 0 and x.max() <= 1):
        raise DataError(f"{file}: pixels of user {user!r} must lie in [0, 1], found {x.min()}..{x.max()}")
    if not 0 <= y.min() <= y.max() < CLASSES:
        raise DataError(f"{file}: labels of user {user!r} must lie in 0..{CLASSES - 1}, found {y.min()}..{y.max()}")
