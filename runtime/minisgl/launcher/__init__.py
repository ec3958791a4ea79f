"""The supervisor: starts the processes of one machine, or the ranks of a replica's pods, watches and stops them."""
