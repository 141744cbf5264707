"""Weight files: GGUF and safetensors, memory-mapped, under canonical tensor names."""
