"""Trained methods as objects: the models of their clusters, and the models that clients predict with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.core.params import ParamSpec
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.work import Address
from cfl_ray.data.federation import Federation, TensorSamples
from cfl_ray.engine.client_state import with_client_state
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.task import TrainingTask
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.models import ModelRecipe

if TYPE_CHECKING:
    import pandas as pd

_EXCHANGE = -1  # of the random draws of a client that trains before it predicts: those of the evaluation


class AdditiveModel(nn.Module):
    """The sum of the outputs of two models (CAM: a cluster model and the frozen global model)."""

    def __init__(self, model: nn.Module, frozen: nn.Module):
        super().__init__()
        self.model, self.frozen = model, frozen

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.model(x) + self.frozen(x)
        return total


class VotingModel(nn.Module):
    """Soft vote: the logarithm of the mean of the models' class probabilities."""

    def __init__(self, models: list[nn.Module]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        log_p = torch.stack([model(x).log_softmax(-1) for model in self.models])
        return log_p.logsumexp(0) - float(np.log(len(self.models)))


@dataclass(frozen=True)
class TrainedMethod:
    """A method after its last round, or after the last one that was saved.

    Inputs are normalised as the federation normalises its samples: `test(client)` returns such inputs.
    """

    label: str
    federation: Federation
    state: State  # cluster models, assignments and what else the method keeps
    round: int  # the last round that it has learned from
    seed: int
    recipe: ModelRecipe
    spec: ParamSpec
    serve: Callable[[np.ndarray], Serving]  # the models that these clients predict with
    online: np.ndarray  # ids of the clients online
    backend: InProcessBackend  # with the state of the clients

    @property
    def num_clusters(self) -> int:
        return self.state.num_clusters

    # ---- clusters

    def state_dict(self, cluster: int | None = None) -> dict[str, Tensor]:
        """Parameters and buffers of a cluster's model, for `load_state_dict` of the network.

        cluster: None where the method has a single model. Raises ConfigError for a cluster that does not exist.
        """
        return self._named(self.state.models_KP[self._row(cluster)])

    def model(self, cluster: int | None = None) -> nn.Module:
        """A cluster's model, in evaluation mode. For additive methods (CAM) it includes the frozen global model."""
        models_KP, row = self.state.models_KP, self._row(cluster)
        serving = self.serve(self.online[:1])
        return self._module(models_KP[row], serving.frozen_P)

    def _row(self, cluster: int | None) -> int:
        if cluster is None and self.num_clusters == 1:
            return 0
        if cluster is None or not 0 <= cluster < self.num_clusters:
            raise ConfigError(
                f"{self.label} has clusters 0 .. {self.num_clusters - 1}, got {cluster}; "
                "name one of them as `cluster`, or a client as `personal_model(client)`"
            )
        return cluster

    # ---- clients

    def test(self, client: int, round: int | None = None) -> TensorSamples:
        """The test samples (x, y) of a client, as its data were in a round; None: in the last one."""
        return self._data(round).test(self._known(client))

    def train(self, client: int, round: int | None = None) -> TensorSamples:
        """The training samples (x, y) of a client, as its data were in a round; None: in the last one."""
        return self._data(round).train(self._known(client))

    def _data(self, round: int | None = None) -> Federation:
        """The federation as it was in a round; None: in the last one."""
        last = max(self.round, 1)
        if round is not None and not 1 <= round <= last:
            raise ConfigError(f"{self.label} has rounds 1 .. {last}, got {round}")
        return self.federation.at(last if round is None else round)

    def personal_model(self, client: int) -> nn.Module:
        """The model that a client would predict with now, in evaluation mode.

        That is the model of its cluster, with the columns that it keeps for itself, after its local training where the
        method prescribes some, or the vote of all models.
        Raises ConfigError for a client that does not exist or has no model yet.
        """
        serving = self.serve(np.array([self._known(client)]))
        if serving.vote:
            return VotingModel([self._module(row_P) for row_P in serving.models_KP]).eval()
        row = int(serving.row_M[0])
        if row < 0:
            raise ConfigError(f"{self.label} has no model for client {client} yet")
        value = None
        if serving.client_state is not None:
            value = self.backend.client_state(serving.client_state.name, client)
        row_P = with_client_state(serving.models_KP[row], serving.client_state, value)
        if serving.tune is not None:
            row_P = self._tuned(client, row_P, serving)
        return self._module(row_P, serving.frozen_P)

    def outputs(self, client: int, x: Tensor | np.ndarray) -> Tensor:
        """Outputs (n, C) of a client's model for normalised inputs (n, *shape)."""
        x = torch.as_tensor(x, dtype=self.federation.shape.dtype)
        if tuple(x.shape[1:]) != self.federation.shape.input:
            raise DataError(
                f"inputs have shape {tuple(x.shape)}, expected (n, {', '.join(map(str, self.federation.shape.input))})"
            )
        model = self.personal_model(client)
        with torch.no_grad():
            outputs: Tensor = model(x)
        return outputs

    def predict(self, client: int, x: Tensor | np.ndarray) -> np.ndarray:
        """Predictions of a client's model for normalised inputs (n, *shape).

        Classes are int64 (n,), tokens int64 (n, T), labels bool (n, C), real numbers float32 as the targets.
        """
        outputs, shape = self.outputs(client, x), self.federation.shape
        if shape.targets == "real":
            return outputs.reshape(-1, *shape.target_shape).numpy()
        predicted: np.ndarray = (outputs > 0 if shape.targets == "binary" else outputs.argmax(-1)).numpy()
        return predicted

    def assignments(self) -> "pd.DataFrame":
        """A data frame with one row per client: client, name, cluster (-1: none), group (true group; -1: not known)."""
        import pandas as pd

        federation = self.federation
        count = federation.num_clients
        group_N = np.full(count, -1) if federation.group_N is None else federation.group_N
        return pd.DataFrame(
            {
                "client": np.arange(count),
                "name": [federation.client_name(client) for client in range(count)],
                "cluster": self.state.assign_N.astype(np.int64),
                "group": group_N.astype(np.int64),
            }
        )

    # ---- parts

    def _known(self, client: int) -> int:
        if not 0 <= client < self.federation.num_clients:
            raise ConfigError(
                f"client {client} does not exist; the federation has clients 0 .. {self.federation.num_clients - 1}"
            )
        return client

    def _tuned(self, client: int, row_P: Tensor, serving: Serving) -> Tensor:
        """The row after the local training that the method prescribes before a client predicts."""
        assert serving.tune is not None
        x, y = self.train(client)
        steps = int(serving.tune.steps_of(np.array([len(y)]))[0])
        address = Address(self.seed, max(self.round, 1), _EXCHANGE)
        task = TrainingTask(
            client, row_P, x, y, steps=steps, local=serving.tune, address=address, frozen_P=serving.frozen_P
        )
        return self.backend.worker.train_one(task).row_P.cpu().clone()

    def _named(self, row_P: Tensor) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.spec.tensors(row_P).items()}

    def _module(self, row_P: Tensor, frozen_P: Tensor | None = None) -> nn.Module:
        module = self.recipe()
        module.load_state_dict(self._named(row_P), strict=False)  # integer buffers keep their initial values
        module.eval()
        return module if frozen_P is None else AdditiveModel(module, self._module(frozen_P)).eval()
