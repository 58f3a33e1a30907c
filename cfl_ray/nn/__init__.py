"""A network as one flat row of parameters, and its forward and backward passes written out."""
