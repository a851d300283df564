"""Peers whose surface is another, seen through the public names; each uses its library and torch alone."""
