"""OpenAI's API: bodies, validation, and answers as OpenAI's clients expect them."""
