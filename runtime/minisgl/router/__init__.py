"""Routing: picks the replica for a request, and retries the request when that replica is lost, drains or refuses it."""
