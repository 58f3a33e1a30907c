"""FEMNIST, Shakespeare and Sentiment140 in LEAF's layout: train/*.json and test/*.json.

Each file holds {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cfl_ray.data.array_checks import label_warnings
from cfl_ray.data.columns import numbered
from cfl_ray.data.data_set import DataSet, Progress
from cfl_ray.data.reading import reading
from cfl_ray.errors import DataError, counted

SIDE = 28  # pixels
CLASSES = 62

Samples = tuple[np.ndarray, np.ndarray]  # x: uint8 (n, C, H, W) or token ids int32 (n, length); y: int16 (n,)
Convert = Callable[[Path, str, int, Any, Any], Samples]  # (file, user, number of samples, x, y) -> Samples
Content = Callable[[Path], bytes]  # of a file


def read(
    train: list[Path],
    test: list[Path],
    convert: Convert,
    num_classes: int,
    vocabulary: int | None,
    content: Content,
    dense: bool,
    progress: Progress | None,
) -> DataSet:
    """The samples of LEAF's files, with their users as clients.

    convert: makes the samples of a user, or raises DataError for unusable data. vocabulary: number of token ids; None:
    the samples are images. dense: whether labels are numbered anew, as in `dense_labels`.
    """
    empty: list[str] = []  # users without samples
    train_x, train_y, client = _part(train, convert, content, empty, progress)
    test_x, test_y, _ = _part(test, convert, content, empty, progress) if test else (None, None, None)
    class_names: tuple[str, ...] = ()
    if dense:
        parts = [(str(files[0].parent), y) for files, y in ((train, train_y), (test, test_y)) if y is not None]
        (train_y, *tests), class_names = numbered(parts)
        test_y, num_classes = next(iter(tests), None), len(class_names)
    warnings = label_warnings(str(train[0].parent), train_y, num_classes)
    if empty:
        are = "is" if len(empty) == 1 else "are"
        without = f"{counted(len(empty), 'user')} without samples {are} left out, e.g. {empty[0]}"
        warnings.append(f"{train[0].parent.parent}: {without}")
    return DataSet(
        train_x,
        train_y,
        test_x,
        test_y,
        num_classes,
        scale=255 if vocabulary is None else 1,
        client=client,
        vocabulary=vocabulary,
        class_names=class_names,
        notes=(
            f"{train[0].parent}: read {counted(len(np.unique(client)), 'user')} with {counted(len(train_y), 'sample')}",
        ),
        warnings=tuple(warnings),
    )


def _part(
    files: list[Path], convert: Convert, content: Content, empty: list[str], progress: Progress | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    xs, ys, names = [], [], []
    file_of: dict[str, Path] = {}  # of each user
    for done, file in enumerate(files, 1):
        for user, count, x_of_user, y_of_user in _users(file, content):
            if (first := file_of.setdefault(user, file)) != file:
                raise DataError(
                    f"user {user!r} is in {first} and in {file}; LEAF's own reader takes the last and loses the other, "
                    "so put the samples of a user into one file, or remove the copy"
                )
            if not count:
                empty.append(user)
                continue
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


def _users(file: Path, content: Content) -> Iterator[tuple[str, int, Any, Any]]:
    """Yields (user, number of samples, x, y) for every user of a file. Raises DataError for lists that disagree."""
    try:
        with reading(str(file), "a LEAF file (users, num_samples, user_data)", "run LEAF's preprocess.sh again"):
            parsed = json.loads(content(file), object_pairs_hook=partial(_once, file))
        users, counts, user_data = parsed["users"], parsed["num_samples"], parsed["user_data"]
        hierarchies = parsed.get("hierarchies")
        lengths = {"users": len(users), "num_samples": len(counts), "user_data": len(user_data)}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is not a LEAF file (users, num_samples, user_data): {error!r}") from error
    if hierarchies:
        lengths["hierarchies"] = len(hierarchies) if isinstance(hierarchies, list) else -1
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(user_data, dict)):
        raise DataError(f"{file} is not a LEAF file: users and num_samples must be lists, user_data an object")
    known: set[str] = set()
    for user in map(str, users):
        if user in known:
            raise DataError(f"{file}: users lists {user!r} twice; a user is listed once")
        if user not in user_data:
            raise DataError(f"{file}: user_data has no entry for user {user!r}, whom users lists; add it")
        known.add(user)
    if others := [user for user in user_data if user not in known]:
        raise DataError(f"{file}: users does not list user {others[0]!r}, who has an entry in user_data; add the name")
    if len(set(lengths.values())) > 1:
        disagreeing = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise DataError(f"{file} has {disagreeing}; each user needs an entry in all")
    for user, count in zip(map(str, users), counts, strict=True):
        try:
            x, y = user_data[user]["x"], user_data[user]["y"]
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: data of user {user!r} cannot be read: {error!r}") from error
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise DataError(f"{file}: num_samples of user {user!r} must be a whole number from 0, got {count!r}")
        if count == 0 and (x or y):
            raise DataError(f"{file}: num_samples of user {user!r} is 0, but the user has data; correct one of them")
        yield user, count, x, y


def _once(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises DataError for a name that it has twice, of which json would keep the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise DataError(f"{file} has the name {name!r} twice in one object; rename one or remove the copy")
    return made


_OTHER_DATA = "a function reads other data of LEAF (docs/extend/data.md#clients-that-another-tool-has-divided)"


def handwriting(file: Path, user: str, count: int, x: Any, y: Any) -> Samples:
    """FEMNIST: images as uint8, without loss, since LEAF's pixels are 8-bit values divided by 255."""
    try:
        x, y = np.asarray(x, np.float64), _whole(np.asarray(y))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{file}: data of user {user!r} cannot be read: {error!r}; {_OTHER_DATA}") from error
    if x.shape != (count, SIDE * SIDE) or y.shape != (count,):
        raise DataError(
            f"{file}: user {user!r} needs x of shape ({count}, {SIDE * SIDE}) and y of ({count},), "
            f"got {x.shape} and {y.shape}; {_OTHER_DATA}"
        )
    if not (x.min() >= 0 and x.max() <= 1):
        raise DataError(f"{file}: pixels of user {user!r} must lie in [0, 1], got {x.min()}..{x.max()}")
    if not 0 <= y.min() <= y.max() < CLASSES:
        raise DataError(f"{file}: labels of user {user!r} must lie in 0..{CLASSES - 1}, got {y.min()}..{y.max()}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), y.astype(np.int16)


def _whole(y: np.ndarray) -> np.ndarray:
    """Labels as integers; 3.0 and "3" are 3. Raises ValueError or OverflowError for other numbers."""
    if y.dtype.kind == "f" and np.isinf(y).any():
        raise OverflowError("cannot convert float infinity to integer")
    if y.dtype.kind == "f" and len(broken := y[y != np.floor(y)]):  # NaN among them
        raise ValueError(f"label {broken.flat[0]} is no whole number")
    return y.astype(np.int64)


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


def read_tweets(
    train: list[Path], test: list[Path], vocabulary: int, content: Content, dense: bool, progress: Progress | None
) -> DataSet:
    """Sentiment140: the first 25 words of each tweet, labelled with its sentiment, 0 or 1.

    The vocabulary has the most frequent words of the training files; equally frequent words in alphabetical order.
    """
    counts: Counter[str] = Counter()
    for file in train:
        for user, count, x, y in _users(file, content):
            _check_text(file, user, count, x, y)
            counts.update(word for tweet in x for word in _words(_text(file, user, tweet)))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    token_of = {word: number for number, word in enumerate(frequent, 2)}

    def words(file: Path, user: str, count: int, x: Any, y: Any) -> Samples:
        _check_text(file, user, count, x, y)
        tokens = np.full((count, MAX_WORDS), FILL, np.int32)
        for row, tweet in enumerate(x):
            for place, word in enumerate(_words(_text(file, user, tweet))[:MAX_WORDS]):
                tokens[row, place] = token_of.get(word, UNKNOWN)
        try:
            labels = _whole(np.array(y))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{file}: labels of user {user!r} must be 0 or 1: {error}") from error
        labels = np.where(labels == 4, 1, labels)  # the original files have 4 for positive
        if not 0 <= labels.min() <= labels.max() <= 1:
            raise DataError(
                f"{file}: labels of user {user!r} must lie in 0..1 (or be 4), got {labels.min()}..{labels.max()}"
            )
        return tokens, labels.astype(np.int16)

    return read(train, test, words, 2, vocabulary, content, dense, progress)


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


def _text(file: Path, user: str, tweet: Any) -> str:
    """The text of a tweet, which LEAF stores with its other fields."""
    text = tweet[TEXT_OF_TWEET] if isinstance(tweet, list) and len(tweet) > TEXT_OF_TWEET else tweet
    if not isinstance(text, str):
        raise DataError(
            f"{file}: user {user!r} has a tweet that is no text but {type(text).__name__}; leave the sample out"
        )
    return text


def _check_text(file: Path, user: str, count: int, x: Any, y: Any) -> None:
    sizes = [len(part) if isinstance(part, list) else type(part).__name__ for part in (x, y)]
    if sizes != [count, count]:
        raise DataError(f"{file}: user {user!r} needs lists x and y of {count} entries, got {sizes[0]} and {sizes[1]}")
