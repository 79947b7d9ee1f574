"""The tests, and what they share: `from tests.oracle.tiny_models import write_tiny`."""
