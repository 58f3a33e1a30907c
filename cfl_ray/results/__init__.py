"""Results of runs: as objects, as tables over seeds, as a report, and as exported models."""
