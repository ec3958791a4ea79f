"""The command line: each command parses its flags and then calls one function of a package below."""
