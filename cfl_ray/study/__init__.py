"""Studies: the runs of methods x settings x seeds, packed onto a machine or a cluster, and their comparison."""
