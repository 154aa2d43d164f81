"""Tensors, groups and devices: everything here has never heard of ``nn.Module``."""
