"""The rounds of a method: the loop, checkpoints, requests to a live run; `on_ray` runs them on a cluster."""
