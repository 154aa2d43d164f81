"""Claims that only a real device can show: ``make gpu``, or ``pytest -m gpu --device cuda``.

They also run on the simulated accelerator (``--device sim``), in small sizes, and not on the CPU.
"""
