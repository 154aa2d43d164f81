"""The ``fairshard`` command: ``fairshard train`` trains a byte-level GPT with the engine."""
