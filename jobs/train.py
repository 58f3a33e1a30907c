"""Runs an experiment as a Ray job: the same as `cfl-ray run`, on the cluster of the job.

ray job submit --working-dir . -- python jobs/train.py jobs/experiments/stocfl_femnist.yaml rounds=100
"""

import sys

from cfl_ray.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
