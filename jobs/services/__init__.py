"""Programs that try cfl_ray beside real servers, and the faults that they meet there."""
