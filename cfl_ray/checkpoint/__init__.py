"""Checkpoints of one method of a run: written as differences to the one before, verified on load."""
