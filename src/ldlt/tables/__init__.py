"""Tables in CSV files: ``ldlt train`` and ``ldlt predict``."""
