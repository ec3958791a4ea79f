"""Benchmarks that ship: workloads, traces, floors of the hardware, an HTTP client that times pieces, reports."""
