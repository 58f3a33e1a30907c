"""The page docs/results.md: `python -m jobs.results`."""
