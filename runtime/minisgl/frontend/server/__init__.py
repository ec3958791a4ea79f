"""HTTP below the APIs: connections, limits, authentication, logs, and the state of requests in progress."""
