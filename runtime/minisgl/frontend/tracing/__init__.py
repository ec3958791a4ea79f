"""Traces over OTLP: which requests have one, and how its spans leave the process."""
