"""Conditions, status and the events about changed conditions. Pure."""
