"""Rows and samples of several clients in one tensor on the device."""

import pytest
import torch

from cfl_ray.engine.rows import DeviceRows, padded, rows_on

CPU, META = torch.device("cpu"), torch.device("meta")
TABLE_KP = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("which", [[0, 0, 0], [0, 1, 2], [1, 0, 1, 1], [2]])
def test_are_those_of_the_clients(which):
    rows_mP = rows_on(CPU, [TABLE_KP[row] for row in which])
    assert torch.equal(rows_mP, TABLE_KP[which])
    before = TABLE_KP.clone()
    rows_mP[0] += 1
    assert torch.equal(rows_mP[1:], TABLE_KP[which][1:]) and torch.equal(TABLE_KP, before), "each is a copy"


def test_a_row_of_several_clients_is_copied_to_the_device_once(monkeypatch):
    copies, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda row, device: (copies.append(row.tolist()), to(row, device))[1])
    assert rows_on(META, [TABLE_KP[row] for row in (1, 0, 1, 1)]).shape == (4, 4)
    assert copies == [TABLE_KP[1].tolist(), TABLE_KP[0].tolist()]


def test_without_copies_one_row_is_shared():
    rows_mP = rows_on(CPU, [TABLE_KP[1]] * 5, copies=False)
    assert torch.equal(rows_mP, TABLE_KP[[1] * 5]) and rows_mP.data_ptr() == TABLE_KP[1].data_ptr()


def test_of_a_work_are_on_the_device_while_they_are_used():
    asked = []
    rows = DeviceRows(META, lambda table, row: (asked.append((table, row)), TABLE_KP[row])[1])
    first = rows(0, 1)
    assert rows(0, 1) is first and rows(1, 1) is not first and asked == [(0, 1), (1, 1)] and first.is_meta
    del first
    rows(0, 1)
    assert asked == [(0, 1), (1, 1), (0, 1)]


def test_padding_is_zero():
    parts = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    whole = padded(parts, CPU)
    assert whole.shape == (2, 4, 3) and torch.equal(whole[0, :2], parts[0]) and torch.equal(whole[1], parts[1])
    assert not whole[0, 2:].any() and padded([torch.ones(2, dtype=torch.long)], META).is_meta
