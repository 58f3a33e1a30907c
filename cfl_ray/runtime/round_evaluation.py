"""The evaluation of a round: metrics by every protocol, agreement of the clusters, diagnostics."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.backend import Backend
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import ClientData, Clients, RoundStats
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, MOST_VALUES, Diagnostics, ReportedDiagnostic, sample_of
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.data.federation import Federation
from cfl_ray.runtime.evaluation import Evaluator, cluster_metrics, cluster_vectors, mean_of_defined, score_metrics
from cfl_ray.runtime.participation import Membership
from cfl_ray.runtime.round_report import RoundDraft
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking.record import LABEL_COUNTS, PAST_SCORES, cluster_diagnostics_of, taken_names


class RoundDiagnostics:
    """The last array reported under each name, for the report of the next evaluated round.

    A method may report a function instead of an array; `resolve` calls it before a checkpoint is saved or the models
    are freed.
    """

    def __init__(self, restored: tuple[ReportedDiagnostic, ...] = ()):
        self.arrays = {reported.name: reported for reported in restored}
        self._deferred: dict[str, tuple[int, Diagnostics]] = {}  # not computed yet: (round, reported in it)

    def take(self, draft: RoundDraft, reported: Diagnostics) -> None:
        """Adds the arrays that were reported in a round; numbers become metrics of the round."""
        draft.metrics |= reported.numbers
        draft.numbers += [name for name in reported.numbers if name not in draft.numbers]
        self._deferred |= dict.fromkeys(reported.names, (draft.round, reported))

    def resolve(self) -> None:
        """Computes the arrays added since the last call."""
        made = {name: ReportedDiagnostic(name, round, of.array(name)) for name, (round, of) in self._deferred.items()}
        self.arrays, self._deferred = self.arrays | made, {}

    @property
    def reported(self) -> tuple[ReportedDiagnostic, ...]:
        """The computed arrays."""
        return tuple(self.arrays.values())


class RoundEvaluation:
    """Evaluates the rounds of one method.

    initial_P: the common initial model, which a client holds before its first training.
    """

    def __init__(
        self,
        setup: Setup,
        label: str,
        steps: CheckedMethod,
        backend: Backend,
        membership: Membership,
        clients_of: Callable[[np.ndarray, int, RoundStats], Clients],
        initial_P: Tensor,
    ):
        experiment, self.task = setup.experiment, setup.task
        self.settings, self.seed, self.label = experiment.evaluation, experiment.seed, label
        self.steps, self.clients_of, self.membership = steps, clients_of, membership
        self.evaluator = Evaluator(self.settings, setup.federation, backend, self.seed, self.task)
        self.initial_P, self.primary = initial_P, self.task.metrics[0].name
        self.attackers = setup.attack.ids
        self.taken = taken_names([metric.name for metric in self.task.metrics])
        self.label_counts = LabelCounts(setup.federation.shape.num_classes)

    def new_diagnostics(self) -> Diagnostics:
        """An empty collection, for a round or an evaluation."""
        return Diagnostics(self.label, self.taken, self.seed)

    def add_to(
        self, draft: RoundDraft, state: State, local_scores_N2: np.ndarray, diagnostics: RoundDiagnostics
    ) -> None:
        """Tests online clients with the models of `state`, and adds the results to the draft of the round.

        local_scores_N2: P-local of every client after its last training, NaN before its first training.
        """
        online, present = self.membership.population.online, self.membership.present
        self.evaluator.federation = present
        stats = RoundStats(diagnostics=self.new_diagnostics())
        clients = replace(
            self.clients_of(self.evaluator.chosen(online), draft.round, stats),
            evaluated=True,
            choice_samples=self.settings.choice_samples,
            tester=lambda those, serving: self.evaluator.scores(serving, those),
        )
        serving = self.steps.serve(state, clients)
        table_MV = self.evaluator.scores(serving, clients)
        draft.scores_MV = np.column_stack([clients.ids_M, table_MV])
        draft.metrics |= score_metrics(table_MV, self.task)
        draft.metrics |= cluster_metrics(state, online, present.group_N)
        if self.settings.local:
            draft.metrics |= self._local_metrics(local_scores_N2, clients)
        draft.metrics |= self._metrics_of_some(table_MV[:, 0], serving, clients)
        if self.settings.past:
            diagnostics.take(draft, self._tests_on_past_data(draft, serving, clients))
        self.steps.diagnose(state, clients)
        draft.record_exclusions(stats)
        traffic, mbit = draft.stats.traffic, 1e-6 / present.num_clients  # bits of all clients -> Mbit per client
        draft.metrics |= {
            "clients_online": float(len(online)),
            "mbit_down": traffic.down_bits * mbit,
            "mbit_up": traffic.up_bits * mbit,
        }
        diagnostics.take(draft, stats.diagnostics)
        if state.num_clusters > 1:
            of_clusters = Diagnostics(self.label)
            vectors = cluster_vectors(state, online, clients.ids_M, table_MV[:, 0])
            for name, vector_K in zip(cluster_diagnostics_of(self.primary), vectors, strict=True):
                of_clusters.add(name, _storable(vector_K), (CLUSTERS,), clients.ids_M)
            diagnostics.take(draft, of_clusters)
        diagnostics.resolve()
        if self.task.targets == "class":
            diagnostics.take(draft, self._labels_of_compared(draft.round, stats, diagnostics))
            diagnostics.resolve()

    def _local_metrics(self, local_scores_N2: np.ndarray, clients: Clients) -> dict[str, float]:
        """P-local over all clients, and over trained clients; untrained clients hold the initial model."""
        score_M = local_scores_N2[clients.ids_M, 0].astype(np.float64)
        trained = ~np.isnan(score_M)
        metrics = {f"{self.primary}_local_trained": float(score_M[trained].mean())} if trained.any() else {}
        if not trained.all():
            untrained = clients.select(~trained)
            initial = Serving(self.initial_P[None], untrained.first_row())
            score_M[~trained] = self.evaluator.scores(initial, untrained)[:, 0]
        return metrics | {f"{self.primary}_local": mean_of_defined(score_M), "trained_share": float(trained.mean())}

    def _metrics_of_some(self, score_M: np.ndarray, serving: Serving, clients: Clients) -> dict[str, float]:
        """Means over honest clients and over newcomers, and P-tune."""
        metrics: dict[str, float] = {}
        honest = ~np.isin(clients.ids_M, self.attackers)
        if len(self.attackers) and honest.any():
            metrics[f"{self.primary}_honest"] = mean_of_defined(score_M[honest])
        newcomers = np.isin(clients.ids_M, self.membership.population.newcomers)
        if newcomers.any():
            metrics[f"newcomer_{self.primary}"] = mean_of_defined(score_M[newcomers])
        if self.settings.tuned_epochs:
            tuned_M = self.evaluator.tuned_scores(serving, clients, clients.local)[:, 0]
            metrics[f"{self.primary}_tuned"] = mean_of_defined(tuned_M)
            if newcomers.any():
                metrics[f"newcomer_{self.primary}_tuned"] = mean_of_defined(tuned_M[newcomers])
        return metrics

    def _tests_on_past_data(self, draft: RoundDraft, serving: Serving, clients: Clients) -> Diagnostics:
        """Scores of clients on the data that they had before their last change. Adds the mean to the draft."""
        diagnostics = Diagnostics(self.label, seed=self.seed)
        federation = self.membership.federation
        changed_N = np.zeros(federation.num_clients, np.int64)  # round of the last change; 0: none
        for round, ids in sorted(federation.changed_in.items()):
            if round <= draft.round:
                changed_N[ids] = round
        chosen_M = changed_N[clients.ids_M] > 0
        if not chosen_M.any():
            return diagnostics
        chosen = clients.select(chosen_M)
        past = chosen.replaying([(int(changed) - 1,) for changed in changed_N[chosen.ids_M]])
        score_M = self.evaluator.scores(serving.select(chosen_M), past)[:, 0]
        diagnostics.add(PAST_SCORES, _storable(score_M), (CLIENTS,), chosen.ids_M)
        draft.metrics[f"{self.primary}_past"] = mean_of_defined(score_M)
        return diagnostics

    def _labels_of_compared(self, round: int, stats: RoundStats, diagnostics: RoundDiagnostics) -> Diagnostics:
        """Label counts of the clients in the method's reported matrices, without attackers, which might lie."""
        labels, population = Diagnostics(self.label, seed=self.seed), self.membership.population
        ids = compared_clients(diagnostics.reported)
        ids = ids[population.is_online_N[ids] & ~np.isin(ids, self.attackers)]
        ids = self.label_counts.bounded(ids, self.seed)
        clients = replace(self.clients_of(ids, round, stats), evaluated=True)
        counted, counts_MC = self.label_counts.of(clients, self.membership.present)
        if len(counted):
            labels.add(LABEL_COUNTS, counts_MC, (CLIENTS, "classes"), counted)
        return labels


def _storable(score_M: np.ndarray) -> np.ndarray:
    """The scores; NaN for those that a diagnostic cannot hold, such as an infinite loss."""
    return np.where(np.abs(score_M) <= np.finfo(np.float32).max, score_M, np.nan)


@dataclass(frozen=True)
class CountLabels:
    """The number of a client's training samples of each class, (C,)."""

    num_classes: int

    def __call__(self, client: ClientData, anchor_P: Tensor | None) -> Tensor:
        return torch.bincount(client.y, minlength=self.num_classes)


@dataclass
class LabelCounts:
    """Label counts of the clients whose similarity a method has reported, for a comparison in the report.

    A client's labels are counted once, and again when its data have changed.
    """

    num_classes: int
    known: dict[tuple[int, Hashable], Tensor] = field(default_factory=dict)  # by client and version of its data

    def bounded(self, ids: np.ndarray, seed: int) -> np.ndarray:
        """A sample of the clients, small enough that their counts fit into a diagnostic."""
        return ids[sample_of(ids, MOST_VALUES // self.num_classes, seed)]

    def of(self, clients: Clients, federation: Federation) -> tuple[np.ndarray, Tensor]:
        """(ids, label counts (M, C)) of the clients whose data are valid."""
        key_of = {client: (client, federation.data_version(client)) for client in clients.ids_M.tolist()}
        self.known = {key: counts_C for key, counts_C in self.known.items() if key_of.get(key[0], key) == key}
        missing = clients.select(np.array([key not in self.known for key in key_of.values()], bool))
        new_MC, valid_M = missing.describe(CountLabels(self.num_classes))
        for client, counts_C in zip(missing.ids_M[valid_M].tolist(), new_MC[torch.from_numpy(valid_M)], strict=True):
            self.known[key_of[client]] = counts_C
        ids = [client for client, key in key_of.items() if key in self.known]
        counts_MC = torch.stack([self.known[key_of[client]] for client in ids]) if ids else new_MC[:0]
        return np.array(ids, np.int64), counts_MC


def compared_clients(reported: Iterable[ReportedDiagnostic]) -> np.ndarray:
    """Ascending ids of the clients in client-by-client matrices."""
    ids = [matrix.diagnostic.labels[0] for matrix in reported if matrix.diagnostic.axes == (CLIENTS, CLIENTS)]
    return np.unique(np.concatenate(ids)) if ids else np.zeros(0, np.int64)
