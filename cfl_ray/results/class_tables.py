"""Tables of classes, from the counts that `evaluation.confusion` records: accuracies by cluster, and confusions."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cfl_ray.errors import ConfigError
from cfl_ray.report.report_data import ALL_CLIENTS, RecordedConfusion, accuracy_of_classes, mean_and_std
from cfl_ray.results.client_scores import RunResults
from cfl_ray.results.comparison import formatted, mean_and_spread
from cfl_ray.results.latex_table import as_table, escaped

if TYPE_CHECKING:
    import pandas as pd

_MOST_COLUMNS, _MOST_SPREADS = 12, 6  # numbers, and means with deviations, side by side in a table
_MOST_MATRIX = 20  # classes of a confusion matrix; of more, the most frequent confusions are listed
_MOST_CONFUSIONS = 20
_COUNTED = "test samples by true class (rows) and predicted class, shared ones once for each client"
_WORDS = ("method", "clients", "class", "true", "predicted")  # columns of texts

Recorded = dict[tuple[str, str], dict[int, RecordedConfusion]]  # by (experiment, method), then seed
_Rows = dict[str, tuple[np.ndarray, np.ndarray]]  # by name: samples (S, C) and accuracy (S, C) in S seeds
_Cells = list[tuple[str, list[str]]]  # a table: the heading of each column and its texts; two may be equal


def recorded_classes(results: RunResults, round: str = "kept") -> Recorded:
    """The counts that the runs have recorded. round: as in `compare_runs`. Raises ConfigError if no run has any."""
    found: Recorded = {}
    for key, of_seeds in results.items():
        for seed, result in of_seeds.items():
            if (recorded := result.recorded_confusion(round)) is not None:
                found.setdefault(key, {})[seed] = recorded
    if not found:
        raise ConfigError(
            "no run has recorded its classes: runs with evaluation.confusion: true do; of a run with its models, "
            "result.class_accuracy() and result.confusion() compute them"
        )
    return found


def accuracy_frame(recorded: Recorded) -> pd.DataFrame:
    """A row for each class of each cluster: experiment, method, seed, cluster, class, samples, accuracy."""
    import pandas as pd

    rows = [
        (*key, seed, part, name, samples, accuracy)
        for key, seed, one, part, counts_CC in _parts(recorded)
        for name, samples, accuracy in zip(one.names, counts_CC.sum(1), accuracy_of_classes(counts_CC), strict=True)
    ]
    return pd.DataFrame(rows, columns=["experiment", "method", "seed", "cluster", "class", "samples", "accuracy"])


def confusion_frame(recorded: Recorded) -> pd.DataFrame:
    """A row for each pair of classes that occurs: experiment, method, seed, cluster, true, predicted, samples, share.

    share: of the samples of the true class.
    """
    import pandas as pd

    rows = [
        (*key, seed, part, one.names[i], one.names[j], counts_CC[i, j], counts_CC[i, j] / counts_CC[i].sum())
        for key, seed, one, part, counts_CC in _parts(recorded)
        for i, j in np.argwhere(counts_CC).tolist()
    ]
    columns = ["experiment", "method", "seed", "cluster", "true", "predicted", "samples", "share"]
    return pd.DataFrame(rows, columns=columns)


def _parts(recorded: Recorded) -> Iterator[tuple[tuple[str, str], int, RecordedConfusion, str, np.ndarray]]:
    """Yields (experiment, method), the seed, its counts, and the name and counts of all clients and of each cluster."""
    for key, of_seeds in recorded.items():
        for seed, one in sorted(of_seeds.items()):
            for part, counts_CC in one.parts.items():
                yield key, seed, one, part, counts_CC


# ---- tables to read


def accuracy_tables(recorded: Recorded, style: str) -> str:
    """The accuracy of each class for all clients and for those of each cluster, as md, html, csv or latex.

    Of several seeds, the numbers of all clients are mean ± standard deviation; clusters are of a single seed, since
    those of different seeds do not correspond. Few classes are columns. Many are rows: of a table with the methods as
    columns, and of one for each method with its clusters.
    """
    if style == "csv":
        return str(accuracy_frame(recorded).to_csv(index=False)).rstrip("\n")
    tables: list[tuple[str, _Cells]] = []
    for experiment in dict.fromkeys(experiment for experiment, _ in recorded):
        methods = {method: of_seeds for (name, method), of_seeds in recorded.items() if name == experiment}
        begin = f"{experiment}: accuracy" if len({name for name, _ in recorded}) > 1 else "Accuracy"
        tables += _accuracies(f"{begin} of each class on the test samples of", methods)
    return _rendered(tables, style)


def _accuracies(begin: str, methods: Mapping[str, Mapping[int, RecordedConfusion]]) -> Iterator[tuple[str, _Cells]]:
    """The tables of an experiment with their titles, which begin with `begin`."""
    rows_of = {method: _rows_of(of_seeds) for method, of_seeds in methods.items()}
    names = next(iter(next(iter(methods.values())).values())).names
    seeds = max(map(len, methods.values()))
    spread = f"; of {ALL_CLIENTS} mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    most = _MOST_COLUMNS if seeds == 1 else _MOST_SPREADS
    if len(names) <= most:
        yield f"{begin} {ALL_CLIENTS} and of the clients of each cluster{spread}", _classes_as_columns(names, rows_of)
        return
    whole = {method: rows.pop(ALL_CLIENTS) for method, rows in rows_of.items()}
    for cells in _classes_as_rows(names, whole, most):
        yield f"{begin} {ALL_CLIENTS}{spread.replace(f' of {ALL_CLIENTS}', '')}", cells
    for method, rows in rows_of.items():
        for cells in _classes_as_rows(names, rows, _MOST_COLUMNS):
            yield f"{begin} the clients of each cluster of {method}", cells


def _rows_of(of_seeds: Mapping[int, RecordedConfusion]) -> _Rows:
    """The rows of all clients, in every seed, and of each cluster of each seed."""
    parts = {seed: one.parts for seed, one in sorted(of_seeds.items())}
    whole = [of_seed[ALL_CLIENTS] for of_seed in parts.values()]
    rows = {ALL_CLIENTS: whole}
    for seed, of_seed in parts.items():
        for name, counts_CC in list(of_seed.items())[1:]:
            rows[f"{name}, seed {seed}" if len(parts) > 1 else name] = [counts_CC]
    return {
        name: (np.array([c.sum(1) for c in counts]), np.array([accuracy_of_classes(c) for c in counts]))
        for name, counts in rows.items()
    }


def _cells(accuracy_SC: np.ndarray) -> list[str]:
    """The text of each class: mean and standard deviation over the seeds that have samples of it."""
    texts = []
    for accuracy_S in accuracy_SC.T:
        known = accuracy_S[~np.isnan(accuracy_S)]
        texts.append(mean_and_spread(*mean_and_std(known)) if len(known) else "")
    return texts


def _classes_as_columns(names: Sequence[str], rows_of: Mapping[str, _Rows]) -> _Cells:
    rows = [
        [method, part, f"{samples_SC.sum(1).mean():.0f}", *_cells(accuracy_SC)]
        for method, of_parts in rows_of.items()
        for part, (samples_SC, accuracy_SC) in of_parts.items()
    ]
    return list(zip(["method", "clients", "samples", *names], map(list, zip(*rows, strict=True)), strict=True))


def _classes_as_rows(names: Sequence[str], rows: _Rows, most: int) -> Iterator[_Cells]:
    """Tables of at most `most` columns of accuracies, the first with the number of samples if it is the same for all.

    rows: by heading of their column.
    """
    samples = [samples_SC.mean(0) for samples_SC, _ in rows.values()]
    same = bool(samples) and all(np.array_equal(samples[0], samples_C) for samples_C in samples)
    for start in range(0, len(rows), most):
        table: _Cells = [("class", list(names))]
        if same and not start:
            table.append(("samples", [f"{count:.0f}" for count in samples[0]]))
        yield table + [(part, _cells(rows[part][1])) for part in list(rows)[start : start + most]]


def confusion_tables(recorded: Recorded, style: str) -> str:
    """The confusion matrix of all clients and of the clients of each cluster, in every seed, as md, html, csv or latex.

    Of many classes, the most frequent confusions.
    """
    if style == "csv":
        return str(confusion_frame(recorded).to_csv(index=False)).rstrip("\n")
    several = len({experiment for experiment, _ in recorded}) > 1
    tables = []
    for (experiment, method), seed, one, part, counts_CC in _parts(recorded):
        where = [*([experiment] if several else []), method, part]
        where += [f"seed {seed}"] if len(recorded[experiment, method]) > 1 else []
        if len(one.names) <= _MOST_MATRIX:
            what, cells = _COUNTED, _matrix(one.names, counts_CC)
        else:
            what, cells = f"the {_MOST_CONFUSIONS} most frequent confusions", _most_confused(one.names, counts_CC)
        tables.append((f"{', '.join(where)}: {what}", cells))
    return _rendered(tables, style)


def _matrix(names: Sequence[str], counts_CC: np.ndarray) -> _Cells:
    columns = [(name, list(map(str, column))) for name, column in zip(names, counts_CC.T.tolist(), strict=True)]
    return [("true", list(names)), *columns]


def _most_confused(names: Sequence[str], counts_CC: np.ndarray) -> _Cells:
    wrong_CC = counts_CC - np.diag(np.diag(counts_CC))
    order = np.argsort(-wrong_CC, axis=None, kind="stable")[:_MOST_CONFUSIONS]
    pairs = [(i, j) for i, j in zip(*np.unravel_index(order, wrong_CC.shape), strict=True) if wrong_CC[i, j]]
    return [
        ("true", [names[i] for i, _ in pairs]),
        ("predicted", [names[j] for _, j in pairs]),
        ("samples", [str(counts_CC[pair]) for pair in pairs]),
        ("share of the class", [f"{counts_CC[i, j] / counts_CC[i].sum():.3f}" for i, j in pairs]),
    ]


# ---- formats


def _rendered(tables: Sequence[tuple[str, _Cells]], style: str) -> str:
    """The tables under their titles."""
    import pandas as pd

    texts = []
    for heading, cells in tables:
        headings, columns = zip(*cells, strict=True)
        frame = pd.DataFrame(list(zip(*columns, strict=True)), columns=headings)
        if style == "latex":
            texts.append(_latex(heading, cells))
        else:
            above = f"<h3>{html.escape(heading)}</h3>" if style == "html" else f"{heading}\n"
            texts.append(f"{above}\n{formatted(frame, style)}")
    return "\n\n".join(texts)


def _latex(caption: str, cells: _Cells) -> str:
    headings, columns = zip(*cells, strict=True)
    align = "".join("l" if name in _WORDS else "r" for name in headings)
    body = [" & ".join(map(escaped, headings)) + r" \\", r"\midrule"]
    body += [" & ".join(_latex_cell(text) for text in row) + r" \\" for row in zip(*columns, strict=True)]
    size = [r"\footnotesize"] if len(body) > 40 or len(cells) > _MOST_COLUMNS else []
    return as_table(escaped(caption).replace("±", r"$\pm$") + ".", align, body, *size)


def _latex_cell(text: str) -> str:
    mean, _, std = text.partition(" ± ")
    return rf"${mean} \pm {std}$" if std else escaped(text)
