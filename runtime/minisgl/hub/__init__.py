"""Model files: resolve a name to a directory, fetch a checkpoint from a Hub, check whether it can be served."""
