"""What the cases of the suite share."""
