"""Benchmarks for users: workloads, traces, rooflines, reports, and a streaming HTTP client with arrival times."""
