"""Audit of a private run by canaries: an empirical lower bound of epsilon, beside the claim of the accountant.

    python -m jobs.privacy_audit                   # FedAvg and IFCA, with and without sampling
    python -m jobs.privacy_audit --break-clipping  # what the audit finds if uploads are not clipped

T. Steinke, M. Nasr, M. Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, arXiv:2305.08846. Every
client is a canary, included by the toss of a coin: its samples have a feature of their own, so that its update moves
columns of its own; without its data, it uploads nothing there. From the models that the run releases, the auditor
guesses which canaries are included. The bound holds with a probability of 95 %.
"""

import argparse

import numpy as np
from scipy.stats import binom

from cfl_ray import Experiment, federation_from_arrays, simulate
from cfl_ray.engine import reduce
from cfl_ray.setup.prepare import prepare

CONFIDENCE = 0.95


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Largest chance that an (epsilon, delta) private run allows so many right guesses (Theorem 5.2)."""
    chance = 1 / (1 + np.exp(-epsilon))
    tail_v = np.cumsum(binom.pmf(right - np.arange(1, right + 1), guesses, chance))
    alpha = max((tail_v / np.arange(1, right + 1)).max(initial=0.0), 0.0)
    return min(float(binom.sf(right - 1, guesses, chance) + 2 * canaries * delta * alpha), 1.0)


def lower_bound(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The largest epsilon that the guesses rule out; 0 if they rule out none."""
    low, high = 0.0, 20.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) < 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def canaries_of(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features (2 count, count), labels and owners of the samples of `count` clients, and who is included, bool."""
    included = np.random.default_rng(seed).random(count) < 0.5
    owner = np.repeat(np.arange(count), 2)
    x = np.zeros((2 * count, count), np.float32)
    x[np.arange(2 * count), owner] = included[owner]
    return x, owner % 2, owner, included  # two labels, so that the biases, which all clients share, stay near 0


def audit(method: object, *, clients: int = 200, rounds: int = 5, seed: int = 0, guesses: int = 100, **privacy) -> dict:
    """The claim of the accountant, and the bound of the audit, for a run with these keys of `privacy`, and `secure`:
    with secure aggregation.
    """
    x, y, owner, included = canaries_of(clients, seed)
    fraction, secure = privacy.pop("fraction", 1.0), privacy.pop("secure", False)
    experiment = Experiment(
        rounds=rounds,
        seed=seed,
        methods=[method],
        data=federation_from_arrays(x, y, owner, num_classes=2),
        model={"name": "mlp", "options": {"hidden": 0}},
        local={"lr": 100.0, "epochs": 1, "batch_size": None},
        cohort={"fraction": fraction, "sampling": "poisson"},
        secure_aggregation={"threshold": 1.0} if secure else None,
        privacy={"noise": "reproducible", "delta": 1e-5} | privacy,
        evaluation={"every": rounds, "local": False},
        tracking={"enabled": False},
    )
    setup = prepare(experiment)
    (plan,) = setup.privacy.values()
    (result,) = simulate(experiment).methods.values()
    weights = np.zeros((2, clients))
    for k in range(result.trained.num_clusters):
        first = setup.network().new_model(seed, k)[: weights.size].reshape(weights.shape)
        weights += (result.state_dict(k)["1.weight"] - first).double().numpy()
    score_M = (weights[1] - weights[0]) * np.where(np.arange(clients) % 2, 1, -1)
    order = np.argsort(score_M)
    half = guesses // 2
    right = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
    return {
        "claim": result.final["epsilon"],
        "bound": lower_bound(clients, 2 * half, right, plan.delta),
        "right": right,
        "guesses": 2 * half,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--break-clipping", action="store_true", help="uploads are not clipped")
    if parser.parse_args().break_clipping:
        reduce.clip_together = lambda clip, changes: True
    for method in ("fedavg", {"ifca": {"num_clusters": 2}}):
        for fraction in (1.0, 0.3):
            for z in (0.5, 1.0, 4.0):
                found = audit(method, fraction=fraction, noise_multiplier=z)
                print(
                    method, f"q {fraction}, z {z}:", {key: round(value, 3) for key, value in found.items()}, flush=True
                )


if __name__ == "__main__":
    main()
