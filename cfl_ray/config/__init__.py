"""Experiments: their sections, and how they are read from YAML."""

from cfl_ray.config.attack import AttackConfig
from cfl_ray.config.experiment import Experiment, check_cohort, load
from cfl_ray.config.sections import (
    AvailabilityConfig,
    BuiltinKind,
    CohortConfig,
    ColumnsConfig,
    ConfigSection,
    CutConfig,
    DataChangeConfig,
    DataConfig,
    EvaluationConfig,
    EventConfig,
    LocalConfig,
    ModelConfig,
    PartConfig,
    PartitionConfig,
    RuntimeConfig,
    ShiftConfig,
    TestDataConfig,
    TrackingConfig,
)

__all__ = [
    "BuiltinKind",
    "PartConfig",
    "AttackConfig",
    "AvailabilityConfig",
    "CohortConfig",
    "ColumnsConfig",
    "ConfigSection",
    "CutConfig",
    "DataChangeConfig",
    "DataConfig",
    "EvaluationConfig",
    "EventConfig",
    "Experiment",
    "LocalConfig",
    "ModelConfig",
    "PartitionConfig",
    "RuntimeConfig",
    "ShiftConfig",
    "TestDataConfig",
    "TrackingConfig",
    "check_cohort",
    "load",
]
