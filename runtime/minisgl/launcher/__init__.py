"""The supervisor of one machine: starts the processes of `serve`, watches them and stops them together."""
