"""The runs of a study: their order, their experiments, and which are selected."""

import pytest

import cfl_ray
from cfl_ray.config.study import Study
from cfl_ray.config.sweep import Trial
from cfl_ray.errors import ConfigError
from cfl_ray.methods import REGISTRY
from cfl_ray.study import worker_pool
from cfl_ray.study.status import PlannedRuns
from cfl_ray.study.study_plan import Selection, plan


def test_the_first_seed_of_everything_comes_first(study, tmp_path):
    runs = plan(study(settings={"a": {}, "b": {"rounds": 3}}))
    assert [(run.seed, run.setting, run.method) for run in runs] == [
        (seed, setting, method) for seed in (0, 1) for setting in ("a", "b") for method in ("fedavg", "two")
    ]
    assert runs[3].folder(tmp_path) == tmp_path / "b" / "two" / "seed-0" and runs[3].name == "b, two, seed 0"
    assert [run.experiment.rounds for run in runs[:4]] == [2, 2, 3, 3]


def test_a_run_has_one_method_without_its_label_and_its_own_local_training(study):
    """`local` of a method replaces keys of the section, as in a run of several methods: mappings in it as a whole."""
    own = {"epochs": 3, "optimizer": "adam", "optimizer_options": {"eps": 0.1}}
    shared = {"epochs": 1, "batch_size": 10, "optimizer": "adam", "optimizer_options": {"betas": [0.8, 0.9]}}
    (run,) = plan(
        study(seeds=[4], experiment={"methods": [{"fedavg": {"label": "mine", "local": own}}], "local": shared})
    )
    assert run.method == "mine" and run.experiment.methods == ["fedavg"] and run.experiment.seed == 4
    local = run.experiment.local
    assert (local.epochs, local.batch_size, local.optimizer_options) == (3, 10, {"eps": 0.1})
    (plain,) = plan(study(seeds=[4], experiment={"methods": ["fedavg"], "local": shared | own}))
    assert plain.experiment.config_hash == run.experiment.config_hash, "the same run in every study that has it"


def test_a_run_equals_one_of_the_same_experiment(study, tmp_path, figures):
    """To the last bit: of all methods together, and of this method alone."""
    made = study(seeds=[1])
    runs = plan(made)
    together = figures(cfl_ray.simulate(cfl_ray.Experiment(**made.experiment, seed=1)))
    for run in runs:
        alone = figures(cfl_ray.simulate(run.experiment))
        assert worker_pool._run(run, tmp_path / "study", None)[0] == "finished"
        (found,) = figures(cfl_ray.load_run(run.folder(tmp_path / "study"))).values()
        assert [found] == list(alone.values()) and found == together[run.method]


def test_selection(study):
    made = study(settings={"a": {}, "b": {}})
    runs = plan(made, Selection(settings=["b"], methods=["two"], seeds=[1]))
    assert [run.name for run in runs] == ["b, two, seed 1"]
    for only, message in (
        (Selection(settings=["c"]), "the study has no setting 'c'"),
        (Selection(methods=["ifca"]), "the study has no method 'ifca'; valid: fedavg, two"),
        (Selection(seeds=[7]), "the study has no seed 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(made, only)


def test_all_methods_at_once(study):
    runs = plan(study(seeds=[0], experiment={"methods": ["all"]}))
    assert {run.method for run in runs} == REGISTRY.keys()


@pytest.mark.parametrize("listed", [{}, {"methods": ["fedavg"]}, {"methods": [{"ifca": {"label": "two"}}, "fedavg"]}])
def test_the_status_of_a_study_counts_the_runs_of_its_plan(listed):
    """Also if the study lists no methods, so that the default of an experiment counts."""
    made = Study(name="s", seeds=[0, 1], experiment=listed, settings={"a": {}, "b": {"methods": ["stocfl"]}})
    runs, planned = plan(made), PlannedRuns(made)
    assert planned.count == len(runs) and all(planned.has(run.setting, run.method, run.seed) for run in runs)


def test_trials_are_settings(study):
    made = study(seeds=[0], experiment={"methods": ["fedavg"]}, settings={"a": {}})
    trials = [Trial({"local.lr": 0.1}), Trial({"local.lr": 0.2})]
    runs = plan(made, trials=trials)
    assert [(run.setting, run.base, run.parameters) for run in runs] == [
        ("a,lr=0.1", "a", trials[0].parameters),
        ("a,lr=0.2", "a", trials[1].parameters),
    ]
    assert [run.setting for run in plan(made.model_copy(update={"settings": {}}), trials=trials)] == [
        "lr=0.1",
        "lr=0.2",
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"experiment": {"methods": ["fedavgg"]}}, "small, all: unknown method 'fedavgg' .did you mean 'fedavg'"),
        ({"experiment": {"methods": "fedavg"}}, r"small, all: methods: expected a list, write \[fedavg\]"),
        ({"settings": {"a": {"local": {"epoch": 1}}}}, "small, a: unknown key 'local.epoch' .did you mean 'epochs'"),
        ({"experiment": {"output": 3}}, "small, all: output: Input should be a valid string, got 3"),
        (
            {"experiment": {"local": "x", "methods": [{"fedavg": {"local": {"epochs": 2}}}]}},
            "small, all: local: expected a section of keys, e.g. {epochs: 5}, got",
        ),
        (
            {"experiment": {"methods": [{"ifca": {"label": "a" * 201}}]}},
            "a folder of at most 200 letters, got 201; give",
        ),
        ({"seeds": [-1]}, "small, all: seed: Input should be greater than or equal to 0"),
        ({"experiment": {"methods": ["ifca", "ifca"]}}, "small, all: methods: 'ifca' is listed twice"),
    ],
)
def test_what_no_run_can_be_made_of(study, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(study(**changes).located())


def test_two_runs_with_one_folder(study):
    with pytest.raises(ConfigError, match="two runs are named lr=1, fedavg, seed 0; rename a setting or a label"):
        plan(study(), trials=[Trial({"local.lr": 1}), Trial({"local.lr": 1})])
