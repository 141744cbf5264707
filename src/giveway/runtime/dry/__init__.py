"""The dry backend: no tensors; every KV slot holds the hash of the tokens it stands for, and every read checks it."""
