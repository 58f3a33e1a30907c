"""The settings of runs as text, and the command that repeats them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cfl_ray.config import Experiment
from cfl_ray.config.schedule import EventConfig
from cfl_ray.config.study import load_study
from cfl_ray.errors import DataError, command
from cfl_ray.methods import full_label
from cfl_ray.report.report_data import MethodRun
from cfl_ray.report.snapshots import PerClient
from cfl_ray.results.load import FoundRun, recorded_methods
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import flatten, read_info, redact


def run_info(runs: Sequence[FoundRun], methods: Mapping[str, Sequence[MethodRun]], groups: PerClient) -> dict[str, str]:
    """Data, model, training, rounds, seeds, hosts and commit of the runs, as far as they are known."""
    first = min(runs, key=lambda run: run.experiment.seed)
    experiment = first.experiment
    settings, defaults = _shared_settings(runs), flatten(Experiment().to_dict())

    def section(prefix: str, always: Sequence[str] = (), without: Sequence[str] = ()) -> str:
        keys = [key for key in settings if key.startswith(prefix) and not key.startswith(tuple(without))]
        chosen = [key for key in keys if key in always or settings[key] != defaults.get(key)]
        chosen.sort(key=lambda key: (key not in always, keys.index(key)))
        return ", ".join(f"{key.removeprefix(prefix)} {settings[key]}" for key in chosen)

    apart = ("data.shift.", "data.partition.", "data.test.", "data.root", "data.download", "data.shards", "data.source")
    scored = [len(run.scores.get("client", ())) for of_method in methods.values() for run in of_method]
    clients = max([*scored, len(groups), experiment.data.partition.clients or 0])
    true_groups = f", {len(groups.sizes)} true groups" if groups else ""
    recorded = _recorded(first.directory)
    seeds = sorted({run.experiment.seed for run in runs})
    settings_in_words = {
        "data": ", ".join(filter(None, [settings["data.source"], section("data.", without=apart)])),
        "groups differ by": section("data.shift.", ["data.shift.kind"]),
        "partition": section("data.partition.", ["data.partition.kind"]),
        "clients": f"{clients}{true_groups}" if clients else "",
        "test data": section("data.test."),
        "model": section("model.", ["model.name"]),
        "task": settings.get("task") or section("task."),
        "local training": section("local.", ["local.epochs", "local.batch_size", "local.lr"]),
        "cohort": section("cohort.", ["cohort.fraction"]),
        "attack": section("attack."),
        "schedule": "; ".join(map(_event_in_words, experiment.schedule)),
        "evaluation": section("evaluation."),
        "rounds": settings["rounds"],
        "seeds": ", ".join(map(str, seeds)),
        "methods": _methods_in_words(runs),
        "hosts": ", ".join(recorded[key] for key in ("hosts", "device", "engine") if key in recorded),
        "commit": recorded.get("git_commit", ""),
    }
    return {name: redact(value) for name, value in settings_in_words.items() if value}


def _shared_settings(runs: Sequence[FoundRun]) -> dict[str, str]:
    """The settings by dotted key; the value is "differs by method" if the runs of a study differ in it."""
    all_settings = [flatten(run.experiment.to_dict()) for run in runs]
    return {
        key: value if all(other.get(key) == value for other in all_settings) else "differs by method"
        for key, value in all_settings[0].items()
    }


def _event_in_words(event: EventConfig) -> str:
    kinds = {
        f"{len(event.join)} join": event.join,
        f"{len(event.leave)} leave": event.leave,
        "data change": event.change,
    }
    return f"round {event.round}: {', '.join(words for words, happens in kinds.items() if happens)}"


def _methods_in_words(runs: Sequence[FoundRun]) -> str:
    """Methods with the options that are not at their defaults."""
    methods = [item for run in runs for item in recorded_methods(run.directory, run.experiment).items()]
    names = [label if method is None else full_label(method) for label, method in methods]
    return ", ".join(dict.fromkeys(names))


def _recorded(directory: Path) -> dict[str, str]:
    """Hosts, device and engine of the run, and the commit of its code, if recorded."""
    try:
        info = read_info(directory)
    except DataError:
        return {}
    session = {key.removeprefix("session."): value for key, value in info.params.items() if key.startswith("session.")}
    return session | {"git_commit": info.tags.get("git_commit", "")}


def command_again(runs: Sequence[FoundRun]) -> tuple[str, str]:
    """The command that repeats these runs, and the config or study that it names, without credentials."""
    first = min(runs, key=lambda run: run.experiment.seed)
    if first.study is not None:
        text = RunDirectory(first.study).study.read_text(encoding="utf-8")
        return _study_again(first.study, str(first.setting)), redact(text)
    seeds = sorted({run.experiment.seed for run in runs})
    commands = [f"cfl-ray run experiment.yaml seed={seed}" for seed in seeds]
    return "\n".join(commands), first.experiment.to_yaml(credentials=False)


def _study_again(folder: Path, setting: str) -> str:
    """The command that repeats a setting of a study; for a sweep, all trials of the setting."""
    study = load_study(RunDirectory(folder).study)
    if study.sweep is None:
        return command("compare", RunDirectory.study.name, "--setting", setting)
    base = next((name for name in study.settings if setting.startswith(f"{name},")), None)
    return command("sweep", RunDirectory.study.name, "--setting" if base else None, base)
