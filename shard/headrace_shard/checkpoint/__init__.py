"""A model folder as it lies on disk: its configuration, its tensors, and GGUF files made into one."""
