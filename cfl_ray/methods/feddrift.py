"""FedDrift: E. Jothimurugesan, K. Hsieh, J. Wang, G. Joshi, P. B. Gibbons. Federated Learning under Distributed Concept
Drift. AISTATS 2023, arXiv:2206.00799, with FedDrift-Eager (`eager`).

    L(w; D): share of wrong predictions, or loss, of a model on data; D_i^t: data of client i in time step t; k_i: the
    model of client i's data in the previous step
    at the beginning of step t:
        d(a, b) = max(L(w_a; D_b) - L(w_b; D_b), L(w_b; D_a) - L(w_a; D_a), 0),    D_a: all data that train model a
        merge models by complete linkage while d < delta; a merged model is the mean by numbers of pairs (i, t)
        drift at i if  min_k L(w_k; D_i^t) - L(w_k_i; D_i^(t-1)) > delta
        without drift  k_i <- argmin_k L(w_k; D_i^t)
        with drift     k_i <- a new model, a copy of the best, for client i alone; Eager: for all that drift in step t
    in every round:
        w_k <- Avg of SGD_i(w_k) on the union of all D_i^t, of any step, that were assigned to model k

Eager does not merge. A new model trains for a step before it can merge. A full pool drops the least recently used model
with its data; if all models are in use, clients that drift take the best model. With `first_models: each` every client
of the first round trains a model of its own in step 0, so concepts that differ from the start are found as these merge.

Deviations: by default all clients train one model in step 0 (official code: `each`; Eager: one). A step also begins
when clients report that their data changed. Clients outside the cohort are compared in the first round of the step in
which they take part, and until then the models that they have are in use; models are compared on the data of the
cohort, so those without data in it do not merge. A client receives the pool anew for the data of each model, and for
its new data. Clients whose data did not change keep a single copy of them; in the official code every step has new
samples. The official code (microsoft/FedDrift, e4ac32f) merges after clients took models in the step, with the new
data; compares at most 21 batches of a model's data; does not train models without a client in the step; and compares
with L before the training of the last step, so that it misses drift in step 1 and at clients that drifted in the last
step.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy
import torch
from torch import Tensor

from cfl_ray.clustering.agglomerative import by_lowest_member, linkage_tree
from cfl_ray.core.clients import Clients, least_loss
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import UNASSIGNED, State

_NEVER = 1e30  # distance of models that are not compared
_ROUNDING = 1e-6  # differences of L that are delta but for rounding are neither above nor below it


@dataclass(frozen=True, kw_only=True)
class PoolState(State):
    """The pool of models, and the model that each client's data of each of T time steps train."""

    model_TN: np.ndarray  # int32: 1 + the model; 0: none, as for newcomers
    round_T: np.ndarray  # int64: the last round of each step
    used_K: np.ndarray  # int64: the last step in which a client had the model
    born_K: np.ndarray  # int64: the first step of the model
    due: bool = False  # whether a step begins with the next round

    @property
    def step(self) -> int:
        """t, from 0; -1 before the first round."""
        return len(self.round_T) - 1

    def begun(self) -> Self:
        """This state at the beginning of the next step."""
        model_TN = np.concatenate([self.model_TN, np.zeros((1, len(self.assign_N)), np.int32)])
        return self.advance(model_TN=model_TN, round_T=np.append(self.round_T, 0), due=False)

    def in_round(self, round: int) -> Self:
        """This state with `round` as the last round of the current step."""
        return self.advance(round_T=np.append(self.round_T[:-1], round))

    def given(self, ids_m: np.ndarray, model_m: np.ndarray | int) -> Self:
        """This state after the clients' data of this step were assigned to these models."""
        model_TN, used_K = self.model_TN.copy(), self.used_K.copy()
        model_TN[-1, ids_m] = np.asarray(model_m) + 1
        used_K[model_m] = self.step
        return self.advance(model_TN=model_TN, used_K=used_K, assign_N=self.place(ids_m, model_m))

    def in_use_of_others(self, ids_M: np.ndarray) -> Self:
        """This state, in which the models of clients that wait to be compared in this step, but `ids_M`, are in use."""
        waiting_N = (self.model_TN[-1] == 0) & (self.assign_N != UNASSIGNED)
        waiting_N[ids_M] = False
        used_K = self.used_K.copy()
        used_K[self.assign_N[waiting_N]] = self.step
        return self.advance(used_K=used_K)

    def with_model(self, model_1P: Tensor, most: int) -> tuple[Self, int]:
        """This state with an additional model, and its number; -1 if the pool is full and all models are in use."""
        if self.num_clusters < most:
            models_KP = torch.cat([self.models_KP, model_1P])
            added = {"used_K": np.append(self.used_K, self.step), "born_K": np.append(self.born_K, self.step)}
            return self.advance(models_KP=models_KP, **added), self.num_clusters
        k = int(self.used_K.argmin())
        if self.used_K[k] == self.step:
            return self, -1
        models_KP, used_K, born_K = self.models_KP.clone(), self.used_K.copy(), self.born_K.copy()
        models_KP[k], used_K[k], born_K[k] = model_1P[0], self.step, self.step
        model_TN, assign_N = self.model_TN.copy(), self.assign_N.copy()
        model_TN[model_TN == k + 1], assign_N[assign_N == k] = 0, UNASSIGNED
        after = self.advance(models_KP=models_KP, used_K=used_K, born_K=born_K, model_TN=model_TN, assign_N=assign_N)
        return after, k

    def merged(self, part_K: np.ndarray) -> Self:
        """This state with models of equal `part_K` (0 .. K' - 1) merged into their mean, weighted by pairs (i, t)."""
        count = part_K.max() + 1
        pairs_K = np.bincount(self.model_TN.ravel(), minlength=self.num_clusters + 1)[1:]
        weight_kK = np.zeros((count, self.num_clusters))
        weight_kK[part_K, np.arange(self.num_clusters)] = np.maximum(pairs_K, 1e-9)  # a model may have no data
        weight_kK /= weight_kK.sum(1, keepdims=True)
        used_k, born_k = np.zeros(count, np.int64), np.full(count, self.step)
        np.maximum.at(used_k, part_K, self.used_K)
        np.minimum.at(born_k, part_K, self.born_K)
        number = np.concatenate([[-1], part_K])  # -1 for no model, then the part of each model
        return self.advance(
            models_KP=(torch.from_numpy(weight_kK) @ self.models_KP.double()).float(),
            assign_N=number[self.assign_N + 1].astype(np.int32),
            model_TN=(number[self.model_TN] + 1).astype(np.int32),
            used_K=used_k,
            born_K=born_k,
        )

    def forget(self, ids: np.ndarray) -> Self:
        model_TN = self.model_TN.copy()
        model_TN[:, ids] = 0
        return super().forget(ids).advance(model_TN=model_TN)


@dataclass(frozen=True)
class FedDrift(Method[PoolState], name="feddrift"):
    """A pool of models: clients whose data drift start new models, which merge with models that fit their data."""

    needs_mean = "models of its pool are merged and replaced between rounds"
    needs_fresh_momentum = "a client may train several models in a round"

    eager: bool = option(False, "clients that drift in a step share a new model; no merging", source="paper")
    delta: float = option(
        0.1, "delta: increase of L that is a drift, and distance below which models merge", source="paper, MNIST", low=0
    )
    criterion: str = option(
        "errors",
        "L: errors (share of wrong predictions) or loss, on training data",
        source="official code",
        choices=("errors", "loss"),
    )
    step_rounds: int = option(200, "rounds of a time step", source="paper", low=1)
    max_models: int = option(20, "most models in the pool", source="ours", low=1)
    first_models: str = option(
        "one",
        "models of the first step: one, or each (a copy of the first model for each client, at most max_models)",
        source="official code: each; Eager: one",
        choices=("one", "each"),
    )
    block: int = option(10, "models that clients receive at a time to compare them", source="ours", low=1)
    weights: str = weights_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eager and self.first_models == "each":
            raise ValueError("feddrift.first_models must be one with eager: its models do not merge")

    def warning(self, clients: int, cohort: int) -> str:
        if self.first_models == "one" or cohort <= self.max_models:
            return ""
        return f"first_models each: the {cohort} clients of a round share {self.max_models} first models (max_models)"

    @property
    def needs_classes(self) -> str:
        return "it counts wrong predictions; criterion: loss does not" if self.criterion == "errors" else ""

    def init(self, start: Start) -> PoolState:
        return PoolState(
            models_KP=start.new_model(0)[None],
            assign_N=start.unassigned(),
            model_TN=np.zeros((0, start.num_clients), np.int32),
            round_T=np.zeros(0, np.int64),
            used_K=np.zeros(1, np.int64),
            born_K=np.zeros(1, np.int64),
        )

    def round(self, state: PoolState, clients: Clients, rng: Draws) -> PoolState:
        if state.step < 0 or state.due or (clients.round - 1) % self.step_rounds == 0:
            if not self.eager and state.num_clusters > 1:
                state = self.merge(state, clients)
            state = state.begun()
        state = self.compare(state.in_round(clients.round), clients)
        clients.record("pool", state.num_clusters)
        # w_k <- Avg of SGD_i(w_k) on the union of all D_i^t that were assigned to model k
        models_KP = state.models_KP.clone()
        for k in range(state.num_clusters):
            members = self.with_data_of(state, clients, k)
            if len(members):
                start = members.send(state.models_KP, np.full(len(members), k))
                own_M = state.assign_N[members.ids_M] == k
                updates = members.train(start, average=members.weights(self.weights), keep_as_local_model=own_M)
                models_KP[k] = updates.averaged(default=models_KP[k : k + 1])[0]
        return state.advance(models_KP=models_KP)

    def with_data_of(self, state: PoolState, clients: Clients, k: int) -> Clients:
        """The clients with data of model k, restricted to these data."""
        has_TM = state.model_TN[:, clients.ids_M] == k + 1
        members = clients.select(has_TM.any(0))
        return members.replaying([state.round_T[has_T].tolist() for has_T in has_TM.T if has_T.any()])

    def losses(self, clients: Clients, models_KP: Tensor) -> np.ndarray:
        """L(w_k; D_i), (M, K); clients receive `block` models at a time."""
        blocks = [clients.broadcast(block) for block in models_KP.split(self.block)]
        clients.count_upload(len(models_KP))
        return np.concatenate([clients.losses(sent, errors=self.criterion == "errors") for sent in blocks], 1)

    def merge(self, state: PoolState, clients: Clients) -> PoolState:
        """The state at the start of a step, with models merged by complete linkage below delta."""
        loss_KK = np.full((state.num_clusters, state.num_clusters), np.nan)  # [a, b]: L(w_a; D_b)
        for b in range(state.num_clusters):
            members = self.with_data_of(state, clients, b)
            if len(members):
                loss_MK = self.losses(members, state.models_KP)
                valid_M = np.isfinite(loss_MK).all(1)
                if valid_M.any():
                    loss_KK[:, b] = np.average(loss_MK[valid_M], axis=0, weights=members.num_samples_M[valid_M])
        # d(a, b) = max(L(w_a; D_b) - L(w_b; D_b), L(w_b; D_a) - L(w_a; D_a), 0)
        excess_KK = loss_KK - loss_KK.diagonal()
        distance_KK = np.nan_to_num(np.maximum(np.maximum(excess_KK, excess_KK.T), 0), nan=_NEVER)
        distance = distance_KK[np.triu_indices(state.num_clusters, 1)]
        tree = linkage_tree(distance, "complete")
        below = min(self.delta - _ROUNDING, _NEVER / 2)  # merge while d < delta
        part_K = by_lowest_member(scipy.cluster.hierarchy.fcluster(tree, below, "distance"))
        if part_K.max() + 1 == state.num_clusters:
            return state
        left = part_K.tolist()
        for k in range(state.num_clusters - 1, -1, -1):
            kept = left.index(left[k])
            if kept < k:
                because = {"distance": distance_KK[k, kept], "delta": self.delta}
                clients.event("merge", cluster=k, into=[kept], because=because)
                del left[k]  # later models move down
        return state.merged(part_K)

    def compare(self, state: PoolState, clients: Clients) -> PoolState:
        """The state with each client's data of this step assigned: to its best model, or after drift to a new one."""
        clients = clients.select(state.model_TN[-1, clients.ids_M] == 0)
        if not len(clients):
            return state
        own_M = state.assign_N[clients.ids_M]
        if self.first_models == "each" and state.step == 0 and (state.assign_N == UNASSIGNED).all():
            return self.apart(state, clients)
        if state.num_clusters == 1 and (self.delta == np.inf or (own_M == UNASSIGNED).all()):
            return state.given(clients.ids_M, 0)
        # drift at i if min_k L(w_k; D_i^t) - L(w_k_i; D_i^(t-1)) > delta
        loss_MK = self.losses(clients, state.models_KP)
        best_M = least_loss(loss_MK)
        valid_M = best_M >= 0
        drifted_M = valid_M & (loss_MK.min(1) > self.losses_before(state, clients) + self.delta + _ROUNDING)
        stay_M = valid_M & ~drifted_M
        before_K, state = state.members_K, state.in_use_of_others(clients.ids_M)
        state = state.given(clients.ids_M[stay_M], best_M[stay_M])
        clients.member_events(before_K, state.members_K, clients=int(stay_M.sum()))
        clients.record("drifted", int(drifted_M.sum()))
        if not drifted_M.any():
            return state
        models_KP = state.models_KP
        if not self.eager:
            for index in np.flatnonzero(drifted_M):
                state = self.open(state, clients.select(np.array([index])), loss_MK[[index]], models_KP)
            return state
        fresh = np.flatnonzero(state.born_K == state.step)
        if len(fresh):
            return state.given(clients.ids_M[drifted_M], int(fresh[0]))
        return self.open(state, clients.select(drifted_M), loss_MK[drifted_M], models_KP)

    def apart(self, state: PoolState, clients: Clients) -> PoolState:
        """The state with a copy of the first model for each of these clients; beyond `max_models` they share copies."""
        count = min(len(clients), self.max_models)
        clients.event("birth", into=range(count), because={"clients": len(clients)})
        state = state.advance(
            models_KP=state.models_KP[:1].repeat(count, 1),
            used_K=np.zeros(count, np.int64),
            born_K=np.zeros(count, np.int64),
        )
        return state.given(clients.ids_M, np.arange(len(clients)) % count)

    def open(self, state: PoolState, drifted: Clients, loss_mK: np.ndarray, models_KP: Tensor) -> PoolState:
        """The state with a copy of the best model for these clients; the best model itself if the pool is full.

        models_KP: the models that the clients compared; new models may have replaced some of them since.
        """
        loss_K = loss_mK.mean(0)
        best = int(loss_K.argmin())
        after, k = state.with_model(models_KP[best : best + 1], self.max_models)
        if k < 0:
            same_K = (state.models_KP[: len(models_KP)] == models_KP).all(1).numpy()
            return state.given(drifted.ids_M, int(np.where(same_K, loss_K, np.inf).argmin()))
        because = {"clients": len(drifted), "loss": loss_mK[:, best].mean(), "delta": self.delta}
        drifted.event("birth", into=[k], because=because)
        return after.given(drifted.ids_M, k)

    def losses_before(self, state: PoolState, clients: Clients) -> np.ndarray:
        """L(w_k_i; D_i^(t-1)), (M,), on the last step for which a client has data; inf for a client without data."""
        loss_M, own_M = np.full(len(clients), np.inf), state.assign_N[clients.ids_M]
        has_TM = state.model_TN[:-1, clients.ids_M] > 0
        for k in np.unique(own_M[has_TM.any(0) & (own_M >= 0)]):
            here_M = has_TM.any(0) & (own_M == k)
            last_m = [state.round_T[np.flatnonzero(has_T)[-1]] for has_T in has_TM.T[here_M]]
            past = clients.select(here_M).replaying([[int(round)] for round in last_m])
            known = past.known_models(state.models_KP[k : k + 1])
            loss_M[here_M] = past.losses(known, errors=self.criterion == "errors")[:, 0]
        return loss_M

    def drift(self, state: PoolState, clients: Clients) -> PoolState:
        return state.advance(due=state.step >= 0)
