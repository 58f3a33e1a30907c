"""Tracker that writes the metrics of a run as a table."""

import csv
import io
from pathlib import Path

from cfl_ray.errors import DataError
from cfl_ray.run_directory import check_inside
from cfl_ray.system.files import append_line, cut_torn_line, open_private, read_text, write_text
from cfl_ray.tracking.record import ROUND_METRICS, RoundRecord, RunEnd, RunInfo


class CsvFile:
    """A CSV file in the directory of each method: round, time_ms and a column per metric."""

    def __init__(self, file: str = "metrics.csv") -> None:
        check_inside("tracking.trackers: csv.file", file)
        self.name = file

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        self.path = run_dir / self.name
        cut_torn_line(self.path)
        try:
            reader = csv.DictReader((read_text(self.path) or "").splitlines())
            self.columns = list(reader.fieldnames or ("round", "time_ms", *ROUND_METRICS))
            if "round" not in self.columns:
                raise ValueError("it has no column 'round'")
            rows = list(reader)
            self.last = int(rows[-1]["round"]) if rows else 0
        except (csv.Error, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path} is damaged ({error!r}); remove it") from error

    def log(self, record: RoundRecord) -> None:
        if record.round <= self.last:  # written already, but the cursor was not saved
            return
        if new := [name for name in record.metrics if name not in self.columns]:
            self._add_columns(new)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        with open_private(self.path, "ab") as file:
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({"round": record.round, "time_ms": record.time_ms, **record.metrics})
            append_line(file, text.getvalue().encode())
        self.last = record.round

    def close(self, end: RunEnd | None) -> None:
        """No effect: the file is closed between rounds."""

    def _add_columns(self, names: list[str]) -> None:
        self.columns += names
        if lines := (read_text(self.path) or "").splitlines():
            header, *rows = lines
            longer = [",".join([header, *names]), *(row + "," * len(names) for row in rows)]
            write_text(self.path, "".join(f"{line}\r\n" for line in longer))
