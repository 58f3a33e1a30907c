"""FedAvg of Flower by its simulation engine, with one Ray actor of one thread per core, which keeps the data.

The strategy is `flwr.serverapp.strategy.FedAvg`; local training is the bare loop's, as the user writes it in Flower.
"""

import os
import time

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.bare import load, module_of, train_client
from benchmarks.peers.common import CORES, Trained, run
from benchmarks.workloads import Workload, first_model, samples_by_client

_kept: dict = {}  # of this actor: the module, and the tensors of all clients


def _client_app(work: Workload) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not _kept:
            torch.set_num_threads(1)
            _kept["module"] = module_of(work)
            _kept["data"] = [torch.from_numpy(array) for array in samples_by_client(work)]
        module, (x, y) = _kept["module"], _kept["data"]
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        client = context.node_config["partition-id"]
        train_client(module, list(module.parameters()), x[client], y[client], work)
        metrics = MetricRecord({"num-examples": work.samples})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


class _Timed(FedAvg):
    """FedAvg that notes when each round ends."""

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return result


def train(work: Workload, rounds: int) -> Trained:
    strategy = _Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients)
    module = module_of(work)
    load(list(module.parameters()), [torch.from_numpy(array) for array in first_model(work)])
    app, results = ServerApp(), []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.ends = [time.perf_counter()]
        results.append(strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=rounds))

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    backend["init_args"] = {"address": "local", "num_cpus": CORES, "include_dashboard": False}
    run_simulation(app, _client_app(work), num_supernodes=work.clients, backend_config=backend)
    seconds = [end - start for start, end in zip(strategy.ends, strategy.ends[1:])]
    return Trained(seconds, [tensor.numpy() for tensor in results[0].arrays.to_torch_state_dict().values()])


if __name__ == "__main__":
    run("Flower", train, ["flwr", "ray", "torch", "numpy"])
