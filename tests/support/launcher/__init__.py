"""Helpers for tests of processes and pods."""
