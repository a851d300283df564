"""Cases of several ranks."""
