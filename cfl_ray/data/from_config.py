"""Builds the federation of an experiment's `data` section. Shards are written once; runs with equal data reuse them."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cfl_ray.config import DataConfig, Experiment
from cfl_ray.config.data import (
    SOURCE_KINDS,
    ArraysConfig,
    GeneratedConfig,
    PartsDataConfig,
    PluginDataConfig,
    SyntheticConfig,
)
from cfl_ray.config.partition import PARTITION_KINDS, PluginPartitionConfig
from cfl_ray.config.shift import SHIFT_KINDS, HybridConfig, PluginShiftConfig
from cfl_ray.config.unused import USES_OF_TESTS, warnings_of_division
from cfl_ray.core import global_generators
from cfl_ray.data.data_set import Progress, Source
from cfl_ray.data.decoding import DECODING
from cfl_ray.data.federation import DataShape, Federation, tested_on, validated_on
from cfl_ray.data.folder import PREPARE_AGAIN, Folder
from cfl_ray.data.indexed import Scaling, layout_warnings, scale_warnings
from cfl_ray.data.own_data import check_called
from cfl_ray.data.plan import FederationPlan, make_plan, with_validation_part
from cfl_ray.data.raw_files import DigestIndex, RawFiles
from cfl_ray.data.shard_writer import shard_bytes, shard_plan_of, write_shards
from cfl_ray.data.shards import ShardFederation, ShardManifest, open_shards, read_manifest
from cfl_ray.data.sources import locate
from cfl_ray.data.synthetic import ConceptFederation, SyntheticFederation
from cfl_ray.data.validation_share import ValidationShare
from cfl_ray.errors import DataError, some_of
from cfl_ray.plugins.calling import reference_of
from cfl_ray.plugins.content import content_of_files, content_of_object
from cfl_ray.plugins.registry import Registry
from cfl_ray.system.collection import paused_collection
from cfl_ray.system.files import cache_folder


@dataclass(frozen=True)
class FederationSummary:
    """Sizes of a federation."""

    clients: int
    samples: tuple[int, float, int]  # training samples of a client: fewest, median, most
    groups: int  # true groups; 0 if they are unknown
    shape: DataShape
    test_sets: int  # shared test sets; 0 if the view is hold-out
    view: str  # the data on which clients are tested (`data.test.view`)
    tested_on: str  # a sentence on these data
    validated_on: str  # a sentence on the validation data; empty: there are none
    bytes: int  # bytes of the shards; 0 for data that are generated or kept in memory
    # training samples of each client, with a share of them that is held out for validation
    num_samples_N: np.ndarray = field(repr=False, compare=False)
    own_validation: bool = False  # whether the source has validation data of its own
    warnings: tuple[str, ...] = ()  # of inputs that are read for a summary: no pixels of files of images


def build(
    data: DataConfig,
    seed: int,
    shards: str | Path,
    progress: Progress | None = None,
    targets: str = "class",
    converts_changed: bool = False,
    protocol: str | None = None,
) -> Federation:
    """The federation that `data` and `seed` describe, with its shards in a folder below `data.shards`.

    shards: the folder for shards if `data.shards` is null. `data.shards` may also be a federation's folder that
    `cfl-ray prepare` wrote; then the raw data are not needed. targets: kind of the task's targets (`core.tasks`).
    converts_changed: whether raw data that have changed since their shards were written are converted, into another
    folder; if not, they raise DataError. protocol: of the experiment, whose keys without effect are not warned of.
    """
    loaded = _loaded(data, seed, targets, protocol)
    if isinstance(loaded, Federation):
        return loaded
    folder = Folder(str(shards if data.shards is None else data.shards))
    if (manifest := read_manifest(folder)) is not None:
        return _reuse(folder, data, _recipe(data, seed, None, targets), manifest)
    name = data.source.rpartition(":")[2]
    # the root is not in the recipe, since data may move; by its name, two tables have shards of their own
    root = {"root": Path(data.root).name} if isinstance(data, PartsDataConfig) and data.root is not None else {}
    name = f"{name}-{data.test.view or 'own'}-{_hash(_recipe(data, seed, None, targets) | root)}"
    raw_data = _RawData(data, seed, targets, _sources(data, loaded, targets))
    with global_generators.seeded(seed):  # for shifts and partitions of users
        federation = _Shards(raw_data, folder, name, progress).written_or_reused(converts_changed)
    if loaded is not None and federation.shape != (shape := loaded.read(False, None).data_shape):
        raise DataError(f"{folder.uri} holds {federation.shape}, {data.source} returns {shape}; {PREPARE_AGAIN}")
    federation.preparation_warnings = (*federation.preparation_warnings, *_unused_tests(data, loaded))
    return federation


@dataclass(frozen=True)
class _RawData:
    """The raw data of shards."""

    data: DataConfig
    seed: int
    targets: str
    sources: list[Source]

    def recipe(self) -> dict[str, Any]:
        """The recipe of their shards; digests that are not known are taken."""
        return _recipe(self.data, self.seed, self.sources, self.targets)

    @property
    def decodes(self) -> bool:
        """Whether files of images are decoded."""
        return any(source.decodes for source in self.sources)

    @property
    def files(self) -> list[RawFiles]:
        """The files whose digests are kept."""
        return [source.raw for source in self.sources if source.raw is not None and source.digest is None]

    def is_decoded_alike(self, written: dict[str, Any], is_unknown: bool, progress: Progress | None) -> bool:
        """Whether this version decodes images as those of shards with the recipe `written` were.

        is_unknown: whether the recipe does not tell, so that the images are decoded to find out.
        """
        if is_unknown:
            return all(source.read(True, progress).decoding is None for source in self.sources if source.decodes)
        return bool(written.get("decoding", DECODING) == DECODING)

    def plan(self, progress: Progress | None) -> FederationPlan:
        """The plan of the federation, with pixels. Raises DataError if a file changes meanwhile."""
        before = [source.raw for source in self.sources if source.raw is not None and source.digested is None]
        for files in before:  # another package reads them
            files.digest()
        plan = _plan(self.data, self.seed, self.sources, pixels=True, progress=progress)
        for files in before:
            files.check_unchanged()
        return plan


@dataclass(frozen=True)
class _Place:
    """The folder of the shards of some raw data."""

    folder: Folder
    manifest: ShardManifest | None  # None: the shards are to be written
    recipe: dict[str, Any]  # of the raw data; empty if their digests were not needed to find the folder
    why: str = ""  # the reason for which it is not the folder that is named by the config alone
    has_no_digests: bool = False  # whether an earlier version wrote the shards, which recorded names and sizes only


class _Shards:
    """The shards of raw data, in the folder `name` below `parent`, or beside it if it has those of other raw data.

    Shards of other raw data stay, since earlier runs may need them.
    """

    def __init__(self, raw: _RawData, parent: Folder, name: str, progress: Progress | None):
        self.raw, self.parent, self.name, self.progress = raw, parent, name, progress
        # the raw files whose digests are kept, with their indices
        self.indexed = [(files, DigestIndex(parent.local or cache_folder() / "raw", files.root)) for files in raw.files]
        for files, index in self.indexed:
            files.recall(index)

    def written_or_reused(self, converts: bool) -> ShardFederation:
        """The shards. converts: whether changed raw data are converted; if not, they raise DataError."""
        raw, place, warnings = self.raw, self._place(), []
        recipe = place.recipe
        if place.manifest is None:
            if place.why and not converts:
                raise DataError(
                    f"{place.why}: runs on the new data cannot be compared with those before; to use them, run "
                    "`cfl-ray prepare` with this config, which keeps the old shards, or delete "
                    f"{self.parent.child(self.name).uri}"
                )
            warnings += [f"{place.why}; converted anew into {place.folder.uri}"] if place.why else []
            plan = raw.plan(self.progress)
            recipe = raw.recipe()
            write_shards(place.folder.uri, plan, recipe | _decoding_of(plan), raw.data.normalize, self.progress)
        warnings += self._keep(recipe, place.has_no_digests)
        expected = {key: value for key, value in recipe.items() if not (place.has_no_digests and key == "digests")}
        federation = _reuse(place.folder, raw.data, expected, place.manifest)
        federation.recipe |= recipe if place.has_no_digests else {}
        federation.preparation_warnings = tuple(warnings)
        return federation

    def _place(self) -> _Place:
        """The folder `name`; if it has shards of other raw data, or decoded otherwise, one beside it."""
        first = folder = self.parent.child(self.name)
        if (manifest := read_manifest(folder)) is None:
            return _Place(folder, None, {})
        recipe, why = self.raw.recipe(), ""
        of_raw = {key: recipe.get(key) for key in _RAW}
        has_no_digests = "digests" in recipe and "digests" not in manifest.recipe
        known = self.indexed[0][1].shards.get(self.name) if has_no_digests and self.indexed else None
        if not _is_of_raw_data(manifest.recipe, recipe, known):
            changed = [file for files, index in self.indexed for file in files.other(index)]
            named = f" ({some_of(changed, 3)})" if changed else ""
            why, has_no_digests = f"the raw data have changed since {first.uri} was written{named}", False
            folder = self._beside(of_raw)
            if (manifest := read_manifest(folder)) is None:
                return _Place(folder, None, recipe, why)
        is_unknown = has_no_digests and known is None and self.raw.decodes
        anew = self._beside(of_raw | {"decoding": DECODING})
        of_anew = read_manifest(anew) if is_unknown or manifest.recipe.get("decoding", DECODING) != DECODING else None
        if of_anew is not None or not self.raw.is_decoded_alike(manifest.recipe, is_unknown, self.progress):
            return _Place(anew, of_anew, recipe, why or f"images of {first.uri} {_DECODED_BEFORE}")
        return _Place(folder, manifest, recipe, why, has_no_digests)

    def _beside(self, recipe: dict[str, Any]) -> Folder:
        return self.parent.child(f"{self.name}-{_hash(recipe)[:8]}")

    def _keep(self, recipe: dict[str, Any], has_no_digests: bool) -> list[str]:
        """Saves new digests in the indices; returns lines on shards that have none."""
        changed = [files.keep(index) for files, index in self.indexed]
        warnings = []
        if has_no_digests and self.indexed and self.name not in (shards := self.indexed[0][1].shards):
            shards[self.name], changed[0] = recipe["digests"], True
            warnings.append(
                f"shards {self.name} are of an earlier version, which recorded names and sizes of the raw files, not "
                "their content; they are taken as made of these files, whose content is compared from now on. Delete "
                "the shards if the files have changed since"
            )
        for (_, index), is_new in zip(self.indexed, changed, strict=True):
            if is_new and not index.save() and warnings:
                warnings.append(f"{index.file} cannot be written: changes of the content go unnoticed")
        return warnings


_RAW = ("files", "digests")  # keys of a recipe for the raw data
_DECODED_BEFORE = (
    "were decoded by an earlier version, which dropped transparency, clipped 16 bits and ignored the mode of a column"
)


def _decoding_of(plan: FederationPlan) -> dict[str, Any]:
    """The part of a recipe for the decoding of images; empty if all versions decode these alike."""
    version = plan.data_set.decoding
    return {} if version is None else {"decoding": version}


def _is_of_raw_data(written: dict[str, Any], wanted: dict[str, Any], digests: list[str] | None) -> bool:
    """Whether shards are of the wanted raw data. digests: those recorded later for shards that have none."""
    recorded = written.get("digests", digests)
    return written.get("files") == wanted.get("files") and recorded in (None, wanted.get("digests"))


def with_shards(federation: Federation, name: str, shards: str | Path) -> ShardFederation:
    """The shards of a federation without shards, written into a folder below `shards` or reused."""
    folder = Folder(str(shards)).child(f"{name}-{_hash(federation.recipe)}")
    if read_manifest(folder) is None:
        write_shards(folder.uri, shard_plan_of(federation), federation.recipe, federation.normalize)
    return open_shards(folder.uri)


def has_validation(experiment: Experiment) -> bool:
    """Whether the experiment has validation data: a share of the training samples, or a validation part of its source.

    A function that is the source is called, unless keys of the config tell. Raises DataError as `build` does.
    """
    data = experiment.data
    if data.validation is not None or getattr(data, "validation_files", None) is not None:
        return True
    if not isinstance(data, ArraysConfig | PluginDataConfig) and data.federation is None:
        return False
    loaded = data.federation or _loaded(data, experiment.seed, experiment.targets)
    if isinstance(loaded, Source):
        return loaded.read(False, None).num_validation > 0
    return loaded is not None and loaded.validation is not None


def describe(data: DataConfig, seed: int, targets: str = "class", protocol: str | None = None) -> FederationSummary:
    """The sizes of the federation that `build` would return. Reads labels but no pixels, and writes nothing."""
    loaded = _loaded(data, seed, targets, protocol)
    if isinstance(loaded, Federation):
        summary = _summary_of(loaded)
    else:
        plan = _plan(data, seed, _sources(data, loaded, targets), pixels=False, progress=None)
        summary = _summary_of_plan(plan, data, _unused_tests(data, loaded))
    if (share := data.validation) is None or summary.own_validation:
        return summary
    of_training = ValidationShare(share.fraction, share.order, seed)
    trained_N = summary.num_samples_N - of_training.counts(summary.num_samples_N)
    return replace(summary, samples=_fewest_median_most(trained_N), validated_on=of_training.in_words)


def _summary_of(federation: Federation) -> FederationSummary:
    return FederationSummary(
        clients=federation.num_clients,
        samples=_fewest_median_most(federation.num_samples_N),
        groups=federation.num_groups,
        shape=federation.shape,
        test_sets=federation.num_test_sets(),
        view=federation.view,
        tested_on=federation.tested_on,
        validated_on=federation.validated_on,
        bytes=0,
        num_samples_N=federation.num_samples_N,
        own_validation=federation.validation is not None,
        warnings=tuple(federation.warnings),
    )


def _summary_of_plan(plan: FederationPlan, data: DataConfig, warnings: list[str]) -> FederationSummary:
    """The summary of a plan without pixels. warnings: on the source, which come first."""
    data_set, most = plan.data_set, data.test.max_samples
    num_samples_N = np.array([len(client.train) for client in plan.clients])
    scaling = Scaling(data_set.scale, data.normalize, data_set.vocabulary is not None)
    warnings = [*warnings, *data_set.warnings, *plan.warnings, *layout_warnings(data_set.shape)]
    warnings += scale_warnings(scaling.to_tensor(data_set.train_x[plan.clients[0].train]))
    view = plan.validation_view
    return FederationSummary(
        clients=len(plan.clients),
        samples=_fewest_median_most(num_samples_N),
        groups=len({client.group for client in plan.clients if client.group >= 0}),
        shape=data_set.data_shape,
        test_sets=len(plan.test_sets),
        view=plan.view,
        tested_on=tested_on(plan.view, len(plan.test_sets), most),
        validated_on="" if view is None else validated_on(view, len(plan.validation_sets), most),
        bytes=shard_bytes(plan),
        num_samples_N=num_samples_N,
        own_validation=view is not None,
        warnings=tuple(warnings),
    )


def _fewest_median_most(num_samples_N: np.ndarray) -> tuple[int, float, int]:
    return int(num_samples_N.min()), float(np.median(num_samples_N)), int(num_samples_N.max())


def _loaded(data: DataConfig, seed: int, targets: str, protocol: str | None = None) -> Federation | Source | None:
    """Data that need no files of a data set: a federation, or a function's samples without clients.

    None for the data sets that `locate` knows.
    """
    if isinstance(data, GeneratedConfig):
        return _generated(data, seed)
    if not isinstance(data, ArraysConfig | PluginDataConfig):
        return None
    loaded: Federation | Source = SOURCE_KINDS.code_of(data)(data, seed, targets)
    if isinstance(data, PluginDataConfig) and isinstance(loaded, Federation):
        check_called(data)
        loaded.preparation_warnings = tuple(warnings_of_division(data, protocol))
    return loaded


def _unused_tests(data: DataConfig, loaded: Source | None) -> list[str]:
    """A warning of the test part that a user's function returns, if the keys leave it out. loaded: of the function."""
    if loaded is None or data.test.pool or data.with_view(True).test.view != "holdout":
        return []
    if loaded.read(False, None).with_test_part.test_y is None:
        return []
    return [
        f"x_test and y_test of source {reference_of(data.source)} have no effect: data.test.view is holdout; "
        f"{USES_OF_TESTS}"
    ]


def _sources(data: DataConfig, first: Source | None, targets: str) -> list[Source]:
    """The data set and, for a hybrid shift, the second data set. first: the data set if it is loaded."""
    names = [data.source, data.shift.other] if isinstance(data.shift, HybridConfig) else [data.source]
    return [first if first is not None and name == data.source else locate(name, data, targets) for name in names]


def _plan(
    data: DataConfig, seed: int, sources: list[Source], pixels: bool, progress: Progress | None
) -> FederationPlan:
    data_set, *other = (source.read(pixels, progress) for source in sources)
    if other:
        notes, warnings = data_set.notes + other[0].notes, data_set.warnings + other[0].warnings
        decoding = data_set.decoding or other[0].decoding
        data_set = replace(data_set, notes=notes, warnings=warnings, decoding=decoding)
    Scaling(data_set.scale, data.normalize, data_set.vocabulary is not None).check(data_set.shape)
    main = data_set.with_test_part
    data = data.with_view(main.test_y is not None)
    plan = make_plan(main, other[0].with_test_part if other else None, data, seed)
    if (on_validation := data_set.with_validation_part) is None:
        return plan
    # the same clients, whose test data are the validation part
    own = data.partition.kind == "writer" and on_validation.validation_client is not None
    view = "all" if own else "cluster" if data.test.view == "holdout" else data.test.view
    of_validation = data.model_copy(update={"test": data.test.model_copy(update={"view": view, "pool": False})})
    second = other[0].with_validation_part or other[0].with_test_part if other else None
    try:
        return with_validation_part(plan, make_plan(on_validation, second, of_validation, seed), own)
    except DataError as error:
        raise DataError(f"the validation part: {error}") from None


@paused_collection()
def _recipe(data: DataConfig, seed: int, sources: list[Source] | None, targets: str) -> dict[str, Any]:
    """All settings that decide the content of the shards, as JSON. sources None: without the raw files."""
    recipe: dict[str, Any] = {"data": data.to_recipe(), "seed": seed}
    if targets != "class":
        recipe["targets"] = targets
    for name, part in (("shift", data.shift), ("partition", data.partition)):
        if isinstance(part, PluginShiftConfig | PluginPartitionConfig):  # shards of an edited function are not reused
            recipe[f"{name} code"] = _code_of(SHIFT_KINDS if name == "shift" else PARTITION_KINDS, part.kind)
    if sources is not None:
        raw = [source.raw for source in sources]
        contents = [source.digest or (files and files.digest()) for source, files in zip(sources, raw, strict=True)]
        # after the digests, which may find other sizes
        recipe["files"] = [entry for files in raw if files is not None for entry in files.sizes]
        if digests := [content for content in contents if content is not None]:
            recipe["digests"] = digests
    return recipe


def _code_of(registry: Registry[Any], kind: Any) -> str:
    """A digest of the code of a plugin that the config names, or of an object made in Python."""
    part = registry.resolve(kind)
    if not isinstance(kind, str):
        return content_of_object(part)
    return content_of_files(part) or str(reference_of(part))


def _hash(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _reuse(folder: Folder, data: DataConfig, recipe: dict[str, Any], manifest: ShardManifest | None) -> ShardFederation:
    """The existing shards in `folder`. Raises DataError if they were written with another recipe.

    manifest: of the folder, if it has been read.
    """
    federation = ShardFederation(folder.uri, folder.local is not None, manifest)
    given = recipe | {"data": data.to_recipe(exclude_defaults=True)}
    if difference := _difference(federation.recipe, recipe, given):
        key, written, wanted = difference
        is_raw_data = key.startswith(("files", "digests"))
        advice = f"the raw data changed: {PREPARE_AGAIN}" if is_raw_data else "name another folder in data.shards"
        raise DataError(f"{folder.uri} holds another federation: its {key} is {written}, wanted is {wanted}; {advice}")
    return federation


def _difference(written: Any, wanted: Any, given: Any, key: str = "") -> tuple[str, object, object] | None:
    """The first key of `wanted` whose value differs in `written`, with both values; None if none differs.

    given: `wanted` without defaults; an earlier version may have written no value for a key that has its default.
    """
    if isinstance(written, dict) and isinstance(wanted, dict):
        parts = (
            _difference(written.get(name), value, given.get(name, {}), f"{key}.{name}".lstrip("."))
            for name, value in wanted.items()
            if name in written or name in given
        )
        return next(filter(None, parts), None)
    return None if written == wanted else (key, written, wanted)


def _generated(data: GeneratedConfig, seed: int) -> SyntheticFederation:
    clients, source = data.partition.clients, data.source
    check_called(data)
    if clients is None:
        raise DataError(f"data.partition.clients: null is for kind writer; source {source} needs a number")
    if data.test.view != "cluster":
        raise DataError(
            f"data.test.view: source {source} has a test set per group, so the view is cluster, not {data.test.view}"
        )
    if not isinstance(data, SyntheticConfig):
        return ConceptFederation(clients, name=source, samples=data.synthetic_samples, seed=seed)
    made: SyntheticFederation = SOURCE_KINDS.code_of(data)(
        clients,
        input=tuple(data.synthetic_shape),
        classes=data.synthetic_classes,
        groups=data.synthetic_groups,
        samples=data.synthetic_samples,
        seed=seed,
    )
    return made
