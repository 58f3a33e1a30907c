"""Trained methods: the models of their clusters, and those that clients predict with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.tasks import Task
from cfl_ray.core.work import Address, state_of_model
from cfl_ray.data.federation import Federation, TensorSamples
from cfl_ray.data.indexed import Scaling
from cfl_ray.engine.client_state import predicting_row
from cfl_ray.engine.describing import ClientView
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.scoring import mixed
from cfl_ray.engine.task import HeldByClient, TrainingTask
from cfl_ray.engine.validation import invalid_input_reason
from cfl_ray.errors import ConfigError, DataError, shown
from cfl_ray.models import ModelRecipe
from cfl_ray.nn.network import new_module
from cfl_ray.report.report_data import accuracy_of_classes

if TYPE_CHECKING:
    import pandas as pd

_EXCHANGE = -1  # exchange number in the random keys of local training before predictions, as in the evaluation


class AdditiveModel(nn.Module):
    """The sum of the outputs of two models (CAM: a cluster model and the frozen global model); see `MixtureModel`."""

    def __init__(self, model: nn.Module, frozen: nn.Module):
        super().__init__()
        self.model, self.frozen = model, frozen
        share_frozen(model, frozen)
        self.register_load_state_dict_pre_hook(_with_shared)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.model(x) + self.frozen(x)
        return total


class MixtureModel(nn.Module):
    """The logarithm of the weighted mean of the models' class probabilities; a soft vote if the weights are equal.

    The frozen parameters of the models are the same tensors; a state dictionary that lacks those of the second and
    further models can be loaded.
    """

    weight_K: Tensor  # float64 (K,), a buffer, so that files of the model have it

    def __init__(self, models: Iterable[nn.Module], weight_K: np.ndarray):
        super().__init__()
        self.models = nn.ModuleList()
        for model in models:
            if self.models:
                share_frozen(self.models[0], model)
            self.models.append(model)
        self.register_load_state_dict_pre_hook(_with_shared)
        self.register_buffer("weight_K", torch.tensor(weight_K, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(torch.stack([model(x).log_softmax(-1) for model in self.models]), self.weight_K)


def share_frozen(module: nn.Module, other: nn.Module) -> None:
    """Makes the frozen parameters of a module those of another module of the same network, which are equal."""
    for path, part in other.named_modules():
        if isinstance(part, torch.jit.ScriptModule):  # its tensors cannot be replaced
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                part._parameters[name] = module.get_parameter(f"{path}.{name}" if path else name)


def _with_shared(whole: nn.Module, tensors: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Adds the names of shared parameters that a state dictionary lacks."""
    first: dict[int, str] = {}
    for name, parameter in whole.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known in tensors:
            tensors.setdefault(name, tensors[known])


@dataclass(frozen=True)
class Newcomer:
    """A client outside the federation, with its model from a method."""

    cluster: int  # cluster of the model; -1: none
    why: str
    model: nn.Module  # in evaluation mode, for normalised inputs


@dataclass(frozen=True)
class TrainedMethod:
    """A method after its last round, after the last saved round, or with `keep: best` after its best round.

    Inputs are normalised as the federation normalises its samples: `test(client)` returns such inputs.
    """

    label: str
    federation: Federation
    state: State  # cluster models, assignments and other state of the method
    round: int  # the last round of training
    seed: int
    recipe: ModelRecipe
    spec: ParamSpec
    constants: Mapping[str, Tensor]  # the network's frozen parameters and saved buffers outside the row, by name
    checked_method: CheckedMethod
    clients_of: Callable[[np.ndarray], Clients]  # these clients, as in the evaluation of the last round
    online: np.ndarray  # ids of the clients online
    backend: InProcessBackend  # with the state of the clients

    def serve(self, ids: np.ndarray) -> Serving:
        """The models that these clients predict with."""
        return self.checked_method.serve(self.state, self.clients_of(ids))

    @property
    def num_clusters(self) -> int:
        return self.state.num_clusters

    # ---- clusters

    def state_dict(self, cluster: int | None = None) -> dict[str, Tensor]:
        """Parameters and buffers of a cluster's model, for `load_state_dict` of the network, as copies.

        cluster: None if the method has a single model. Raises ConfigError for a cluster that does not exist.
        """
        tensors = self.module(self.state.models_KP[self._row(cluster)]).state_dict()
        return {name: tensor.detach() if isinstance(tensor, Tensor) else tensor for name, tensor in tensors.items()}

    def model(self, cluster: int | None = None) -> nn.Module:
        """A cluster's model, in evaluation mode. For additive methods (CAM) it includes the frozen global model."""
        models_KP, row = self.state.models_KP, self._row(cluster)
        serving = self.serve(self.online[:1])
        return self.module(models_KP[row], serving.frozen_P)

    def _row(self, cluster: int | None) -> int:
        if cluster is None and self.num_clusters == 1:
            return 0
        if not self.num_clusters:
            raise ConfigError(
                f"{self.label} has no cluster after round {self.round}; give the number of a client for the model that "
                "it predicts with"
            )
        if not is_whole(cluster) or not 0 <= cluster < self.num_clusters:
            raise ConfigError(
                f"{self.label} has clusters 0 .. {self.num_clusters - 1}, got "
                f"{'no number' if cluster is None else shown(cluster)}; give the number of a cluster, or of a client "
                "for the model that it predicts with"
            )
        return cluster

    # ---- clients

    def test(self, client: int, round: int | None = None) -> TensorSamples:
        """The test samples (x, y) of a client in a round; None: in the last round."""
        return self.present(round).test(self._known(client))

    def train(self, client: int, round: int | None = None) -> TensorSamples:
        """The training samples (x, y) of a client in a round; None: in the last round."""
        return self.present(round).train(self._known(client))

    def validation(self, client: int, round: int | None = None) -> TensorSamples:
        """The validation samples (x, y) of a client in a round; None: in the last round.

        Raises ConfigError if the run has no validation data.
        """
        if (part := self.present(round).validation) is None:
            raise ConfigError("this run has no validation data; data.validation makes some")
        return part.test(self._known(client))

    def present(self, round: int | None = None) -> Federation:
        """The federation in a round; None: in the last round."""
        last = max(self.round, 1)
        if round is not None and not (is_whole(round) and 1 <= round <= last):
            raise ConfigError(f"{self.label} has rounds 1 .. {last}, got {shown(round)}")
        return self.federation.at(last if round is None else round)

    def personal_model(self, client: int) -> nn.Module:
        """The model that a client predicts with, in evaluation mode.

        It is the model of its cluster with the client's private columns, after local training if the method prescribes
        it, or the mixture of all models. Raises ConfigError for a client that does not exist or has no model yet.
        """
        return self.served_model(client, self.serve(np.array([self._known(client)])))

    def served_model(self, client: int, serving: Serving) -> nn.Module:
        """The same by what `serve` returned for this client."""
        if serving.weight_MK is not None:
            return self.mixture(self._with_states(client, serving), serving.weight_MK[0])
        row = int(serving.row_M[0])
        if row < 0:
            raise ConfigError(f"{self.label} has no model for client {client} yet")
        value = None
        if serving.client_state is not None:
            value = self.backend.client_state(serving.client_state.name, client)
        view = partial(self.view, client, lambda: self._trained_on(client))
        row_P = predicting_row(serving.models_KP[row], serving.client_state, value, view)
        if serving.tune is not None:
            row_P = self.tuned(client, row_P, serving.tune, self._trained_on(client), serving.frozen_P)
        return self.module(row_P, serving.frozen_P)

    def _with_states(self, client: int, serving: Serving) -> Tensor:
        """All models, (K, P), with the client's state of each, or else its state for all, put in."""
        if (state := serving.client_state) is None:
            return serving.models_KP
        names = [[state_of_model(state.name, k), state.name] for k in range(len(serving.models_KP))]
        found = [[self.backend.client_state(name, client) for name in of_model] for of_model in names]
        values = [next((value for value in of_model if value is not None), None) for of_model in found]
        rows = zip(serving.models_KP, values, strict=True)
        return torch.stack([predicting_row(row_P, state, value) for row_P, value in rows])

    def inputs(self, x: Tensor | np.ndarray) -> Tensor:
        """Normalised inputs as a tensor; uint8, as images are stored, is divided by the scale and normalised.

        Raises DataError for another shape than that of the federation's samples, and for values that these cannot have.
        """
        federation, x = self.federation, as_tensor(x, "inputs")
        if x.dtype == torch.uint8 and federation.shape.vocabulary is None:
            x = Scaling(federation.scale, federation.normalize).to_tensor(x.numpy())
        given, x = x, x.to(federation.shape.dtype)
        if not keeps_values(given, x):
            raise DataError("the inputs have tokens that are not whole numbers")
        if tuple(x.shape[1:]) != federation.shape.input:
            raise DataError(
                f"inputs have shape {tuple(x.shape)}, expected (n, {', '.join(map(str, federation.shape.input))})"
            )
        if reason := invalid_input_reason(x, federation.shape):
            raise DataError(f"the inputs have {reason}")
        return x

    def outputs(self, client: int | Newcomer, x: Tensor | np.ndarray) -> Tensor:
        """Outputs (n, C) of a client's model for normalised inputs (n, *shape)."""
        x = self.inputs(x)
        model = client.model if isinstance(client, Newcomer) else self.personal_model(client)
        with torch.no_grad():
            outputs: Tensor = model(x)
        return outputs

    def predict(self, x: Any, like: Any) -> np.ndarray:
        """Predictions for normalised inputs (n, *shape) by the model of a client.

        like: id of the client, or a `Newcomer`; predict(client, x) is the same as predict(x, like=client).
        Classes are int64 (n,), tokens int64 (n, T), labels bool (n, C), real numbers float32 as the targets.
        """
        if isinstance(x, int | np.integer | Newcomer):
            x, like = like, x
        outputs, shape = self.outputs(like, x), self.federation.shape
        if shape.targets == "real":
            return outputs.reshape(-1, *shape.target_shape).numpy()
        predicted: np.ndarray = (outputs > 0 if shape.targets == "binary" else outputs.argmax(-1)).numpy()
        return predicted

    def confusion(self, cluster: int | None = None) -> "pd.DataFrame":
        """Numbers of test samples by true class (rows) and predicted class (columns), with the names of the classes.

        Of the clients of a cluster, each with the model that it predicts with; None: of all clients with a model. A
        sample of a test set that clients share counts once for each of them, as in the mean of their accuracies.
        Raises ConfigError for targets that are not classes, and for a cluster without such clients.
        """
        import pandas as pd

        shape = self.federation.shape
        if shape.targets != "class":
            raise ConfigError(f"a confusion matrix is of classes, the targets of the task are {shape.targets!r}")
        clients = np.arange(len(self.state.assign_N))
        clients = clients[self.serve(clients).row_M >= 0]
        if cluster is not None:
            clusters = np.unique(self.state.assign_N[clients])
            clients = clients[self.state.assign_N[clients] == cluster]
            if not len(clients):
                raise ConfigError(
                    f"cluster {cluster} has no clients with a model; such clusters are {', '.join(map(str, clusters))}"
                )
        counts_CC = np.zeros((shape.num_classes, shape.num_classes), np.int64)
        for client in clients.tolist():
            x, y = self.test(client)
            if len(y):
                np.add.at(counts_CC, (y.numpy(), self.predict(x, client)), 1)
        names = shape.class_names or range(shape.num_classes)
        frame = pd.DataFrame(counts_CC, pd.Index(names, name="true"), pd.Index(names, name="predicted"))
        return frame

    def class_accuracy(self) -> "pd.DataFrame":
        """The accuracy of each class (columns) on the test samples of each cluster's clients (rows).

        NaN without samples. Cluster -1: clients with a model that are in no cluster. As `confusion` counts.
        """
        import pandas as pd

        clients = np.arange(len(self.state.assign_N))
        clusters = np.unique(self.state.assign_N[self.serve(clients).row_M >= 0]).tolist()
        rows = {}
        for cluster in clusters:
            counts = self.confusion(cluster)
            rows[cluster] = accuracy_of_classes(counts.to_numpy())
        names = self.federation.shape.class_names or range(self.federation.shape.num_classes)
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(names)).rename_axis("cluster")

    def assignments(self) -> "pd.DataFrame":
        """A data frame with a row per client.

        client, name; cluster: its cluster (-1: none); group: true group in the last round (-1: not known); served_by:
        the cluster whose model it predicts with (-1: none); why: the reason, as text.
        """
        import pandas as pd

        federation = self.present()
        count = federation.num_clients
        served_N, why_N = self._served()
        group_N = np.full(count, -1) if federation.group_N is None else federation.group_N
        return pd.DataFrame(
            {
                "client": np.arange(count),
                "name": [federation.client_name(client) for client in range(count)],
                "cluster": self.state.assign_N.astype(np.int64),
                "group": group_N.astype(np.int64),
                "served_by": served_N,
                "why": why_N,
            }
        )

    def _served(self) -> tuple[np.ndarray, list[str]]:
        """The cluster whose model each client predicts with, int64 (N,), -1 for none, and the reasons."""
        count, method = self.federation.num_clients, self.checked_method.method
        served_N, why_N = np.full(count, -1), ["it is not in the federation now"] * count
        serving = self.serve(self.online)
        for client, row in zip(self.online.tolist(), np.asarray(serving.row_M).tolist(), strict=True):
            name = None if serving.client_state is None else serving.client_state.name
            if serving.weight_MK is not None:
                why_N[client] = method.placement
                continue
            served_N[client] = cluster_of(serving, row, self.num_clusters)
            if row < 0:
                why_N[client] = "it has no model yet"
            elif name is not None and self.backend.client_state(name, client) is not None:
                why_N[client] = f"its own columns ({name}) in that model"
            elif name is not None and method.untrained:
                why_N[client] = method.untrained  # and it has not trained yet
            elif row == self.state.assign_N[client]:
                why_N[client] = "it is a member"
            else:
                why_N[client] = method.placement if served_N[client] >= 0 else method.without_cluster
        return served_N, why_N

    # ---- parts

    @property
    def task(self) -> Task:
        return self.backend.worker.network.task

    def _known(self, client: Any) -> int:
        if not is_whole(client):
            raise ConfigError(f"a client is named by its number, from 0, got {shown(client)}")
        if not 0 <= client < self.federation.num_clients:
            raise ConfigError(
                f"client {client} does not exist; the federation has clients 0 .. {self.federation.num_clients - 1}"
            )
        return int(client)

    @property
    def _address(self) -> Address:
        return Address(self.seed, max(self.round, 1), _EXCHANGE)

    def _trained_on(self, client: int) -> TensorSamples:
        """The training samples of a client in the last round, with the labels that an attacker trains on."""
        x, y = self.train(client)
        return x, self.backend.worker.attack.labels(client, y, self.federation.shape.num_classes, self._address)

    def view(self, client: int, samples: Callable[[], TensorSamples]) -> ClientView:
        """A client with these samples, for functions that read its data."""
        worker = self.backend.worker
        return ClientView(client, *samples(), worker.network, self._address, LocalSGD(), worker.train_one)

    def tuned(
        self, client: int, row_P: Tensor, local: LocalSGD, samples: TensorSamples, frozen_P: Tensor | None
    ) -> Tensor:
        """The row after local training of a client on these samples."""
        x, y = samples
        steps = int(local.steps_of(np.array([len(y)]))[0])
        held = HeldByClient(frozen_P=frozen_P)
        task = TrainingTask(client, row_P, x, y, steps=steps, local=local, address=self._address, held=held)
        return self.backend.worker.train_one(task).row_P.cpu().clone()

    def mixture(self, models_KP: Tensor, weight_K: np.ndarray) -> nn.Module:
        """The mixture of models with these weights, in evaluation mode."""
        return MixtureModel(map(self.module, models_KP), weight_K).eval()

    def module(self, row_P: Tensor, frozen_P: Tensor | None = None) -> nn.Module:
        """The network with this row, in evaluation mode; with a frozen row, the sum of the outputs of both."""
        module = new_module(self.recipe, self.seed, 0)  # with the buffers of the run that are not saved
        module.load_state_dict(self.spec.tensors(row_P) | dict(self.constants), strict=False)
        module.eval()
        return module if frozen_P is None else AdditiveModel(module, self.module(frozen_P)).eval()


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number; a bool, such as an element of a mask, is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_tensor(values: Any, what: str) -> Tensor:
    """Values that a user gives, as a tensor. Raises DataError, which calls them `what`, if they are no numbers."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be an array of numbers, got {shown(values)}: {error}") from error


def keeps_values(given: Tensor, converted: Tensor) -> bool:
    """Whether a conversion to whole numbers, if it is one, keeps the values."""
    return not given.is_floating_point() or converted.is_floating_point() or torch.equal(converted.to(given), given)


def cluster_of(serving: Serving, row: int, num_clusters: int) -> int:
    """The cluster whose model this row of `serving` is; -1: it is another model.

    If there are fewer rows than clusters, none is a cluster's, as in the warm-up of IFCA-CAM.
    """
    return row if row < num_clusters <= len(serving.models_KP) else -1
