"""POST /v1/responses, OpenAI's Responses API without state: bodies, input items, and output items with their events."""
