"""The pages of docs/results.md: `python -m jobs.results`."""
