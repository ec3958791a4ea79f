"""Checkpoints made by code: tiny ones for tests, shapes without weights, and a demo model that answers questions."""
