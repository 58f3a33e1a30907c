"""A tracker: one line of text per round."""


class TextFile:
    """A text file in the directory of each method, with one metric per round."""

    def __init__(self, metric="accuracy"):
        self.metric = metric

    def open(self, run_dir, info, after):
        self.file = (run_dir / f"{self.metric}.txt").open("a")

    def log(self, record):
        self.file.write(f"{record.round} {record.metrics.get(self.metric, float('nan')):.4f}\n")
        self.file.flush()

    def close(self, end):
        self.file.close()
