"""A user's file is read where a run starts; hosts do its work without it, and the figures are those of one process."""

import pytest

from cfl_ray import load_run, run, simulate
from cfl_ray.errors import RunError

FILE = '''
from dataclasses import dataclass

import half_beside
import numpy as np
import torch

from cfl_ray import ClientProgram, LocalTraining, Method, Serving, State


@dataclass(frozen=True)
class Rounds(ClientProgram):
    """Counts the rounds in which the client took part."""

    def keeps(self, spec):
        return {"rounds": torch.zeros(1)}

    def uploads(self, spec):
        return {"rounds": 1}

    def reports(self, spec):
        return {"rounds": 1}

    def loss(self, batch, held):
        return batch.loss + 0.01 * batch.mean(batch.outputs.square().sum(1))

    def finish(self, client, start_P, row_P, held):
        held["rounds"] = held["rounds"] + 1


@dataclass(frozen=True)
class Described(Method[State], name="described_by_labels"):
    """FedAvg over the clients that have more than one label."""

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        labels_M1, valid_M = clients.describe(number_of_labels)
        weight_M = clients.num_samples_M * (labels_M1[:, 0].numpy() > 1)
        how = LocalTraining(program=Rounds())
        updates = clients.train(clients.send(state.models_KP), how=how, average=weight_M)
        mean_KX = updates.uploaded("rounds", torch.zeros(1, 1))
        assert 1 <= mean_KX <= clients.round and updates.reported("rounds").nanmean() >= 1
        return state.advance(models_KP=updates.averaged(default=state.models_KP) * (1 - mean_KX / 100))

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first_row())


def number_of_labels(client, anchor_P):
    return torch.tensor([len(client.y.unique())])


class Middle:
    def combine(self, values_nF, weight_n):
        return np.median(values_nF, 0)


class Even:
    def weigh(self, squared_nn, weight_n):
        return np.ones(len(weight_n))


class Half(half_beside.Half): ...


def rider(upload_P, start_P, draw, sigma):
    return start_P + sigma * draw.standard_normal(len(start_P))


def turns(clients, round, draw):
    return (clients + round) % 2 == 0


class Wrong:
    def combine(self, values_nF, weight_n):
        return np.full(values_nF.shape[1], np.nan)
'''

BESIDE = """
import numpy as np


class Half:
    def scale(self, distance_n, weight_n):
        return np.full(len(weight_n), 0.5)
"""


@pytest.fixture
def own(tmp_path, experiment):
    file = tmp_path / "own.py"
    (tmp_path / "half_beside.py").write_text(BESIDE)
    file.write_text(FILE)

    def made(*others, **changes):
        rules = [*("Middle", "Even", "Half"), *others]
        return experiment(
            methods=[f"{file}:Described", *({"fedavg": {"aggregation": f"{file}:{name}"}} for name in rules)],
            rounds=2,
            cohort={"fraction": 1.0, "availability": {"kind": f"{file}:turns"}},
            attack={"kind": f"{file}:rider", "fraction": 0.2, "options": {"sigma": 0.1}},
            **changes,
        )

    return made, file


def test_own_parts_travel_to_hosts_and_a_wrong_result_there_names_the_authors_line(own, figures, cluster, tmp_path):
    made, file = own
    expected = figures(simulate(made()))
    assert len(expected) == 4 and len({str(one) for one in expected.values()}) == 4
    with pytest.raises(
        RunError, match=rf"aggregation rule Wrong.combine \({file}, line \d+\) returned nan at position 0 of"
    ):
        run(made("Wrong", runtime={"hosts": 1}), tmp_path / "run")
    found = figures(load_run(tmp_path / "run"))
    assert {label: found[label] for label in expected} == expected
