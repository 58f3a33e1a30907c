"""What a reader of results sees: figures and tables, from the records of runs."""
