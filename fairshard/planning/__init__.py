"""Which modules become units, and the table of the units of a model."""
