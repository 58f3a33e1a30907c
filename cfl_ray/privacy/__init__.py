"""Accounting of differential privacy."""
