"""The vocabulary of clustered federated learning. Imports nothing else of this package."""
