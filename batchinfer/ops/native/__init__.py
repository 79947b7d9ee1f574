"""Native code, built at first use by the system's compiler and kept in the cache."""
