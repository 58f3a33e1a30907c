"""Checkpoints of a method of a run, written as differences to the previous checkpoint and verified when read."""
