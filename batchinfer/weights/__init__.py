"""Where models come from, and the files that hold their weights. No torch here."""
