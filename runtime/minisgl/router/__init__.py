"""Routing: which replica gets a request, and what becomes of it when that replica is lost, drains or refuses it."""
