"""From an experiment to everything a process needs to work on it, with the trials before a run."""
