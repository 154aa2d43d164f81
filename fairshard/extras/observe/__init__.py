"""The observer: events of a training step, and pictures of them."""
