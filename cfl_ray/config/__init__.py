"""Experiments: their sections, and how they are read from YAML."""

from cfl_ray.config.attack import AttackConfig
from cfl_ray.config.data import ColumnsConfig, DataConfig
from cfl_ray.config.evaluation import EvaluationConfig
from cfl_ray.config.experiment import Experiment, changed_local, check_buffer, check_cohort
from cfl_ray.config.local import LocalConfig
from cfl_ray.config.part import BuiltinKind
from cfl_ray.config.partition import PartitionConfig
from cfl_ray.config.reading import load
from cfl_ray.config.runtime import RuntimeConfig
from cfl_ray.config.section import ConfigSection
from cfl_ray.config.shift import ShiftConfig
from cfl_ray.config.tracking import TrackingConfig

__all__ = [
    "BuiltinKind",
    "AttackConfig",
    "ColumnsConfig",
    "ConfigSection",
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "LocalConfig",
    "PartitionConfig",
    "RuntimeConfig",
    "ShiftConfig",
    "TrackingConfig",
    "changed_local",
    "check_buffer",
    "check_cohort",
    "load",
]
