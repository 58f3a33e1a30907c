"""FedSoft: Y. Ruan, C. Joe-Wong. FedSoft: Soft Clustered Federated Learning with Proximal Local Updating. AAAI 2022,
arXiv:2112.06053, Algorithm 1.

    n_ik: number of samples of client i whose loss is least under c_k       every tau rounds, all clients
    u_ik <- max(n_ik / n_i, sigma)                                          importance
    v_ik <- u_ik n_i / sum_j u_jk n_j                                       probability of selection
    S_k: m clients, drawn without replacement with the probabilities v_.k
    w_i <- argmin f_i(w) + (lambda / 2) sum_k u_ik ||w - c_k||^2            clients of any S_k, from their own w_i
    c_k <- mean of w_i over S_k                                             without selection: sum_i v_ik w_i

A client keeps w_i, and predicts with it; w_i is uploaded once, for any number of its S_k. A client without a w_i starts
from, and predicts with, the centre of its largest importance.

Deviations: all reachable clients take part in the estimate, but S_k is drawn from the cohort, whose clients without
importances estimate them at once. The proximal problem is solved by the experiment's local SGD (official code: Adam,
whose moments live over rounds, on batches in a fixed order). The centres start from independent initialisations. A
client's first w_i starts from a centre (official code: from one more model, common to all clients). The official code
(ycruan/FedSoft, e71a4ab) stops with a TypeError as published. Its option without selection is
`clients_per_cluster: null`.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from cfl_ray.core.clients import Clients, ClientState, Held, LocalTraining, Proximal
from cfl_ray.core.method import Start, option
from cfl_ray.core.mixtures import Mixture, MixtureMethod, MixtureState
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving

PERSONAL = ClientState("personal", private=False)  # w_i


@dataclass(frozen=True)
class Nearest(Mixture):
    """One-hot: the centre with the least loss for each sample; ties go to the first centre."""

    def responsibilities(self, loss_nK: Tensor, y_n: Tensor, held: Held) -> Tensor:
        return one_hot(loss_nK.argmin(1), loss_nK.shape[1]).float()


@dataclass(frozen=True)
class FedSoft(MixtureMethod[MixtureState], name="fedsoft"):
    """Each client has a personal model, drawn to all centres by the shares of its samples that they fit best."""

    placement = "the centre that fits most of its training samples best"
    fit_steps = 1  # the shares n_ik / n_i do not depend on the weights

    num_clusters: int = option(2, "K, number of centres", source="paper: CIFAR-10, two distributions", low=1)
    lam: float = option(0.1, "lambda: weight of the proximal terms", source="paper: MNIST; CIFAR-10: 0.01", low=0)
    tau: int = option(2, "rounds between two estimates of the importances", source="paper", low=1)
    clients_per_cluster: int | None = option(
        15,
        "m, clients that are drawn for each centre; null: no selection, the mean of the cohort weighed by v_ik",
        source="official code",
        low=1,
    )
    least_importance: float = option(1e-4, "sigma: least importance u_ik", source="official code", low=0, high=1)

    def warning(self, clients: int, cohort: int) -> str:
        if self.num_clusters == 1 or self.clients_per_cluster is None or self.clients_per_cluster < cohort:
            return ""
        return (
            f"clients_per_cluster ({self.clients_per_cluster}) is not below the {cohort} clients of a round: "
            "every S_k is the whole cohort, and all centres are equal"
        )

    def init(self, start: Start) -> MixtureState:
        return MixtureState.first(start, self.num_clusters)

    def round(self, state: MixtureState, clients: Clients, rng: Draws) -> MixtureState:
        # u_ik
        due = (clients.round - 1) % self.tau == 0
        asked = clients.all_reachable() if due else clients.select(state.weight_NK[clients.ids_M].sum(1) == 0)
        if len(asked):
            state = self.join(state, asked)
        u_MK = np.maximum(state.weights_of(clients.ids_M), self.least_importance)
        # S_k
        v_MK = u_MK * clients.weights()[:, None]
        drawn_KM = self.draw(v_MK, rng)
        weight_KM = drawn_KM * (v_MK.T if self.clients_per_cluster is None else 1.0)
        drawn = np.flatnonzero(drawn_KM.any(0))
        clients, u_MK = clients.select(drawn), u_MK[drawn]
        # w_i
        received = self.broadcast(state, clients)
        terms = [
            Proximal(self.lam, received.choose(np.full(len(clients), k)), factor_M=u_MK[:, k])
            for k in range(self.num_clusters)
        ]
        updates = clients.train(
            received.choose(u_MK.argmax(1)),
            client_state=PERSONAL,
            how=LocalTraining(proximal=terms),
            average=weight_KM[:, drawn],
        )
        # c_k
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def draw(self, v_MK: np.ndarray, rng: Draws) -> np.ndarray:
        """S_k as bool (K, M): clients drawn without replacement, with probabilities in proportion to v_MK."""
        count, draw = len(v_MK), rng.stream("selection")
        size = count if self.clients_per_cluster is None else min(self.clients_per_cluster, count)
        drawn_KM = np.zeros(v_MK.T.shape, bool)
        for k, v_M in enumerate(v_MK.T):
            if most := min(size, int(np.count_nonzero(v_M))):
                drawn_KM[k, draw.choice(count, most, replace=False, p=v_M / v_M.sum())] = True
        return drawn_KM

    def join(self, state: MixtureState, clients: Clients) -> MixtureState:
        """The state with the importances of newcomers or of the clients of an estimate, which upload them."""
        after = super().join(state, clients)
        clients.count_upload(self.num_clusters)
        return after

    def serve(self, state: MixtureState, clients: Clients) -> Serving:
        return Serving(state.models_KP, super().serve(state, clients).row_M, client_state=PERSONAL)

    def how(self, state: MixtureState, weight_MK: np.ndarray) -> LocalTraining:
        return LocalTraining(program=Nearest(), given={"mixture": weight_MK})
