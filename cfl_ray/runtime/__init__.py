"""Running an experiment: launch, the round loop, checkpoints, requests to a live run; `on_ray` runs it on a cluster."""
