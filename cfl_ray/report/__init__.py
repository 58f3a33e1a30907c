"""Results for their readers: figures and tables from the records of runs."""
