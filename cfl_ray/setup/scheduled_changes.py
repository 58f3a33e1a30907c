"""The schedule of an experiment: clients that join and leave, and changes of data."""

from cfl_ray.config import Experiment
from cfl_ray.data.changes import DataChange, Domain
from cfl_ray.population.population import Population, PopulationChange


def population_of(experiment: Experiment, num_clients: int) -> Population:
    """The clients online before round 1, with the changes that the schedule plans."""
    changes = [PopulationChange(event.round, tuple(event.join), tuple(event.leave)) for event in experiment.schedule]
    return Population(num_clients, changes, experiment.seed)


def data_changes(experiment: Experiment) -> list[DataChange]:
    """The changes of clients' data, in the order of the schedule."""
    return [
        DataChange(
            event.round,
            tuple(change.clients),
            turns=change.rotate // 90 % 4,
            offset=change.relabel,
            data_of=None if change.data_of is None else tuple(change.data_of),
            swap=change.swap,
            back_to=change.back_to,
            domain=None if change.domain is None else Domain(*change.domain, experiment.seed),
        )
        for event in experiment.events
        for change in event.change
    ]


def ignored_events(experiment: Experiment) -> list[str]:
    """A text that names the events of the schedule that have no effect; empty if all have an effect."""
    if late := sorted({event.round for event in experiment.events if event.round > experiment.rounds}):
        rounds = f"round{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        return [f"the events of the schedule in {rounds} are ignored: the last round is {experiment.rounds}"]
    return []
