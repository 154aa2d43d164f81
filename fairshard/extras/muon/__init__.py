"""Muon, which orthogonalises whole matrices, over shards."""
