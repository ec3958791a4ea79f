"""Observations and the facts that follow from them. Pure."""
