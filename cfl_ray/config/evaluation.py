"""The section `evaluation`."""

from typing import Any, Literal

from pydantic import Field

from cfl_ray.config.section import ConfigSection, former


class EvaluationConfig(ConfigSection):
    """The evaluation: what it measures, and how often."""

    every: int = Field(
        1, ge=1, description="rounds from one evaluation to the next; the last round is always evaluated"
    )
    clients: int | None = Field(
        None, ge=1, description="number of clients evaluated, the same random sample in all rounds; null: all clients"
    )
    weights: Literal["uniform", "samples"] = Field(
        "uniform",
        description="weight of a client in the means over clients: uniform | samples: its number of test samples, so "
        "that accuracy is the share of all test samples",
    )
    reported: dict[str, Literal["server", "local", "tuned"]] | None = Field(
        None,
        description="the protocol by which a method is scored in the metric `reported`, by label or name, e.g. {apfl: "
        "local}: server | local | tuned; methods that are not named: server. null: there is no such metric",
    )
    local: bool = Field(True, description="also measure P-local: each client's model right after its own training")
    local_samples: int = Field(
        500,
        ge=1,
        description="most samples of a shared test set for a model of a single client (P-local, personal models)",
        **former("local_samples", "local_images"),
    )
    choice_samples: int | None = Field(
        256,
        ge=1,
        description="number of training samples, the same random ones in all rounds, on which a client compares models "
        "to choose one for the evaluation (ifca, ifca_cam); null: as many as the method uses in training, where this "
        "limit has no effect",
    )
    tuned_epochs: int = Field(
        0, ge=0, description="F of P-tune(F): local epochs of fine-tuning before the test; 0: do not measure it"
    )
    past: bool = Field(
        False,
        description="also test clients whose data have changed on the data that they had before their last change, for "
        "the backward transfer",
    )
    verify: bool = Field(
        True,
        description="at the end of a method, and before its models are used, test the saved models of at most ten "
        "clients as plain PyTorch modules, and end with an error if their scores are not those recorded",
    )
    target: float | None = Field(
        None,
        description="target of rounds_to_target and mbit_to_target (P-server, and _local for P-local): a value of the "
        "first metric of the task, for accuracy above 0 and at most 1; null: do not measure them",
    )
    metrics: list[Any] = Field(
        [],
        description="further metrics of each client: accuracy | macro_f1 | micro_f1 | balanced_accuracy | roc_auc | "
        "subset_accuracy | ece | mse | "
        "mae | r2 | token_accuracy | perplexity | path/to/file.py:function of the outputs (n, C) and the targets (n,) "
        "that returns a number",
    )
    over_clients: list[Literal["gini", "jain", "worst_10", "best_10"]] = Field(
        [],
        description="further numbers of the first metric over the clients: gini, Gini's coefficient | jain, Jain's "
        "index | worst_10, best_10, the mean of the worst and of the best tenth",
    )
    confusion: bool = Field(
        False,
        description="record in each evaluation the number of test samples of each cluster's clients by true and "
        "predicted class, for the report and cfl-ray table --classes (docs/metrics.md)",
    )

    def protocol_of(self, label: str, name: str) -> str:
        """The protocol of `reported` for the method with this label and name: server, local or tuned."""
        reported = self.reported or {}
        return reported.get(label, reported.get(name, "server"))
