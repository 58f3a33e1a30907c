"""Tracking of runs: records are written to the run directory first and delivered to MLflow from there.

Importing this package does not import mlflow.
"""

from cfl_ray.errors.redaction import redact
from cfl_ray.tracking.chosen import TRACKERS, sinks
from cfl_ray.tracking.delivery import Delivered, deliver_pending
from cfl_ray.tracking.mlflow_models import check_mlflow, save_model
from cfl_ray.tracking.mlflow_tracker import MlflowTracker
from cfl_ray.tracking.record import (
    METRICS,
    ROUND_METRICS,
    RUN_METRICS,
    RoundRecord,
    RunEnd,
    RunInfo,
    check_metrics,
    flatten,
)
from cfl_ray.tracking.sink import Relay, RelayingTracker, Sink
from cfl_ray.tracking.summary import summarise
from cfl_ray.tracking.tracker import FileTracker, Tracker, read_end, read_info, read_records
from cfl_ray.tracking.uri import resolve_uri

__all__ = [
    "METRICS",
    "ROUND_METRICS",
    "RUN_METRICS",
    "TRACKERS",
    "Delivered",
    "FileTracker",
    "MlflowTracker",
    "Relay",
    "RelayingTracker",
    "RoundRecord",
    "RunEnd",
    "RunInfo",
    "Sink",
    "Tracker",
    "check_metrics",
    "check_mlflow",
    "deliver_pending",
    "flatten",
    "read_end",
    "read_info",
    "read_records",
    "redact",
    "resolve_uri",
    "save_model",
    "sinks",
    "summarise",
]
