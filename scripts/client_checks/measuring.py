"""Clients of the metrics."""
