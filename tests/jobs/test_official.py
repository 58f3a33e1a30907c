"""Methods beside the code of their authors."""

from pathlib import Path

import torch

from jobs import official

ROTATIONS = {frozenset(range(5)), frozenset(range(5, 10))}


def test_half_of_the_clients_have_rotated_images(monkeypatch):
    images = torch.arange(10_000 * 784, dtype=torch.uint8).reshape(-1, 1, 28, 28).numpy()
    found = type("Images", (), {"train_x": images, "train_y": torch.zeros(10_000).numpy()})
    monkeypatch.setattr(official, "locate", lambda *_: type("Source", (), {"read": lambda *_: found})())
    data = official.mnist(0)
    assert data.x.shape == (10, 800, 1, 28, 28) and data.x_test.shape == (10, 200, 1, 28, 28)
    step = data.x[..., 0, 1] - data.x[..., 0, 0]  # pixels count up from left to right, and down where rotated
    assert ((step < 0).float().mean((1, 2)) > 0.9).tolist() == [True] * 5 + [False] * 5


def test_the_page_compares_weights_clusters_and_accuracy(monkeypatch):
    start_P = official.first_weights(0)
    apart = {t: (start_P + 1.0).expand(10, -1) for t in official.FULL.kept}

    def course(by: float) -> official.Course:
        weights = {t: rows + by for t, rows in apart.items()}
        return official.Course([0.5] * 20 + [0.9] * 10, [1] * 20 + [2] * 10, ROTATIONS, weights)

    monkeypatch.setattr(official, "mnist", lambda seed: None)
    monkeypatch.setattr(official, "theirs", lambda *_: course(0.0))
    monkeypatch.setattr(official, "ours", lambda *_: course(0.001))
    lines = official.page(Path("checkout"), "23a1c38").split("\n")
    assert "| 22 | 1.0e-03 | 0.9000 | 0.9000 | 2 | 2 |" in lines, "0.001 beside a way of 1"
    assert "The clusters after round 22 are the same." in lines
    assert "| 2 | ours | 21 | 2 | yes | 0.500 | 0.900 | 0.900 | 0.900 |" in lines
