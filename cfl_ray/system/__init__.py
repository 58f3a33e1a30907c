"""Files and threads of this process and its machine: no federated learning."""
