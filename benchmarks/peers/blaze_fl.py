"""FedAvg of BlazeFL: the classes of `blazefl.contrib`, with a pool of one thread per core, its recommended mode.

Data come from a DataLoader per client, as in its examples.
"""

from enum import StrEnum

import torch
from blazefl.contrib import fedavg
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.bare import load, module_of
from benchmarks.peers.common import CORES, Trained, run, timed_rounds
from benchmarks.workloads import Workload, first_model, samples_by_client


class _Model(StrEnum):
    ONLY = "only"


class _Models:
    """Builds the workload's model with the first parameters."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    def select_model(self, model_name: str) -> torch.nn.Module:
        return module_of(self.work)


class _Data:
    """The samples of every client, in memory."""

    def __init__(self, work: Workload) -> None:
        x, y = (torch.from_numpy(array) for array in samples_by_client(work))
        self.shuffle, self.of_client = work.shuffle, [TensorDataset(*samples) for samples in zip(x, y)]

    def get_dataset(self, type_: str, cid: int | None) -> TensorDataset:
        return self.of_client[cid]

    def set_dataset(self, type_: str, cid: int | None, dataset: TensorDataset) -> None:
        self.of_client[cid] = dataset

    def get_dataloader(self, type_, cid, batch_size=None, generator=None) -> DataLoader:
        return DataLoader(self.get_dataset(type_, cid), batch_size, self.shuffle, generator=generator)


def train(work: Workload, rounds: int) -> Trained:
    torch.set_num_threads(1)
    data, models, batch = _Data(work), _Models(work), work.batch or work.samples
    handler = fedavg.FedAvgBaseServerHandler(models, _Model.ONLY, data, rounds, work.clients, 1.0, "cpu", batch, 0)
    load(list(handler.model.parameters()), [torch.from_numpy(array) for array in first_model(work)])
    trainer = fedavg.FedAvgThreadPoolClientTrainer(
        model_selector=models,
        model_name=_Model.ONLY,
        dataset=data,
        device="cpu",
        num_clients=work.clients,
        epochs=work.epochs,
        batch_size=batch,
        lr=work.lr,
        seed=0,
        num_parallels=CORES,
    )

    def one_round() -> None:
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)

    seconds = timed_rounds(one_round, rounds)
    return Trained(seconds, [p.detach().numpy() for p in handler.model.parameters()])


if __name__ == "__main__":
    run("BlazeFL", train, ["blazefl", "torch", "numpy"])
