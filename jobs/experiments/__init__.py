"""The published experiments, as studies; `python -m jobs.experiments` runs them one after another."""
