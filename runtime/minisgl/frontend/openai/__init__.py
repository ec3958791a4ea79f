"""OpenAI's API: bodies, validation, and responses as OpenAI's clients expect them; also /tokenize and /detokenize."""
