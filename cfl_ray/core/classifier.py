"""The last layer of a model as a row for each label, and the mean features of each label."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientData
from cfl_ray.core.params import ParamSpec, layer_name
from cfl_ray.core.state import SeenState


@dataclass(frozen=True)
class Classifier:
    """The linear last layer of a model: for each of C labels a row of F weights and, if the layer has one, a bias."""

    spec: ParamSpec
    num_classes: int  # C
    num_features: int  # F
    has_bias: bool

    @classmethod
    def of(cls, spec: ParamSpec) -> Self:
        """The classifier of a model. Raises ValueError if its last layer is not linear."""
        layer = spec.layers[-1]
        shape_of = dict(zip(spec.names, spec.shapes, strict=True))
        shape = shape_of.get(_tensor(layer, "weight"), ())
        if len(shape) != 2:
            own = f"the shape of its weight is {shape}" if shape else "it has no weight of its own"
            raise ValueError(f"the last layer {layer_name(layer)} must be linear, with a weight (C, F); {own}")
        if layer in spec.not_linear:
            raise ValueError(
                f"the last layer {layer_name(layer)} must be linear, with a weight (C, F); its weight {shape} is a "
                "matrix, but its outputs are not its inputs times the transposed weight, plus the bias: use nn.Linear"
            )
        return cls(spec, *shape, _tensor(layer, "bias") in shape_of)

    def _views(self, models_XP: Tensor) -> list[Tensor]:
        """Views of the weights (..., C, F) and, if any, the biases (..., C, 1) of models (..., P)."""
        tensors, layer = self.spec.tensors(models_XP), self.spec.layers[-1]
        weight = tensors[_tensor(layer, "weight")]
        return [weight, tensors[_tensor(layer, "bias")][..., None]] if self.has_bias else [weight]

    def rows(self, models_XP: Tensor) -> Tensor:
        """The rows (..., C, F + 1) of models (..., P), a copy; (..., C, F) without biases."""
        return torch.cat(self._views(models_XP), -1)

    def places_in_head(self) -> Tensor:
        """The place of each entry of the rows among the columns of `spec.head`, int64 (C, F + 1) or (C, F)."""
        column_P = torch.arange(self.spec.size)
        return torch.searchsorted(self.spec.head.of(column_P), self.rows(column_P))

    def put(self, models_XP: Tensor, row_XCF: Tensor) -> None:
        """Writes rows into models, in place."""
        first = 0
        for view in self._views(models_XP):
            view.copy_(row_XCF[..., first : first + view.shape[-1]])
            first += view.shape[-1]


def _tensor(layer: str, name: str) -> str:
    """Name of a tensor of a layer, which may be the whole module."""
    return f"{layer}.{name}" if layer else name


@dataclass(frozen=True, kw_only=True)
class ClassifiersState(SeenState):
    """A state in which the server keeps a classifier for each of the S clients that have taken part.

    Other clients have that of the average model, row 0 of `models_KP`.
    """

    of_each_client = "a classifier"

    row_SCF: Tensor  # float32: a row of weights and bias for each label

    @classmethod
    def peak_floats(cls, spec: ParamSpec, seen: int, cohort: int, evaluated: int) -> int:
        kept = Classifier.of(spec)
        models = max(4 * cohort, 2 * min(seen, evaluated))  # of a round; of an evaluation, with their message
        return 4 * seen * kept.num_classes * (kept.num_features + 1) + models * spec.size

    def models_of(self, ids_M: np.ndarray, spec: ParamSpec) -> tuple[Tensor, np.ndarray]:
        """Models (1 + m, P), theta under the average classifier and under each own; and the row (M,) of each client."""
        position_M = self.positions(ids_M)
        own_M = position_M >= 0
        models_KP = self.models_KP[0].repeat(1 + own_M.sum(), 1)
        Classifier.of(spec).put(models_KP[1:], self.row_SCF[position_M[own_M]])
        return models_KP, np.where(own_M, own_M.cumsum(), 0)


@dataclass(frozen=True)
class Prototypes:
    """For `Clients.describe`: (C, F + 1), mean features and number of samples of each label, 0 without samples."""

    classifier: Classifier
    reads_features: ClassVar[bool] = True

    def floats(self, inputs: int, classes: int) -> int:
        return self.classifier.num_classes * (self.classifier.num_features + 1)

    def __call__(self, client: ClientData, model_P: Tensor) -> Tensor:
        return self.of(client.features(model_P), client.y.cpu())

    def of(self, feature_nF: Tensor, y_n: Tensor) -> Tensor:
        """The same of features and labels."""
        label_nC = torch.nn.functional.one_hot(y_n, self.classifier.num_classes).to(feature_nF.dtype)
        count_C1 = label_nC.sum(0)[:, None]
        return torch.cat([label_nC.T @ feature_nF / count_C1.clamp(min=1), count_C1], 1)
