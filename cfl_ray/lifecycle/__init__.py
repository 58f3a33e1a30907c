"""Runs from start to end: launched, driven, recorded, extended, and loaded again."""
