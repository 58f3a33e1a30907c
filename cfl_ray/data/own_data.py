"""Data of the user: what a function returns, and the arrays of an .npz file."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cfl_ray.config import DataConfig
from cfl_ray.config.data import SOURCE_KINDS, ArraysConfig, PluginDataConfig
from cfl_ray.config.partition import PluginPartitionConfig
from cfl_ray.config.shift import PluginShiftConfig
from cfl_ray.core import global_generators
from cfl_ray.data.arrays import data_set_from_arrays, digest, federation_from_arrays
from cfl_ray.data.data_set import Source
from cfl_ray.data.federation import Federation
from cfl_ray.data.reading import reading
from cfl_ray.data.tables import read_npz
from cfl_ray.errors import DataError, did_you_mean
from cfl_ray.plugins.calling import call_plugin, check_options, place_of, reference_of

_OF_VALIDATION = ("x_validation", "y_validation", "validation_clients")
_NUMBERS = ("num_classes", "class_names", "vocabulary")
KEYS = ("x", "y", "x_test", "y_test", "groups", *_NUMBERS, "clients", "test_clients", *_OF_VALIDATION)


def load_function(data: PluginDataConfig, seed: int, targets: str = "class") -> Federation | Source:
    """The data of the function that `data.source` names: a Federation, or without clients a Source.

    The function is called with `data.options`. It returns a Federation, a pair (x, y), or a mapping with x, y and
    optionally clients, groups, num_classes, class_names, vocabulary, x_test, y_test, test_clients, and the same three
    for validation: arguments of `federation_from_arrays`. Without clients, the samples are divided later as
    `data.partition` says. Raises DataError naming the function and its line. targets: kind of y.
    """
    function = SOURCE_KINDS.find(data.source)
    if not callable(function):
        raise DataError(f"data.source {data.source!r} is {type(function).__name__}, expected a function")
    check_options("data.source", function, data.options)
    with global_generators.seeded(seed):
        result = call_plugin("data.source", partial(function, **data.options), error=DataError)
    if isinstance(result, Federation):
        return result
    try:
        return _from_mapping(_as_mapping(result), data, seed, targets)
    except DataError as error:
        raise DataError(f"data.source {place_of(function)}: {error}") from None


def _as_mapping(result: object) -> dict[str, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return dict(zip(("x", "y"), result, strict=True))
    if not isinstance(result, Mapping):
        raise DataError(
            f"it returns {type(result).__name__}, expected a Federation, a pair (x, y) or a mapping with x and y"
        )
    for key in result:
        if key not in KEYS:
            raise DataError(f"it returns an unknown key {key!r}{did_you_mean(str(key), KEYS)}")
    if missing := [key for key in ("x", "y") if key not in result]:
        raise DataError(f"it returns no {missing[0]!r}; x and y are needed, clients and others are optional")
    return dict(result)


def _from_mapping(arrays: dict[str, Any], data: PluginDataConfig, seed: int, targets: str) -> Federation | Source:
    if arrays.get("clients") is not None:
        if data.shift.kind != "none":
            raise DataError(
                f"data.shift.kind: samples that have clients are taken as they are, so none, not {data.shift.kind}"
            )
        return federation_of(arrays, data, seed, targets)
    if arrays.pop("test_clients", None) is not None:
        raise DataError("it returns test_clients without clients; give both or neither")
    if arrays.pop("validation_clients", None) is not None:
        raise DataError("it returns validation_clients without clients; give both or neither")
    arrays.pop("clients", None)
    data_set = data_set_from_arrays(**arrays, targets=targets, labels=data.labels)
    parts = (data_set.train_x, data_set.train_y, data_set.test_x, data_set.test_y, data_set.group)
    named = (
        [] if arrays.get("class_names") is None else [np.frombuffer("\0".join(data_set.class_names).encode(), np.uint8)]
    )
    of_data = digest(*(part for part in parts if part is not None), *named)
    of_data += f"-{data_set.num_validation}" if data_set.num_validation else ""
    return Source((), lambda pixels, progress: data_set, of_data)


def of_arrays(data: ArraysConfig, seed: int, targets: str) -> Federation:
    """The federation of the .npz file `data.root`; `data.partition` has no effect.

    The file has the arrays x, y, clients, and optionally groups, x_test, y_test, test_clients, the same three for
    validation, class_names, and the numbers num_classes and vocabulary.
    """
    check_called(data)
    if data.shift.kind != "none":
        raise DataError(f"data.shift.kind: source arrays is taken as it is, so none, not {data.shift.kind}")
    if data.root is None:
        raise DataError(
            "source arrays needs data.root: an .npz file with x, y and clients (numpy.savez); the record of a run does "
            "not hold arrays made in Python: give it the experiment, resume(RUN, experiment=...)"
        )
    file = Path(data.root).expanduser()
    if not file.is_file():
        raise DataError(
            f"data.root: there is no file {file.absolute()}; source arrays reads an .npz file (numpy.savez)"
        )
    required, needs = ("x", "y", "clients"), "it needs x, y and clients"
    optional = ("groups", "x_test", "y_test", "test_clients", *_NUMBERS, *_OF_VALIDATION)
    with reading(str(file), "an .npz file of plain arrays", "write it again with numpy.savez"):
        arrays: dict[str, Any] = read_npz(file, required, optional, needs)
    if data.test.view == "holdout" and "test_clients" not in arrays:
        arrays = {name: array for name, array in arrays.items() if not name.endswith("_test")}
    numbers = {name: arrays.pop(name).squeeze().tolist() for name in ("num_classes", "vocabulary") if name in arrays}
    names = {name: arrays.pop(name).tolist() for name in ("class_names",) if name in arrays}
    try:
        return federation_of(arrays | numbers | names, data, seed, targets)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def federation_of(
    arrays: Mapping[str, Any], data: ArraysConfig | PluginDataConfig, seed: int, targets: str
) -> Federation:
    """The federation of samples that have clients. arrays: arguments of `federation_from_arrays`."""
    return federation_from_arrays(
        **arrays,
        holdout=data.test.fraction,
        seed=seed,
        view=data.test.view,
        order=data.test.order,
        normalize=data.normalize,
        targets=targets,
        labels=data.labels,
    )


def check_called(data: DataConfig) -> None:
    """Raises DataError for a user's shift or partition of samples that belong to clients already."""
    for key, part in (("shift", data.shift), ("partition", data.partition)):
        if isinstance(part, PluginShiftConfig | PluginPartitionConfig):
            raise DataError(
                f"data.{key}.kind: {reference_of(part.kind)} would not be called, for the samples of source "
                f"{reference_of(data.source)} belong to clients already; leave out data.{key}.kind, or choose a source "
                "of samples without clients"
            )
