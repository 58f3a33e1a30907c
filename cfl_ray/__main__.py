"""`python -m cfl_ray`: the command line where the `cfl-ray` script is not installed, as in a submitted job."""

from cfl_ray.cli import main

if __name__ == "__main__":
    main()
