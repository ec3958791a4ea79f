"""Helpers for tests of the frontend, the router and the scheduler behind it."""
