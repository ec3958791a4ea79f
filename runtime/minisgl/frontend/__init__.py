"""The OpenAI endpoint: HTTP in front, tokenizer workers behind."""
