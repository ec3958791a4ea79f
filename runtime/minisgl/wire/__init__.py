"""Message structs and sockets between the processes. Imports no other package."""
