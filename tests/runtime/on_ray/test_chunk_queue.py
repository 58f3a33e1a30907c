"""Which host is given which chunks, without Ray."""

import numpy as np
import pytest

from cfl_ray.engine.chunks import Chunk
from cfl_ray.runtime.on_ray.chunk_queue import ChunkQueue


def chunks(costs, rows=None) -> list[Chunk]:
    rows = [0] * len(costs) if rows is None else rows
    return [Chunk(np.array([at]), row, cost) for at, (cost, row) in enumerate(zip(costs, rows))]


def rounds(queue: ChunkQueue, hosts: range) -> list[list[list[int]]]:
    """Calls by round, where every host in turn is given one call, until nothing is left."""
    found = []
    while queue:
        found.append([queue.next_for(host, hosts) for host in hosts])
    return found


@pytest.mark.parametrize("count", [4, 100])
def test_as_many_chunks_as_hosts_are_one_for_each(count):
    (first,) = rounds(ChunkQueue(chunks([1.0] * count)), range(count))
    assert [len(call) for call in first] == [1] * count


def test_few_hosts_are_given_several_chunks_at_a_time_and_fewer_towards_the_end():
    calls = [call for each in rounds(ChunkQueue(chunks([1.0] * 600)), range(2)) for call in each if call]
    sizes = [len(call) for call in calls]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 100 and sizes[-1] == 1 and len(calls) < 40
    assert sorted(number for call in calls for number in call) == list(range(600))


def test_short_chunks_share_calls_that_are_worth_their_overhead_and_every_host_has_work():
    def sizes(least):
        made = rounds(ChunkQueue(chunks([1.0] * 20), least=least), range(2))
        return [len(call) for each in made for call in each if call]

    assert sizes(4) == [5] * 4 and sizes(7) == [10, 10] and sizes(1e9) == [10, 10]


def test_with_a_call_for_each_chunk_there_is_one_chunk_in_a_call():
    calls = [call for each in rounds(ChunkQueue(chunks([1.0] * 9), together=False), range(2)) for call in each if call]
    assert calls == [[number] for number in range(9)]


def test_a_call_has_at_most_so_many_clients_or_one_chunk():
    parts = [Chunk(np.arange(3 * at, 3 * at + 3)) for at in range(40)]
    for most, chunks_of_call in ((9, 3), (8, 2), (1, 1)):
        calls = [call for each in rounds(ChunkQueue(parts, most=most), range(2)) for call in each if call]
        assert max(map(len, calls)) == chunks_of_call
        assert sorted(number for call in calls for number in call) == list(range(40))


def test_the_largest_chunk_comes_first_and_alone_where_it_is_more_than_a_share():
    queue = ChunkQueue(chunks([1, 5, 2, 40, 3]))
    assert queue.next_for(0, range(2)) == [3]
    assert [queue.next_for(1, range(2)), queue.next_for(0, range(2))] == [[1], [4]]


def test_a_host_stays_with_an_output_row():
    """Four rows of 100 chunks on two hosts: each host adds up two rows, and at the end perhaps one more."""
    queue = ChunkQueue(chunks([1.0] * 400, rows=np.repeat(range(4), 100).tolist()))
    met = {0: set(), 1: set()}
    for call in rounds(queue, range(2)):
        for host, numbers in enumerate(call):
            met[host] |= {queue.chunks[number].row for number in numbers}
    assert all(len(rows) <= 3 for rows in met.values()), met


def test_a_host_prefers_data_that_its_node_has_and_is_never_idle_for_that():
    """Node a has the data of the first half. Host 0 is on a, host 1 on b, which has none; 20 chunks are anywhere."""
    nodes = ["a"] * 40 + [""] * 20
    queue, node_of_host = ChunkQueue(chunks([1.0] * 60), nodes=nodes), {0: "a", 1: "b"}
    given = {0: [], 1: []}
    while queue:
        for host, node in node_of_host.items():
            given[host].append(queue.next_for(host, range(2), node=node))
    assert sorted(number for calls in given.values() for call in calls for number in call) == list(range(60))
    of_second = [nodes[number] for call in given[1] for number in call]
    assert of_second == [""] * 20 + ["a"] * (len(of_second) - 20) and len(of_second) > 20, (
        "then it helps the other node"
    )
    assert all(given[0]) and all(given[1][:-1]), "no host is idle before the end"
    assert all(nodes[number] == "a" for number in given[0][0])


def test_chunks_put_back_stay_in_their_group():
    queue = ChunkQueue(chunks([1.0] * 4), nodes=["a", "a", "b", "b"], together=False)
    first = queue.next_for(0, range(2), node="b")
    assert first == [2]
    queue.put_back(first)
    assert [queue.next_for(0, range(2), node="b") for _ in range(2)] == [[2], [3]]


def test_all_hosts_are_busy_to_the_end_with_costs_drawn_log_normally():
    """The last host ends within 3 % of the mean."""
    draw = np.random.default_rng(0)
    costs, hosts = draw.lognormal(0, 1, 20_000), range(100)
    queue = ChunkQueue(chunks(costs.tolist(), rows=draw.integers(0, 50, len(costs)).tolist()))
    busy = np.zeros(len(hosts))
    while queue:
        host = int(busy.argmin())
        busy[host] += costs[queue.next_for(host, hosts)].sum()
    assert busy.max() < 1.03 * busy.mean()


def test_chunks_that_are_put_back_are_given_again_and_none_is_lost():
    draw = np.random.default_rng(1)
    queue, done = ChunkQueue(chunks(draw.random(300).tolist(), rows=draw.integers(0, 9, 300).tolist())), []
    while queue:
        numbers = queue.next_for(int(draw.integers(4)), range(4))
        if draw.random() < 0.3:
            queue.put_back(numbers)
        else:
            done += numbers
    assert sorted(done) == list(range(300)) and queue.cost_left == pytest.approx(0, abs=1e-9)


def test_the_parts_of_a_late_chunk_come_next():
    queue = ChunkQueue(chunks([3.0, 2.0, 1.0]))
    queue.add_urgent(chunks([1.0, 1.0]), home=None)
    assert [queue.next_for(0, range(2)) for _ in range(2)] == [[3], [4]]
    assert queue.chunks[3].index_m.tolist() == [0]


# ---- chunks that only one host may do


def handed(homes, starting=()) -> list[list[int]]:
    """The chunks that hosts 0, 1 and 2 are given."""
    queue = ChunkQueue(chunks([1.0] * len(homes)), homes=homes)
    ready = [host for host in range(3) if host not in starting]
    of_host = [[], [], []]
    for host in ready:
        while numbers := queue.next_for(host, ready, range(3)):
            of_host[host] += numbers
    return [sorted(numbers) for numbers in of_host]


def test_a_chunk_with_a_home_waits_for_it():
    assert handed([2, 0, 2, 1]) == [[1], [3], [0, 2]]
    assert handed([2, 0, 2, 1], starting=[2]) == [[1], [3], []]


def test_chunks_without_their_home_are_spread_over_ready_hosts():
    assert handed([3, 4, 5, 7]) == [[0], [1, 3], [2]]
    assert handed([3, 4, 5, 7], starting=[1]) == [[1], [], [0, 2, 3]]


def test_a_host_does_not_wait_for_a_late_chunk_of_another_home():
    queue = ChunkQueue(chunks([1.0, 1.0]), homes=[0, 2])
    queue.add_urgent(chunks([1.0]), home=2)
    assert queue.next_for(0, range(3)) == [0]
    assert [queue.next_for(2, range(3)) for _ in range(2)] == [[2], [1]]
