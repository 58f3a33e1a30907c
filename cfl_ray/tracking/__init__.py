"""What a run reports, kept in its directory first and brought to MLflow from there. Importing this does not import mlflow."""

from cfl_ray.tracking.delivery import Delivered, deliver_pending
from cfl_ray.tracking.live import MlflowTracker
from cfl_ray.tracking.record import METRICS, ROUND_METRICS, RUN_METRICS, RoundRecord, RunEnd, RunInfo, check_metrics, flatten
from cfl_ray.tracking.summary import summarise
from cfl_ray.tracking.tracker import ARTIFACTS, Spool, Tracker, read_end, read_info, read_records
from cfl_ray.tracking.uri import redact, resolve_uri

__all__ = [
    "ARTIFACTS",
    "METRICS",
    "ROUND_METRICS",
    "RUN_METRICS",
    "Delivered",
    "MlflowTracker",
    "RoundRecord",
    "RunEnd",
    "RunInfo",
    "Spool",
    "Tracker",
    "check_metrics",
    "deliver_pending",
    "flatten",
    "read_end",
    "read_info",
    "read_records",
    "redact",
    "resolve_uri",
    "summarise",
]
