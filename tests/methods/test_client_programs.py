"""Client programs of a user's own file, those of docs/extend/client_program.md among them, by engine and by formula."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, protected
from plain import ALL, LOCAL, SIZES, Torch, stage
from rounds import assert_survives_an_interruption
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from cfl_ray import Experiment, Proximal, simulate
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.aggregation.rules import Median
from cfl_ray.core.clients import ClientProgram, ClientState, LocalTraining, UpdateFeatures
from cfl_ray.core.exchange import Sent
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.serving import Serving
from cfl_ray.core.versions import NotAsynchronous, Received, Versions
from cfl_ray.engine.engines import chunk_size
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.privacy.noisy_sums import Noise, Privacy, PrivateRun
from cfl_ray.runtime.evaluation import Evaluator
from cfl_ray.setup.dry_rounds import DryRounds, load_of

PAGE = (Path(__file__).parents[2] / "docs" / "extend" / "client_program.md").read_text()
ENGINES = ["sequential", "vectorised"]


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Returns the module of a file that the page shows."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(name: str) -> ModuleType:
        (source,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", PAGE, re.S)
        (tmp_path / f"{name}.py").write_text(source)
        found = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found)
        exec(compile(source, str(tmp_path / f"{name}.py"), "exec"), vars(found))
        return found

    return module


def test_clients_are_trained_together():
    """A vmap batch of one client would be trained by `sequential`."""
    assert chunk_size(len(SIZES), "vectorised") == 2


class TestScaffold:
    def by_torch(self, one: Stage, cohorts) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        """(w, c, c_i) by Algorithm 1 of the paper, option II."""
        clients, w = Torch(one), one.model()
        c, own = torch.zeros_like(w), {i: torch.zeros_like(w) for i in range(len(SIZES))}
        for round, cohort in enumerate(cohorts, 1):
            models, changes = [], []
            for i in cohort:
                y, steps = w.clone(), 0
                for index_B in clients.batches(i, round):
                    y, steps = y - LOCAL.lr * (clients.gradient(y, i, index_B) - own[i] + c), steps + 1
                new = own[i] - c + (w - y) / (steps * LOCAL.lr)
                models.append(y)
                changes.append(new - own[i])
                own[i] = new
            w = torch.stack(models).mean(0)
            c = c + len(cohort) / len(SIZES) * torch.stack(changes).mean(0)
        return w, c, own

    @pytest.mark.parametrize("engine", ["sequential", "vectorised", "manual"])
    def test_is_algorithm_1(self, engine, shown):
        one, cohorts = stage(engine), [ALL, [0, 2, 3, 4, 7], [1, 2, 3, 5, 6, 7]]
        state = one.play(shown("scaffold").Scaffold(), *cohorts)
        w, c, own = self.by_torch(one, cohorts)
        assert close(state.models_KP[0], w, 2e-5) and close(state.c_KP[0], c, 2e-5)
        assert c.abs().max() > 0.01 and set(one.client_states) == {("Corrected", i) for i in ALL}
        assert all(close(one.client_states["Corrected", i], own[i], 2e-5) for i in ALL)

    def test_two_rows_go_each_way(self, shown):
        one = stage("vectorised")
        one.play(shown("scaffold").Scaffold(), [0, 2])
        row = 32 * one.network.spec.size * 2
        assert (one.stats.traffic.down_bits, one.stats.traffic.up_bits) == (2 * row, 2 * row)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_survives_an_interruption(self, engine, shown, tmp_path):
        cohorts = [[0, 1, 2, 3, 5], [1, 2, 4, 6, 7], [0, 2], ALL]
        method = shown("scaffold").Scaffold()
        assert_survives_an_interruption(lambda: stage(engine), method, cohorts, tmp_path / "checkpoints")

    def test_runs_from_a_file_on_both_engines(self, shown, tmp_path):
        shown("scaffold")
        found = []
        for engine in ENGINES:
            settings = {"rounds": 3, "data": {"partition": {"clients": 12}}, "tracking": {"enabled": False}}
            method = f"{tmp_path}/scaffold.py:Scaffold"
            results = simulate(Experiment(methods=["fedavg", method], runtime={"engine": engine}, **settings))
            found.append([results[name].final["train_loss"] for name in ("fedavg", "scaffold")])
        assert np.allclose(*found, rtol=1e-4) and abs(found[0][0] - found[0][1]) > 1e-3

    @pytest.mark.parametrize("engine", ENGINES)
    def test_keeps_a_momentum_buffer_behind_its_numbers(self, engine, shown):
        """With c = c_i = 0 in the first round, the corrected training is the plain one, and so is its buffer."""
        one = stage(engine, momentum=0.9, persist=True)
        clients, w = one.clients(), one.model()[None]
        sent, c = clients.send(w), clients.send(torch.zeros_like(w))
        how = LocalTraining(program=shown("scaffold").Corrected(), given={"c": c})
        clients.train(sent, how=how, average=clients.weights())
        plain = stage(engine, momentum=0.9, persist=True)
        plain.clients().train(plain.clients().send(w), average=np.ones(len(SIZES)))
        for i in ALL:
            kept, buffer = one.client_states["Corrected", i], plain.client_states["momentum", i]
            assert len(kept) == 2 * len(buffer) and close(kept[len(buffer) :], buffer, 1e-5)


class TestContrastive:
    @pytest.mark.parametrize("engine", ENGINES)
    def test_is_the_loss_of_the_paper(self, engine, shown):
        one, method, cohorts = stage(engine), shown("moon").Moon(), [ALL, [0, 2, 3, 4, 7]]
        state = one.play(method, *cohorts)
        clients, w, previous = Torch(one), one.model(), {}
        for round, cohort in enumerate(cohorts, 1):
            for i in cohort:
                y, before = w.clone(), previous.get(i, w)
                for index_B in clients.batches(i, round):
                    near, far = (clients.features(model, i, index_B) for model in (w, before))

                    def contrast(features, loss):
                        cosines = [cosine_similarity(features, other) / 0.5 for other in (near, far)]
                        return loss - (cosines[0].exp() / sum(map(torch.exp, cosines))).log().mean()

                    y = y - LOCAL.lr * clients.gradient(y, i, index_B, contrast)
                previous[i] = y
            sizes = torch.tensor([float(SIZES[i]) for i in cohort])
            w = (sizes / sizes.sum()) @ torch.stack([previous[i] for i in cohort])
        assert close(state.models_KP[0], w, 2e-5)
        assert all(close(one.client_states["previous", i], previous[i], 2e-5) for i in ALL)
        assert not close(state.models_KP[0], stage(engine).play(FedAvg(), *cohorts).models_KP[0], 1e-3)

    def test_engines_agree_with_batch_statistics(self, shown):
        """Equal sizes, as these need; the models of the pass have their own statistics."""
        states = [stage(engine, with_batch_norm, [8] * 8).play(shown("moon").Moon(), ALL, ALL) for engine in ENGINES]
        assert close(states[0].models_KP, states[1].models_KP, 2e-5)


@dataclass(frozen=True)
class Mixed(ClientProgram):
    """Training starts from a mixture, number by number, of the received and the kept model, whose weights are kept."""

    kept_model: ClassVar = "own"

    def keeps(self, spec):
        return {"share": torch.full((spec.size,), 0.5)}

    def reports(self, spec):
        return {"mean": 1, "seen": 2}

    def begin(self, client, start_P, held):
        held["share"] = (held["share"] + 0.1 * (held["own"] - start_P).sign()).clamp(0, 1)
        return start_P.lerp(held["own"], held["share"])

    def finish(self, client, start_P, row_P, held):
        held["mean"], held["seen"] = held["share"].mean(), torch.tensor([len(client.y), client.steps])


@dataclass(frozen=True)
class OwnHead(ClientProgram):
    """A second last layer of the client, trained by its own cross-entropy on the features of the first model."""

    lr: float
    moves: ClassVar = ("head",)
    only_tensors: ClassVar = True

    def keeps(self, spec):
        return {"head": torch.zeros(3, 5)}

    def step(self, gradient, w, held, number):
        seen = gradient.forward(w, 0)
        error = (seen.features @ held["head"].mT).softmax(-1) - nn.functional.one_hot(seen.y, 3)
        error = error * (seen.real_B / seen.real_B.sum(-1, keepdim=True))[..., None]
        held["head"].sub_(self.lr * error.mT @ seen.features)
        return gradient(w, 0)


class TestHooks:
    def train(self, engine: str, program: ClientProgram, rounds: int = 1, **how):
        """(updates, stage) after some rounds with a client state."""
        one = stage(engine)
        for round in range(1, rounds + 1):
            clients = one.clients(round=round)
            sent = clients.send(torch.stack([one.model(round)]))
            updates = clients.train(
                sent,
                client_state=ClientState("own", private=False),
                how=LocalTraining(program=program, **how),
                average=clients.weights(),
            )
        return updates, one

    @pytest.mark.parametrize("engine", ENGINES)
    def test_begin_starts_from_a_mixture(self, engine):
        updates, one = self.train(engine, Mixed(), rounds=2)
        plain = stage(engine)
        clients = plain.clients(round=1)
        clients.train(
            clients.send(plain.model(1)[None]),
            client_state=ClientState("own", private=False),
            average=np.ones(len(SIZES)),
        )
        rows, received = [], plain.model(2)
        for i in ALL:
            share = 0.5 + 0.1 * (plain.client_states["own", i] - received).sign()
            rows.append(received.lerp(plain.client_states["own", i], share))
            assert close(one.client_states["own", i][-len(share) :], share, 1e-6)
            assert updates.reported("mean")[i].item() == pytest.approx(share.mean().item(), rel=1e-5)
        clients = plain.clients(round=2)
        features = UpdateFeatures(plain.network.spec.all)
        expected = clients.train(clients.send(torch.stack(rows), np.arange(len(SIZES))), features=features).features_MF
        size = plain.network.spec.size
        found = torch.stack([one.client_states["own", i][:size] for i in ALL])
        assert close(found, expected, 2e-5)
        steps = LOCAL.steps_of(np.array(SIZES))
        assert updates.reported("seen").tolist() == [[n, k] for n, k in zip(SIZES, steps)]
        assert one.stats.traffic.up_bits == 32 * len(SIZES) * (size + 3)

    def test_a_pass_of_the_present_model_in_a_step(self):
        heads = []
        for engine in ENGINES + ["manual"]:
            _, one = self.train(engine, OwnHead(0.5))
            heads.append(torch.stack([one.client_states["own", i][-15:] for i in ALL]))
        assert close(heads[0], heads[1], 1e-5) and close(heads[0], heads[2], 1e-5)
        one, (clients, expected) = stage("sequential"), (Torch(stage("sequential")), [])
        for i in ALL:
            w, head, (_, y) = one.model(1), torch.zeros(3, 5), one.federation.train(i)
            for index_B in clients.batches(i, 1):
                head.requires_grad_()
                loss = cross_entropy(clients.features(w, i, index_B) @ head.T, y[index_B])
                head = (head - 0.5 * torch.autograd.grad(loss, head)[0]).detach()
                w = w - LOCAL.lr * clients.gradient(w, i, index_B)
            expected.append(head.reshape(-1))
        assert close(heads[0], torch.stack(expected), 1e-5) and heads[0].abs().max() > 0.01

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_client_whose_numbers_are_not_finite_is_excluded(self, engine):
        @dataclass(frozen=True)
        class Spoiled(ClientProgram):
            def uploads(self, spec):
                return {"sum": 2}

            def finish(self, client, start_P, row_P, held):
                held["sum"] = torch.tensor([1.0, len(client.y) if len(client.y) > 4 else torch.inf])

        updates, one = self.train(engine, Spoiled())
        assert updates.valid_M.tolist() == [size > 4 for size in SIZES]
        others = np.array([size for size in SIZES if size > 4])
        expected = torch.tensor([[1.0, (others * others).sum() / others.sum()]])  # by samples
        assert close(updates.uploaded("sum", torch.zeros(1, 2)), expected, 1e-6)
        assert "its sum has numbers that are not finite" in one.stats.excluded[1].reason

    @pytest.mark.parametrize(
        "hook, returned, message",
        [
            ("begin", 3, "begin returned int 3, expected a row of 53 numbers"),
            ("loss", torch.ones(2), r"loss returned Tensor of float32 and shape \(2,\), expected one number"),
            ("step", torch.ones(2), r"step returned Tensor .* expected a direction of shape \(53,\)"),
            ("finish", None, r"after finish, held\['a'\] is None, declared are 2 numbers"),
        ],
    )
    def test_results_of_another_shape_are_errors(self, hook, returned, message):
        own = type("Own", (ClientProgram,), {hook: lambda self, *_: returned})
        if hook == "finish":
            own.uploads = lambda self, spec: {"a": 2}
        with pytest.raises(RunError, match=message):
            self.train("sequential", own())

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("hook", ["step", "loss", "begin", "finish"])
    def test_an_error_in_a_hook_names_the_line(self, hook, engine, shown, tmp_path):
        (tmp_path / "mine.py").write_text(
            "from cfl_ray import ClientProgram\n\n\nclass Mine(ClientProgram):\n"
            f"    def {hook}(self, *arguments):\n        return arguments['c']\n"
        )
        mine = __import__("mine")
        with pytest.raises(RunError, match=rf"{hook} .*line 6|in {hook} failed: TypeError: .*line 6"):
            self.train(engine, mine.Mine())
        del sys.modules["mine"]

    def test_a_loss_without_a_batching_rule_says_what_to_do(self):
        class Branching(ClientProgram):
            def loss(self, batch, held):
                return batch.loss * 2 if batch.loss > 1 else batch.loss

        with pytest.raises(RunError, match="(?s)Branching .* in loss failed: .*; set one_by_one = True"):
            self.train("vectorised", Branching())

    @pytest.mark.parametrize(
        "hook, returned, message",
        [
            ("keeps", None, "keeps returned None, expected a dict of first values by name"),
            ("keeps", {"a": "x"}, "keeps returned str 'x' as 'a', expected numbers"),
            ("uploads", {"a": torch.zeros(3)}, "uploads returned Tensor .* as 'a', expected a length"),
            ("uploads", ["a"], "uploads returned list of 1, expected a dict of lengths by name"),
            ("reports", {"a": 2.5}, "reports returned float 2.5 as 'a', expected a length"),
            ("reports", {"a": -1}, "reports returned int -1 as 'a', expected a length"),
        ],
    )
    def test_declarations_of_another_type_are_errors(self, hook, returned, message):
        with pytest.raises(RunError, match=message):
            self.train("sequential", type("Own", (ClientProgram,), {hook: lambda self, spec: returned})())

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize(
        "hook, function, message",
        [
            ("loss", lambda self, batch, held: batch.loss.detach(), "loss returned a constant"),
            ("loss", lambda self, batch, held: batch.outputs.argmax(), "loss returned a constant"),
            ("loss", lambda self, batch, held: held.update(n=batch.loss) or batch.loss, r"loss changed held\['n'\]"),
            ("loss", lambda self, batch, held: held.update(q=batch.loss) or batch.loss, r"loss changed held\['q'\]"),
            (
                "loss",
                lambda self, batch, held: batch.loss * held["q"],
                "KeyError: 'q' .*; held has given, n: ",
            ),
            (
                "step",
                lambda self, gradient, w, *_: w.sub_(gradient(w, 0)),
                "step changed w in place; return the",
            ),
            (
                "loss",
                lambda self, batch, held: batch.forward("other").outputs.sum(),
                "forward of 'other', .* are 'given'",
            ),
            ("step", lambda self, gradient, w, *_: w, "step did not call gradient"),
            ("step", lambda self, gradient, w, *_: gradient(w, 1), "batch 1 in step, which has batches 0 .. 0"),
            ("step", lambda self, gradient, w, *_: gradient(w, -1), "batch -1 in step"),
            ("step", lambda self, gradient, w, *_: gradient.forward("other", 0), "forward of 'other'"),
        ],
    )
    def test_misused_hooks_are_errors_on_both_engines(self, engine, hook, function, message):
        """Each of them gave other results by engine, or a plain zero gradient, without a word."""
        one = stage(engine)
        given = {"given": one.clients().send(one.model()[None]), "n": np.ones(len(SIZES))}
        with pytest.raises(RunError, match=message):
            self.train(engine, type("Own", (ClientProgram,), {hook: function})(), given=given)

    def test_a_hook_with_other_arguments_is_refused_with_its_signature(self):
        own = type("Own", (ClientProgram,), {"loss": lambda self, batch: batch.loss})()
        with pytest.raises(ConfigError, match=r"is called with batch, held: too many .*; it takes \(batch\)$"):
            LocalTraining(program=own)
        with pytest.raises(TypeError, match=r"proximal must be a list, \[Proximal\(mu, anchor\)\], got Proximal"):
            LocalTraining(proximal=Proximal(0.1, None))

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize(
        "value",
        [2.5, np.float64(2.5), [2.5], torch.tensor(2.5, dtype=torch.float64), torch.tensor([2.5]).requires_grad_()],
    )
    def test_numbers_of_any_type_are_reported(self, engine, value):
        own = {"reports": lambda self, spec: {"a": 1}, "finish": lambda self, *rest: rest[-1].update(a=value)}
        updates, _ = self.train(engine, type("Own", (ClientProgram,), own)())
        assert updates.reported("a").tolist() == [[2.5]] * len(SIZES)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_begin_may_return_doubles(self, engine):
        own = type("Own", (ClientProgram,), {"begin": lambda self, client, start_P, held: start_P.double()})
        found, plain = (
            self.train(engine, program)[0].averaged(torch.zeros(1, 53)) for program in (own(), ClientProgram())
        )
        assert torch.equal(found, plain)

    def test_numbers_of_different_shapes_are_left_to_sequential(self):
        class Labels(ClientProgram):
            def begin(self, client, start_P, held):
                held["seen"] = client.y.float()
                return start_P

            def step(self, gradient, w, held, number):
                return gradient(w, 0) * held["seen"].sum()

        found = [self.train(engine, Labels()) for engine in ENGINES]
        assert close(*(updates.averaged(torch.zeros(1, 53)) for updates, _ in found), 1e-5)
        assert any("numbers of different shapes" in line for line in found[1][0].outcome.fallbacks)

    @pytest.mark.parametrize("before, after", [(3, 5), (5, 3)])
    def test_kept_numbers_of_another_length_are_an_error(self, before, after):
        one = stage("sequential")
        for length in (before, after):
            own = type("Own", (ClientProgram,), {"keeps": lambda self, spec, n=length: {"a": torch.zeros(n)}})
            clients = one.clients()
            how, sent = LocalTraining(program=own()), clients.send(one.model()[None])
            if length == before:
                clients.train(sent, how=how)
        with pytest.raises(RunError, match=f"keeps {before} numbers under 'Own', but .* now keeps {after}"):
            clients.train(sent, how=how)

    @pytest.mark.parametrize(
        "attribute, value", [("moves", "own"), ("batches_per_step", 0), ("batches_per_step", 2.0), ("kept_model", None)]
    )
    def test_class_attributes_are_checked(self, attribute, value):
        with pytest.raises(TypeError, match=f"Own: {attribute} is {value!r}, expected"):
            LocalTraining(program=type("Own", (ClientProgram,), {attribute: value})())

    def test_a_program_of_tensors_alone_can_be_hashed(self):
        """A GPU finds the recorded steps by the program."""
        with pytest.raises(TypeError, match="OwnHead.* only_tensors = True needs fields that can be hashed"):
            LocalTraining(program=OwnHead([0.1]))

    def test_names_that_hide_others_are_errors(self):
        keeps = type("Own", (ClientProgram,), {"keeps": lambda self, spec: {"a": torch.zeros(2)}})
        with pytest.raises(ValueError, match=r"keeps numbers named \['a'\], which are also names of given"):
            self.train("sequential", keeps(), given={"a": np.ones(len(SIZES))})
        one = stage("sequential")
        clients = one.clients()
        with pytest.raises(ValueError, match="Mixed.* has kept_model = 'own': pass the client state"):
            clients.train(clients.send(one.model()[None]), how=LocalTraining(program=Mixed()))
        with pytest.raises(TypeError, match="given 'a' is dict {}, expected models"):
            self.train("sequential", ClientProgram(), given={"a": {}})

    def test_wrong_arguments_are_named(self):
        with pytest.raises(TypeError, match="program must be an object of a subclass of ClientProgram, got type"):
            LocalTraining(program=OwnHead)
        with pytest.raises(ValueError, match=r"given 'z' has the shape \(2, 5\), expected one entry for each of 8"):
            self.train("sequential", ClientProgram(), given={"z": np.zeros((2, 5))})

    def test_a_loss_that_branches_is_left_to_sequential(self):
        @dataclass(frozen=True)
        class Branching(ClientProgram):
            one_by_one: ClassVar = True

            def loss(self, batch, held):
                return batch.loss * 2 if batch.loss > 1 else batch.loss

        found = [self.train(engine, Branching())[0].averaged(torch.zeros(1, 53)) for engine in ENGINES]
        assert close(*found, 1e-6)
        updates, _ = self.train("vectorised", Branching())
        assert any("a loss that branches on values" in line for line in updates.outcome.fallbacks)


@dataclass(frozen=True)
class Sum(ClientProgram):
    def uploads(self, spec):
        return {"sum": spec.size}

    def finish(self, client, start_P, row_P, held):
        held["sum"] = row_P


class TestUploads:
    @dataclass(frozen=True)
    class Two(ClientProgram):
        def uploads(self, spec):
            return {"count": 1}

        def reports(self, spec):
            return {"size": 1}

        def finish(self, client, start_P, row_P, held):
            held["count"] = held["size"] = torch.tensor([float(len(client.y))])

    def test_are_averaged_by_output_row(self):
        one = stage("vectorised")
        clients = one.clients()
        weight_RM = np.zeros((3, len(SIZES)))
        weight_RM[0, [0, 2]], weight_RM[1, 1] = [1, 3], 1
        sent = clients.send(one.model()[None])
        updates = clients.train(sent, how=LocalTraining(program=self.Two()), average=weight_RM)
        expected = torch.tensor([[(9 + 3 * 14) / 4], [4.0], [-1.0]])
        assert close(updates.uploaded("count", torch.full((3, 1), -1.0)), expected, 1e-6)
        plain = clients.train(sent, average=weight_RM)
        default = one.model()[None].repeat(3, 1)
        assert len(updates.averaged(default)) == 3 and len(plain.averaged(default)) == 3
        with pytest.raises(ValueError, match="only \\['count'\\]"):
            updates.uploaded("other", default)
        with pytest.raises(ValueError, match="rows of 2 numbers, not 1"):
            updates.uploaded("count", torch.zeros(3, 2))

    def test_are_refused_where_the_server_may_not_read_them(self):
        one = stage("sequential")
        noise = PrivateRun(Privacy(1.0, 1.0, 3.0), Noise(b"key"))
        clients = protected(one.clients(), noise=noise)
        for program, values in ((self.Two(), "the size that clients report"), (Sum(), "the sum that clients upload")):
            with pytest.raises(PrivacyError, match=values):
                clients.train(
                    clients.send(one.model()[None]), how=LocalTraining(program=program), average=np.ones(len(SIZES))
                )
        secure = protected(one.clients(), masks=SecureAggregation(clip=1.0))
        with pytest.raises(PrivacyError, match="the sum that clients upload"):
            secure.train(secure.send(one.model()[None]), how=LocalTraining(program=Sum()), average=np.ones(len(SIZES)))
        versions = Received(Versions(strict=True), dict.fromkeys(ALL, 0), 0)
        late = replace(one.clients(), received=versions)
        with pytest.raises(NotAsynchronous, match="its clients upload sum beside their models"):
            late.train(
                Sent(one.model()[None], np.zeros(len(SIZES), int)),
                how=LocalTraining(program=Sum()),
                average=np.ones(len(SIZES)),
            )

    def test_need_an_average_and_the_mean(self):
        one = stage("sequential")
        clients, how = one.clients(), LocalTraining(program=self.Two())
        with pytest.raises(ValueError, match="pass `average`"):
            clients.train(clients.send(one.model()[None]), how=how)
        robust = one.clients(aggregation=Median())
        with pytest.raises(ConfigError, match="which only the mean averages"):
            robust.train(robust.send(one.model()[None]), how=how, average=np.ones(len(SIZES)))


def test_a_program_sees_its_class_attributes_not_names_of_engines():
    """Engines ask a program for its `needs`; hooks that are not overridden need nothing."""
    assert ClientProgram().needs == set()
    assert {need.name for need in OwnHead(0.1).needs} == {"STEP"}
    assert {need.name for need in ClientProgram(trace=2).needs} == {"TRACE"}


def averaging(program: ClientProgram):
    """FedAvg whose clients run the program."""

    @dataclass(frozen=True)
    class Own(FedAvg, name="own"):
        def round(self, state, clients, rng):
            how = LocalTraining(program=program)
            updates = clients.train(clients.send(state.models_KP), how=how, average=clients.weights())
            return state.advance(models_KP=updates.averaged(default=state.models_KP))

    return Own()


class Weighing(ClientProgram):
    def weigh(self, client, loss_nK, held):
        return loss_nK


class Contrasting(ClientProgram):
    def loss(self, batch, held):
        return batch.loss + sum(batch.forward(name).outputs.mean() for name in ("a", "b"))


@pytest.mark.parametrize(
    "program, gradients, forwards, tests",
    [
        (ClientProgram(), 1, 0, 0),
        (OwnHead(0.1), 1, 1, 0),
        (Contrasting(), 1, 2, 0),
        (Weighing(), 1, 0, 1),  # a pass over all samples, whose losses weigh them
    ],
)
def test_the_plan_counts_the_passes_of_a_step(program, gradients, forwards, tests):
    """Of a step without training, on ones; forward passes of its batches are tests."""

    one = stage("sequential")
    load = load_of(DryRounds(averaging(program), 4, 4, LOCAL, one.network.spec, one.federation.shape, size=8))
    assert (load.trainings, load.tests) == (gradients, LOCAL.epochs * forwards + tests)


class TestPredicts:
    """The model that a client predicts with is a function of what it receives and keeps."""

    def served(self, predicts, ids=(0, 1)) -> tuple[np.ndarray, Stage]:
        """Scores of a model with which client 0 alone keeps another, and the stage."""
        one = stage("sequential")
        clients, w = one.clients([0]), one.model()[None]
        clients.train(clients.send(w), client_state=ClientState("own", predicts=predicts))
        state = ClientState("own", predicts=predicts)
        evaluator = Evaluator(EvaluationConfig(local_samples=10**6), one.federation, one.backend, one.seed)
        clients = one.clients(ids)
        return evaluator.scores(Serving(one.model(1)[None], clients.first_row(), client_state=state), clients), one

    def test_a_function_of_both_models_and_of_the_data(self):
        def difference(received_P, value):
            return received_P - value

        def scaled(received_P, value, client):
            return len(client.y) * client.loss(received_P) * received_P

        scaled.reads_data = True
        for predicts in (difference, scaled):
            found, one = self.served(predicts)
            received_P, kept_P = one.model(1), one.client_states["own", 0]
            x, y = one.federation.train(0)
            clients = Torch(one)
            clients.load(received_P)
            loss = cross_entropy(clients.module(x), y).item()
            row_P = received_P - kept_P if predicts is difference else len(y) * loss * received_P
            for client, row in ((0, row_P), (1, received_P)):  # client 1 keeps none
                clients.load(row)
                x, y = one.federation.test(client)
                with torch.no_grad():
                    assert found[client, -1] == pytest.approx(cross_entropy(clients.module(x), y).item(), rel=1e-4)

    @pytest.mark.parametrize("wrong", [None, torch.zeros(3), [1.0]])
    def test_what_is_no_row_is_named(self, wrong):
        with pytest.raises(
            RunError, match="predicts of the client state 'own' returned .*, expected a row of 53 numbers"
        ):
            self.served(lambda received_P, value: wrong)


class TestTorchScript:
    def run(self, program: ClientProgram):
        model = {"name": scripted}
        settings = {"rounds": 1, "data": {"partition": {"clients": 6}}, "tracking": {"enabled": False}}
        return simulate(Experiment(methods=[averaging(program)], model=model, **settings))

    @pytest.mark.parametrize(
        "hook, function",
        [
            ("loss", lambda self, batch, held: batch.features.sum()),
            ("step", lambda self, gradient, w, *_: gradient.forward(w, 0) and gradient(w, 0)),
            ("finish", lambda self, client, start_P, row_P, held: client.features(row_P)),
        ],
    )
    def test_features_are_refused_at_the_start(self, hook, function):
        with pytest.raises(ConfigError, match="own: the inputs of the last layer .* TorchScript does not show"):
            self.run(type("Own", (ClientProgram,), {hook: function})())

    def test_other_programs_train(self):
        program = type("Own", (ClientProgram,), {"step": lambda self, gradient, w, *_: gradient(w, 0)})()
        assert np.isfinite(self.run(program)["own"].final["train_loss"])


def scripted(input_shape, output_shape):
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), output_shape)))


class TestSilentFaults:
    """Mistakes in a program that would have no effect: each is refused with what to do."""

    @dataclass(frozen=True)
    class OtherName(ClientProgram):
        def keeps(self, spec):
            return {"c": torch.zeros(1)}

        def begin(self, client, start_P, held):
            held["scratch"] = torch.ones(1)  # between hooks any name is fine
            return start_P

        def finish(self, client, start_P, row_P, held):
            held["c_i"] = held["c"] + held["scratch"]

    @dataclass(frozen=True)
    class MovesOther(ClientProgram):
        moves = ("C",)

        def step(self, gradient, w, held, number):
            return gradient(w, 0) + held["c"][..., None]

    @dataclass(frozen=True)
    class Negative(ClientProgram):
        def weigh(self, client, loss_nK, held):
            return torch.full_like(loss_nK, -0.25)

    @dataclass(frozen=True)
    class WithoutAxis(ClientProgram):
        def step(self, gradient, w, held, number):
            return gradient(w, 0) * held["c"]

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize(
        "program, message",
        [
            (OtherName(), r"OtherName.*: after finish, held has 'c_i', which keeps, .* \(did you mean 'c'\?\)"),
            (MovesOther(), r"MovesOther.*: moves has 'C', which clients do not hold; valid: c"),
            (Negative(), r"Negative.*weigh returned the weight -0.25 for a sample of client 0; .* at least 0"),
        ],
    )
    def test_are_refused(self, engine, program, message):
        one = stage(engine)
        clients = one.clients()
        how = LocalTraining(program=program)
        if not isinstance(program, self.OtherName):
            how = replace(how, given={"c": np.zeros(len(SIZES), np.float32)})
        with pytest.raises(RunError, match=message):
            clients.train(clients.send(one.model()[None]), how=how, average=clients.weights())

    def test_a_number_of_each_client_needs_an_axis(self):
        one = stage("vectorised")
        clients = one.clients()
        how = LocalTraining(program=self.WithoutAxis(), given={"c": np.ones(len(SIZES), np.float32)})
        with pytest.raises(RunError, match=r"must match.*shape \(m,\): write held\['c'\]\[..., None\]"):
            clients.train(clients.send(one.model()[None]), how=how, average=clients.weights())

    def test_a_program_with_fields_is_a_dataclass(self):
        class Scaled(ClientProgram):
            only_tensors: ClassVar = True
            rate: float

        class OnlyHooks(ClientProgram):
            only_tensors: ClassVar = True

        with pytest.raises(TypeError, match="Scaled declares rate, but is no dataclass; write @dataclass"):
            Scaled(0.1)
        assert OnlyHooks(trace=1).trace == 1


@pytest.mark.parametrize("engine, configured", [("vectorised", True), ("vectorised", False), ("sequential", True)])
def test_clients_that_a_vmap_batch_does_not_take_alone_are_told(engine, configured):
    one = stage(engine)
    one.backend.worker.configured = configured
    clients = one.clients(np.array([0]))
    clients.train(clients.send(one.model()[None]))
    told = engine == "vectorised" and configured
    assert len(clients.stats.fallbacks) == told
    assert all(
        "gives way to sequential for some or all clients: clients of a chunk" in x for x in clients.stats.fallbacks
    )
