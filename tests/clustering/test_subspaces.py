import itertools

import numpy as np
import pytest
import torch
from closeness import close
from scipy.linalg import subspace_angles

from cfl_ray.clustering.subspaces import KINDS, angles, angles_between, orthonormal, principal_vectors


def columns(*columns_: list[float]) -> torch.Tensor:
    return torch.tensor(columns_, dtype=torch.float32).T


def turned(degrees: float) -> list[float]:
    return [float(np.cos(np.deg2rad(degrees))), float(np.sin(np.deg2rad(degrees))), 0, 0]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


X, Y, Z, W, NONE = np.eye(4).tolist() + [[0.0] * 4]


class TestPrincipalVectors:
    @pytest.mark.parametrize("shape", [(5, 40), (40, 12), (30, 30)])
    def test_are_those_of_the_svd(self, shape):
        x_BD = random(*shape)
        found = principal_vectors(x_BD, 3)
        expected = np.linalg.svd(x_BD.double().numpy().T, full_matrices=False)[0][:, :3]
        cosine = (found.double().numpy() * expected).sum(0)
        assert close(np.abs(cosine), 1, 1e-6)
        assert found.dtype == torch.float32 and found.shape == (shape[1], 3)

    def test_the_largest_entry_is_positive(self):
        """Samples (0, -3, 0) and (1, 0, 0), of norms 3 and 1 along axes 1 and 0."""
        x_BD = torch.tensor([[0.0, -3, 0], [1, 0, 0]])
        assert principal_vectors(x_BD, 2).T.tolist() == [[0, 1, 0], [1, 0, 0]]
        assert torch.equal(principal_vectors(x_BD, 2), principal_vectors(-x_BD, 2))

    @pytest.mark.parametrize(
        ("x_BD", "rank"),
        [
            (random(2, 9), 2),
            (random(9, 2), 2),
            (random(1, 9).repeat(4, 1), 1),
            (random(9, 1) * random(1, 4), 1),
            (torch.zeros(4, 9), 0),
        ],
        ids=["few samples", "few pixels", "equal samples", "parallel samples", "zeros"],
    )
    def test_no_more_than_the_rank(self, x_BD, rank):
        u_DR = principal_vectors(x_BD, 5)
        assert u_DR.shape == (x_BD.shape[1], rank)
        assert close(u_DR.T @ u_DR, torch.eye(rank), 1e-5)

    def test_no_samples(self):
        assert principal_vectors(torch.zeros(0, 9), 3).shape == (9, 0)

    def test_errors(self):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            principal_vectors(torch.ones(2, 2), 0)


class TestOrthonormal:
    def test_spans_the_same(self):
        u_DR = random(20, 4)
        q_DR = orthonormal(u_DR)
        assert close(q_DR.T @ q_DR, torch.eye(4, dtype=torch.float64), 1e-7)
        assert close(q_DR @ (q_DR.T @ u_DR.double()), u_DR.double(), 1e-7)

    @pytest.mark.parametrize("u_DR", [columns(X, X, Y), columns(NONE, Y, X), columns(X, [1, 1e-9, 0, 0], Y)])
    def test_dependent_columns_leave_zeros_at_the_end(self, u_DR):
        """The span is that of x and y: the projection on it is diag(1, 1, 0, 0)."""
        q_DR = orthonormal(u_DR)
        assert close(q_DR @ q_DR.T, torch.diag(torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)), 1e-7)
        assert q_DR.shape == (4, 3) and not q_DR[:, 2].any()

    def test_more_columns_than_rows(self):
        q_DR = orthonormal(random(3, 5))
        assert close(q_DR @ q_DR.T, torch.eye(3, dtype=torch.float64), 1e-7)
        assert q_DR.shape == (3, 5)


class TestAngles:
    @pytest.mark.parametrize(
        ("a_DR", "b_DR", "smallest", "total", "code"),
        [
            (columns(X, Z), columns(Y, W), 90, 180, 90),
            (columns(X, Z), columns(turned(30), W), 30, 120, 30),
            (columns(X, Z), columns(turned(150), W), 30, 120, 90),  # signs of columns have an effect on "code" alone
            (columns(X, Y), columns(turned(45), Z), 0, 90, 45),  # the planes share a line, which "code" ignores
            (columns(X, Y), columns(turned(20), turned(110)), 0, 0, 20),
            (columns(X, NONE), columns(turned(70), Z), 70, 70, 70),  # padding: one angle instead of two
            (columns(NONE, X), columns(NONE, turned(70)), 70, 70, 70),
            (columns(X, turned(60)), columns(Y, Z), 0, 90, 30),  # columns that are not at right angles
            (columns(X, X), columns(turned(40), Z), 40, 40, 40),  # nor independent
        ],
    )
    def test_by_hand(self, a_DR, b_DR, smallest, total, code):
        basis_SDR = torch.stack([a_DR, b_DR])
        found = [angles(basis_SDR, kind=kind) for kind in ("smallest", "sum", "code")]
        assert close(np.concatenate(found), [smallest, total, code], 1e-6)

    @pytest.mark.parametrize("columns_", [1, 6, 300])
    def test_are_scipys(self, columns_):
        """Several blocks of clients, in the order of condensed distances."""
        size = 3 if columns_ == 300 else 20
        basis_SDR = random(size, 400, columns_)
        expected = [
            np.rad2deg(subspace_angles(a.double().numpy(), b.double().numpy()))
            for a, b in itertools.combinations(basis_SDR, 2)
        ]
        assert close(angles(basis_SDR, kind="smallest"), [each.min() for each in expected], 1e-6)
        assert close(angles(basis_SDR, kind="sum"), [each.sum() for each in expected], 1e-6)

    def test_code_is_the_smallest_angle_of_columns(self):
        """More clients than a block."""
        basis_SDR = torch.nn.functional.normalize(random(120, 30, 6), dim=1)
        cosine_SSRR = torch.einsum("sdr,tdq->strq", basis_SDR.double(), basis_SDR.double())
        angle_SS = cosine_SSRR.amax((2, 3)).clamp(max=1).arccos().rad2deg().numpy()
        expected = angle_SS[np.triu_indices(120, 1)]
        assert close(angles(basis_SDR, kind="code"), expected, 1e-6)

    def test_code_has_signs_and_skips_padding(self):
        """Columns that point away from each other are more than 90 degrees apart, which padding would hide."""
        found = angles(torch.stack([columns(X, NONE), -columns(turned(30), NONE)]), kind="code")
        assert close(found, [150], 1e-7)

    def test_trace_is_the_sum_of_the_angles_of_columns_in_the_same_place(self):
        """More clients than a block; a client with fewer columns is compared in those that it has."""
        basis_SDR = torch.nn.functional.normalize(random(120, 30, 6), dim=1)
        basis_SDR[::3, :, 4:] = 0
        cosine_SSR = torch.einsum("sdr,tdr->str", basis_SDR.double(), basis_SDR.double()).abs().clamp(max=1)
        both_SSR = basis_SDR.any(1)[:, None] & basis_SDR.any(1)[None]
        expected = (cosine_SSR.arccos().rad2deg() * both_SSR).sum(2).numpy()[np.triu_indices(120, 1)]
        assert close(angles(basis_SDR, kind="trace"), expected, 1e-6)
        found = angles(torch.stack([columns(X, turned(60)), columns(Y, Z)]), kind="trace")
        assert close(found, [90 + 90], 1e-7)

    def test_the_same_span_is_at_0(self):
        """Other columns of the same span, rounded to float32: arccos(1 - 1e-7) would be 0.026 degrees."""
        u_DR = torch.linalg.qr(random(784, 6).double())[0]
        mixed = torch.linalg.qr(random(6, 6, seed=1).double())[0]
        basis_SDR = torch.stack([u_DR, u_DR, u_DR @ mixed]).float()
        assert angles(basis_SDR, kind="smallest").max() < 1e-4
        assert angles(basis_SDR, kind="sum").max() < 6e-4

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_client_is_at_0_from_itself(self, kind):
        """Columns whose norms are 1 except for rounding to float32."""
        basis_SDR = torch.nn.functional.normalize(random(20, 784, 1), dim=1)
        assert angles_between(basis_SDR, basis_SDR, kind=kind).diagonal().max() < 1e-4

    def test_does_not_depend_on_padding(self):
        basis_SDR = random(5, 30, 3)
        padded_SDR = torch.cat([basis_SDR, torch.zeros(5, 30, 4)], 2)
        for kind in KINDS:
            assert close(angles(padded_SDR, kind=kind), angles(basis_SDR, kind=kind), 1e-7)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("clients", [0, 1])
    def test_of_no_pair(self, kind, clients):
        assert angles(torch.ones(clients, 4, 2), kind=kind).shape == (0,)

    def test_errors(self):
        with pytest.raises(ValueError, match="kind must be one of smallest, sum, trace, code, got 'largest'"):
            angles(torch.ones(2, 4, 2), kind="largest")
        with pytest.raises(ValueError, match="1 of 2 have none, the first is 1"):
            angles(torch.stack([columns(X, Y), columns(NONE, NONE)]), kind="smallest")
        with pytest.raises(ValueError, match="1 of 2 rows are not, the first is row 0"):
            angles(torch.stack([columns(X, [torch.nan] * 4), columns(X, Y)]), kind="code")


class TestAnglesBetween:
    @pytest.mark.parametrize("kind", KINDS)
    def test_extends_the_matrix(self, kind):
        """More clients than a block: the newcomers' columns of the whole matrix."""
        basis_SDR = random(200, 20, 4)
        whole = angles(basis_SDR, kind=kind)
        pairs = dict(zip(itertools.combinations(range(200), 2), whole))
        between = angles_between(basis_SDR[:190], basis_SDR[190:], kind=kind)
        assert between.shape == (190, 10)
        assert close(between, [[pairs[s, t] for t in range(190, 200)] for s in range(190)], 1e-7)

    @pytest.mark.parametrize("kind", KINDS)
    def test_with_another_number_of_columns(self, kind):
        a_SDR, b_UDR = random(3, 20, 2), random(4, 20, 5, seed=1)
        padded_SDR = torch.cat([a_SDR, torch.zeros(3, 20, 3)], 2)
        expected = angles_between(padded_SDR, b_UDR, kind=kind)
        assert close(angles_between(a_SDR, b_UDR, kind=kind), expected, 1e-7)
        assert close(angles_between(b_UDR, a_SDR, kind=kind), expected.T, 1e-7)

    def test_of_no_clients(self):
        assert angles_between(torch.ones(0, 4, 2), torch.ones(3, 4, 2), kind="sum").shape == (0, 3)

    def test_errors(self):
        with pytest.raises(ValueError, match="need equal sizes, got 4 and 5 values"):
            angles_between(torch.ones(1, 4, 2), torch.ones(1, 5, 2), kind="sum")
