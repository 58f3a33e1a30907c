"""Diagnostics of signatures that several methods report. S is the number of clients with a signature.

Each value is computed for a sample of the clients, and only if it is recorded.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.agglomerative import centre_distances, distances
from cfl_ray.core.clients import Clients
from cfl_ray.core.diagnostics import MOST_PAIRED, sample_of

COMPONENTS = 8  # most principal components of a signature that are reported


def record_signatures(clients: Clients, ids_S: np.ndarray, signature_SF: Tensor) -> None:
    """Reports `signatures` (clients, components): the leading principal components of the signatures."""
    _record(clients, "signatures", ids_S, "components", lambda at: principal_components(signature_SF[at]))


def record_similarity(clients: Clients, ids_S: np.ndarray, signature_SF: Tensor) -> None:
    """Reports `similarity` (clients, clients): the cosines of the signatures."""
    _record(clients, "similarity", ids_S, "clients", lambda at: cosines(signature_SF[at]))


def record_distance(clients: Clients, ids_S: np.ndarray, signature_SF: Tensor) -> None:
    """Reports `distance` (clients, clients): the Euclidean distances of the signatures."""
    _record(clients, "distance", ids_S, "clients", lambda at: distances(signature_SF[at], "l2"))


def record_centre_distances(clients: Clients, ids_M: np.ndarray, feature_MF: Tensor, centre_KF: Tensor) -> None:
    """Reports `centre_distance` (clients, clusters): the l2 distances of the clients' features to the centres."""
    _record(clients, "centre_distance", ids_M, "clusters", lambda at: centre_distances(feature_MF[at], centre_KF, "l2"))


def _record(
    clients: Clients, name: str, ids: np.ndarray, axis: str, value_of: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Reports the array (clients, `axis`) that `value_of` returns for the positions of a sample of these clients."""
    at = sample_of(ids, MOST_PAIRED, clients.seed)
    clients.record(name, lambda: value_of(at), ("clients", axis), ids=ids[at])


def principal_components(signature_SF: Tensor) -> np.ndarray:
    """Coordinates (S, Q) of the signatures on their leading principal components; 1 <= Q <= `COMPONENTS`."""
    from sklearn.decomposition import PCA  # imported here: loading it takes a second, and hosts do not need it

    if len(signature_SF) < 2:
        return np.zeros((len(signature_SF), 1))
    most = min(COMPONENTS, *signature_SF.shape)
    pca = PCA(most, random_state=0, iterated_power=3)  # takes 0.2 s for 1,000 signatures of 8,192 values
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 in the shares of variance if all signatures are equal
        coordinate_SQ: np.ndarray = pca.fit_transform(signature_SF.numpy())
    return coordinate_SQ


def cosines(signature_SF: Tensor) -> np.ndarray:
    """Cosines of all pairs of signatures, float32 (S, S); 0 for a signature of zeros."""
    unit_SF = normalize(signature_SF, dim=1)
    cosine_SS = (unit_SF @ unit_SF.T).clamp(-1, 1)
    return ((cosine_SS + cosine_SS.T) / 2).numpy()  # the product is symmetric up to rounding
