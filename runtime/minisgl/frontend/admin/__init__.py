"""The ports for operators of the server: administration, and probes and status of a frontend pod."""
