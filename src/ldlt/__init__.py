"""Placeholder until the public surface is assembled."""
