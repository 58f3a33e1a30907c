"""Clustering algorithms on vectors, and the client signatures that they cluster. Several methods share each of them."""
