"""From an experiment's `data` section to a federation: shards are written once and used by every run that asks for the same."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cfl_ray.config import Data
from cfl_ray.core.errors import DataError
from cfl_ray.data.arrays import federation_from_arrays
from cfl_ray.data.federation import Federation
from cfl_ray.data.images import Progress, Source
from cfl_ray.data.indexed import Scaling
from cfl_ray.data.plan import Plan, make_plan
from cfl_ray.data.shards import ShardFederation, open_shards, read_manifest
from cfl_ray.data.sources import locate
from cfl_ray.data.store import AGAIN, Folder
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.data.writing import shard_bytes, write_shards


@dataclass(frozen=True)
class Summary:
    """What a federation will be, without making it."""

    clients: int
    samples: tuple[int, float, int]  # training samples of a client: fewest, median, most
    groups: int  # true groups; 0 where none are known
    num_classes: int
    input: tuple[int, ...]
    test_sets: int  # shared ones; 0 under hold-out
    bytes: int  # of the shards; 0 for data that are made or kept in memory


def build(data: Data, seed: int, shards: str | Path, progress: Progress | None = None) -> Federation:
    """The federation that `data` and `seed` describe. Its shards are kept below `data.shards`, or `shards` where that is null.

    `data.shards` may also be one federation's own folder, as `cfl-ray prepare` made it: then the raw data need not be there.
    """
    if data.source == "synthetic":
        return _synthetic(data, seed)
    if data.source == "arrays":
        return _arrays(data, seed)
    folder = Folder(str(shards if data.shards is None else data.shards))
    if read_manifest(folder) is not None:
        return _reuse(folder, _recipe(data, seed, None))
    sources = _sources(data)
    recipe = _recipe(data, seed, sources)
    folder = folder.child(f"{data.source}-{data.test.view}-{_name(_recipe(data, seed, None))}")
    if read_manifest(folder) is None:
        write_shards(folder.uri, _plan(data, seed, sources, True, progress), recipe, data.normalize, progress)
    return _reuse(folder, recipe)


def describe(data: Data, seed: int) -> Summary:
    """Sizes of the federation that `build` would make; reads labels, not pixels, and writes nothing."""
    if data.source in ("synthetic", "arrays"):
        federation = _synthetic(data, seed) if data.source == "synthetic" else _arrays(data, seed)
        groups = 0 if federation.group_N is None else len(np.unique(federation.group_N))
        return Summary(federation.num_clients, _spread(federation.size_N), groups, federation.shape.num_classes, federation.shape.input,
                       federation.num_test_sets(), 0)
    plan = _plan(data, seed, _sources(data), False, None)
    sizes = np.array([len(client.train) for client in plan.clients])
    groups = len({client.group for client in plan.clients if client.group >= 0})
    return Summary(len(plan.clients), _spread(sizes), groups, plan.images.num_classes, plan.images.shape, len(plan.test_sets), shard_bytes(plan))


def _spread(sizes: np.ndarray) -> tuple[int, float, int]:
    return int(sizes.min()), float(np.median(sizes)), int(sizes.max())


def _sources(data: Data) -> list[Source]:
    """The data set and, for a hybrid, the second one."""
    names = [data.source, data.shift.other] if data.shift.kind == "hybrid" else [data.source]
    return [locate(name, data) for name in names]


def _plan(data: Data, seed: int, sources: list[Source], pixels: bool, progress: Progress | None) -> Plan:
    images, *other = (source.read(pixels, progress) for source in sources)
    Scaling(images.scale, data.normalize).check(images.shape)
    return make_plan(images, other[0] if other else None, data, seed)


def _recipe(data: Data, seed: int, sources: list[Source] | None) -> dict:
    """Everything that decides what the shards hold, as JSON; `sources` None leaves the raw files out."""
    apart = {"root", "download", "shards", "synthetic_shape", "synthetic_samples", "synthetic_groups", "synthetic_classes"}
    recipe = {"data": data.model_dump(mode="json", exclude=apart), "seed": seed}
    if sources is not None:
        recipe["files"] = [[file.name, file.stat().st_size] for source in sources for file in source.files]
    return recipe


def _name(recipe: dict) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _reuse(folder: Folder, recipe: dict) -> ShardFederation:
    """Shards that are there, if they are what the recipe says."""
    federation = open_shards(folder.uri, verify=folder.local is not None)
    if differing := _difference(federation.recipe, recipe):
        key, found, wanted = differing
        advice = f"the raw data changed: {AGAIN}" if key.startswith("files") else "name another folder in data.shards"
        raise DataError(f"{folder.uri} holds another federation: its {key} is {found}, wanted is {wanted}; {advice}")
    return federation


def _difference(found: object, wanted: object, key: str = "") -> tuple[str, object, object] | None:
    """The first key of `wanted`, with its values, that is different in `found`."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        parts = (_difference(found.get(name), value, f"{key}.{name}".lstrip(".")) for name, value in wanted.items())
        return next(filter(None, parts), None)
    return None if found == wanted else (key, found, wanted)


def _synthetic(data: Data, seed: int) -> SyntheticFederation:
    if data.partition.clients is None:
        raise DataError("data.partition.clients: null is for kind writer; source synthetic needs a number")
    if data.test.view != "cluster":
        raise DataError(f"data.test.view: source synthetic has one test set per group, so the view is cluster, not {data.test.view}")
    return SyntheticFederation(data.partition.clients, input=tuple(data.synthetic_shape), classes=data.synthetic_classes,
                               groups=data.synthetic_groups, samples=data.synthetic_samples, seed=seed)


def _arrays(data: Data, seed: int) -> Federation:
    """The .npz file `data.root`: x, y, clients, and optionally groups, x_test, y_test, test_clients. `data.partition` has no say."""
    if data.shift.kind != "none":
        raise DataError(f"data.shift.kind: source arrays is taken as it is, so none, not {data.shift.kind}")
    if data.root is None or not Path(data.root).expanduser().is_file():
        raise DataError(f"source arrays needs data.root: an .npz file with x, y and clients (numpy.savez), got {data.root!r}")
    known = ("x", "y", "clients", "groups", "x_test", "y_test", "test_clients")
    try:
        with np.load(Path(data.root).expanduser(), allow_pickle=False) as file:
            held = {name: file[name] for name in known if name in file}
    except (ValueError, OSError, TypeError) as error:
        raise DataError(f"{data.root} cannot be read as an .npz file of plain arrays: {error}") from error
    if missing := [name for name in known[:3] if name not in held]:
        raise DataError(f"{data.root} has no array {missing[0]!r}; it needs x, y and clients")
    if data.test.view == "holdout" and "test_clients" not in held:
        held = {name: array for name, array in held.items() if not name.endswith("_test")}
    return federation_from_arrays(**held, holdout=data.test.fraction, seed=seed, view=data.test.view, normalize=data.normalize)
