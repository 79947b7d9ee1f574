"""Paged attention: what a backend is given, how keys and values are stored, the reference."""
