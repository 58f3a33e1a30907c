"""A network as a flat row of parameters, and its forward and backward passes written out."""
