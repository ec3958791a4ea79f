"""Helpers for tests of grammars."""
