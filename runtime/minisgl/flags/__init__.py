"""Flags of the command line and their sources: arguments, environment variables, a YAML file, a manifest."""
