"""Helpers for tests of the operator and of the chart."""
