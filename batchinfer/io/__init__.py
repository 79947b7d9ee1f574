"""Files: rows in, results out, tokenizers."""
