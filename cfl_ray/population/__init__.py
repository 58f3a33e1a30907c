"""Which clients are in the federation, which are reachable, and which take part in a round."""
