"""Measurements against other systems and on other devices. `jobs/benchmark.py` measures cfl_ray itself."""
