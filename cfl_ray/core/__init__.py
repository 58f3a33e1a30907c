"""The vocabulary of clustered federated learning. It imports `errors` and `plugins` alone."""
