"""A federation from a torch Dataset, which is read once."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cfl_ray.data.array_checks import Array, as_array
from cfl_ray.data.arrays import federation_from_arrays
from cfl_ray.data.federation import Federation
from cfl_ray.data.reading import reading
from cfl_ray.errors import DataError
from cfl_ray.system.mapped import mapped_array


class PairDataset(Protocol):
    """A map-style Dataset: it has a length, and dataset[number] is a pair (input, label)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def federation_from_dataset(
    dataset: PairDataset,
    clients: Array,
    *,
    test: PairDataset | None = None,
    test_clients: Array | None = None,
    groups: Mapping[Any, Any] | Array | None = None,
    num_classes: int | None = None,
    vocabulary: int | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    view: str | None = None,
    normalize: list[list[float]] | None = None,
    targets: str = "class",
    labels: str = "given",
    order: str = "random",
    validation: PairDataset | None = None,
    validation_clients: Array | None = None,
    class_names: Sequence[str] | None = None,
) -> Federation:
    """A federation in which sample dataset[r] belongs to client clients[r]; every sample is read once.

    An input is a tensor, an array or a PIL image. test, validation: in place of x_test and y_test, and of x_validation
    and y_validation. Other arguments: as in `federation_from_arrays`.
    Raises DataError naming the sample that does not fit.
    """
    x, y = _arrays(dataset, "dataset", targets)
    x_test, y_test = (None, None) if test is None else _arrays(test, "test", targets)
    x_validation, y_validation = (None, None) if validation is None else _arrays(validation, "validation", targets)
    return federation_from_arrays(
        x,
        y,
        clients,
        x_test=x_test,
        y_test=y_test,
        test_clients=test_clients,
        groups=groups,
        num_classes=num_classes,
        vocabulary=vocabulary,
        holdout=holdout,
        seed=seed,
        view=view,
        normalize=normalize,
        targets=targets,
        labels=labels,
        order=order,
        x_validation=x_validation,
        y_validation=y_validation,
        validation_clients=validation_clients,
        class_names=class_names,
    )


def _arrays(dataset: PairDataset, name: str, targets: str) -> tuple[np.ndarray, np.ndarray]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} must have a length and samples by number, {type(dataset).__name__} does not")
    if len(dataset) == 0:
        raise DataError(f"{name} has 0 samples, expected at least 1")
    x, labels = np.empty(0), []
    for row in range(len(dataset)):
        with reading(f"{name}[{row}]", "a sample", f"correct the dataset ({type(dataset).__name__})"):
            sample = dataset[row]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            columns = ", e.g. [(row['image'], row['label']) for row in dataset]" * isinstance(sample, dict)
            raise DataError(f"{name}[{row}] is {type(sample).__name__}, expected a pair (input, label){columns}")
        one = _input(sample[0], f"{name}[{row}]")
        if row == 0:
            x = mapped_array((len(dataset), *one.shape), one.dtype)
        if (one.shape, one.dtype) != (x.shape[1:], x.dtype):
            raise DataError(
                f"{name}[{row}] is {one.dtype} {one.shape}, {name}[0] is {x.dtype} {x.shape[1:]}; "
                "all samples need one shape and type"
            )
        x[row] = one
        labels.append(_target(sample[1], f"{name}[{row}]", targets))
        if np.shape(labels[-1]) != np.shape(labels[0]):
            raise DataError(
                f"the target of {name}[{row}] has shape {np.shape(labels[-1])}, but {name}[0] has {np.shape(labels[0])}"
            )
    return x, np.array(labels)


def _input(value: Any, name: str) -> np.ndarray:
    if getattr(value, "mode", None) in ("P", "PA") and hasattr(value, "getbands"):
        raise DataError(f"{name} is an image of mode {value.mode}, numbers of colours; write image.convert('RGB')")
    x = as_array(f"the input of {name}", value)
    if x.dtype == object:
        raise DataError(f"the input of {name} is {type(value).__name__}, expected a tensor, an array or an image")
    if hasattr(value, "getbands"):  # a PIL image: (H, W) or (H, W, C)
        return x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
    return x


def _target(value: Any, name: str, targets: str) -> np.ndarray:
    y = as_array(f"the target of {name}", value)
    if targets == "class":
        if y.size != 1 or not np.issubdtype(y.dtype, np.integer):
            raise DataError(f"the label of {name} is {y.dtype} of shape {y.shape}, expected one integer")
        return y.reshape(())
    if y.dtype == object:
        raise DataError(f"the target of {name} is {type(value).__name__}, expected numbers")
    return y
