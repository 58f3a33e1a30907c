"""Clustering algorithms on vectors, and the client signatures that they cluster; none belongs to one paper alone."""
