"""Disturbed and long runs, which must have the same outcome and bounded resources: `python -m jobs.chaos`."""
