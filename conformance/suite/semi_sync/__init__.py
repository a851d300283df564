"""The cases of the area semi_sync."""
