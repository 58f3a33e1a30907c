"""Tracking of runs: records are written to the run directory first, and then delivered to trackers.

Importing this package does not import mlflow.
"""

from cfl_ray.tracking.delivery import Delivery
from cfl_ray.tracking.mlflow import check_destination, resolve_uri, save_model
from cfl_ray.tracking.mlflow_tracker import Mlflow, deliver_earlier_results, deliver_pending, where_to_look
from cfl_ray.tracking.record import (
    METRICS,
    RUN_METRICS,
    RoundRecord,
    RunInfo,
    check_metrics,
    flatten,
    last_record,
    read_end,
    read_info,
    read_records,
    summarise,
)
from cfl_ray.tracking.run_log import RunLog
from cfl_ray.tracking.trackers import new_trackers

__all__ = [
    "METRICS",
    "RUN_METRICS",
    "Delivery",
    "Mlflow",
    "RoundRecord",
    "RunInfo",
    "RunLog",
    "check_metrics",
    "check_destination",
    "deliver_earlier_results",
    "deliver_pending",
    "flatten",
    "last_record",
    "new_trackers",
    "read_end",
    "read_info",
    "read_records",
    "resolve_uri",
    "save_model",
    "summarise",
    "where_to_look",
]
