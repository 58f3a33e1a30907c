"""Application of an aggregation rule other than the mean to results kept on the hosts."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.aggregation.rules import ClippingRule, ColumnRule, Median, MultiKrum, WeightRule, result_of
from cfl_ray.core.backend import Backend
from cfl_ray.core.params import Columns
from cfl_ray.core.work import AverageDeferred, Averaging, ClientState, CombineColumns, Outcome, Train
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import place_of

# Results are cut into at most _RANGES ranges of columns. All results have up to _RANGE values in a range, if possible:
# as many as a host reads at a time.
_RANGES, _RANGE = 64, 1 << 22


def by_columns(rule: ColumnRule, weight_n: np.ndarray, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The aggregate by a column rule, float64 (F,), from blocks (n, f) of columns of the results, one after another."""
    return np.concatenate([result_of(rule, "combine", values_nF, weight_n) for values_nF in blocks])


def squared_distances(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Squared distances between n results, float64 (n, n), from blocks (n, f) of their columns."""
    total_nn = np.zeros(())
    for rows_nF in blocks:
        # centred at the median, so that squares of honest results stay small and exact despite distant outliers
        centred_nF = torch.from_numpy(rows_nF - np.median(rows_nF, 0)).double()
        gram_nn = (centred_nF @ centred_nF.T).numpy()
        total_nn = total_nn + np.maximum(np.diag(gram_nn)[:, None] + np.diag(gram_nn) - 2 * gram_nn, 0)
    return total_nn


def aggregate(
    rule: ColumnRule | WeightRule | ClippingRule,
    backend: Backend,
    training: Train,
    outcome: Outcome,
    ids_M: np.ndarray,
    averaging: Averaging,
) -> Outcome:
    """Averages deferred results of the clients `ids_M` by a rule other than the mean.

    training, outcome: the exchange that left the results on the hosts. Returns an outcome like that of
    `AverageDeferred`, which computes the mean.
    """
    key_M = training.keys_of(ids_M, np.arange(len(ids_M)))
    at_M = training.positions_of(key_M)
    valid_M = (at_M >= 0) & outcome.arrays["valid"][at_M]
    averaging = averaging.subset(valid_M[averaging.client_E])
    if isinstance(rule, ClippingRule):
        at_E = at_M[averaging.client_E]
        return _clipped_mean(rule, backend, training, outcome, ids_M, averaging, valid_M, at_E)
    columns = uploaded_columns(training.columns_of(training.start), training.client_state)
    chosen: list[tuple[int, int, float]] = []  # (output row, member, weight) of rows that are weighted means
    means: dict[int, Tensor] = {}
    for out in np.unique(averaging.out_E).tolist():
        member_n, weight_n = _members(averaging, out)
        few = len(member_n) < 5  # too few for Krum to allow an attacker
        applied = Median() if isinstance(rule, MultiKrum) and rule.attackers and few else rule
        result_n = np.full(len(member_n), 1 / len(member_n))
        if len(member_n) >= 3 and columns.count:
            if isinstance(applied, ColumnRule):
                means[out] = _aggregate_of_columns(applied, backend, training, key_M[member_n], weight_n, columns)
                continue
            values, _ = _combined(squared_distances, backend, training, key_M[member_n], columns)
            result_n = _weights(applied, sum(values, start=np.zeros(())), weight_n)
        chosen += [(out, *pair) for pair in zip(member_n.tolist(), result_n.tolist(), strict=True) if pair[1] > 0]
    arrived_R = np.bincount(averaging.out_E, averaging.weight_E, averaging.num_rows)
    if chosen:
        out_E, client_E, weight_E = (np.array(values) for values in zip(*chosen, strict=True))
        plain = Averaging(averaging.num_rows, out_E, client_E, weight_E, averaging.total_R)
        means |= backend.run(AverageDeferred.of(training, training.address, ids_M, plain)).means
    return Outcome({"valid": valid_M}, means, arrived_R)


def _members(averaging: Averaging, out: int) -> tuple[np.ndarray, np.ndarray]:
    """The members of an output row, ascending, and their weights, which add up to 1."""
    mine = np.flatnonzero(averaging.out_E == out)
    mine = mine[np.argsort(averaging.client_E[mine])]
    weight_n = averaging.weight_E[mine]
    return averaging.client_E[mine], weight_n / weight_n.sum()


def _aggregate_of_columns(
    rule: ColumnRule, backend: Backend, training: Train, key_n: np.ndarray, weight_n: np.ndarray, columns: Columns
) -> Tensor:
    """The aggregate by a column rule, float64 (P,). Private columns are 0, until `Updates` replaces them."""
    values, ranges = _combined(partial(by_columns, rule, weight_n), backend, training, key_n, columns)
    parts = [part[: stop - start] for part, (start, stop) in zip(values, ranges, strict=True)]
    mean_P = torch.zeros(training.columns_of(training.start), dtype=torch.float64)
    columns.put(mean_P, torch.from_numpy(np.concatenate(parts)))
    return mean_P


def _weights(rule: WeightRule, squared_nn: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
    """The weights returned by a rule, normalised to sum 1."""
    result_n = result_of(rule, "weigh", squared_nn, weight_n, "weights >= 0")
    total = result_n.sum()
    if not total:
        raise RunError(f"aggregation rule {place_of(rule.weigh)} returned 0 for all {len(weight_n)} results")
    return result_n if abs(total - 1) < 1e-9 else result_n / total


def _combined(
    function: Callable[[Iterable[np.ndarray]], np.ndarray],
    backend: Backend,
    training: Train,
    key_n: np.ndarray,
    columns: Columns,
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Values (ranges, ...) of a function for every range of these columns, in their order, and the (start, stop)."""
    edges = (0, *training.deferred_cuts, training.columns_of(training.start))
    uploaded = [any(first <= start < last for first, last in columns.ranges) for start in edges[:-1]]
    part_M = np.flatnonzero(uploaded)
    start_M, stop_M = np.array(edges)[part_M], np.array(edges)[part_M + 1]
    work = CombineColumns(
        training.address,
        start_M,
        (),
        stop_M=stop_M,
        part_M=part_M,
        members=key_n,
        function=function,
        deferred_from=training.address.exchange,
    )
    return backend.run(work).arrays["combined"], list(zip(start_M.tolist(), stop_M.tolist(), strict=True))


def _clipped_mean(
    rule: ClippingRule,
    backend: Backend,
    training: Train,
    outcome: Outcome,
    ids_M: np.ndarray,
    averaging: Averaging,
    valid_M: np.ndarray,
    at_E: np.ndarray,
) -> Outcome:
    """The mean of w + s (W - w) with weights p: of W with weights p s, from the hosts, and of w with p (1 - s).

    at_E: the position in `training` of each entry's result.
    """
    distance_E, scale_E = outcome.arrays["upload_distance"][at_E], np.ones(len(at_E))
    for out in np.unique(averaging.out_E):
        mine = averaging.out_E == out
        weight_n = averaging.weight_E[mine] / averaging.weight_E[mine].sum()
        scale_E[mine] = result_of(rule, "scale", distance_E[mine], weight_n, "factors in 0 .. 1", 1.0)
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


def range_cuts(rule: Any, size: int, state: ClientState | None, clients: int) -> np.ndarray:
    """The columns, int64 and ascending, at which results of `size` columns of this many clients are cut for a rule.

    Empty for a rule that needs no columns of all results. No range has both private and uploaded columns.
    """
    if not isinstance(rule, ColumnRule | WeightRule):
        return np.zeros(0, np.int64)
    columns = uploaded_columns(size, state)
    ranges = min(_RANGES, max(1, -(-columns.count * clients // _RANGE)))
    longest = max(-(-columns.count // ranges), 1)
    cuts = {stop for _, stop in columns.ranges}
    for start, stop in columns.ranges:
        cuts.update(range(start, stop, longest))
    return np.array(sorted(cuts - {0, size}), np.int64)


def uploaded_columns(size: int, state: ClientState | None) -> Columns:
    """All columns except private columns."""
    everything = Columns(((0, size),))
    if state is None or not state.private:
        return everything
    return (state.private_columns or everything).others(size)


def try_rule(rule: ColumnRule | WeightRule | ClippingRule, count: int) -> None:
    """Calls a rule with `count` random results. Raises RunError if it fails, or returns another type or shape."""
    draw = np.random.default_rng(0)
    values_nF = draw.standard_normal((count, 8)).astype(np.float32)
    weight_n = draw.uniform(1, 2, count)
    weight_n /= weight_n.sum()
    if isinstance(rule, ClippingRule):
        result_of(rule, "scale", np.linalg.norm(values_nF, axis=1).astype(np.float64), weight_n, trial=True)
    elif count >= 3 and isinstance(rule, ColumnRule):  # of fewer results these rules are their mean
        result_of(rule, "combine", values_nF, weight_n, trial=True)
    elif count >= 3:
        result_of(rule, "weigh", squared_distances([values_nF]), weight_n, trial=True)
