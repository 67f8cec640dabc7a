"""Parts of networks: they know dtype, weights and attention, and no architecture.

Layers are built on torch's meta device, where they cost nothing; `models.load_model` gives their parameters
memory and fills them from a checkpoint.
"""
