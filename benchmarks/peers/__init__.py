"""FedAvg of other systems on the workloads of `benchmarks.workloads`: one script and one requirements file each."""
