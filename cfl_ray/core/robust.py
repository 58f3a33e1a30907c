"""Robust aggregation: what may stand in for the weighted mean of the clients' results, in every average of a method.

For the n sound results W_i of one output row, without their private columns:

    median          coordinate-wise median                                       D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 1
    trimmed_mean    per coordinate, the mean without the b = floor(share n) least and b greatest values               ibid., Definition 2
    multi_krum      s_i = sum of ||W_i - W_j||^2 over the n - f - 2 results nearest to i; mean of the m results with the least s_i
                                                                    P. Blanchard et al., NeurIPS 2017, arXiv:1703.02757, Section 4
    norm_clipping   weighted mean of w + min(1, c / ||W_i - w||) (W_i - w), w: what the client was sent
                                                                    Z. Sun et al., 2019, arXiv:1911.07963, Section 3

The first three weigh all clients alike, as their papers do; a client with weight 0 is no member. Of one or two results they take
the mean. Krum's condition is n >= 2 f + 3: with fewer results f is the most that it allows, and below 5, where that is nobody, the
coordinate-wise median stands in.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.errors import nearest
from cfl_ray.core.params import Columns
from cfl_ray.core.work import Backend, Combine, Mix, MixPending, Outcome, Train

_RANGES, _RANGE = 16, 1 << 20  # of columns that an output row is cut into at most, and values in each at least


@dataclass(frozen=True)
class Mean:
    """The weighted mean, formed where clients train."""

    name: ClassVar[str] = "mean"


@dataclass(frozen=True)
class Median:
    """Coordinate-wise median; of an even number, the mean of the middle two."""

    name: ClassVar[str] = "median"

    def __call__(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        """float64 (F,) of blocks (n, f) of the F columns."""
        return np.concatenate([_middle(np.sort(rows_nF, 0), (len(rows_nF) - 1) // 2) for rows_nF in blocks])


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the extremes."""

    name: ClassVar[str] = "trimmed_mean"
    share: float = 0.3  # beta: of the values, left out at either end; in 0 .. 0.5, without 0.5

    def __post_init__(self):
        if not _number(self.share) or not 0 <= self.share < 0.5:
            raise ValueError(f"trimmed_mean.share must be in 0 .. 0.5, without 0.5, got {self.share!r}")

    def __call__(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        """As of Median."""
        return np.concatenate([_middle(np.sort(rows_nF, 0), int(self.share * len(rows_nF) + 1e-9)) for rows_nF in blocks])


@dataclass(frozen=True)
class MultiKrum:
    """Mean of the results that have the nearest neighbours."""

    name: ClassVar[str] = "multi_krum"
    attackers: float = 0.3  # f: a share of the results below 0.5, rounded down, or a whole number of them
    keep: int | None = None  # m: results that are averaged; None: n - f

    def __post_init__(self):
        whole = isinstance(self.attackers, int) and self.attackers >= 0
        if not _number(self.attackers) or not (whole or 0 <= self.attackers < 0.5):
            raise ValueError(f"multi_krum.attackers must be a share in 0 .. 0.5, without 0.5, or a whole number, got {self.attackers!r}")
        if self.keep is not None and (isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"multi_krum.keep must be a whole number from 1 on, or null, got {self.keep!r}")

    def __call__(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        """Squared distances, float64 (n, n)."""
        return sum(map(_squared_distances, blocks))

    def suspects(self, count: int) -> int:
        """f of `count` results: as configured, and at most what n >= 2 f + 3 allows."""
        wanted = self.attackers if isinstance(self.attackers, int) else int(self.attackers * count + 1e-9)
        return min(wanted, max((count - 3) // 2, 0))

    def chosen(self, squared_nn: np.ndarray) -> np.ndarray:
        """The m results with the least scores, ascending; the first ones on ties."""
        count = len(squared_nn)
        suspects = self.suspects(count)
        others_nn = np.sort(squared_nn + np.diag(np.full(count, np.inf)), 1)
        score_n = others_nn[:, : count - suspects - 2].sum(1)
        return np.sort(np.argsort(score_n, kind="stable")[: self.keep or count - suspects])


@dataclass(frozen=True)
class NormClipping:
    """Weighted mean of changes that are shortened to a common length at most."""

    name: ClassVar[str] = "norm_clipping"
    bound: float | None = None  # c: longest change; None: the median length of the row's results

    def __post_init__(self):
        if self.bound is not None and (not _number(self.bound) or not 0 < self.bound < np.inf):
            raise ValueError(f"norm_clipping.bound must be above 0, or null, got {self.bound!r}")


Rule = Mean | Median | TrimmedMean | MultiKrum | NormClipping
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Mean, Median, TrimmedMean, MultiKrum, NormClipping)}


def parse(value: Any) -> Rule:
    """The rule of a name, or of {name: {parameter: value}}. Raises ValueError."""
    name, given = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (value, {})
    if not isinstance(name, str) or name not in RULES or not isinstance(given or {}, dict):
        raise ValueError(f"aggregation must be one of {', '.join(RULES)}, or one with its parameters such as {{trimmed_mean: {{share: 0.2}}}}, got {value!r}")
    valid = [item.name for item in fields(RULES[name])]
    for key in given or {}:
        if key not in valid:
            raise ValueError(f"aggregation {name} has no parameter {key!r}{nearest(key, valid) if valid else ''}")
    return RULES[name](**(given or {}))


def aggregate(rule: Rule, backend: Backend, training: Train, found: Outcome, ids_M: np.ndarray, mix: Mix) -> Outcome:
    """What `MixPending` would find for the clients `ids_M`, with the rule in place of the mean.

    training: the exchange that left the results where they were trained; `found`: what came back of it.
    """
    ok_M = np.isin(ids_M, training.ids_M[found.arrays["ok"]])
    sound = mix.only(ok_M[mix.client_E])
    if isinstance(rule, NormClipping):
        return _clipped(rule, backend, training, found, ids_M, sound)
    columns = _shared(training)
    chosen, rows = [], {}  # chosen: (output row, member) of plain means
    for out in np.unique(sound.out_E).tolist():
        member_n = np.sort(sound.client_E[sound.out_E == out])
        by = Median() if isinstance(rule, MultiKrum) and rule.attackers and len(member_n) < 5 else rule
        if len(member_n) >= 3 and columns.count:
            parts = _combined(by, backend, training, ids_M[member_n], columns)
            if isinstance(by, MultiKrum):
                member_n = member_n[by.chosen(sum(parts))]
            else:
                rows[out] = _whole(parts, columns, training.tables[training.start.table].shape[1])
                continue
        chosen += [(out, member, 1 / len(member_n)) for member in member_n.tolist()]
    mass_R = np.bincount(sound.out_E, sound.weight_E, mix.num_rows)
    sums = {out: row_P * mass_R[out] for out, row_P in rows.items()}
    if chosen:
        out_E, client_E, weight_E = (np.array(values) for values in zip(*chosen))
        plain = _mixed(backend, training, ids_M, Mix(mix.num_rows, out_E, client_E, weight_E, mix.total_R))
        sums |= {out: sum_P * (mass_R[out] / plain.mass_R[out]) for out, sum_P in plain.sums.items()}
    return Outcome({"ok": ok_M}, sums, mass_R)


def _combined(function: Any, backend: Backend, training: Train, ids_n: np.ndarray, columns: Columns) -> list[np.ndarray]:
    """What the function makes of every range of these columns, in their order."""
    ranges = min(_RANGES, max(1, columns.count * len(ids_n) // _RANGE))
    longest = -(-columns.count // ranges)
    start_M, stop_M = np.array([(at, min(at + longest, stop)) for start, stop in columns.ranges for at in range(start, stop, longest)]).T
    work = Combine(training.address, start_M, (), stop_M=stop_M, members=ids_n, function=function, pending=training.address.exchange)
    found = backend.run(work).arrays["combined"]
    return [part if isinstance(function, MultiKrum) else part[: stop - start] for part, start, stop in zip(found, start_M, stop_M)]


def _whole(parts: list[np.ndarray], columns: Columns, size: int) -> Tensor:
    row_P = torch.zeros(size, dtype=torch.float64)  # private columns: `Updates` puts the server's own there
    columns.put(row_P, torch.from_numpy(np.concatenate(parts)))
    return row_P


def _clipped(rule: NormClipping, backend: Backend, training: Train, found: Outcome, ids_M: np.ndarray, mix: Mix) -> Outcome:
    """The mean of w + s (W - w) is linear in the results: sum of p s W where they are, and sum of p (1 - s) w here."""
    at = {client: position for position, client in enumerate(training.ids_M.tolist())}
    at_E = np.array([at[client] for client in ids_M[mix.client_E].tolist()], np.int64)
    length_E, scale_E = found.arrays["length"][at_E], np.ones(len(at_E))
    for out in np.unique(mix.out_E):
        mine = mix.out_E == out
        bound = np.median(length_E[mine]) if rule.bound is None else rule.bound
        scale_E[mine] = np.minimum(1, bound / np.maximum(length_E[mine], 1e-300))
    plain = _mixed(backend, training, ids_M, replace(mix, weight_E=mix.weight_E * scale_E))
    rest_E, row_E, sums = mix.weight_E * (1 - scale_E), training.start.row_M[at_E], dict(plain.sums)
    for out, row in np.unique(np.stack([mix.out_E, row_E])[:, rest_E > 0], axis=1).T.tolist():
        rest = rest_E[(mix.out_E == out) & (row_E == row)].sum()
        sums[out] = sums[out] + rest * training.tables[training.start.table][row].double()
    ok_M = np.isin(ids_M, training.ids_M[found.arrays["ok"]])
    return Outcome({"ok": ok_M}, sums, plain.mass_R + np.bincount(mix.out_E, rest_E, mix.num_rows))


def _mixed(backend: Backend, training: Train, ids_M: np.ndarray, mix: Mix) -> Outcome:
    return backend.run(MixPending(training.address, ids_M, (), mix=mix, pending=training.address.exchange))


def _shared(training: Train) -> Columns:
    """The columns that clients upload."""
    size = training.tables[training.start.table].shape[1]
    if training.own is None or not training.own.private:
        return Columns(((0, size),))
    private = training.own.columns.ranges if training.own.columns is not None else ((0, size),)
    edges = [0, *(edge for pair in private for edge in pair), size]
    return Columns(tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop))


def _middle(sorted_nF: np.ndarray, cut: int) -> np.ndarray:
    """Mean of sorted rows without the first and the last `cut`."""
    return sorted_nF[cut : len(sorted_nF) - cut].mean(0, dtype=np.float64)


def _squared_distances(rows_nF: np.ndarray) -> np.ndarray:
    # Around the median, so that the squares of honest results stay small and exact however far off others are.
    centred_nF = torch.from_numpy(rows_nF - np.median(rows_nF, 0)).double()
    gram_nn = (centred_nF @ centred_nF.T).numpy()
    return np.maximum(np.diag(gram_nn)[:, None] + np.diag(gram_nn) - 2 * gram_nn, 0)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
