"""What only the maintainers of keyedopt run."""
