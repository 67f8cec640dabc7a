"""How the next token is chosen from logits. Knows tensors; knows no wire, no cache and no model."""
