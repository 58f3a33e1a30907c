"""Principal angles between the data subspaces of clients.

Axis letters here: S, U: clients; D: values of a sample (pixels); R: columns of a basis.
"""

from collections.abc import Iterator

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.agglomerative import require_finite

KINDS = ("smallest", "sum", "trace", "code")
OF_VECTORS = ("trace", "code")  # kinds that compare the given columns, not the subspaces that the columns span

RANK = 1e-6  # directions weaker than this share of the strongest direction are rounding errors of float32
COLUMNS = 512  # columns of a block of bases; the products of two blocks take 2 MB

Prepared = tuple[Tensor, Tensor]  # transposed bases, float64 (S, R, D), and the rank of each, (S,)


def principal_vectors(x_BD: Tensor, count: int) -> Tensor:
    """Leading left singular vectors of the matrix whose columns are the samples, float32 (D, p'), strongest first.

    x_BD: samples, float (B, D). count: p, at least 1; p' = min(p, rank).

    The entry of largest magnitude of each vector is positive. Raises ValueError for count < 1.
    """
    if count < 1:
        raise ValueError(f"the number of principal vectors must be at least 1, got {count}")
    x, small = x_BD.double().numpy(), min(x_BD.shape)
    if not small:
        return torch.zeros(x_BD.shape[1], 0)
    wide = len(x) <= x.shape[1]  # B <= D: the Gram matrix of the samples, (B, B), is not larger than (D, D)
    count = min(count, small)
    square_p, vector_p = scipy.linalg.eigh(x @ x.T if wide else x.T @ x, subset_by_index=[small - count, small - 1])
    length_p = np.sqrt(np.maximum(square_p[::-1], 0))
    strong = length_p > RANK * length_p[0]
    u_Dp = vector_p[:, ::-1][:, strong]
    if wide:
        u_Dp = x.T @ u_Dp / length_p[strong]
    largest = np.take_along_axis(u_Dp, np.abs(u_Dp).argmax(0)[None], 0)
    return torch.from_numpy(u_Dp * np.sign(largest)).float()


def orthonormal(u_DR: Tensor) -> Tensor:
    """Orthonormal basis of the span of the columns, float64 (D, R), by pivoted QR. Columns past the rank are 0."""
    q_Dr, r_rR, _ = scipy.linalg.qr(u_DR.double().numpy(), mode="economic", pivoting=True)
    strength = np.abs(r_rR.diagonal())
    rank = int((strength > RANK * strength.max(initial=0)).sum())
    basis_DR = torch.zeros(u_DR.shape, dtype=torch.float64)
    basis_DR[:, :rank] = torch.from_numpy(q_Dr[:, :rank])
    return basis_DR


def _prepared(basis_SDR: Tensor, kind: str) -> Prepared:
    """The columns of each basis made orthonormal; for "trace" and "code", only scaled to norm 1.

    Raises ValueError for another kind, values that are not finite, or a basis of zeros.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    require_finite(basis_SDR.flatten(1))
    ready_SRD = torch.empty(basis_SDR.mT.shape, dtype=torch.float64)
    for ready_RD, basis_DR in zip(ready_SRD, basis_SDR, strict=True):
        ready_RD.copy_((normalize(basis_DR.double(), dim=0) if kind in OF_VECTORS else orthonormal(basis_DR)).T)
    rank_S = ready_SRD.any(2).sum(1)
    if not rank_S.all():
        empty = torch.nonzero(rank_S == 0).flatten().tolist()
        count = f"{len(empty)} of {len(rank_S)} have none, the first is {empty[0]}"
        raise ValueError(f"every basis needs a column that is not zero; {count}")
    return ready_SRD, rank_S


def _blocks(ready_SRD: Tensor) -> Iterator[slice]:
    """Yields slices of clients whose bases together have at most COLUMNS columns (or a single client)."""
    size = max(COLUMNS // max(ready_SRD.shape[1], 1), 1)
    return (slice(start, start + size) for start in range(0, len(ready_SRD), size))


def _block(a_sRD: Tensor, b_uRD: Tensor, rank_s: Tensor, rank_u: Tensor, kind: str) -> np.ndarray:
    """Angles between two blocks of prepared bases, in degrees, float64 (s, u)."""
    s, u, rows, columns = len(a_sRD), len(b_uRD), a_sRD.shape[1], b_uRD.shape[1]
    product_suRR = (a_sRD.flatten(0, 1) @ b_uRD.flatten(0, 1).T).view(s, rows, u, columns).transpose(1, 2)
    if kind == "code":
        counted_suRR = a_sRD.any(2)[:, None, :, None] & b_uRD.any(2)[None, :, None, :]
        return _degrees(product_suRR.masked_fill(~counted_suRR, -1).amax((2, 3))).numpy()
    if kind == "trace":
        both_suR = product_suRR.diagonal(dim1=2, dim2=3)
        places = both_suR.shape[2]
        counted_suR = a_sRD.any(2)[:, None, :places] & b_uRD.any(2)[None, :, :places]
        return _summed(_degrees(both_suR.abs()), counted_suR)
    # The cosines are singular values: the roots of the eigenvalues of Gram matrices, in half the time of svdvals.
    product_pRR = product_suRR.reshape(s * u, rows, columns)
    square_pR = torch.linalg.eigvalsh(torch.bmm(product_pRR.mT, product_pRR)).view(s, u, -1)
    if kind == "smallest":
        return _degrees(square_pR[..., -1].clamp(min=0).sqrt()).numpy()
    angle_suR = _degrees(square_pR.flip(2).clamp(min=0).sqrt())
    return _summed(angle_suR, torch.arange(angle_suR.shape[2]) < torch.minimum(rank_s[:, None], rank_u)[..., None])


def _summed(angle_suR: Tensor, counted_suR: Tensor) -> np.ndarray:
    """Sums (s, u) of each pair's counted angles."""
    return (angle_suR * counted_suR).sum(2).numpy()


def _degrees(cosine: Tensor) -> Tensor:
    """Angle of each cosine in degrees. Cosines beyond -1..1 are rounding errors and are clamped."""
    return cosine.clamp(-1, 1).arccos().rad2deg()


def angles(basis_SDR: Tensor, *, kind: str) -> np.ndarray:
    """Angles between the subspaces of all pairs of clients: condensed, in degrees, float64 (S (S - 1) / 2,).

    basis_SDR: the columns span each client's subspace; columns of zeros are padding.
    kind: "smallest": the smallest principal angle of the two subspaces;
        "sum": the sum of their principal angles, as many as the lower of the two ranks;
        "trace": the sum of the angles between the two first columns, the two second columns, and so on, as far as both
        have columns, without regard to sign: the trace of arccos |U_i' U_j|;
        "code": the smallest angle between a column of one client and a column of the other, 0 to 180 degrees.
        "smallest" and "sum" depend on the subspaces only, so columns need not be orthonormal; "trace" and "code" depend
        on the columns.

    Angles are computed in float64 with errors of at most 1e-5 degrees, even near 0 and 90; with float32, the error
    would be 0.03 degrees near 0. Raises ValueError for another kind, values that are not finite, or a client whose
    columns are all zero.
    """
    prepared = _prepared(basis_SDR, kind)
    angle_SS = _angles(prepared, prepared, kind, above_diagonal=True)
    return angle_SS[np.triu_indices(len(angle_SS), 1)]


def angles_between(a_SDR: Tensor, b_UDR: Tensor, *, kind: str) -> np.ndarray:
    """Angles in degrees, float64 (S, U), between the subspaces of two sets of clients, as in `angles`.

    The sets may differ in R. Raises ValueError as `angles` does, and if the sets differ in D.
    """
    if a_SDR.shape[1] != b_UDR.shape[1]:
        raise ValueError(f"samples of both sets need equal sizes, got {a_SDR.shape[1]} and {b_UDR.shape[1]} values")
    return _angles(_prepared(a_SDR, kind), _prepared(b_UDR, kind), kind)


def _angles(a: Prepared, b: Prepared, kind: str, above_diagonal: bool = False) -> np.ndarray:
    """Angles (S, U) of all pairs; with `above_diagonal`, blocks below the diagonal are left at 0."""
    (a_SRD, rank_S), (b_URD, rank_U) = a, b
    angle_SU = np.zeros((len(a_SRD), len(b_URD)))
    for rows in _blocks(a_SRD):
        for columns in _blocks(b_URD):
            if columns.start >= rows.start or not above_diagonal:
                angle_SU[rows, columns] = _block(a_SRD[rows], b_URD[columns], rank_S[rows], rank_U[columns], kind)
    return angle_SU
