"""FedBN: X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou. FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021, arXiv:2102.07623, Algorithm 1.

    (w_i, b_i) <- SGD_i(w_t, b_i)              b_i: weight, bias, running mean and variance of the client's norm layers
    w_{t+1} <- mean of w_i                     all other parameters; norm layers are neither sent nor averaged

Norm layers are known by the type of their module: BatchNorm and InstanceNorm, with `layers: all` also GroupNorm,
LayerNorm and RMSNorm, which keep no statistics. The option `norm: local` of every method keeps norm layers in the same
way, but also averages them, for clients that have none.

A newcomer has no norm layers (paper: open). It begins with the first model's weights and biases, or with the mean of
the clients' norm layers (`newcomers: mean`, for which clients also upload theirs), and with statistics of its own
inputs, by passes at a learning rate of 0, in which labels have no effect. A client of the first round that has not
taken part predicts without statistics, so nearly at random, or with the mean of the others.

Deviations: of the official code (med-air/FedBN, 2fa38ad) none; it knows norm layers by names with "bn", as PFLlib and
FL-bench do, which miss `downsample.1` of torchvision's ResNets and the numbered layers of VGG and MobileNet. With a
model without norm layers this is FedAvg, which a run says before it starts.

None of the paper's accuracies can be repeated here: three of its five sets of digits (USPS, MNIST-M, SynthDigits), and
Office-Caltech10, DomainNet and ABIDE, are not among the sources of data.
"""

from dataclasses import dataclass, replace

from cfl_ray.core.clients import Clients, ClientState, LocalTraining
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec, layer_name
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State

_PASSES = (
    50  # batches for the statistics of a newcomer; at momentum 0.1 the first values have a share of 0.9^50 = 0.5 %
)


@dataclass(frozen=True)
class FedBN(OneModel, name="fedbn"):
    """One global model without its norm layers, which stay with the clients."""

    layers: str = option(
        "statistics",
        "layers that stay: those that keep statistics (BatchNorm, InstanceNorm), or all norm layers",
        source="paper: BatchNorm",
        choices=("statistics", "all"),
    )
    newcomers: str = option(
        "first",
        "weights and biases of a newcomer's norm layers: of the first model, or the mean of the clients'",
        source="ours",
        choices=("first", "mean"),
    )
    weights: str = weights_option("uniform")

    def norms(self, spec: ParamSpec) -> Columns:
        """b_i."""
        return spec.norms(every=self.layers == "all")

    def shared_columns(self, spec: ParamSpec) -> Columns:
        return self.norms(spec).others(spec.size)

    def model_warning(self, spec: ParamSpec) -> str:
        return (
            ""
            if self.norms(spec).count
            else f"the model has no norm layer of this type ({', '.join(map(layer_name, spec.layers))}): it is FedAvg"
        )

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        w = clients.send(state.models_KP, columns=self.shared_columns(clients.spec))
        updates = clients.train(w, client_state=self.kept(clients.spec), average=clients.weights(self.weights))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def kept(self, spec: ParamSpec) -> ClientState | None:
        """b_i; None without norm layers."""
        norms = self.norms(spec)
        return ClientState("norm", norms, private=self.newcomers == "first") if norms.count else None

    def join(self, state: State, clients: Clients) -> State:
        """The same state; newcomers receive the model and take the statistics of their inputs."""
        if (norms := self.kept(clients.spec)) is None or not len(clients):
            return state
        w = clients.send(state.models_KP, columns=self.shared_columns(clients.spec) if norms.private else None)
        still = replace(clients.local, lr=0.0, steps=_PASSES, weight_decay=0.0, persist=False)
        clients.train(w, client_state=norms, how=LocalTraining(sgd=still), keep_as_local_model=False)
        return state
