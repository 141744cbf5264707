"""Models: files, tokenizers and the backends, the only place where tensors live."""
