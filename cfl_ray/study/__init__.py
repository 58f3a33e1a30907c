"""Studies: runs of methods x settings x seeds in parallel on a machine or a cluster, and their comparison."""
