"""Experiments: their sections, and how they are read from YAML."""

from cfl_ray.config.attack import AttackConfig
from cfl_ray.config.clock import AsynchronousConfig, ClockConfig, StalenessConfig
from cfl_ray.config.cohort import AvailabilityConfig, CohortConfig
from cfl_ray.config.data import ColumnsConfig, DataConfig, TestDataConfig
from cfl_ray.config.evaluation import EvaluationConfig
from cfl_ray.config.experiment import Experiment, changed_local, check_buffer, check_cohort, load
from cfl_ray.config.local import LocalConfig
from cfl_ray.config.model import ModelConfig
from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.partition import CutConfig, PartitionConfig
from cfl_ray.config.runtime import RuntimeConfig
from cfl_ray.config.schedule import DataChangeConfig, EventConfig
from cfl_ray.config.section import ConfigSection
from cfl_ray.config.shift import ShiftConfig
from cfl_ray.config.tracking import TrackingConfig

__all__ = [
    "BuiltinKind",
    "Kinds",
    "PluginConfig",
    "AsynchronousConfig",
    "AttackConfig",
    "AvailabilityConfig",
    "ClockConfig",
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
    "StalenessConfig",
    "TestDataConfig",
    "TrackingConfig",
    "changed_local",
    "check_buffer",
    "check_cohort",
    "load",
]
