"""The result of a run: its format, its verdict, digests, and the cleaning of untrusted text."""
