"""A toy data set whose images encode their row, and the real data sets where they are on this machine."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest

from cfl_ray.config import DataConfig
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.plan import make_plan
from cfl_ray.data.sources import locate


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the real data sets."""
    named = os.environ.get("CFL_RAY_DATA")
    root = Path(named) if named else Path(__file__).parents[3] / "shared/data"
    if not root.is_dir():
        pytest.skip(f"no real data in {root}; set CFL_RAY_DATA")
    return root


@pytest.fixture(scope="session")
def real(data_root):
    """Reads a real data set without its pixels, once; the division needs only labels."""

    @functools.cache
    def read(name: str) -> DataSet:
        data = SOURCE_KINDS.of(source=name, root=str(data_root))
        if name == "images":
            data = SOURCE_KINDS.of(
                source=name,
                root=str(data_root / "hf/cifar10"),
                columns={"image": "img", "label": "label"},
                test_files="plain_text/test-*.parquet",
            )
        return locate(name, data).read(False, None)

    return read


@pytest.fixture
def toy():
    """Makes DataSet with n training rows: row r has the label r % classes.

    Its pixels (0, 0) and (0, 1) are r % 256 and r // 256.
    """

    def make(
        n: int = 400,
        n_test: int = 100,
        shape: tuple[int, int, int] = (1, 4, 4),
        classes: int = 10,
        seed: int = 0,
        **known,
    ) -> DataSet:
        def part(count: int):
            x = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
            rows = np.arange(count)
            x[:, 0, 0, 0], x[:, 0, 0, 1] = rows % 256, rows // 256
            return x, (rows % classes).astype(np.int16)

        return DataSet(*part(n), *(part(n_test) if n_test else (None, None)), num_classes=classes, **known)

    return make


@pytest.fixture
def config():
    """Makes a DataConfig: config("iid", 4, view="label", shift={...})."""

    def make(
        kind: str = "iid",
        clients: int | None = 4,
        view: str = "cluster",
        shift: dict | None = None,
        max_samples: int | None = None,
        fraction: float = 0.2,
        source: str = "digits",
        pool: bool = False,
        **partition,
    ) -> DataConfig:
        return SOURCE_KINDS.of(
            source=source,
            shift=shift or {},
            partition={"kind": kind, "clients": clients, **partition},
            test={"view": view, "max_samples": max_samples, "fraction": fraction, "pool": pool},
        )

    return make


@pytest.fixture
def planned(toy, config):
    """Makes the plan of a toy data set: planned("iid", 4, view="label", images=toy(n=40), seed=1)."""

    def make(*division, images: DataSet | None = None, other: DataSet | None = None, seed: int = 0, **options):
        return make_plan(images or toy(), other, config(*division, **options), seed)

    return make
