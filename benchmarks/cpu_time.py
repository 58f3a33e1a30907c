"""A tracker that keeps the CPU seconds of a run in one process: of its rounds and their evaluations; for field.yaml."""

import json
import time
from pathlib import Path

FILE = "cpu_seconds.json"  # in the directory of a method


class CpuTime:
    """Writes the CPU seconds of this process from the first record to the end, added to those of earlier starts."""

    def open(self, run_dir: Path, info: object, after: int) -> None:
        self.file, self.began = run_dir / FILE, time.process_time()

    def log(self, record: object) -> None:
        """Rounds are not told apart."""

    def close(self, end: object) -> None:
        before = json.loads(self.file.read_text()) if self.file.is_file() else 0.0
        self.file.write_text(json.dumps(before + time.process_time() - self.began))
