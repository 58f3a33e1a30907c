"""The report of runs: figures and tables made from their records."""
