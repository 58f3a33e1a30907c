"""Prints one checksum per method: every metric of short runs, to the last bit, with all phases in the first rounds.

    python tests/checksums.py > before.txt     # on the commit before a change
    python tests/checksums.py | diff before.txt -

Equal lines mean that a change altered no metric. The checksums depend on the processor and the version of PyTorch, so
they are compared on one machine and never stored.
"""

import hashlib
import json
import sys
import tempfile

from cfl_ray import Experiment, simulate
from cfl_ray.methods import REGISTRY

EARLY = {  # options that bring every phase into the first rounds
    "autocfl": {"min_rounds": 1, "max_rounds": 2},
    "clove": {"stable_rounds": 2},
    "cfl": {"eps1": 10.0, "eps2": 0.0, "min_rounds": 1},
    "fedac": {"adapt_after": 1, "adapt_every": 2, "pca_every": 2},
    "fedgroup": {"num_clusters": 3, "alpha": 3, "pretrain_steps": 5},
    "feroma": {"warmup_rounds": 1},
    "fl_hc": {"cluster_round": 2},
    "flux": {"cluster_round": 2},
    "cflgp": {"num_clusters": 3, "period": 1, "cluster_rounds": 2},
    "fesem_cam": {"num_clusters": 3},
    "ifca_cam": {"warmup_rounds": 1},
}
FULL_BATCH = {
    "data": {"source": "synthetic", "synthetic_shape": [20], "synthetic_samples": 9, "partition": {"clients": 12}},
    "local": {"epochs": 3, "weight_decay": 0.01},
}
MINI_BATCHES = {
    "data": {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 12}},
    "local": {"epochs": 1, "batch_size": 20, "momentum": 0.9, "persist": True},
}
ATTACKED = {"attack": {"kind": "colluders", "fraction": 0.3, "scale": 2}, "cohort": {"fraction": 1.0}}
SCHEDULE = [
    {"round": 2, "join": [10, 11], "change": [{"clients": "2-3", "relabel": 1}]},
    {"round": 3, "leave": [0, 1]},
    {"round": 4, "change": [{"clients": [4, 5], "data_of": [5, 4]}]},
]
CASES = {  # name: (sections, engine)
    "full batch": (FULL_BATCH, "sequential"),
    "full batch, span": (FULL_BATCH, "span"),
    "mini-batches": (MINI_BATCHES, "sequential"),
    "mini-batches, vectorised": (MINI_BATCHES, "vectorised"),
    "attacked": (MINI_BATCHES | ATTACKED, "sequential"),
}
COMMON = {
    "rounds": 4,
    "schedule": SCHEDULE,
    "cohort": {
        "fraction": 0.75,
        "availability": {"kind": "diurnal", "chance": 0.8, "amplitude": 0.2, "period": 4.0},
        "dropout": 0.2,
    },
    "evaluation": {"tuned_epochs": 1},
    "tracking": {"enabled": False},
}
LEFT_OUT = {"round_seconds", "cohort_size", "updates_rejected"}  # times, and metrics that earlier versions lack
RULES = ("median", {"trimmed_mean": {"share": 0.2}}, {"multi_krum": {"attackers": 1}}, "norm_clipping")


def figures(name: str, options: dict, output: str) -> list:
    """Every metric of every round of every case, without measured times."""
    found = []
    for case, (sections, engine) in CASES.items():
        rule = (
            {"aggregation": RULES[len(name) % len(RULES)]}
            if case == "attacked" and "aggregation" in chosen(name)
            else {}
        )
        if REGISTRY[name]().needs_fresh_momentum:
            sections = sections | {"local": sections["local"] | {"persist": False}}
        values = (
            COMMON | sections | {"methods": [{name: options | rule}], "runtime": {"engine": engine}, "output": output}
        )
        (result,) = simulate(Experiment(**values)).methods.values()
        metrics = [
            {key: value for key, value in record.metrics.items() if key not in LEFT_OUT} for record in result.records
        ]
        found.append([case, metrics, result.summary])
    return found


def chosen(name: str) -> set[str]:
    """The options of a method; none for FedNova, which supports only some aggregation rules."""
    return set() if name == "fednova" else {option["name"] for option in REGISTRY[name].options()}


def main() -> None:
    with tempfile.TemporaryDirectory() as output:
        for name in sys.argv[1:] or list(REGISTRY):
            options = {
                key: value for key, value in EARLY.get(name, {}).items() if key in chosen(name) or name == "fednova"
            }
            text = json.dumps(figures(name, options, output), sort_keys=True)
            print(f"{name:14} {hashlib.sha256(text.encode()).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
