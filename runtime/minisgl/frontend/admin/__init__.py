"""Ports for people and machines that run the server: the admin API, and probes and status of a frontend pod."""
