"""FL-bench's servers with one thing after another as in the papers: subclasses that are made in memory."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Server = type[Any]  # of theirs, with the class of its worker, which plays all clients, as `client_cls`


def of_worker(server: Server, **functions: Callable[..., Any]) -> Server:
    """The server whose worker has these functions in the place of its own."""
    worker = type("Worker", (server.client_cls,), functions)
    return type("Mended", (server,), {"client_cls": worker})


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def first_heads(server: Server) -> Server:
    """The server of FedPer or FedRep whose clients begin with the first head; as it is, with an average of heads."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def init_model(self, *given: Any, **named: Any) -> None:
            super().init_model(*given, **named)
            self.first_head = {k: v.clone() for k, v in self.public_model_params.items() if "classifier" in k}

        def get_client_model_params(self, client_id: int) -> dict[str, Any]:
            found: dict[str, Any] = super().get_client_model_params(client_id)
            if not found["personal_model_params"]:
                found["regular_model_params"].update(copied(self.first_head))
            return found

    return Mended


def w_in_one_step(server: Server) -> Server:
    """APFL's server whose w_i takes one step on a batch; as it is, the step of v_i repeats that of w_i."""

    def made(worker: Any, **given: Any) -> None:
        server.client_cls.__init__(worker, **given)
        step = worker.optimizer.step

        def stepped() -> None:
            step()
            for part in worker.model.parameters():
                part.grad = None

        worker.optimizer.step = stepped

    return of_worker(server, __init__=made)


def mixed_parameters(server: Server) -> Server:
    """The same, and parameters are mixed; as it is, outputs."""

    def mixture(worker: Any) -> dict[str, Tensor]:
        w, alpha = dict(worker.model.named_parameters()), worker.alpha
        return {k: alpha * v + (1 - alpha) * w[k].detach() for k, v in worker.local_model.named_parameters()}

    def fit(worker: Any) -> None:
        worker.model.train()
        for _ in range(worker.local_epoch):
            for x, y in worker.trainloader:
                if len(x) > 1:
                    worker.optimizer.zero_grad()
                    for outputs in (worker.model(x), functional_call(worker.model, mixture(worker), (x,))):
                        worker.criterion(outputs, y).backward()
                    worker.optimizer.step()

    def evaluate(worker: Any) -> Any:
        mixed = deepcopy(worker.model)
        mixed.load_state_dict(mixture(worker))
        return super(server.client_cls, worker).evaluate(mixed)

    return of_worker(server, fit=fit, evaluate=evaluate)


def stored_theta(server: Server) -> Server:
    """The server of pFedMe that stores theta_i; as it is, the first model stays."""

    def fit(worker: Any) -> None:
        server.client_cls.fit(worker)
        worker.personalized_params_dict = copied(worker.model.state_dict())

    class Mended(of_worker(server, fit=fit)):  # type: ignore[misc]
        def aggregate_client_updates(self, packages: dict[int, Any]) -> None:
            super().aggregate_client_updates(packages)
            for client, package in packages.items():
                self.clients_personalized_model_params[client] = package["personalized_model_params"]

    return Mended


def theta_of_the_paper(server: Server) -> Server:
    """The same, and theta_i begins a batch as w_i; as it is, it goes on from the last batch."""
    server = stored_theta(server)

    def fit(worker: Any) -> None:
        passes = count()

        def restart(model: nn.Module, _: Any) -> None:
            if model.training and next(passes) % worker.args.pfedme.k == 0:
                for theta, w in zip(model.parameters(), worker.local_parameters, strict=True):
                    theta.data = w.detach().clone()

        hook = worker.model.register_forward_pre_hook(restart)
        server.client_cls.fit(worker)
        hook.remove()

    return of_worker(server, fit=fit)


def own_weights(server: Server) -> Server:
    """FedALA's server whose clients have weights W and a local model each; as it is, those of the worker."""

    class Worker(server.client_cls):  # type: ignore[misc, name-defined]
        kept: dict[int, tuple[Any, bool, Any]]

        def set_parameters(self, package: dict[str, Any]) -> None:
            first = package["regular_model_params"]
            self.kept = getattr(self, "kept", {})
            self.weights, self.start_phase, state = self.kept.get(package["client_id"], (None, True, first))
            self.model.load_state_dict(state)
            if package["client_id"] in self.kept:
                super().set_parameters(package)
            else:  # in its first round a client begins with the received model
                self.client_id, self.local_epoch = package["client_id"], package["local_epoch"]
                self.load_data_indices()
            if self.testing is False and package["client_id"] in self.kept:
                self.kept[self.client_id] = (self.weights, self.start_phase, state)

        def train(self, package: dict[str, Any]) -> Any:
            result = super().train(package)
            self.kept[self.client_id] = (self.weights, self.start_phase, copied(self.model.state_dict()))
            return result

    return type("Mended", (server,), {"client_cls": Worker})


def received(server: Server) -> Server:
    """FedRoD's server whose clients load the average; as it is, its names are not theirs, and nothing is loaded."""

    def set_parameters(worker: Any, package: dict[str, Any]) -> None:
        server.client_cls.set_parameters(worker, package)
        worker.model.generic_model.load_state_dict(package["regular_model_params"])

    return of_worker(server, set_parameters=set_parameters)


def with_both_heads(server: Server) -> Server:
    """The same, and clients predict with g + p; p starts as g, and moves neither g nor the body."""
    server = received(server)

    def made(worker: Any, **given: Any) -> None:
        server.client_cls.__init__(worker, **given)
        worker.model.forward = partial(forward, worker.model)

    def forward(model: Any, x: Tensor) -> Any:
        features = model.generic_model.base(x)
        generic = model.generic_model.classifier(features)
        both = generic.detach() + model.personalized_classifier(features.detach())
        return (generic, both) if model.training else both

    def set_parameters(worker: Any, package: dict[str, Any]) -> None:
        server.client_cls.set_parameters(worker, package)
        if not package["personal_model_params"]:  # as it is: those of the client that the worker played before
            generic = worker.model.generic_model.classifier
            worker.model.personalized_classifier.load_state_dict(generic.state_dict())

    return of_worker(server, __init__=made, set_parameters=set_parameters)


def with_c_local(server: Server) -> Server:
    """SCAFFOLD's server that stores the new c_i of the clients; as it is, they stay 0."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def aggregate_client_updates(self, packages: dict[int, Any]) -> None:
            super().aggregate_client_updates(packages)
            for client, package in packages.items():
                pairs = zip(self.c_local[client], package["c_delta"], strict=True)
                self.c_local[client] = [c + delta for c, delta in pairs]

    return Mended
