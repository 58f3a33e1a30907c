"""Readable titles of metrics with their units, for figures, reports and tables in papers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cfl_ray.core.metrics import METRICS, Metric
from cfl_ray.tracking.record import is_of_validation, test_metric

PERCENT = "%"
# of what no task declares; any other name is its own title
_TITLES = {
    "test_loss": ("Loss", ""),
    "train_loss": ("Training loss", ""),
    "num_clusters": ("Clusters", ""),
    "largest_cluster_share": ("Largest cluster", PERCENT),
    "ari": ("ARI", ""),
    "nmi": ("NMI", ""),
    "purity": ("Purity", PERCENT),
    "mbit": ("Traffic per client", "Mbit"),
    "mbit_down": ("Traffic down", "Mbit"),
    "mbit_up": ("Traffic up", "Mbit"),
    "mbit_to_target": ("Traffic to target", "Mbit"),
    "mbit_to_target_local": ("Traffic to target, P-local", "Mbit"),
    "rounds_to_target_local": ("Rounds to target, P-local", ""),
    "seconds": ("Time", "s"),
    "round_seconds": ("Time a round", "s"),
    "virtual_seconds": ("Virtual time", "s"),
    "seconds_to_target": ("Virtual time to target", "s"),
    "trained_share": ("Clients trained", PERCENT),
}
_OF_CLIENTS = {  # endings of the first metric of a task
    "_local_trained": "P-local, trained clients",
    "_local": "P-local",
    "_tuned": "P-tune",
    "_past": "past data",
    "_honest": "honest clients",
    "_std": "std. dev. of clients",
    "_p10": "10th percentile of clients",
    "_p90": "90th percentile of clients",
    "_worst_10": "worst 10 % of clients",
    "_best_10": "best 10 % of clients",
    "_gini": "Gini of clients",
    "_jain": "Jain of clients",
}
_INDICES = ("_gini", "_jain")  # have no unit, whatever the metric's
_NEWCOMER = "newcomer_"


@dataclass(frozen=True)
class Title:
    """The title of a metric."""

    text: str  # e.g. "Accuracy, worst 10 % of clients"
    unit: str = ""  # PERCENT: of a share, 0..1

    @property
    def factor(self) -> float:
        """The recorded value times this is in the unit."""
        return 100.0 if self.unit == PERCENT else 1.0

    @property
    def as_recorded(self) -> str:
        """The title of values that are not multiplied by `factor`."""
        return self.text if self.unit == PERCENT else str(self)

    def __str__(self) -> str:
        return f"{self.text} ({self.unit})" if self.unit else self.text


def title_of(name: str) -> Title:
    """The title of a recorded metric: as it is declared (`Metric.title`), else its name in words."""
    base = test_metric(name)
    of = ["validation"] if is_of_validation(name) else []
    if base in _TITLES:
        title = Title(*_TITLES[base])
    else:
        if base.startswith(_NEWCOMER):
            of, base = [*of, "newcomers"], base.removeprefix(_NEWCOMER)
        ending = next((ending for ending in _OF_CLIENTS if base.endswith(ending)), "")
        declared = METRICS.builtin.get(score := base.removesuffix(ending) if ending else base)
        of = [*([_OF_CLIENTS[ending]] if ending else []), *of]
        title = Title(*_declared(declared, score))
        title = replace(title, unit="") if ending in _INDICES else title
    return replace(title, text=", ".join([title.text, *of]))


def _declared(metric: object, name: str) -> tuple[str, str]:
    words = name.replace("_", " ").strip()
    own = words[:1].upper() + words[1:]
    return (metric.title or own, metric.unit) if isinstance(metric, Metric) else (own, "")
