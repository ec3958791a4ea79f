"""Text generation for every API: the parsed request, its choices, and the endpoint that serves it."""
