"""Scale on paper: shapes of published models, their plans, and a model of the time of a step. See ``../scale.py``."""
