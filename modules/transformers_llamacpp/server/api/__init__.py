"""The HTTP API under `/v1`: OpenAI's routes and names, and those of text-generation-webui for the same things."""
