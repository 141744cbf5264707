"""Text to token ids and back: from tokenizer.json or from GGUF metadata; chat templates."""
