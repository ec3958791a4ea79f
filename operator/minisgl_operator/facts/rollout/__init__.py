"""Rollouts of a revision: which replicas get it when, whether it serves, and what happens if it does not."""
