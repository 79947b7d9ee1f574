"""Building blocks with weights."""
