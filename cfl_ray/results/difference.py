"""The differences between two runs: config, code, data, versions, results. Reads files and runs no code of the user."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from cfl_ray import config
from cfl_ray.config.experiment import NOT_HASHED
from cfl_ray.errors.redaction import redact
from cfl_ray.results.comparison import values_of
from cfl_ray.results.environment import Environment, read_environment
from cfl_ray.results.kept_code import kept_code, shown_difference
from cfl_ray.results.recorded_runs import recorded_result
from cfl_ray.results.results import MethodResult
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import flatten, read_info

_LINES = 40  # of the difference of a file
_DIGITS = 12
_TIMES = ("seconds", "round_seconds")
_VERSIONS = ("torch", "engine", "device", "instructions", "one_by_one", "has_deadline")


def differences_of(first: str | Path, second: str | Path) -> dict[str, list[str]]:
    """The lines that tell the differences of two runs, by section; an empty section is equal.

    Sections: config, code, data, versions, results. A line has the value of the first run, then that of the second.
    Raises ConfigError for a folder that holds no run.
    """
    first, second = Path(first).absolute(), Path(second).absolute()
    for run in (first, second):
        RunDirectory(run).require_run()
        RunDirectory(run).require_signed([])  # no links
    before, after = read_environment(first), read_environment(second)
    return {
        "config": _of_config(first, second),
        "code": list(_of_code(first, second, before, after)),
        "data": _of_data(before, after),
        "versions": list(_of_versions(first, second, before, after)),
        "results": list(_of_results(first, second)),
    }


def _of_config(first: Path, second: Path) -> list[str]:
    one, two = (flatten(config.load(RunDirectory(run).config).to_dict_as_written()) for run in (first, second))
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    keys.sort(key=lambda key: key.partition(".")[0] in NOT_HASHED)  # the keys that decide no result last
    return [f"{key}: {redact(one.get(key, '(none)'))} -> {redact(two.get(key, '(none)'))}" for key in keys]


def _of_code(first: Path, second: Path, before: Environment | None, after: Environment | None) -> Iterator[str]:
    one, two = kept_code(first), kept_code(second)
    texts = [{} if kept is None else {name: (kept.folder / name) for name in kept.digests} for kept in (one, two)]
    digests = [{} if environment is None else environment.code for environment in (before, after)]
    for name, other in _pairs(texts[0], texts[1]):
        here, there = texts[0].get(name), texts[1].get(other)
        if here is None or there is None:
            yield f"{name if here else other}: only in {first if here else second}"
        elif (old := here.read_text(errors="replace")) != (new := there.read_text(errors="replace")):
            names = name if name == other else f"{name} -> {other}"
            yield f"{names}:\n{shown_difference(old, new, _LINES)}"
    if one is None or two is None:  # of an earlier version, which kept no copy
        for name in sorted(digests[0].keys() & digests[1].keys()):
            if digests[0][name] != digests[1][name]:
                yield f"{name}: {digests[0][name][:_DIGITS]} -> {digests[1][name][:_DIGITS]} (no copy of both is kept)"


def _pairs(one: Collection[str], two: Collection[str]) -> list[tuple[str, str]]:
    """The names of the same file in two copies; a file that one of them lacks is paired with itself.

    The name of a copy begins with the user's folder, which may have another name for the author of the other run.
    """
    pairs = {name: name for name in one}
    alone = [[name for name in names if name not in others] for names, others in ((one, two), (two, one))]
    for name in alone[0]:
        below = name.partition("/")[2]
        same = [other for other in alone[1] if other.partition("/")[2] == below]
        if len(same) == 1 and sum(each.partition("/")[2] == below for each in alone[0]) == 1:
            pairs[name] = same[0]
    return [*pairs.items(), *((name, name) for name in alone[1] if name not in pairs.values())]


def _of_data(before: Environment | None, after: Environment | None) -> list[str]:
    one, two = ("not known" if environment is None else environment.data[:_DIGITS] for environment in (before, after))
    return [] if one == two else [f"digest: {one or 'not known'} -> {two or 'not known'}"]


def _of_versions(first: Path, second: Path, before: Environment | None, after: Environment | None) -> Iterator[str]:
    one, two = ({} if environment is None else asdict(environment) for environment in (before, after))
    for name in _VERSIONS:
        if one.get(name) != two.get(name):
            yield f"{name}: {one.get(name, 'not known')} -> {two.get(name, 'not known')}"
    commits = [_commit_of(run) for run in (first, second)]
    if commits[0] != commits[1]:
        yield f"commit of cfl_ray: {commits[0]} -> {commits[1]}"


def _commit_of(run: Path) -> str:
    return read_info(run).tags.get("git_commit", "not known") if RunDirectory(run).info.is_file() else "not known"


def _of_results(first: Path, second: Path) -> Iterator[str]:
    one, two = _results_of(first), _results_of(second)
    for label in dict.fromkeys([*one, *two]):
        if label not in one or label not in two:
            yield f"{label}: only in {first if label in one else second}"
            continue
        begin = _first_difference(one[label], two[label])
        lines = list(_of_metrics(values_of(one[label]), values_of(two[label])))
        if begin is not None:
            yield f"{label}: metrics differ from round {begin} on"
        yield from (f"{label}: {line}" for line in lines)


def _results_of(run: Path) -> dict[str, MethodResult]:
    folders = [file.parent for file in RunDirectory(run).of_methods(RunDirectory.info)]
    return {folder.name: recorded_result(folder.name, folder) for folder in folders}


def _first_difference(one: MethodResult, two: MethodResult) -> int | None:
    """The first round whose metrics differ; None if the rounds that both have are equal."""
    others = {record.round: record.metrics for record in two.records}
    for record in one.records:
        metrics = others.get(record.round, record.metrics)
        if any(_differ(record.metrics, metrics, name) for name in record.metrics.keys() | metrics.keys()):
            return record.round
    return None


def _of_metrics(one: Mapping[str, float], two: Mapping[str, float]) -> Iterator[str]:
    for name in dict.fromkeys([*one, *two]):
        if _differ(one, two, name):
            a, b = one.get(name, math.nan), two.get(name, math.nan)
            yield f"{name} {a:.4g} -> {b:.4g}" + (f" ({b - a:+.3g})" if math.isfinite(b - a) else "")


def _differ(one: Mapping[str, float], two: Mapping[str, float], name: str) -> bool:
    a, b = one.get(name, math.nan), two.get(name, math.nan)
    return name not in _TIMES and a != b and not (math.isnan(a) and math.isnan(b))
