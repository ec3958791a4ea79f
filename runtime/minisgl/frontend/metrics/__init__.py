"""Prometheus metrics of a frontend."""
