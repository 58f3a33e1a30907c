"""Augmented samples: what crops and flips are, when they are drawn, and that every engine trains on the same ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn

from cfl_ray.core.augmentation import AUGMENTATIONS, resolve_augmentations
from cfl_ray.core.client_program import ClientProgram
from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine.augmented import augmented, black_of
from cfl_ray.engine.task import HeldByClient, TrainingTask
from cfl_ray.engine.vmap_batches import in_batches, train_alone
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.methods.fedavg import FedAvg

SHAPE = (2, 6, 5)
CROP, FLIP = AUGMENTATIONS.builtin["crop"], AUGMENTATIONS.builtin["flip"]


def images(count):
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1)) + 1


def rolled(x, draw, black, by=1):
    return x.roll(by, -1)


def by_draw(x, draw, black):
    return x + float(draw.random())


def by_torch(x, draw, black):
    return x + torch.rand(())


def test_a_crop_is_a_part_of_the_framed_image():
    x, black = images(200), torch.tensor([-1.0, -2.0])[:, None, None]
    found, framed = CROP(x, np.random.default_rng(0), black, padding=2), torch.empty(200, 2, 10, 9)
    framed[:] = black
    framed[:, :, 2:8, 2:7] = x
    corners = []
    for one, whole in zip(found, framed, strict=True):
        at = [(i, j) for i in range(5) for j in range(5) if torch.equal(one, whole[:, i : i + 6, j : j + 5])]
        assert len(at) == 1
        corners += at
    assert len(set(corners)) == 25  # of 200 draws, each corner is missing with a chance of 0.0003


def test_a_frame_may_mirror_the_image():
    x = images(3)
    found = CROP(x, np.random.default_rng(0), torch.zeros(()), padding=3, padding_mode="reflect")
    row, column = ([*reversed(range(1, 4)), *range(n), *reversed(range(n - 4, n - 1))] for n in SHAPE[1:])
    framed = x[:, :, row][..., column]
    for one, whole in zip(found, framed, strict=True):
        assert any(torch.equal(one, whole[:, i : i + 6, j : j + 5]) for i in range(7) for j in range(7))


def test_a_flip_exchanges_left_and_right_of_half_of_the_images():
    x = images(400)
    found = FLIP(x, np.random.default_rng(0), torch.zeros(()))
    flipped = [torch.equal(one, before.flip(2)) for one, before in zip(found, x, strict=True)]
    assert all(f or torch.equal(one, before) for f, one, before in zip(flipped, found, x, strict=True))
    assert 160 < sum(flipped) < 240


def task(size, steps, augment, y=None, weight_n=None, **local):
    x = images(size)
    y = torch.arange(size) if y is None else y
    program = local.pop("program", ClientProgram())
    local = LocalSGD(augment=resolve_augmentations(augment), **local)
    held = HeldByClient(weight_n=weight_n)
    return TrainingTask(3, torch.zeros(1), x, y, steps, local, Address(5, 2, 1), program, held)


def test_every_epoch_has_samples_of_its_own():
    """Ten samples in batches of four: three batches an epoch, of which the third epoch has one."""
    before = task(10, 7, [by_draw], batch_size=4, weight_n=torch.arange(10.0))
    after = augmented(before)
    assert (after.size, after.copies, len(after.y), after.tail, before.tail) == (10, 3, 30, 3, 3)
    for number, (index, plain) in enumerate(zip(after.batches(), before.batches(), strict=True)):
        assert np.array_equal(index % 10, plain) and set(index // 10) == {number // 3}
        assert torch.equal(after.y[index], before.y[plain])
        assert torch.equal(after.held.weight_n[index], before.held.weight_n[plain])
    shift = (after.x - torch.cat([before.x] * 3)).reshape(3, -1)
    assert len(shift.mean(1).unique()) == 3 and close(shift, shift[:, :1].expand_as(shift), 1e-6)


@pytest.mark.parametrize(
    "batch_size, drop_last, per_step", [(None, False, 1), (4, True, 1), (4, False, 2), (99, False, 1)]
)
def test_batches_are_those_without_augmentation(batch_size, drop_last, per_step):
    class Several(ClientProgram):
        batches_per_step = per_step

    before = task(10, 4, ["flip"], batch_size=batch_size, drop_last=drop_last, program=Several())
    after = augmented(before)
    pairs = list(zip(after.batches(), before.batches(), strict=True))
    assert len(pairs) == 4 * per_step
    epoch = [(np.arange(10) if plain is None else plain, index) for index, plain in pairs]
    assert all(np.array_equal(plain, index % 10) for plain, index in epoch)
    assert after.copies == max(index.max() for _, index in epoch) // 10 + 1


def test_poisson_batches_are_of_the_copy_of_their_epoch():
    before = task(10, 6, ["flip"], batch_size=4, examples=ExampleNoise(1.0, 1.0))
    after = augmented(before)
    for number, (index, plain) in enumerate(zip(after.batches(), before.batches(), strict=True)):
        assert np.array_equal(index - number // 3 * 10, plain)


def test_draws_follow_from_seed_round_exchange_and_client():
    """Also those of PyTorch's generator, which a function of the user draws from."""
    for change in (by_draw, by_torch):
        one = task(4, 2, [change])
        x = augmented(one).x
        torch.manual_seed(9)
        assert torch.equal(x, augmented(one).x)
        assert torch.equal(x[:4], augmented(replace(one, steps=1)).x)
        for other in (
            replace(one, client=4),
            replace(one, address=Address(5, 3, 1)),
            replace(one, address=Address(6, 2, 1)),
        ):
            assert not torch.equal(x, augmented(other).x)
        assert not torch.equal(x[:4], x[4:])


def test_changes_are_applied_in_their_order():
    one = task(3, 1, [{rolled: {"by": 2}}, by_draw])
    found = augmented(one).x - one.x.roll(2, -1)
    assert close(found, found.flatten()[0].expand_as(found), 1e-6)


def test_black_is_what_zero_became():
    federation = uneven([2, 3], SHAPE)
    assert black_of(federation).tolist() == [[[0]], [[0]]]
    federation.normalize = [[0.5, 0.1], [0.25]]
    assert close(black_of(federation), torch.tensor([-2.0, -0.4])[:, None, None], 1e-6)
    federation.normalize = [[0.5], [0.25]]
    assert black_of(federation).flatten().tolist() == [-2.0, -2.0]
    assert black_of(uneven([2], (5,))) is None


def test_clients_are_augmented_as_they_are_trained():
    """Those that wait for a batch hold their own samples alone."""
    network, tasks = (
        Stage(uneven([4], SHAPE), lambda: nn.Linear(5, 3)).network,
        [task(4, 2, ["flip"]) for _ in range(3)],
    )
    copies = lambda batch: [one.copies for one in batch]
    ((batch, trained),) = in_batches(network.memory, tasks, copies, "vectorised")
    assert copies(batch) == [1, 1, 1] and trained == [2, 2, 2]
    assert train_alone(network.memory, tasks[0], lambda one: one.copies) == 2


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "compiled", "span"])
@pytest.mark.parametrize("local", [{"batch_size": 3}, {}, {"batch_size": 4, "momentum": 0.9, "weight_decay": 0.01}])
def test_every_engine_trains_on_the_same_samples(engine, local):
    """Against steps of torch.optim.SGD on the changed copies, written out here."""
    augment = resolve_augmentations([{"crop": {"padding": 1}}, "flip"])
    module = lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    sgd = LocalSGD(epochs=2, lr=0.1, augment=augment, **local)
    federation = uneven([7, 5], SHAPE)
    federation.normalize = [[0.5, 0.1], [0.25]]
    one = Stage(federation, module, sgd, engine)
    found = one.play(FedAvg(), [0, 1]).models_KP[0]
    rows = []
    for client in (0, 1):
        x, y = one.federation.train(client)
        steps = int(sgd.steps_of(np.array([len(y)]))[0])
        plain = TrainingTask(client, one.model(), x, y, steps, sgd, Address(0, 1, 1))
        changed = augmented(replace(plain, black=black_of(federation)))
        assert augmented(changed) is changed
        net = module()
        one.network.load(one.model())
        net.load_state_dict({k: v.clone() for k, v in one.network.module.state_dict().items()})
        optimizer = torch.optim.SGD(
            net.parameters(), 0.1, local.get("momentum", 0), weight_decay=local.get("weight_decay", 0)
        )
        for index in changed.batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(changed.x[index]), changed.y[index]).backward()
            optimizer.step()
        rows.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert close(found, (7 * rows[0] + 5 * rows[1]) / 12, 1e-5)
    assert not close(found, one_without(one, engine, sgd, module), 1e-3)


def one_without(one, engine, sgd, module):
    plain = Stage(one.federation, module, replace(sgd, augment=()), engine)
    return plain.play(FedAvg(), [0, 1]).models_KP[0]


@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.rand(2, 5), {}, r"crop is for images .* the inputs are numbers of shape \(5,\)"),
        (torch.zeros(2, 7, dtype=torch.int64), {}, r"the inputs are tokens of shape \(7,\)"),
        (images(2), {"padding": 0}, "padding of crop is a whole number of at least 1, got 0"),
        (images(2), {"padding_mode": "edge"}, "black or reflect, got 'edge'"),
        (images(2), {"padding": 5, "padding_mode": "reflect"}, "at most 4 pixels of images of 6x5, got padding 5"),
    ],
)
def test_crops_that_cannot_be(x, options, message):
    with pytest.raises(ConfigError, match=message):
        CROP(x, np.random.default_rng(0), torch.zeros(()), **options)


@pytest.mark.parametrize(
    "value, message",
    [
        ("mixup", "augmentation 'mixup'"),
        ({"crop": {"pad": 2}}, "'pad'"),
        ({"crop": {"padding": 2}, "flip": {}}, "one name with its options"),
    ],
)
def test_errors_of_the_config(value, message):
    with pytest.raises(ConfigError, match=message):
        resolve_augmentations([value])


def test_a_result_of_another_shape_is_an_error():
    def halved(x, draw, black):
        return x[..., ::2]

    with pytest.raises(RunError, match=r"halved.* returned .*\(3, 2, 6, 3\).*expected .*\(3, 2, 6, 5\)"):
        augmented(task(3, 1, [halved]))
