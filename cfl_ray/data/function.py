"""Data from a function in a user's file: `data.source: my.py:load`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from cfl_ray.config.data import SOURCE_KINDS, ArraysConfig, PluginDataConfig
from cfl_ray.data.arrays import digest, federation_from_arrays, images_from_arrays
from cfl_ray.data.federation import Federation
from cfl_ray.data.images import Source
from cfl_ray.errors import DataError, did_you_mean
from cfl_ray.plugins.calling import call_plugin, check_options, place_of

KEYS = ("x", "y", "x_test", "y_test", "groups", "num_classes", "vocabulary", "clients", "test_clients")


def load_function(data: PluginDataConfig, seed: int, targets: str = "class") -> Federation | Source:
    """The data of the function that `data.source` names: a Federation, or without clients a Source.

    The function is called with `data.options`. It returns a Federation, a pair (x, y), or a mapping with x, y and
    optionally clients, groups, x_test, y_test, test_clients, num_classes, vocabulary: arguments of
    `federation_from_arrays`. Without clients, the samples are divided later as `data.partition` says. Raises DataError
    naming the function and its line. targets: kind of y.
    """
    function = SOURCE_KINDS.find(data.source)
    if not callable(function):
        raise DataError(f"data.source {data.source!r} is {type(function).__name__}, expected a function")
    check_options("data.source", function, data.options)
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
    arrays.pop("clients", None)
    images = images_from_arrays(**arrays, targets=targets)
    parts = (images.train_x, images.train_y, images.test_x, images.test_y, images.group)
    of_data = digest(*(part for part in parts if part is not None))
    return Source((), lambda pixels, progress: images, of_data)


def federation_of(
    arrays: Mapping[str, Any], data: ArraysConfig | PluginDataConfig, seed: int, targets: str
) -> Federation:
    """The federation of samples that have clients. arrays: arguments of `federation_from_arrays`."""
    return federation_from_arrays(
        **arrays,
        holdout=data.test.fraction,
        seed=seed,
        view=data.test.view,
        normalize=data.normalize,
        targets=targets,
    )
