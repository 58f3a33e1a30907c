"""Measurements against other systems and on other devices. `jobs/benchmarks` measures cfl_ray itself."""
