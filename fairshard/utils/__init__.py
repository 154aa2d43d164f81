"""Tools for tensors, process groups and devices; nothing here depends on ``nn.Module``."""
