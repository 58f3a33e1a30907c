"""Robust aggregation: rules that replace the weighted mean of the clients' results in every average of a method.

For the n valid results W_i of one output row, without their private columns:

    median          coordinate-wise median
                    D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 1
    trimmed_mean    in each coordinate, the mean without the b = floor(share n) least and the b greatest values
                    D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 2
    multi_krum      mean of the m results with the least s_i, where s_i is the sum of ||W_i - W_j||^2 over the
                    n - f - 2 results nearest to i
                    P. Blanchard et al., NeurIPS 2017, arXiv:1703.02757, Section 4
    norm_clipping   weighted mean of w + min(1, c / ||W_i - w||) (W_i - w), with the model w that the client was sent
                    Z. Sun et al., 2019, arXiv:1911.07963, Section 3

The first three weigh all clients equally, as in their papers; a client with weight 0 does not count. Of one or two
results they are the mean. Krum requires n >= 2 f + 3: with fewer results f is the largest number that satisfies it, and
below 5 results, where that number is 0, the coordinate-wise median is used (not where `attackers` is 0).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.errors import did_you_mean
from cfl_ray.core.params import Columns
from cfl_ray.core.work import AverageDeferred, Averaging, Backend, CombineColumns, Outcome, Train

# An output row is cut into at most _RANGES ranges of columns, with at least _RANGE values each.
_RANGES, _RANGE = 16, 1 << 20


@dataclass(frozen=True)
class Mean:
    """The weighted mean, computed on the hosts that train the clients."""

    name: ClassVar[str] = "mean"


@dataclass(frozen=True)
class Median:
    """Coordinate-wise median; of an even number of values, the mean of the middle two."""

    name: ClassVar[str] = "median"

    def __call__(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        """Aggregate, float64 (F,), of n results of F columns, given as blocks (n, f) of columns in their order."""
        return np.concatenate([_middle(np.sort(rows_nF, 0), (len(rows_nF) - 1) // 2) for rows_nF in blocks])


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the least and the greatest values."""

    name: ClassVar[str] = "trimmed_mean"
    share: float = 0.3  # beta: share of the values to leave out at either end, in [0, 0.5)

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 <= self.share < 0.5:
            raise ValueError(f"trimmed_mean.share must be in 0 .. 0.5, without 0.5, got {self.share!r}")

    def __call__(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        """Aggregate, as `Median`."""
        # 1e-9: the product in float64 may be a little less than the whole number that it stands for.
        return np.concatenate(
            [_middle(np.sort(rows_nF, 0), int(self.share * len(rows_nF) + 1e-9)) for rows_nF in blocks]
        )


@dataclass(frozen=True)
class MultiKrum:
    """Mean of the results that are nearest to the others."""

    name: ClassVar[str] = "multi_krum"
    attackers: float = 0.3  # f: share of the results in [0, 0.5), rounded down, or an int: their number
    keep: int | None = None  # m: number of results to average; None: n - f

    def __post_init__(self) -> None:
        whole = isinstance(self.attackers, int) and self.attackers >= 0
        if not _is_number(self.attackers) or not (whole or 0 <= self.attackers < 0.5):
            allowed = "a share in 0 .. 0.5, without 0.5, or a whole number"
            raise ValueError(f"multi_krum.attackers must be {allowed}, got {self.attackers!r}")
        if self.keep is not None and (isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"multi_krum.keep must be a whole number from 1 on, or null, got {self.keep!r}")

    @staticmethod
    def squared_distances(blocks: Iterable[np.ndarray]) -> np.ndarray:
        """Squared distances between n results, float64 (n, n), from blocks (n, f) of their columns."""
        return sum(map(_squared_distances, blocks), start=np.zeros(()))

    def suspects(self, count: int) -> int:
        """The number f among `count` results: as configured, but at most what n >= 2 f + 3 allows."""
        wanted = self.attackers if isinstance(self.attackers, int) else int(self.attackers * count + 1e-9)
        return min(wanted, max((count - 3) // 2, 0))

    def chosen(self, squared_nn: np.ndarray) -> np.ndarray:
        """Indices of the m results with the least scores, ascending; the lowest indices on ties."""
        count = len(squared_nn)
        suspects = self.suspects(count)
        others_nn = np.sort(squared_nn + np.diag(np.full(count, np.inf)), 1)
        score_n = others_nn[:, : count - suspects - 2].sum(1)
        return np.sort(np.argsort(score_n, kind="stable")[: self.keep or count - suspects])


@dataclass(frozen=True)
class NormClipping:
    """Weighted mean of results whose changes are scaled down to a common largest norm."""

    name: ClassVar[str] = "norm_clipping"
    bound: float | None = None  # c: largest norm of a change; None: the median norm of the row's changes

    def __post_init__(self) -> None:
        if self.bound is not None and (not _is_number(self.bound) or not 0 < self.bound < np.inf):
            raise ValueError(f"norm_clipping.bound must be above 0, or null, got {self.bound!r}")


AggregationRule = Mean | Median | TrimmedMean | MultiKrum | NormClipping
RULES: dict[str, type[AggregationRule]] = {
    rule.name: rule for rule in (Mean, Median, TrimmedMean, MultiKrum, NormClipping)
}


def parse_rule(value: Any) -> AggregationRule:
    """The rule for a name or {name: {parameter: value}}. Raises ValueError for anything else."""
    name, given = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (value, {})
    if not isinstance(name, str) or name not in RULES or not isinstance(given or {}, dict):
        example = "{trimmed_mean: {share: 0.2}}"
        names = ", ".join(RULES)
        raise ValueError(
            f"aggregation must be one of {names}, or one with its parameters such as {example}, got {value!r}"
        )
    valid = [item.name for item in fields(RULES[name])]
    for key in given or {}:
        if key not in valid:
            raise ValueError(f"aggregation {name} has no parameter {key!r}{did_you_mean(key, valid) if valid else ''}")
    return RULES[name](**(given or {}))


def aggregate(
    rule: AggregationRule, backend: Backend, training: Train, found: Outcome, ids_M: np.ndarray, averaging: Averaging
) -> Outcome:
    """Averages deferred results of the clients `ids_M` by a rule other than the mean.

    training: the exchange that left the results on the hosts. found: its outcome.
    Returns the outcome that an `AverageDeferred` has for the mean.
    """
    valid_M = np.isin(ids_M, training.ids_M[found.arrays["valid"]])
    averaging = averaging.subset(valid_M[averaging.client_E])
    if isinstance(rule, NormClipping):
        return _clipped_mean(rule, backend, training, found, ids_M, averaging, valid_M)
    columns = _uploaded_columns(training)
    chosen: list[tuple[int, int, float]] = []  # (output row, member, weight) of rows that are plain means
    means: dict[int, Tensor] = {}
    for out in np.unique(averaging.out_E).tolist():
        member_n = np.sort(averaging.client_E[averaging.out_E == out])
        few = len(member_n) < 5  # where Krum allows no attacker
        applied = Median() if isinstance(rule, MultiKrum) and rule.attackers and few else rule
        if len(member_n) >= 3 and columns.count:
            if not isinstance(applied, MultiKrum):
                values, cuts = _combined(applied, backend, training, ids_M[member_n], columns)
                parts = [part[: stop - start] for part, (start, stop) in zip(values, cuts, strict=True)]
                means[out] = _whole_row(parts, columns, training.tables[training.start.table].shape[1])
                continue
            values, _ = _combined(MultiKrum.squared_distances, backend, training, ids_M[member_n], columns)
            member_n = member_n[applied.chosen(sum(values, start=np.zeros(())))]
        chosen += [(out, member, 1 / len(member_n)) for member in member_n.tolist()]
    arrived_R = np.bincount(averaging.out_E, averaging.weight_E, averaging.num_rows)
    if chosen:
        out_E, client_E, weight_E = (np.array(values) for values in zip(*chosen, strict=True))
        plain = Averaging(averaging.num_rows, out_E, client_E, weight_E, averaging.total_R)
        means |= backend.run(AverageDeferred.of(training, training.address, ids_M, plain)).means
    return Outcome({"valid": valid_M}, means, arrived_R)


def _combined(
    function: Any, backend: Backend, training: Train, ids_n: np.ndarray, columns: Columns
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Values (ranges, ...) of a function for every range of these columns, in their order, and the (start, stop)."""
    ranges = min(_RANGES, max(1, columns.count * len(ids_n) // _RANGE))
    longest = -(-columns.count // ranges)
    cuts = [(at, min(at + longest, stop)) for start, stop in columns.ranges for at in range(start, stop, longest)]
    start_M, stop_M = np.array(cuts).T
    work = CombineColumns(
        training.address,
        start_M,
        (),
        stop_M=stop_M,
        members=ids_n,
        function=function,
        deferred_from=training.address.exchange,
    )
    return backend.run(work).arrays["combined"], cuts


def _whole_row(parts: list[np.ndarray], columns: Columns, size: int) -> Tensor:
    """A row of `size` columns from parts of the uploaded ones, float64; `Updates` fills in the private columns."""
    row_P = torch.zeros(size, dtype=torch.float64)
    columns.put(row_P, torch.from_numpy(np.concatenate(parts)))
    return row_P


def _clipped_mean(
    rule: NormClipping,
    backend: Backend,
    training: Train,
    found: Outcome,
    ids_M: np.ndarray,
    averaging: Averaging,
    valid_M: np.ndarray,
) -> Outcome:
    """The mean of w + s (W - w) with weights p: of W with weights p s, from the hosts, and of w with p (1 - s)."""
    position = {client: at for at, client in enumerate(training.ids_M.tolist())}
    at_E = np.array([position[client] for client in ids_M[averaging.client_E].tolist()], np.int64)
    distance_E, scale_E = found.arrays["upload_distance"][at_E], np.ones(len(at_E))
    for out in np.unique(averaging.out_E):
        mine = averaging.out_E == out
        bound = np.median(distance_E[mine]) if rule.bound is None else rule.bound
        scale_E[mine] = np.minimum(1, bound / np.maximum(distance_E[mine], 1e-300))
    scaled = replace(averaging, weight_E=averaging.weight_E * scale_E)
    plain = backend.run(AverageDeferred.of(training, training.address, ids_M, scaled))
    assert plain.arrived_R is not None
    sums = {out: mean_P.double() * plain.arrived_R[out] for out, mean_P in plain.means.items()}
    rest_E, row_E = averaging.weight_E * (1 - scale_E), training.start.row_M[at_E]
    for out, row in np.unique(np.stack([averaging.out_E, row_E])[:, rest_E > 0], axis=1).T.tolist():
        rest = rest_E[(averaging.out_E == out) & (row_E == row)].sum()
        sums[out] = sums.get(out, 0.0) + rest * training.tables[training.start.table][row].double()
    arrived_R = plain.arrived_R + np.bincount(averaging.out_E, rest_E, averaging.num_rows)
    means = {out: sum_P / arrived_R[out] for out, sum_P in sums.items()}
    return Outcome({"valid": valid_M}, means, arrived_R)


def _uploaded_columns(training: Train) -> Columns:
    """All columns except the private ones."""
    size, state = training.tables[training.start.table].shape[1], training.client_state
    if state is None or not state.private:
        return Columns(((0, size),))
    private = state.columns.ranges if state.columns is not None else ((0, size),)
    edges = [0, *(edge for pair in private for edge in pair), size]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return Columns(tuple((start, stop) for start, stop in pairs if start < stop))


def _middle(sorted_nF: np.ndarray, cut: int) -> np.ndarray:
    """Mean of sorted rows without the first and the last `cut`, float64 (F,)."""
    return sorted_nF[cut : len(sorted_nF) - cut].mean(0, dtype=np.float64)


def _squared_distances(rows_nF: np.ndarray) -> np.ndarray:
    # Centred at the median, so that squares of honest results stay small and exact, however far the others are.
    centred_nF = torch.from_numpy(rows_nF - np.median(rows_nF, 0)).double()
    gram_nn = (centred_nF @ centred_nF.T).numpy()
    return np.maximum(np.diag(gram_nn)[:, None] + np.diag(gram_nn) - 2 * gram_nn, 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
