"""A replica over one or several pods: the leader supervises the ranks of all pods, epoch by epoch."""
