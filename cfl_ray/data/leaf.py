"""FEMNIST, Shakespeare and Sentiment140 in LEAF's layout: train/*.json and test/*.json.

Each file holds {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cfl_ray.data.images import Images, Progress
from cfl_ray.errors import DataError

SIDE = 28  # pixels
CLASSES = 62

Samples = tuple[np.ndarray, np.ndarray]  # x: uint8 (n, C, H, W) or token ids int32 (n, length); y: int16 (n,)
Convert = Callable[[Path, str, int, Any, Any], Samples]  # (file, user, number of samples, x, y) -> Samples


def read(
    train: list[Path],
    test: list[Path],
    convert: Convert,
    num_classes: int,
    vocabulary: int | None,
    progress: Progress | None,
) -> Images:
    """The samples of LEAF's files, with their users as clients.

    convert: makes the samples of a user, or raises DataError for unusable data. vocabulary: number of token ids; None:
    the samples are images.
    """
    train_x, train_y, client = _part(train, convert, progress)
    test_x, test_y, _ = _part(test, convert, progress) if test else (None, None, None)
    scale = 255 if vocabulary is None else 1
    return Images(train_x, train_y, test_x, test_y, num_classes, scale, client, vocabulary=vocabulary)


def _part(files: list[Path], convert: Convert, progress: Progress | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    xs, ys, names = [], [], []
    for done, file in enumerate(files, 1):
        for user, count, x_of_user, y_of_user in _users(file):
            x, y = convert(file, user, count, x_of_user, y_of_user)
            xs.append(x)
            ys.append(y)
            names += [user] * len(y)
        if progress:
            progress("reading LEAF files", done, len(files))
    if not names:
        raise DataError(
            f"{files[0].parent}: no user of its {len(files)} JSON files has a sample; run LEAF's preprocess.sh again"
        )
    return np.concatenate(xs), np.concatenate(ys), np.asarray(names, dtype=np.str_)


def _users(file: Path) -> Iterator[tuple[str, int, Any, Any]]:
    """Yields (user, number of samples, x, y) for every user of a file who has samples."""
    try:
        content = json.loads(file.read_bytes())
        counts = list(zip(content["users"], content["num_samples"], strict=False))  # a user without a count is ignored
        user_data = content["user_data"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{file} is not a LEAF file (users, num_samples, user_data): {error!r}") from error
    for user, count in counts:
        try:
            x, y = user_data[user]["x"], user_data[user]["y"]
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: data of user {user!r} cannot be read: {error!r}") from error
        if count:
            yield str(user), count, x, y


def handwriting(file: Path, user: str, count: int, x: Any, y: Any) -> Samples:
    """FEMNIST: images as uint8, without loss, since LEAF's pixels are 8-bit values divided by 255."""
    try:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{file}: data of user {user!r} cannot be read: {error!r}") from error
    if x.shape != (count, SIDE * SIDE) or y.shape != (count,):
        raise DataError(
            f"{file}: user {user!r} needs x of shape ({count}, {SIDE * SIDE}) and y of ({count},), "
            f"got {x.shape} and {y.shape}"
        )
    if not (x.min() >= 0 and x.max() <= 1):
        raise DataError(f"{file}: pixels of user {user!r} must lie in [0, 1], got {x.min()}..{x.max()}")
    if not 0 <= y.min() <= y.max() < CLASSES:
        raise DataError(f"{file}: labels of user {user!r} must lie in 0..{CLASSES - 1}, got {y.min()}..{y.max()}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), y.astype(np.int16)


# --- text ---------------------------------------------------------------------------------------

# The characters of Shakespeare's plays in LEAF's models/utils/language_utils.py, which has no number for others.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_TOKEN_OF = {letter: place for place, letter in enumerate(ALPHABET)}
LENGTH = 80  # characters before the character to predict
MAX_WORDS = 25  # words of a tweet that LEAF's stacked LSTM reads
VOCABULARY = 10_000  # number of tokens for tweets: the most frequent words, FILL and UNKNOWN
FILL, UNKNOWN = 0, 1  # tokens after the last word, and for words outside the vocabulary
TEXT_OF_TWEET = 4  # position of the text in [id, date, query, user, text, ...]


def characters(file: Path, user: str, count: int, x: Any, y: Any) -> Samples:
    """Shakespeare: inputs of 80 characters, labelled with the next character. Unknown characters get the last token."""
    _check_text(file, user, count, x, y)
    for text, expected in (*((text, LENGTH) for text in x), *((text, 1) for text in y)):
        if not isinstance(text, str) or len(text) != expected:
            actual = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise DataError(f"{file}: user {user!r} needs texts of {expected} characters, got {actual}")
    tokens, labels = ([[_TOKEN_OF.get(letter, len(ALPHABET)) for letter in text] for text in texts] for texts in (x, y))
    return np.array(tokens, np.int32), np.array(labels, np.int16)[:, 0]


def read_tweets(train: list[Path], test: list[Path], vocabulary: int, progress: Progress | None) -> Images:
    """Sentiment140: the first 25 words of each tweet, labelled with its sentiment, 0 or 1.

    The vocabulary has the most frequent words of the training files; equally frequent words in alphabetical order.
    """
    counts: Counter[str] = Counter()
    for file in train:
        for user, count, x, y in _users(file):
            _check_text(file, user, count, x, y)
            counts.update(word for tweet in x for word in _words(_text(tweet)))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    token_of = {word: number for number, word in enumerate(frequent, 2)}

    def words(file: Path, user: str, count: int, x: Any, y: Any) -> Samples:
        _check_text(file, user, count, x, y)
        tokens = np.full((count, MAX_WORDS), FILL, np.int32)
        for row, tweet in enumerate(x):
            for place, word in enumerate(_words(_text(tweet))[:MAX_WORDS]):
                tokens[row, place] = token_of.get(word, UNKNOWN)
        try:
            labels = np.array([int(value) for value in y])
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{file}: labels of user {user!r} must be 0 or 1: {error}") from error
        labels = np.where(labels == 4, 1, labels)  # the original files have 4 for positive
        if not 0 <= labels.min() <= labels.max() <= 1:
            raise DataError(
                f"{file}: labels of user {user!r} must lie in 0..1 (or be 4), got {labels.min()}..{labels.max()}"
            )
        return tokens, labels.astype(np.int16)

    return read(train, test, words, 2, vocabulary, progress)


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


def _text(tweet: Any) -> str:
    """The text of a tweet, which LEAF stores with its other fields."""
    return str(tweet[TEXT_OF_TWEET]) if isinstance(tweet, list) and len(tweet) > TEXT_OF_TWEET else str(tweet)


def _check_text(file: Path, user: str, count: int, x: Any, y: Any) -> None:
    sizes = [len(part) if isinstance(part, list) else type(part).__name__ for part in (x, y)]
    if sizes != [count, count]:
        raise DataError(f"{file}: user {user!r} needs lists x and y of {count} entries, got {sizes[0]} and {sizes[1]}")
