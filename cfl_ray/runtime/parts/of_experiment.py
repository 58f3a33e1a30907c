"""The parts of the round loop that an experiment has."""

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.params import ParamSpec
from cfl_ray.runtime.participation import Membership
from cfl_ray.runtime.parts.best_round import BestRound
from cfl_ray.runtime.parts.loop_part import LoopPart
from cfl_ray.runtime.parts.masked_uploads import MaskedUploads
from cfl_ray.runtime.parts.private_run import ClientPrivacy, SamplePrivacy
from cfl_ray.runtime.parts.server_steps import ServerSteps
from cfl_ray.runtime.parts.timed_rounds import AsynchronousRounds, TimedRounds
from cfl_ray.setup.criterion import RoundChoice
from cfl_ray.setup.setup import Setup


def parts_of(
    setup: Setup, label: str, spec: ParamSpec, membership: Membership, store: CheckpointStore | None
) -> list[LoopPart]:
    """The parts for a method, before round 1, in the order of their hooks. store: None if no files are kept."""
    parts: list[LoopPart] = []
    experiment = setup.experiment
    if (plan := setup.privacy.get(label)) is not None:
        parts.append(ClientPrivacy(plan, experiment.seed, store, membership))
    if (account := setup.examples.get(label)) is not None and experiment.privacy is not None:
        parts.append(SamplePrivacy(experiment.privacy, account, experiment.seed, store))
    if setup.secure is not None:
        parts.append(MaskedUploads(setup.secure))
    if (time := setup.time_of(label, spec, lambda ids: membership.present.num_samples_N[ids])) is not None:
        parts.append(TimedRounds(time, membership))
        if setup.asynchrony is not None:
            parts.append(AsynchronousRounds(setup.asynchrony, time, membership))
    if (step := setup.methods[label].server_step) is not None:
        parts.append(ServerSteps(step))
    if setup.choice != RoundChoice():
        parts.append(BestRound(setup.choice, experiment.evaluation.every))
    return parts
