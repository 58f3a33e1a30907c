"""Running an experiment: the round loop, checkpoints, and Ray. The only package that imports ray, and only where it is used."""
