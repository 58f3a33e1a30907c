"""Aggregation rules, and their application to results that are kept on the hosts."""
