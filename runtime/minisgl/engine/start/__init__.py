"""Start of a rank: what steps need of memory, the KV pool, and a warm-up of all kinds of steps."""
