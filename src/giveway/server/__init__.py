"""The OpenAI-compatible edge: HTTP in, requests to the engine, answers and streams out. No tensors, no scheduling."""
