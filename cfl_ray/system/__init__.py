"""Files, threads and limits of this process and its machine, independent of federated learning."""
