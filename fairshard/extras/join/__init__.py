"""Training in which some ranks run out of batches earlier than others."""
