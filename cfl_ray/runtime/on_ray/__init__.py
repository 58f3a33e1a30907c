"""Running on a Ray cluster: the only place that imports ray."""
