"""The setup of an experiment, with everything a process needs to work on it, and the trials before a run."""
