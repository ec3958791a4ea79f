"""POST /v1/messages, Anthropic's Messages API: bodies, messages, and responses with their events."""
