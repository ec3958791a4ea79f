"""Message structs and sockets between the processes. Knows nothing of the other packages."""
