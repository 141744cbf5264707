"""The main job in small: a pool that is too small, background work, urgent questions, and what becomes of them."""
